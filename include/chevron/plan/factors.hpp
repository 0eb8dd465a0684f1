#pragma once

#include <chevron/plan/buffer.hpp>
#include <chevron/plan/costs.hpp>

/// \file
/// Sorts the factors of microbatches of unequal length and computes their means, for lower bounds and for the start of a
/// search.

namespace chevron::detail {

/// The mean factors of all microbatches; 1 if microbatches are of equal length.
struct mean_factors {
  double computation = 1, transfer = 1;

  constexpr mean_factors(length_view const& of, int micro_batches) {
    if (of.alike()) return;
    computation = transfer = 0;
    for (int m = 0; m < micro_batches; ++m) {
      computation += of.of_computation(m) / micro_batches;
      transfer += of.of_transfer(m) / micro_batches;
    }
  }
};

/// The factors of all microbatches for computations, or for transfers, in ascending order.
struct sorted_factors {
  buffer<double> of;
  double sum = 0;

  /// \param all `count` factors; microbatch m has factor all[m % count]
  constexpr sorted_factors(double const* all, int count, int micro_batches) : of(micro_batches) {
    for (int m = 0; m < micro_batches; ++m) {
      double const one = all[m % count];
      sum += one;
      int at = m;
      for (; at > 0 && of.data[at - 1] > one; --at) of.data[at] = of.data[at - 1];
      of.data[at] = one;
    }
  }
  constexpr double least() const { return of.data[0]; }
  constexpr double most() const { return of.data[of.count - 1]; }
  /// The sum of the `count` smallest factors.
  constexpr double smallest(int count) const {
    double out = 0;
    for (int i = 0; i < count; ++i) out += of.data[i];
    return out;
  }
  /// The sum of the `count` largest factors, if each factor occurs `times` times. `count` may be fractional: the last factor
  /// then counts in part.
  constexpr double largest(double count, int times) const {
    double out = 0;
    for (int i = of.count - 1; i >= 0 && count > 0; --i) {
      double const taken = count < times ? count : times;
      out += taken * of.data[i];
      count -= taken;
    }
    return out;
  }
  /// Multiplies each factor by each of the `kinds` numbers in `values`. \returns the sum of the `count` largest or smallest
  /// products
  constexpr double products(double const* values, int kinds, int count, bool largest) const {
    buffer<int> taken(kinds, zeroed);
    double out = 0;
    for (; count > 0; --count) {
      int best = -1;
      double best_product = 0;
      for (int k = 0; k < kinds; ++k) {
        if (taken.data[k] == of.count) continue;
        double const one = values[k] * of.data[largest ? of.count - 1 - taken.data[k] : taken.data[k]];
        if (best >= 0 && (largest ? one <= best_product : one >= best_product)) continue;
        best = k;
        best_product = one;
      }
      if (best < 0) return out;
      ++taken.data[best];
      out += best_product;
    }
    return out;
  }
};

}  // namespace chevron::detail
