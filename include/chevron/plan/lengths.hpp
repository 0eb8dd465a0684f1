#pragma once

#include <cstddef>
#include <vector>

#include <chevron/plan/costs.hpp>

/// \file
/// Microbatches of unequal length: factors on costs that own their memory.

namespace chevron {

/// Factors by microbatch, as `length_view` has them.
struct length_factors {
  std::vector<double> computation, transfer;
  double attention = 0;  ///< as `length_view` has it

  length_view view() const { return {computation.data(), transfer.data(), static_cast<int>(computation.size()), attention}; }
  /// In another order: microbatch `order[k]` goes in k-th.
  /// \param slices of each microbatch, which go in together
  length_factors in(std::vector<int> const& order, int slices = 1) const {
    length_factors out;
    out.attention = attention;
    for (int const m : order) {
      for (int s = 0; s < slices; ++s) {
        auto const unit = static_cast<std::size_t>(m * slices + s);
        out.computation.push_back(computation[unit]);
        out.transfer.push_back(transfer[unit]);
      }
    }
    return out;
  }
};

/// The factors of so many microbatches.
inline length_factors factors_of(length_view const& lengths, int micro_batches) {
  length_factors out;
  out.attention = lengths.attention;
  for (int m = 0; m < micro_batches; ++m) {
    out.computation.push_back(lengths.of_computation(m));
    out.transfer.push_back(lengths.of_transfer(m));
  }
  return out;
}

/// What a microbatch's computations take beside one of length 1, of which the share `attention` goes with the square of the
/// length.
constexpr double computation_factor(double length, double attention) {
  return (1 - attention) * length + attention * length * length;
}

/// Factors for lengths in tokens, where costs are those of a microbatch of `measured` tokens: messages go with the length, and
/// so do computations but for attention.
///
/// \param lengths above 0, one a microbatch
/// \param attention share of the measured computations that goes with the square of the length, 0 to 1: of a transformer layer of
/// width h with a feed-forward part of 4h and full attention, 4s²h of 24sh² + 4s²h operations at length s, which is s / (6h + s)
inline length_factors factors_of(std::vector<double> const& lengths, double measured, double attention = 0) {
  length_factors out;
  for (double const length : lengths) {
    double const x = length / measured;
    out.computation.push_back(computation_factor(x, attention));
    out.transfer.push_back(x);
  }
  return out;
}

}  // namespace chevron
