#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include <chevron/plan/footprint.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/prove/footprint.hpp>

/// \file
/// The chunks that ranks hold at one time, from which the peak memory of a plan follows for any bytes of its stages.

namespace chevron::search {

/// By rank, the numbers of chunks that a plan's rank holds at one time, without the times at which the rank holds as many or more
/// chunks of every kind. Searches that change bytes of stages, but not the order of actions, ask for the peak memory without
/// walking through the actions again. The constructor takes O(actions × sets of a rank), of which published schedules have few.
/// Each slice of a stage's microbatches counts by itself, since slices have bytes of their own.
class held_sets {
 public:
  /// How a held chunk counts in bytes.
  enum part {
    input,          ///< its stage's input: from F to an R
    after_forward,  ///< `footprint_view::after_forward`: from F to B or I
    whole,          ///< all activations: in R, B or I, and from R on
    kept,           ///< the tensors that W reads, from I to W
    parts
  };

  /// Walks through each rank's actions once. \param plan a lawful plan, which may go afterwards
  explicit held_sets(plan_view const& plan)
      : slices_(static_cast<std::size_t>(plan.size.slices)),
        stages_(static_cast<std::size_t>(plan.size.ranks)),
        sets_(stages_.size()) {
    std::vector<std::size_t> place(static_cast<std::size_t>(plan.stages));
    for (int s = 0; s < plan.stages; ++s) {
      auto& of_rank = stages_[static_cast<std::size_t>(plan.rank_of[s])];
      place[static_cast<std::size_t>(s)] = parts * slices_ * of_rank.size();
      of_rank.push_back(s);
    }
    recomputed_chunks const again(plan);
    std::vector<int> now;
    for (std::size_t r = 0; r < stages_.size(); ++r) {
      now.assign(parts * slices_ * stages_[r].size(), 0);
      for (int i = plan.begin[r]; i < plan.begin[r + 1]; ++i) {
        action const a = plan.actions[i];
        std::size_t const slice = static_cast<std::size_t>(a.micro_batch) % slices_;
        int* const held = now.data() + place[static_cast<std::size_t>(a.stage)] + parts * slice;
        bool const gives_back = makes_input_gradient(a.kind), by_action = again.hold(a);
        part const left = by_action ? input : after_forward;
        if (makes_output(a.kind)) ++held[left];
        if (a.kind == kind::recompute || (gives_back && !by_action)) {
          --held[left];
          ++held[whole];
        }
        record(sets_[r], now);
        if (plan.forward_only) --held[left];
        if (gives_back) {
          --held[whole];
          if (!ends_cell(a.kind)) ++held[kept];
        }
        if (!gives_back && ends_cell(a.kind)) --held[kept];
      }
    }
  }

  /// The stages of a rank, in their order.
  std::vector<int> const& stages(int rank) const { return stages_[static_cast<std::size_t>(rank)]; }
  /// The slices of a microbatch.
  std::size_t slices() const { return slices_; }
  /// The number of a rank's sets.
  std::size_t count(int rank) const {
    std::size_t const length = parts * slices_ * stages(rank).size();
    return length > 0 ? sets_[static_cast<std::size_t>(rank)].size() / length : 0;
  }
  /// One set of a rank: `parts` numbers for each slice of each of its stages.
  std::span<int const> set(int rank, std::size_t which) const {
    std::size_t const length = parts * slices_ * stages(rank).size();
    return {sets_[static_cast<std::size_t>(rank)].data() + which * length, length};
  }

  /// `peak_memory` (prove/footprint.hpp) of a rank of the plan, in O(sets).
  /// \param of bytes of the plan's stages, by slice: `slices()` entries, of which `fixed` is read from the first
  std::int64_t peak_memory(std::span<footprint_view const> of, int rank) const {
    std::int64_t fixed = 0, most = 0;
    for (int const s : stages(rank)) fixed += of.front().fixed[s];
    for (std::size_t which = 0; which < count(rank); ++which) {
      int const* held = set(rank, which).data();
      std::int64_t sum = 0;
      for (int const s : stages(rank)) {
        for (footprint_view const& one : of) {
          if (held[input] > 0) sum += held[input] * one.input[s];
          sum += held[after_forward] * one.after_forward(s) + held[whole] * one.activation[s] + held[kept] * one.kept[s];
          held += parts;
        }
      }
      most = std::max(most, sum);
    }
    return fixed + most;
  }
  /// The same for whole microbatches. \param of bytes of the plan's stages
  std::int64_t peak_memory(footprint_view const& of, int rank) const { return peak_memory(std::span(&of, 1), rank); }

 private:
  /// Adds a set unless the list has one with as much of everything; removes sets of which the new one has as much.
  static void record(std::vector<int>& list, std::vector<int> const& now) {
    std::size_t const length = now.size();
    auto const covers = [&](int const* more, int const* less) {
      for (std::size_t i = 0; i < length; ++i) {
        if (more[i] < less[i]) return false;
      }
      return true;
    };
    for (std::size_t at = list.size(); at > 0; at -= length) {  // the last added ones first: neighbours in time are alike
      if (covers(list.data() + at - length, now.data())) return;
    }
    std::size_t left = 0;
    for (std::size_t at = 0; at < list.size(); at += length) {
      if (covers(now.data(), list.data() + at)) continue;
      if (left != at) std::copy_n(list.data() + at, length, list.data() + left);
      left += length;
    }
    list.resize(left);
    list.insert(list.end(), now.begin(), now.end());
  }

  std::size_t slices_;
  std::vector<std::vector<int>> stages_;
  std::vector<std::vector<int>> sets_;  ///< by rank, one set behind another
};

}  // namespace chevron::search
