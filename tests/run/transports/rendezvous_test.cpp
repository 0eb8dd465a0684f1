// timeout: 300
// waits: deadlines run out
// Ranks meet, and exchange texts, through a store whose requests and bytes are counted.
#include "support/thread_ranks.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <doctest/doctest.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <chevron/transports/rendezvous.hpp>

using chevron::rendezvous;
using std::chrono::milliseconds;

namespace {

struct traffic {
  std::atomic<long> requests{0}, bytes{0};
};

/// A store that counts what ranks ask. A request with several keys is one request, as of TCPStore.
class counting_store : public c10d::PrefixStore {
 public:
  counting_store(c10::intrusive_ptr<c10d::Store> const& of, traffic& to) : c10d::PrefixStore("counted/", of), to_(to) {}
  using c10d::PrefixStore::check;
  using c10d::PrefixStore::get;
  using c10d::PrefixStore::set;

  void set(std::string const& key, std::vector<std::uint8_t> const& value) override {
    note(value.size());
    c10d::PrefixStore::set(key, value);
  }
  std::vector<std::uint8_t> get(std::string const& key) override {
    auto value = c10d::PrefixStore::get(key);
    note(value.size());
    return value;
  }
  bool check(std::vector<std::string> const& keys) override {
    std::size_t bytes = 0;
    for (std::string const& key : keys) bytes += key.size();
    note(bytes);
    return c10d::PrefixStore::check(keys);
  }
  std::vector<std::vector<std::uint8_t>> multiGet(std::vector<std::string> const& keys) override {
    std::vector<std::vector<std::uint8_t>> values;
    std::size_t bytes = 0;
    for (std::string const& key : keys) bytes += values.emplace_back(c10d::PrefixStore::get(key)).size();
    note(bytes);
    return values;
  }
  std::int64_t add(std::string const& key, std::int64_t value) override {
    note(0);
    return c10d::PrefixStore::add(key, value);
  }

 private:
  void note(std::size_t bytes) {
    ++to_.requests;
    to_.bytes += static_cast<long>(bytes);
  }
  traffic& to_;
};

/// Looks of one wait within a time, by the pauses between them.
long looks_within(std::chrono::duration<double, std::milli> time) {
  long out = 1;
  for (double passed = 0, pause = 1; passed < time.count(); ++out) {
    passed += pause;
    pause = std::min(100.0, pause + std::max(1.0, std::floor(pause / 2)));
  }
  return out;
}

constexpr auto patience = milliseconds(60000);

}  // namespace

TEST_CASE("texts of all ranks arrive by rank, equal or not, of any bytes") {
  for (auto const& [pipeline_ranks, replicas] : {std::pair(1, 2), {3, 1}, {4, 4}, {5, 3}}) {
    int const world = pipeline_ranks * replicas;
    auto const text_of = [&](int round, int rank) -> std::string {
      if (round == 0) return {};
      if (round == 1) return "the same";
      if (round == 2)
        return std::string(static_cast<std::size_t>(rank % 3), ' ') + std::string("\0\x1f 12 ", 6) +
               std::to_string(rank % pipeline_ranks);
      return std::string(1000, static_cast<char>('a' + rank));
    };
    auto const said = thread_ranks::said(
        thread_ranks::run(pipeline_ranks, replicas, [&](auto const& where, auto const& store, auto const& watch) {
          rendezvous meeting(store, watch, where);
          meeting.join(patience);
          for (int round = 0; round < 4; ++round) {
            auto const all = meeting.all_gather(text_of(round, where.global_rank), {.words = "a test"}, patience, {});
            if (static_cast<int>(all.size()) != world) throw std::runtime_error("texts are missing");
            for (int r = 0; r < world; ++r)
              if (all[static_cast<std::size_t>(r)] != text_of(round, r))
                throw std::runtime_error("another text of rank " + std::to_string(r));
          }
          meeting.leave();
        }));
    for (std::string const& one : said) CHECK(one == "");
  }
}

TEST_CASE("requests grow as the number of ranks, and copies of a text cross once to each rank") {
  std::string const text(20000, 'x');  // of each pipeline rank, with its number
  for (int const replicas : {4, 16, 32}) {
    for (auto const late : {milliseconds(0), milliseconds(400)}) {
      traffic seen;
      auto const begun = std::chrono::steady_clock::now();
      auto const said =
          thread_ranks::said(thread_ranks::run(2, replicas, [&](auto const& where, auto const& store, auto const& watch) {
            rendezvous meeting(c10::make_intrusive<counting_store>(store, seen), watch, where);
            if (where.global_rank == 1) std::this_thread::sleep_for(late);
            meeting.join(patience);
            if (where.global_rank == where.world() - 1) std::this_thread::sleep_for(late);
            meeting.all_gather(text + std::to_string(where.pipeline_rank()), {.words = "a test"}, patience, {});
          }));
      for (std::string const& one : said) CHECK(one == "");
      long const world = 2 * replicas;
      // Three waits of each rank: for rank 0's layout, for all layouts, for all texts. The others: add, three of publishing and
      // reading each, and a look at ranks that have ended in every eighth look.
      long const looks = 3 * looks_within(std::chrono::steady_clock::now() - begun);
      CAPTURE(world);
      CAPTURE(late.count());
      CAPTURE(seen.requests.load());
      CHECK(seen.requests.load() <= world * (looks + looks / 4 + 8));
      // A rank writes its own text and reads two; rank 0 reads all; keys and places are short.
      CHECK(seen.bytes.load() <= world * (4 * 20010 + looks * 40) + world * (looks * 40 + 16 * world));
    }
  }
}

TEST_CASE("ranks that do not come are named by all others, also rank 0") {
  for (std::set<int> const& absent : {std::set{3, 5}, {0}, {7}}) {
    auto const said = thread_ranks::said(thread_ranks::run(4, 2, [&](auto const& where, auto const& store, auto const& watch) {
      rendezvous meeting(store, watch, where);
      meeting.join(patience);
      if (absent.contains(where.global_rank)) {
        std::this_thread::sleep_for(milliseconds(3000));
        return;
      }
      meeting.all_gather("", {.words = "a test"}, milliseconds(1500), {});
    }));
    for (int r = 0; r < 8; ++r) {
      if (absent.contains(r)) continue;
      CAPTURE(said[static_cast<std::size_t>(r)]);
      CHECK(said[static_cast<std::size_t>(r)].find("rank " + std::to_string(*absent.begin()) +
                                                   " did not answer within 1500 ms") != std::string::npos);
    }
  }
}

TEST_CASE("all ranks that do not join are named, also rank 0") {
  for (std::set<int> const& absent : {std::set{1, 2, 6}, {0, 4}}) {
    auto const said = thread_ranks::said(thread_ranks::run(8, 1, [&](auto const& where, auto const& store, auto const& watch) {
      if (absent.contains(where.global_rank)) {
        std::this_thread::sleep_for(milliseconds(3000));
        return;
      }
      rendezvous(store, watch, where).join(milliseconds(1000));
    }));
    std::string names;
    for (int const r : absent) names += (names.empty() ? "rank " : ", ") + std::to_string(r);
    for (int r = 0; r < 8; ++r) {
      if (absent.contains(r)) continue;
      CAPTURE(said[static_cast<std::size_t>(r)]);
      CHECK(said[static_cast<std::size_t>(r)].find(names + " did not join within 1000 ms") != std::string::npos);
    }
  }
}

TEST_CASE("ranks in different calls, and layouts of more ranks than there are, are told at once") {
  auto const begun = std::chrono::steady_clock::now();
  auto const different = thread_ranks::said(thread_ranks::run(2, 2, [&](auto const& where, auto const& store, auto const& watch) {
    rendezvous meeting(store, watch, where);
    meeting.join(patience);
    meeting.all_gather("", {.words = where.global_rank == 2 ? "check" : "save"}, patience, {});
  }));
  for (int r = 0; r < 4; ++r)
    CHECK(different[static_cast<std::size_t>(r)].find(r == 2 ? "rank 0 is in save where rank 2 is in check"
                                                             : "rank 2 is in check where rank") != std::string::npos);
  for (int const larger : {0, 3}) {
    auto const said =
        thread_ranks::said(thread_ranks::run(2, 2, [&](chevron::topology where, auto const& store, auto const& watch) {
          if (where.global_rank == larger) where.pipeline_ranks = 4;
          rendezvous(store, watch, where).join(patience);
        }));
    for (int r = 0; r < 4; ++r) {
      CAPTURE(said[static_cast<std::size_t>(r)]);
      CHECK(said[static_cast<std::size_t>(r)].find("4 pipeline ranks × 2 replicas") != std::string::npos);
    }
  }
  CHECK(std::chrono::steady_clock::now() - begun < std::chrono::seconds(40));  // by far not the patience of each
}
