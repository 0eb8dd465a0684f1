#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <chevron/plan/lengths.hpp>
#include <chevron/plan/shape.hpp>

/// \file
/// Computes where to cut sequences into slices, and the cost factors of the slices.
///
/// The first tokens of a sequence, a share x of all (0 to 1), take the share C(x) = (1-φ)x + φx² of the sequence's time, where
/// φ is the share of time for causal attention, in which a token attends to all tokens before it. The computations of a slice
/// take the increase of C from the slice's start to its end, its messages the increase of x. A W takes the increase of x, too,
/// since a W contains no attention; all attention of a backward is in the I.

namespace chevron {

/// The ends of slices that take equal time, as shares of a sequence's tokens: end i is where C(x) = i / slices. (Seq1F1B, Sun
/// et al., arXiv 2406.03488 §3.3, solves this equation for numbers of operations.)
/// \param slices at least 1
/// \param attention φ, from 0 to 1; 0: slices are of equal length
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

/// The inner boundaries of slices that take equal time, in tokens: those of `slice_ends`, rounded so that each slice has a token
/// or more.
/// \param length tokens of a sequence, at least `slices`
/// \param multiple boundaries are multiples of this number, from 1
/// \returns one boundary fewer than slices, ascending, between 0 and `length`
inline std::vector<std::int64_t> cuts_of_equal_time(std::int64_t length, int slices, double attention,
                                                    std::int64_t multiple = 1) {
  std::vector<double> const ends = slice_ends(slices, attention);
  std::vector<std::int64_t> cuts;
  std::int64_t const steps = (length - 1) / multiple;  // the last cut is at most this number of multiples
  for (int i = 1; i < slices; ++i) {
    double const wanted = ends[static_cast<std::size_t>(i - 1)] * static_cast<double>(length) / static_cast<double>(multiple);
    std::int64_t const least = cuts.empty() ? 1 : cuts.back() / multiple + 1;
    cuts.push_back(std::max(least, std::min(std::int64_t{std::llround(wanted)}, steps - (slices - 1 - i))) * multiple);
  }
  return cuts;
}

/// Computes the factors of slices, for costs of whole microbatches.
/// \param ends the slices' ends, as `slice_ends` returns them
/// \param attention φ of a microbatch with factor 1
/// \param lengths by microbatch, relative to the length of a microbatch with factor 1
/// \returns factors by unit
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

/// Computes the factors of slices for microbatches of equal length: one microbatch's factors, which repeat for each microbatch.
inline length_factors factors_of_slices(std::vector<double> const& ends, double attention) {
  return factors_of_slices(ends, attention, std::vector<double>{1.0});
}

}  // namespace chevron
