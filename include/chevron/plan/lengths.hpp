#pragma once

#include <vector>

#include <chevron/plan/costs.hpp>

/// \file
/// Microbatches of unequal length: the factors by which their costs differ.

namespace chevron {

/// Factors by microbatch, for computations and transfers, with the meaning of `length_view`; owns its memory.
struct length_factors {
  buffer<double> computation{}, transfer{};  ///< empty: all microbatches are alike
  double attention = 0;                      ///< as in `length_view`

  constexpr length_view view() const { return {computation.data, transfer.data, computation.count, attention}; }
  /// The factors in another order: microbatch `order[k]` enters the pipeline k-th.
  /// \param slices the number of slices of each microbatch, which stay together
  length_factors in(std::vector<int> const& order, int slices = 1) const {
    int const units = static_cast<int>(order.size()) * slices;
    length_factors out{buffer<double>(units), buffer<double>(units), attention};
    int at = 0;
    for (int const m : order) {
      for (int unit = m * slices; unit < (m + 1) * slices; ++unit, ++at) {
        out.computation[at] = computation[unit];
        out.transfer[at] = transfer[unit];
      }
    }
    return out;
  }
};

/// The factors of the first `micro_batches` microbatches.
constexpr length_factors factors_of(length_view const& lengths, int micro_batches) {
  length_factors out{buffer<double>(micro_batches), buffer<double>(micro_batches), lengths.attention};
  for (int m = 0; m < micro_batches; ++m) {
    out.computation[m] = lengths.of_computation(m);
    out.transfer[m] = lengths.of_transfer(m);
  }
  return out;
}

/// The time of a microbatch's computations, relative to a microbatch of length 1. The share `attention` of that time grows with
/// the square of the length.
constexpr double computation_factor(double length, double attention) {
  return (1 - attention) * length + attention * length * length;
}

/// Factors for lengths in tokens, where costs are those of a microbatch of `measured` tokens: messages take time in proportion to
/// the length, and so do computations other than attention.
///
/// \param lengths one for each microbatch, above 0
/// \param attention share, 0 to 1, of the measured computations' time that grows with the square of the length. A transformer
/// layer of width h with a feed-forward part of 4h and full attention has 24sh² + 4s²h operations at length s, of which 4s²h are
/// attention: a share of s / (6h + s)
inline length_factors factors_of(std::vector<double> const& lengths, double measured, double attention = 0) {
  length_factors out{lengths, lengths};
  for (double& x : out.transfer) x /= measured;
  for (int m = 0; m < out.transfer.count; ++m) out.computation[m] = computation_factor(out.transfer[m], attention);
  return out;
}

}  // namespace chevron
