#include <cstdint>
#include <string>
#include <vector>

#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/rand.h>

#include <chevron/run/comm/shard_group.hpp>
#include <chevron/run/comm/threads/run_threads.hpp>

#include <doctest/doctest.h>

#include "support/gloo_ranks.hpp"

using chevron::after_gather;
using chevron::shard_group;
using chevron::tensors;

namespace {

at::Tensor drawn(std::uint64_t seed, std::vector<std::int64_t> sizes) {
  return at::rand(sizes, at::make_generator<at::CPUGeneratorImpl>(seed), at::kDouble);
}
/// The part of shard `t`.
at::Tensor part(int t, std::vector<std::int64_t> sizes) { return drawn(static_cast<std::uint64_t>(10 + t), std::move(sizes)); }

at::Tensor sum_of_parts(int shards, std::vector<std::int64_t> sizes) {
  at::Tensor out = part(0, sizes);
  for (int t = 1; t < shards; ++t) out = out + part(t, sizes);
  return out;
}

struct function {
  at::Tensor result, gradient;
};
/// A collective of this rank, and the gradient of its argument where the result's is `seed`.
template <class Collective>
function of(at::Tensor x, at::Tensor const& seed, Collective const& collective) {
  x = x.detach().clone().requires_grad_();
  at::Tensor const y = collective(x);
  y.backward(seed);
  return {y.detach(), x.grad()};
}

/// Each collective against its definition: exact, since shards are added in their order.
void check_collectives(chevron::transport& comm) {
  shard_group const group(comm);
  int const T = group.shards(), t = group.shard();
  auto const same = [](at::Tensor const& a, at::Tensor const& b) { return a.sizes() == b.sizes() && a.equal(b); };
  std::vector<std::int64_t> const sizes{3, 7, 2};
  at::Tensor const mine = part(t, sizes), seed = drawn(1, sizes), total = sum_of_parts(T, sizes);

  auto const summed = of(mine, seed, [&](at::Tensor const& x) { return group.all_reduce(x); });
  CHECK(same(summed.result, total));
  CHECK(same(summed.gradient, seed));

  auto const copied = of(seed, mine, [&](at::Tensor const& x) { return group.copy(x); });
  CHECK(same(copied.result, seed));
  CHECK(same(copied.gradient, total));

  auto const piece = group.piece(7);
  auto const reduced =
      of(mine, seed.narrow(1, piece.begin, piece.size), [&](at::Tensor const& x) { return group.reduce_scatter(x, 1); });
  CHECK(same(reduced.result, total.narrow(1, piece.begin, piece.size)));
  CHECK(same(reduced.gradient, seed));

  auto const scattered =
      of(seed, total.narrow(1, piece.begin, piece.size), [&](at::Tensor const& x) { return group.scatter(x, -2); });
  CHECK(same(scattered.result, seed.narrow(1, piece.begin, piece.size)));
  CHECK(same(scattered.gradient, total));

  at::Tensor const own = seed.narrow(1, piece.begin, piece.size);
  auto const whole = of(own, total, [&](at::Tensor const& x) { return group.all_gather(x, 1, after_gather::whole, 7); });
  CHECK(same(whole.result, seed));
  CHECK(same(whole.gradient, total.narrow(1, piece.begin, piece.size)));
  auto const partial = of(own, mine, [&](at::Tensor const& x) { return group.all_gather(x, 1, after_gather::partial, 7); });
  CHECK(same(partial.result, seed));
  CHECK(same(partial.gradient, total.narrow(1, piece.begin, piece.size)));

  // Shard a gives shard b rows that say so: 1 + (a + 2 b) % 3 of them, none to the last shard from shard 0.
  auto const rows = [&](int a, int b) { return a == 0 && b == T - 1 ? 0 : 1 + (a + 2 * b) % 3; };
  tensors to_others, from_others;
  std::vector<std::int64_t> given;
  for (int other = 0; other < T; ++other) {
    given.push_back(rows(t, other));
    to_others.push_back(at::arange(rows(t, other) * 2, at::kDouble).view({-1, 2}) + 100 * t + 10 * other);
    from_others.push_back(at::arange(rows(other, t) * 2, at::kDouble).view({-1, 2}) + 100 * other + 10 * t);
  }
  std::vector<std::int64_t> const counts = group.all_counts(given);
  at::Tensor const sent = at::cat(to_others), expected = at::cat(from_others);
  auto const exchanged = of(sent, expected, [&](at::Tensor const& x) { return group.all_to_all(x, counts); });
  CHECK(same(exchanged.result, expected));
  CHECK(same(exchanged.gradient, sent));
  CHECK(exchanged.gradient.equal(sent));
}

}  // namespace

TEST_CASE("collectives over shards and their gradients, on threads") {
  for (int const shards : {1, 2, 3, 4})
    chevron::run_threads({.pipeline_ranks = 2, .replicas = 2, .shards = shards}, check_collectives);
}

TEST_CASE("the same over Gloo, with shared memory") {
  for (int const shards : {2, 3})
    gloo_ranks::check_all_well(gloo_ranks::on_ranks({1, 2, 0, shards}, gloo_ranks::all_share, check_collectives));
}

TEST_CASE("the same over Gloo's sockets, between two shards, whose sum has one order") {
  gloo_ranks::check_all_well(gloo_ranks::on_ranks(
      {2, 1, 0, 2}, [](int) { return false; }, check_collectives));
}

TEST_CASE("shards of processes that call different collectives are told in which step, as shards of threads are") {
  auto const said = gloo_ranks::on_ranks({1, 1, 0, 2}, gloo_ranks::all_share, [](chevron::transport& comm) {
    comm.begin_step(3);
    shard_group const group(comm);
    at::Tensor const x = at::rand({4, 2});
    group.shard() == 0 ? (void)group.summed(x) : (void)group.summed_piece(x, 0);
  });
  bool told = false;
  for (std::string const& each : said) {
    CAPTURE(each);
    CHECK(each.find(", step 3, ") != std::string::npos);
    told = told || each.find("starts the sum over shards in bucket 0 where shard") != std::string::npos ||
           each.find("starts the reduce-scatter over shards in bucket 0 where shard") != std::string::npos;
  }
  CHECK(told);
}

TEST_CASE("shards that call different collectives, or with other sizes, are refused; one that does not come is named") {
  auto const said = [](auto const& body) -> std::string {
    try {
      chevron::run_threads({.shards = 2, .deadline = std::chrono::milliseconds(300)}, body);
    } catch (chevron::error const& e) {
      return e.what();
    }
    return "";
  };
  CHECK(said([](chevron::transport& comm) {
          shard_group const group(comm);
          at::Tensor const x = at::rand({4, 2});
          group.shard() == 0 ? (void)group.summed(x) : (void)group.summed_piece(x, 0);
        }).find("shard 0 starts the sum over shards in bucket 0 where shard 1 starts the reduce-scatter over shards") !=
        std::string::npos);
  CHECK(said([](chevron::transport& comm) {
          shard_group const group(comm);
          (void)group.summed(at::rand({4, 2 + group.shard()}));
        }).find("shards 0 and 1 sum tensors of different shapes or dtypes") != std::string::npos);
  std::string const late = said([](chevron::transport& comm) {
    shard_group const group(comm);
    if (group.shard() == 0) (void)group.summed(at::rand({4}));
    if (group.shard() == 1) std::this_thread::sleep_for(std::chrono::milliseconds(900));
  });
  CAPTURE(late);
  CHECK(late.find("sum over shards") != std::string::npos);
  CHECK(late.find("rank 0 (replica 0, pipeline rank 0, shard 0)") != std::string::npos);
  CHECK(late.find("Places: rank 1 (replica 0, pipeline rank 0, shard 1)") != std::string::npos);
  CHECK(said([](chevron::transport& comm) {
          (void)shard_group(comm).all_to_all(at::rand({3, 2}), {1, 1, 1, 1});
        }).find("all_to_all over 2 shards needs 4 counts, of which those of shard") != std::string::npos);
  CHECK(said([](chevron::transport& comm) {
          (void)shard_group(comm).gathered(at::rand({3, 2}), 0, 7);
        }).find("has 3, where its piece has") != std::string::npos);
}
