// timeout: 300
// waits: deadlines run out
// Sums, reduce-scatters and gathers of shares over replicas, asked of every transport (tests/support/contract_subjects.hpp).
#include "support/contract_subjects.hpp"
#include "support/retry.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

#include <chevron/transports/shared_memory/shared_memory.hpp>

namespace {

using namespace transport_contract;
using namespace std::chrono_literals;
using cut = std::vector<std::int64_t>;

void check_all_well(std::vector<outcome> const& all) {
  for (outcome const& each : all) CHECK(each.text == "");
}
bool contains(std::string const& text, std::string const& part) { return text.find(part) != std::string::npos; }

/// The part of a replica, the same on every rank.
at::Tensor part(int replica, std::int64_t numbers, at::ScalarType type) {
  return (at::arange(numbers, at::kDouble) * (0.37 * (replica + 1)) + replica).sin().to(type);
}

/// Bytes of every pattern; among floats negative zeros, infinities and NaNs with payloads, also signalling ones.
at::Tensor patterns(int replica, std::int64_t numbers, at::ScalarType type) {
  auto const generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(31 + replica));
  auto const width = static_cast<std::int64_t>(c10::elementSize(type));
  at::Tensor const bytes = at::randint(0, type == at::kBool ? 2 : 256, {numbers * width}, generator, at::kByte);
  at::Tensor const made = bytes.view(type);
  if (type != at::kFloat) return made;
  at::Tensor const bits = bytes.view(at::kInt);
  std::uint32_t const special[] = {0x80000000u, 0x7f800000u, 0x7fc00123u, 0xff800001u};
  for (std::int64_t k = 0; k < 4; ++k)
    bits.slice(0, std::min(k, numbers), numbers, 5).fill_(static_cast<std::int64_t>(static_cast<std::int32_t>(special[k])));
  return made;
}

bool same_bits(at::Tensor const& a, at::Tensor const& b) {
  return a.nbytes() == b.nbytes() && (a.nbytes() == 0 || std::memcmp(a.const_data_ptr(), b.const_data_ptr(), a.nbytes()) == 0);
}
at::Tensor share(at::Tensor const& of, cut const& at, int replica) {
  auto const r = static_cast<std::size_t>(replica);
  return of.view({-1}).narrow(0, at[r], at[r + 1] - at[r]);
}

/// Shares of all sizes: equal ones, some empty, all in one, and drawn ones.
std::vector<cut> cuts(std::int64_t numbers, int replicas) {
  auto const count = static_cast<std::size_t>(replicas) + 1;
  cut equal(count), first(count, numbers), last(count, 0), drawn(count);
  std::mt19937 random(static_cast<unsigned>(numbers + replicas));
  for (std::size_t r = 0; r < count; ++r) {
    equal[r] = numbers * static_cast<std::int64_t>(r) / replicas;
    drawn[r] = static_cast<std::int64_t>(random() % static_cast<unsigned>(numbers + 1));
  }
  first.front() = 0;
  last.back() = drawn.back() = numbers;
  drawn.front() = 0;
  std::sort(drawn.begin(), drawn.end());
  return {equal, first, last, drawn};
}

constexpr auto piece = static_cast<std::int64_t>(chevron::detail::shared_memory::sum_piece);

}  // namespace

TEST_CASE("the share of a reduce-scatter is that of the sum, to the last bit, whatever the cut") {
  for_each_transport([](subject const& over) {
    for (int const replicas : {2, 3, 4}) {
      check_all_well(over.run(1, replicas, [&](transport& comm) {
        int const me = comm.topology().replica();
        for (at::ScalarType const type : {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16}) {
          std::vector<std::int64_t> sizes{0, 1, 17, 1001};
          if (type == at::kFloat) sizes.push_back(piece / 2 + 3);  // two pieces of equal shares, more of others
          for (std::int64_t const numbers : sizes) {
            at::Tensor const sum = part(me, numbers, type);
            comm.start_all_reduce(0, sum);
            comm.wait_bucket(0);
            for (cut const& at : cuts(numbers, replicas)) {
              at::Tensor const mine = part(me, numbers, type);
              comm.start_reduce_scatter(0, mine, at);
              comm.wait_bucket(0);
              INFO(c10::toString(type) << ", " << numbers << " numbers, replica " << me << " of " << replicas);
              bool const same = over.sums_in_order ? same_bits(share(mine, at, me), share(sum, at, me))
                                                   : at::allclose(share(mine, at, me), share(sum, at, me), 1e-2, 1e-2);
              CHECK(same);
            }
          }
        }
      }));
    }
  });
}

TEST_CASE("a gather of shares brings each to all, to the last bit, in every dtype") {
  for_each_transport([](subject const& over) {
    for (int const replicas : {2, 3, 4}) {
      check_all_well(over.run(1, replicas, [&](transport& comm) {
        int const me = comm.topology().replica();
        for (at::ScalarType const type :
             {at::kFloat, at::kDouble, at::kHalf, at::kBFloat16, at::kBool, at::kChar, at::kLong, at::kComplexFloat}) {
          std::vector<std::int64_t> sizes{0, 1, 17, 1001};
          if (type == at::kHalf || type == at::kBool) sizes.push_back(piece + 3);
          for (std::int64_t const numbers : sizes) {
            for (cut const& at : cuts(numbers, replicas)) {
              at::Tensor const mine = patterns(me, numbers, type);
              comm.start_share_gather(0, mine, at);
              comm.wait_bucket(0);
              INFO(c10::toString(type) << ", " << numbers << " numbers, replica " << me << " of " << replicas);
              for (int r = 0; r < replicas; ++r) CHECK(same_bits(share(mine, at, r), share(patterns(r, numbers, type), at, r)));
            }
          }
        }
      }));
    }
  });
}

TEST_CASE("tensors of several dimensions, of one element, and parameters are cut by their elements") {
  for_each_transport([](subject const& over) {
    check_all_well(over.run(2, 2, [](transport& comm) {
      int const me = comm.topology().replica();
      at::Tensor const mine = at::full({3, 5}, me + 1.0).requires_grad_(true), one = at::full({}, me + 1.5);
      comm.start_share_gather(0, mine, cut{0, 7, 15});
      comm.start_share_gather(1, one, cut{0, 0, 1});
      comm.wait_bucket(1);
      comm.wait_bucket(0);
      at::Tensor const all = mine.detach().view({-1});
      CHECK(at::equal(all.narrow(0, 0, 7), at::ones({7})));
      CHECK(at::equal(all.narrow(0, 7, 8), at::full({8}, 2.0F)));
      CHECK(mine.requires_grad());
      CHECK(one.item<double>() == 2.5);
      at::Tensor const sums = at::full({2, 2}, 10.0 * comm.topology().pipeline_rank() + me);
      comm.start_reduce_scatter(2, sums, cut{0, 1, 4});
      comm.wait_bucket(2);
      at::Tensor const own = share(sums, cut{0, 1, 4}, me);
      CHECK(at::equal(own, at::full_like(own, 20.0 * comm.topology().pipeline_rank() + 1)));
    }));
  });
}

TEST_CASE("sums, reduce-scatters and gathers of shares are under way at once, by replicas that come at any time") {
  for_each_transport([](subject const& over) {
    check_all_well(over.run(2, 3, [](transport& comm) {
      int const me = comm.topology().replica(), p = comm.topology().pipeline_rank();
      std::mt19937 random(static_cast<unsigned>(comm.topology().global_rank));
      std::int64_t const sizes[] = {5, 300000, 1, 70, 400001, 3};
      for (int round = 0; round < 8; ++round) {
        comm.begin_step(round);
        std::vector<at::Tensor> values;
        std::vector<cut> at;
        for (int b = 0; b < 6; ++b) {
          if (random() % 3 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 2000));
          at.push_back(cuts(sizes[b], 3)[static_cast<std::size_t>((round + b) % 4)]);
          values.push_back(at::full({sizes[b]}, 100 * me + 10 * p + b + round));
          // Another collective in each bucket from round to round.
          if ((b + round) % 3 == 0) comm.start_all_reduce(b, values.back());
          if ((b + round) % 3 == 1) comm.start_reduce_scatter(b, values.back(), at.back());
          if ((b + round) % 3 == 2) comm.start_share_gather(b, values.back(), at.back());
        }
        for (int const b : {3, 0, 5, 4, 1, 2}) {
          comm.wait_bucket(b);
          auto const& mine = values[static_cast<std::size_t>(b)];
          double const sum = 300 + 3.0 * (10 * p + b + round);
          auto const of = [&](int r) { return share(mine, at[static_cast<std::size_t>(b)], r); };
          INFO("round " << round << ", bucket " << b);
          if ((b + round) % 3 == 0) CHECK(at::equal(mine, at::full_like(mine, sum)));
          if ((b + round) % 3 == 1) CHECK(at::equal(of(me), at::full_like(of(me), sum)));
          for (int r = 0; r < 3 && (b + round) % 3 == 2; ++r)
            CHECK(at::equal(of(r), at::full_like(of(r), 100 * r + 10 * p + b + round)));
        }
      }
    }));
  });
}

TEST_CASE("what is no cut, or not contiguous, is refused before any replica waits; with one replica nothing is done") {
  for_each_transport([](subject const& over) {
    check_all_well(over.run(1, 2, [](transport& comm) {
      at::Tensor const values = at::ones({10});
      for (cut const& wrong :
           {cut{}, cut{0, 10}, cut{0, 3, 5, 10}, cut{0, 11, 10}, cut{1, 5, 10}, cut{0, 5, 9}, cut{-1, 5, 10}}) {
        CHECK_THROWS_AS(comm.start_reduce_scatter(0, values, wrong), chevron::usage_error);
        CHECK_THROWS_AS(comm.start_share_gather(0, values, wrong), chevron::usage_error);
      }
      CHECK_THROWS_WITH_AS(comm.start_share_gather(4, values, cut{0, 5, 9}),
                           "the gather of shares of bucket 4 has the cut [0, 5, 9], which does not divide 10 elements among 2 "
                           "replicas. Remedy: 3 offsets, ascending, from 0 to 10",
                           chevron::usage_error);
      CHECK_THROWS_WITH_AS(comm.start_reduce_scatter(2, at::ones({4, 4}).t().narrow(0, 0, 2), cut{0, 4, 8}),
                           "the reduce-scatter of gradients of bucket 2 needs a contiguous tensor. Remedy: .contiguous()",
                           chevron::usage_error);
      comm.start_reduce_scatter(0, values, cut{0, 5, 10});
      comm.wait_bucket(0);
      CHECK(at::equal(share(values, {0, 5, 10}, comm.topology().replica()), at::full({5}, 2.0F)));
    }));
    check_all_well(over.run(2, 1, [](transport& comm) {
      at::Tensor const values = at::ones({10});
      comm.start_reduce_scatter(0, values, cut{3});
      comm.start_share_gather(1, values, {});
      comm.wait_bucket(0);
      comm.wait_bucket(1);
      CHECK(at::equal(values, at::ones({10})));
    }));
  });
}

TEST_CASE("replicas that start different collectives in a bucket, or with other cuts, are refused") {
  std::vector<body> const starts{
      [](transport& comm) { comm.start_all_reduce(0, at::ones({10})); },
      [](transport& comm) {
        comm.start_reduce_scatter(0, at::ones({10}), cut{0, 5, 10});
      },
      [](transport& comm) {
        comm.start_reduce_scatter(0, at::ones({10}), cut{0, 6, 10});
      },
      [](transport& comm) {
        comm.start_share_gather(0, at::ones({10}), cut{0, 5, 10});
      },
      [](transport& comm) {
        comm.start_share_gather(0, at::ones({10}, at::kInt), cut{0, 5, 10});
      },
      [](transport& comm) {
        comm.start_share_gather(0, at::ones({1000000}), cut{0, 5, 1000000});
      },
  };
  for_each_transport([&](subject const& over) {
    if (!over.compares_collectives) return;
    for (std::size_t a = 0; a < starts.size(); ++a) {
      for (std::size_t b = 0; b < starts.size(); ++b) {
        if (a == b) continue;
        retry::stopwatch const since;
        auto const all = over.run(1, 2, [&](transport& comm) {
          starts[comm.topology().replica() == 0 ? a : b](comm);
          comm.wait_bucket(0);
        });
        for (outcome const& each : all) {
          INFO(a << " and " << b << ": " << each.text);
          CHECK(each.code == static_cast<int>(chevron::exit_code::preflight));
          bool const said =
              contains(each.text, " starts the ") || contains(each.text, "different shapes, dtypes or cuts in bucket 0");
          CHECK(said);
        }
        CHECK(since.spent() < 60s);  // by far not the deadline
      }
    }
  });
}

TEST_CASE("a replica that does not come, or fails, ends the others' waits") {
  for_each_transport([](subject const& over) {
    for (bool const scatters : {true, false}) {
      for (bool const fails : {true, false}) {
        retry::stopwatch const since;
        std::atomic<bool> ended = false;
        auto const all = over.run(1, 3, [&](transport& comm) {
          comm.begin_step(5);
          comm.all_gather({}, {});
          if (comm.topology().replica() == 2) {
            if (fails) {
              std::this_thread::sleep_for(20ms);
              comm.fail(chevron::stage_error(chevron::exit_code::other, "stage 0 threw", {.rank = 2, .step = 5}));
              throw std::runtime_error("gone");
            }
            for (int naps = 0; naps < 12000 && !ended; ++naps) std::this_thread::sleep_for(5ms);
            return comm.all_gather({}, {});  // throws the published failure
          }
          if (!fails) comm.deadline(500ms);
          comm.begin_step(6);
          cut const at{0, 300000, 300001, 1000000};
          at::Tensor const values = at::ones({1000000});
          scatters ? comm.start_reduce_scatter(1, values, at) : comm.start_share_gather(1, values, at);
          try {
            comm.wait_bucket(1);
          } catch (...) {
            ended = true;
            throw;
          }
        });
        for (std::size_t r = 0; r < 2; ++r) {
          INFO(all[r].text);
          CHECK(all[r].code == static_cast<int>(fails ? chevron::exit_code::other : chevron::exit_code::timeout));
          CHECK(contains(all[r].text, scatters ? "waiting for reduce-scatter of gradients" : "waiting for gather of shares"));
        }
        CHECK(since.spent() < 60s);
      }
    }
  });
}
