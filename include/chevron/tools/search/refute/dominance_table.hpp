#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include <chevron/tools/search/problem/random.hpp>
#include <chevron/tools/search/refute/integer_durations.hpp>

/// \file
/// A table of the cases that are refuted already.

namespace chevron::detail {

/// Stores refuted cases. A case's key: how many actions of each chain (one kind of one stage) are done, and which chains may
/// not come next on each rank. A case with a refuted case's key and no earlier times is refuted, too.
class dominance_table {
 public:
  std::vector<whole_time> times;  ///< times of the current case

  explicit dominance_table(int chains) {
    search::detail::random_numbers random(0);
    for (int c = 0; c < chains; ++c) mark_.push_back(random.next() | 1);
  }
  /// Updates the key when one more action of a chain is done (`put`) or undone (`take`).
  void put(int chain) { hash_ += mark_[static_cast<std::size_t>(chain)]; }
  void take(int chain) { hash_ -= mark_[static_cast<std::size_t>(chain)]; }

  /// Whether the table may contain a case with the same key. `times` are not read.
  bool any(std::vector<std::uint64_t> const& not_next) {
    found_ = first_.find(key(not_next));
    return found_ != first_.end();
  }
  /// Whether a refuted case with the same key has no later times. To be called after `any`; subtracts 8 from `work` for each
  /// case that it compares.
  bool no_later(std::vector<int> const& done, std::vector<std::uint64_t> const& not_next, std::int64_t& work) const {
    for (std::size_t entry = found_->second; entry != none; entry = cases_[entry].next) {
      work -= 8;
      auto const then = all_times_.begin() + static_cast<std::ptrdiff_t>(cases_[entry].times);
      if (cases_[entry].count != times.size() ||
          !std::equal(times.begin(), times.end(), then, [](whole_time now, whole_time t) { return t <= now; }))
        continue;
      // Compared last, since two cases hardly ever have equal hashes by chance.
      if (same(done, all_done_, entry) && same(not_next, all_not_next_, entry)) return true;
    }
    return false;
  }
  void add(std::vector<int> const& done, std::vector<std::uint64_t> const& not_next) {
    auto const place = first_.try_emplace(key(not_next), none).first;
    cases_.push_back({place->second, all_times_.size(), times.size()});
    place->second = cases_.size() - 1;
    all_times_.insert(all_times_.end(), times.begin(), times.end());
    all_done_.insert(all_done_.end(), done.begin(), done.end());
    all_not_next_.insert(all_not_next_.end(), not_next.begin(), not_next.end());
  }

 private:
  static constexpr std::size_t none = static_cast<std::size_t>(-1);
  struct one_case {
    std::size_t next, times, count;
  };
  using by_key = std::unordered_map<std::uint64_t, std::size_t>;

  template <class Value>
  static bool same(std::vector<Value> const& now, std::vector<Value> const& all, std::size_t entry) {
    return std::equal(now.begin(), now.end(), all.begin() + static_cast<std::ptrdiff_t>(entry * now.size()));
  }
  std::uint64_t key(std::vector<std::uint64_t> const& not_next) const {
    std::uint64_t sum = hash_;
    for (std::uint64_t const one : not_next) sum = sum * 31 + one;
    return sum;
  }

  std::vector<std::uint64_t> mark_;
  std::uint64_t hash_ = 0;
  by_key first_;
  by_key::iterator found_;
  std::vector<one_case> cases_;
  std::vector<whole_time> all_times_;
  std::vector<int> all_done_;
  std::vector<std::uint64_t> all_not_next_;
};

}  // namespace chevron::detail
