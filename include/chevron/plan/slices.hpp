#pragma once

#include <cmath>
#include <cstddef>
#include <vector>

#include <chevron/plan/lengths.hpp>
#include <chevron/plan/shape.hpp>

/// \file
/// Where sequences are cut into slices, and the costs of the slices.
///
/// Tokens 0 to x of a sequence take the share C(x) = (1-φ)x + φx² of the sequence's time, x being the share of its tokens and φ
/// the share of its time that goes to causal attention: a token attends to all tokens before it. A slice's computations take what
/// C grows by from its first token to its last, its messages what x grows by. So does a W, which has no attention in it; the I
/// has all that the whole backward has.

namespace chevron {

/// The ends of slices that take equal time, as shares of a sequence's tokens: end i is where C(x) = i / slices. (Seq1F1B, Sun et
/// al., arXiv 2406.03488 §3.3, solves the same for operations.)
/// \param slices at least 1
/// \param attention φ, from 0 to 1; with 0 slices are of equal length
/// \returns one end a slice, above 0 and rising; the last is 1
inline std::vector<double> slice_ends(int slices, double attention) {
  std::vector<double> ends;
  double const linear = 1 - attention;
  for (int i = 1; i < slices; ++i) {
    double const share = static_cast<double>(i) / slices;
    // The root in the form that does not divide by φ.
    ends.push_back(2 * share / (linear + std::sqrt(linear * linear + 4 * attention * share)));
  }
  ends.push_back(1);
  return ends;
}

/// Factors of slices, where costs are those of microbatches with all their slices.
/// \param ends of the slices, as `slice_ends` gives them
/// \param attention φ of a microbatch with factor 1
/// \param lengths by microbatch, in tokens of one with factor 1
/// \returns by unit
inline length_factors factors_of_slices(std::vector<double> const& ends, double attention, std::vector<double> const& lengths) {
  length_factors out;
  out.attention = attention;
  for (double const length : lengths) {
    double before = 0;
    for (double const end : ends) {
      out.computation.push_back(computation_factor(end * length, attention) - computation_factor(before * length, attention));
      out.transfer.push_back((end - before) * length);
      before = end;
    }
  }
  return out;
}

/// The same for microbatches of one length, whose costs are given: factors repeat from microbatch to microbatch.
inline length_factors factors_of_slices(std::vector<double> const& ends, double attention) {
  return factors_of_slices(ends, attention, std::vector<double>{1.0});
}

}  // namespace chevron
