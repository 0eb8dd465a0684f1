#pragma once

#include <utility>

/// \file
/// Gives the collectives of a trainer their numbers.

namespace chevron::detail {

/// Gives numbers to the collectives that run in the background of a step: the argument `bucket` of `transport::start_all_reduce`
/// and `start_share_gather`. Each owner of collectives claims its numbers once, when the trainer is made. Ranks with a collective
/// in common claim in the same order, so the collective has one number on these ranks. Each group of ranks has numbers of its
/// own: these are numbers among replicas and copies of experts. Among shards and ranks of experts a collective ends before the
/// next one starts (`transport::over_group`), and all have the number 0.
class collective_numbers {
 public:
  /// Claims numbers for one owner. \param count number of collectives \returns the first number; the others follow
  int claim(int count = 1) { return std::exchange(next_, next_ + count); }

 private:
  int next_ = 0;
};

}  // namespace chevron::detail
