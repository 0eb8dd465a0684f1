// timeout: 120
#include <chrono>
#include <cmath>
#include <functional>
#include <random>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>

#include <chevron/transports/gloo/gloo_transport.hpp>
#include <chevron/transports/shared_memory/shared_memory.hpp>

#include "support/gloo_ranks.hpp"

#include <doctest/doctest.h>

using namespace chevron;
using namespace std::chrono_literals;
using gloo_ranks::all_share;
using gloo_ranks::check_all_well;
using gloo_ranks::on_ranks;

namespace {

bool none_shares(int) { return false; }

/// The part of replica r of a stage, the same on every rank; small whole numbers if the dtype is integral.
at::Tensor part(int pipeline_rank, int r, std::int64_t numbers, at::ScalarType type, int round) {
  std::mt19937 random(static_cast<unsigned>(1000 * pipeline_rank + 100 * r + round));
  at::Tensor const made = at::empty({numbers}, at::kDouble);
  auto* const to = made.data_ptr<double>();
  for (std::int64_t i = 0; i < numbers; ++i) {
    auto const drawn = static_cast<double>(random());
    to[i] = at::isFloatingType(type) ? std::sin(drawn) : static_cast<double>(random() % 40);
  }
  return made.to(type);
}

/// ((r0 + r1) + r2) …
at::Tensor sum_in_order(int pipeline_rank, int replicas, std::int64_t numbers, at::ScalarType type, int round) {
  at::Tensor total = part(pipeline_rank, 0, numbers, type, round);
  for (int r = 1; r < replicas; ++r) total.add_(part(pipeline_rank, r, numbers, type, round));
  return total;
}

constexpr auto piece = static_cast<std::int64_t>(chevron::detail::shared_memory::sum_piece);

}  // namespace

TEST_CASE("replicas are added in their order, to the last bit, in every dtype and size") {
  at::ScalarType const types[] = {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kChar, at::kByte, at::kInt, at::kLong};
  for (int const replicas : {2, 3, 4}) {
    check_all_well(on_ranks(1, replicas, all_share, [&](gloo_transport& link) {
      for (at::ScalarType const type : types) {
        std::vector<std::int64_t> sizes{0, 1, 17, 1000};
        if (type == at::kFloat || type == at::kBFloat16) {
          auto const in_a_piece = piece / static_cast<std::int64_t>(c10::elementSize(type));
          sizes.insert(sizes.end(), {in_a_piece, in_a_piece + 1});
        }
        for (std::int64_t const numbers : sizes) {
          at::Tensor const mine = part(0, link.topology().replica(), numbers, type, 0);
          link.start_all_reduce(0, mine);
          link.wait_bucket(0);
          INFO(c10::toString(type) << ", " << numbers << " numbers, replica " << link.topology().replica() << " of " << replicas);
          CHECK(at::equal(mine, sum_in_order(0, replicas, numbers, type, 0)));
        }
      }
    }));
  }
}

TEST_CASE("two replicas get the same to the last bit whoever shares memory; with more, Gloo's order differs") {
  for (auto const& [replicas, same] : {std::pair{2, true}, std::pair{3, false}}) {
    std::function<bool(int)> const sharing[] = {all_share, none_shares, [](int r) { return r != 1; }};
    for (auto const& shared : sharing) {
      check_all_well(on_ranks(2, replicas, shared, [&, count = replicas, exact = same](gloo_transport& link) {
        int const p = link.topology().pipeline_rank();
        std::int64_t const numbers = 270001;  // two pieces
        at::Tensor const mine = part(p, link.topology().replica(), numbers, at::kFloat, 0);
        link.start_all_reduce(0, mine);
        link.wait_bucket(0);
        at::Tensor const wanted = sum_in_order(p, count, numbers, at::kFloat, 0);
        if (exact) CHECK(at::equal(mine, wanted));
        CHECK(at::allclose(mine, wanted, 0, 1e-6));
        // All replicas have the same bits, whatever the order.
        double const check = mine.to(at::kDouble).mul(at::arange(numbers, at::kDouble)).sum().item<double>();
        std::vector<double> all(static_cast<std::size_t>(link.topology().world()));
        link.all_gather({&check, 1}, all);
        for (int r = 0; r < link.topology().world(); ++r) {
          if (r % 2 == p) CHECK(all[static_cast<std::size_t>(r)] == check);
        }
      }));
    }
  }
}

TEST_CASE("many sums under way, waited for in any order, by replicas that come at any time") {
  check_all_well(on_ranks(2, 3, all_share, [](gloo_transport& link) {
    int const p = link.topology().pipeline_rank(), r = link.topology().replica();
    std::mt19937 random(static_cast<unsigned>(link.topology().global_rank));
    std::int64_t const sizes[] = {5, 400000, 70, 1, 1300000, 260};  // some of several pieces
    for (int round = 0; round < 12; ++round) {
      link.begin_step(round);
      std::vector<at::Tensor> buckets;
      for (int b = 0; b < 6; ++b) {
        buckets.push_back(at::full({sizes[b]}, 100 * round + 10 * p + b + r * 1000));
        if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
        link.start_all_reduce(b, buckets.back());
      }
      for (int const b : {3, 0, 5, 4, 1, 2}) link.wait_bucket(b);
      for (int b = 0; b < 6; ++b) {
        double const wanted = 3 * (100 * round + 10 * p + b) + 3000;
        CHECK(at::equal(buckets[static_cast<std::size_t>(b)], at::full({sizes[b]}, wanted)));
      }
    }
  }));
}

TEST_CASE("other calls come between the halves of a sum") {
  check_all_well(on_ranks(2, 2, all_share, [](gloo_transport& link) {
    for (int round = 0; round < 5; ++round) {
      link.begin_step(round);
      at::Tensor const mine = at::full({500000}, link.topology().replica() + 1);
      link.start_all_reduce(0, mine);
      double const number = link.topology().global_rank;
      std::vector<double> all(4);
      link.all_gather({&number, 1}, all);
      CHECK(all == std::vector<double>{0, 1, 2, 3});
      if (round == 2) link.open({.activation = 0, .receive = 1, .send = 1});
      link.wait_bucket(0);
      CHECK(at::equal(mine, at::full({500000}, 3)));
    }
  }));
}

TEST_CASE("replicas that sum different things are refused, on both sides") {
  struct difference {
    int bucket;
    at::Tensor values;
  };
  for (auto const& [bucket, values] :
       {difference{0, at::ones({11})}, difference{0, at::ones({10}, at::kDouble)}, difference{0, at::ones({20}, at::kHalf)},
        difference{1, at::ones({10})}, difference{0, at::ones({2000000})}}) {
    auto const thrown = on_ranks(1, 2, all_share, [&, b = bucket, v = values](gloo_transport& link) {
      bool const first = link.topology().replica() == 0;
      int const mine = first ? 0 : b;
      link.start_all_reduce(mine, first ? at::ones({10}) : v.clone());
      link.wait_bucket(mine);
    });
    CHECK(thrown[0] == "rank 0, sum of gradients: replicas 0 and 1 sum gradients of different shapes or dtypes in bucket 0");
    CHECK(thrown[1] == "rank 1, sum of gradients: replicas 1 and 0 sum gradients of different shapes or dtypes in bucket " +
                           std::to_string(bucket));
  }
}

TEST_CASE("what cannot be summed is refused before anybody waits") {
  auto const thrown = on_ranks(1, 2, all_share, [](gloo_transport& link) {
    CHECK_THROWS_WITH_AS(link.start_all_reduce(0, at::ones({4, 4}).t().narrow(0, 0, 2)),
                         "the sum of gradients of bucket 0 needs a contiguous tensor. Remedy: .contiguous()", usage_error);
    CHECK_THROWS_WITH_AS(link.start_all_reduce(3, at::zeros({4}, at::kComplexFloat)),
                         "the sum of gradients of bucket 3: replicas cannot sum ComplexFloat", usage_error);
    at::Tensor const well = at::ones({4});
    link.start_all_reduce(0, well);
    link.wait_bucket(0);
    link.wait_bucket(0);  // not under way: nothing to wait for
    link.wait_bucket(7);
    CHECK(at::equal(well, at::full({4}, 2)));
  });
  check_all_well(thrown);
}

TEST_CASE("a transport that goes in the middle of a sum does not wait for it") {
  auto const begin = std::chrono::steady_clock::now();
  auto const thrown = on_ranks(1, 2, all_share, [](gloo_transport& link) {
    if (link.topology().replica() == 0) link.start_all_reduce(0, at::ones({5000000}));
    throw std::runtime_error("something else");
  });
  for (auto const& each : thrown) CHECK(each == "something else");
  CHECK(std::chrono::steady_clock::now() - begin < 50s);  // the deadline is 60 s
}
