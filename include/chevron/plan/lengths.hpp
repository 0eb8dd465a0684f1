#pragma once

#include <vector>

#include <chevron/plan/costs.hpp>

/// \file
/// The factors by which microbatches of unequal length multiply costs.

namespace chevron {

/// Factors by microbatch, for computations and transfers, with the meaning of `length_view`; owns its memory.
struct length_factors {
  buffer<double> computation{}, transfer{};  ///< empty: microbatches are of equal length
  double attention = 0;                      ///< as in `length_view`

  constexpr length_view view() const { return {computation.data, transfer.data, computation.count, attention}; }
  /// Returns the factors in another order, in which microbatch `order[k]` enters the pipeline k-th.
  /// \param slices number of slices per microbatch; a microbatch's slices remain adjacent
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

/// The time of a microbatch's computations, relative to a microbatch of length 1. The share `attention` of the time at length 1
/// grows with the square of the length.
constexpr double computation_factor(double length, double attention) {
  return (1 - attention) * length + attention * length * length;
}

/// Computes factors from lengths in tokens, for costs measured with a microbatch of `measured` tokens. The times of messages
/// and of computations other than attention are proportional to the length.
///
/// \param lengths in tokens, one for each microbatch, above 0
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
