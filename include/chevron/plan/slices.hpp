#pragma once

#include <cmath>
#include <vector>

#include <chevron/plan/lengths.hpp>
#include <chevron/plan/shape.hpp>

/// \file
/// Where sequences are cut into slices, and the costs of the slices.
///
/// The first x of a sequence's tokens (a share from 0 to 1) take the share C(x) = (1-φ)x + φx² of the sequence's time, where φ is
/// the share of time for causal attention, in which a token attends to all tokens before it. The time of a slice's computations
/// is the growth of C from its first token to its last; the time of its messages is the growth of x. W's take time as messages
/// do, since they have no attention; I has all attention of the backward.

namespace chevron {

/// The ends of slices that take equal time, as shares of a sequence's tokens: end i is where C(x) = i / slices. (Seq1F1B, Sun et
/// al., arXiv 2406.03488 §3.3, solves the same for operations.)
/// \param slices at least 1
/// \param attention φ, from 0 to 1; with 0 slices are of equal length
/// \returns one end for each slice, ascending, above 0; the last is 1
inline std::vector<double> slice_ends(int slices, double attention) {
  std::vector<double> ends;
  double const linear = 1 - attention;
  for (int i = 1; i < slices; ++i) {
    double const share = static_cast<double>(i) / slices;
    // The root in a form that does not divide by φ.
    ends.push_back(2 * share / (linear + std::sqrt(linear * linear + 4 * attention * share)));
  }
  ends.push_back(1);
  return ends;
}

/// Factors of slices, for costs that are given for whole microbatches.
/// \param ends of the slices, as `slice_ends` gives them
/// \param attention φ of a microbatch with factor 1
/// \param lengths one for each microbatch; 1 is the length of a microbatch with factor 1
/// \returns one factor for each unit
inline length_factors factors_of_slices(std::vector<double> const& ends, double attention, std::vector<double> const& lengths) {
  int const units = static_cast<int>(ends.size() * lengths.size());
  length_factors out{buffer<double>(units), buffer<double>(units), attention};
  int at = 0;
  for (double const length : lengths) {
    double before = 0;
    for (double const end : ends) {
      out.computation[at] = computation_factor(end * length, attention) - computation_factor(before * length, attention);
      out.transfer[at++] = (end - before) * length;
      before = end;
    }
  }
  return out;
}

/// Factors of slices for microbatches of equal length: they repeat from microbatch to microbatch.
inline length_factors factors_of_slices(std::vector<double> const& ends, double attention) {
  return factors_of_slices(ends, attention, std::vector<double>{1.0});
}

}  // namespace chevron
