#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include <chevron/prove/check.hpp>
#include <chevron/prove/footprint.hpp>
#include <chevron/search.hpp>

/// \file
/// A search within a rank's memory in bytes.

namespace plan_program {

/// Whether no rank of a plan holds more than so many bytes at any time.
inline bool fits(chevron::plan_view const& plan, chevron::footprint_view const& takes, std::int64_t memory) {
  for (int r = 0; r < plan.size.ranks; ++r) {
    if (chevron::peak_memory(plan, takes, r) > memory) return false;
  }
  return true;
}

/// The same plan, but an F that is too much for its rank's memory waits for room, and later Fs of that rank behind it.
/// \returns a plan that passes `check` and fits; nothing where an F would have to wait for its own backward, or ranks for each
/// other
std::optional<chevron::plan> brought_within(chevron::plan_view const& plan, chevron::footprint_view const& takes,
                                            std::int64_t memory);

/// Bytes of memory as chunks in flight, the unit in which `search::find` counts.
struct chunk_range {
  int safe = 0;           ///< whatever order keeps this limit fits
  int last = 0;           ///< whatever order fits keeps this limit
  double most_kept = 0;   ///< share of a chunk that its W needs, at most
  double least_kept = 1;  ///< and at least
};

/// \param placed any plan with the stages on their ranks
chunk_range chunks_within(chevron::plan_view const& placed, chevron::footprint_view const& takes, std::int64_t memory);

/// Which orders a search may take: those that fit in bytes, rank by rank, as they are or once Fs wait for room.
class within_bytes {
 public:
  within_bytes(chevron::footprint_view const& takes, std::int64_t memory, chevron::activation_limit widest, int safe,
               double known_length)
      : takes_(takes), memory_(memory), widest_(widest), safe_(safe), known_length_(known_length) {}

  chevron::activation_limit widest(chevron::activation_limit) const { return widest_; }
  bool fits(chevron::plan_view const& plan) const { return plan_program::fits(plan, takes_, memory_); }
  bool mended(chevron::plan& made) const {
    auto fitting = brought_within(made, takes_, memory_);
    if (!fitting) return false;
    made = std::move(*fitting);
    return true;
  }
  /// Three limits above the safe one that bring nothing shorter are enough; so is one where nothing can be shorter than what is
  /// known.
  bool enough(int limit, double length, double bound) {
    bool const shorter = length_ == 0 || length < length_;
    length_ = length;
    if (limit < safe_ || length == 0) return false;
    misses_ = shorter ? 0 : misses_ + 1;
    return misses_ == 3 || (known_length_ > 0 && bound >= known_length_);
  }

 private:
  chevron::footprint_view takes_;
  std::int64_t memory_;
  chevron::activation_limit widest_;
  int safe_;
  double known_length_, length_ = 0;
  int misses_ = 0;
};

/// Looks for the shortest schedule that takes no more than so many bytes on any rank. One search goes up from the least chunks in
/// flight; what it finds at each limit is counted in bytes, rank by rank, until several limits above those that surely fit bring
/// nothing shorter that does. Plans of the catalogue take part as they are.
///
/// \param asked without a limit of chunks; recomputed stages cost their F again in its costs already
/// \param takes bytes by stage
/// \param known_length a length that is known to fit, 0: none; higher limits are tried only where something shorter than it may
/// exist
/// \returns as `search::find`; `bound` holds for every schedule that fits
inline chevron::search::found find_within(chevron::search::problem const& asked, chevron::footprint_view const& takes,
                                          std::int64_t memory, chevron::search::effort const& effort, double known_length = 0) {
  using namespace chevron;
  plan const& placed = asked.where;
  if (placed.problem) return search::find(asked, effort);  // says why
  bool const split = asked.split();
  chunk_range const range = chunks_within(placed, takes, memory);
  int const all = placed.size.micro_batches * placed.size.chunks, least = least_in_flight(placed);
  double const last = std::min(range.last, all);
  search::found out;
  if (last >= least) {
    within_bytes const judge(takes, memory, {last, split ? range.least_kept : 1}, std::clamp(range.safe, least, all),
                             known_length);
    out = search::find(asked.within({last, split ? range.most_kept : 1}), effort, judge);
  }
  if (out.length == 0) {
    finding f;
    f.broken = law::description;
    f.words = "no order was found that fits into a rank's memory; stages: ";
    f.number = placed.stages;
    out.best = chevron::detail::refused(placed.size, "searched", f);
  } else {
    search::detail::finish(out.best, {});
  }
  return out;
}

}  // namespace plan_program
