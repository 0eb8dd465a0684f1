#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include <chevron/plan/lengths.hpp>
#include <chevron/plan/profile.hpp>
#include <chevron/tools/profile/trace_window.hpp>

/// \file
/// Estimates from measured steps how the times of stages grow with a microbatch's length.

namespace chevron {

/// Estimates the share of a microbatch's computation time that grows with the square of the microbatch's length. For each share
/// from 0 to 1, takes as a computation's time at length `unit` the median of the measured times divided by their factors
/// (`computation_factor`), and sums the absolute differences between measured and predicted times; the least sum wins.
/// \param ranks records of all ranks' steps \param pipeline_ranks ranks of one pipeline
/// \param lengths in tokens, by replica, step and microbatch
/// \param unit length to which the share refers, in tokens
/// \returns the share, 0 to 1 in steps of 0.01; 0 if all lengths are equal
inline double attention_share(all_steps const& ranks, int pipeline_ranks,
                              std::vector<std::vector<std::vector<double>>> const& lengths, double unit) {
  struct sample {
    double length, seconds;
  };
  std::map<std::tuple<kind, bool, int>, std::vector<sample>> groups;  // by kind, whether fused, and stage
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    auto const& of_replica = lengths[rank / static_cast<std::size_t>(pipeline_ranks)];
    for (std::size_t step = 0; step < ranks[rank].size(); ++step) {
      each_computation(
          ranks[rank][step].entries, [&](trace_event const& one, trace_event const* other, std::int64_t start, std::int64_t end) {
            auto const m = static_cast<std::size_t>(one.op.micro_batch);
            // A fused pair of two microbatches has no single length.
            if (other != nullptr && other->op.micro_batch != one.op.micro_batch) return;
            groups[{one.op.kind, other != nullptr, one.op.stage}].push_back({of_replica[step][m], seconds_between(start, end)});
          });
    }
  }
  double best = 0, least = std::numeric_limits<double>::infinity();
  for (int hundredths = 0; hundredths <= 100; ++hundredths) {
    double const share = hundredths / 100.;
    double differences = 0;
    for (auto const& [what, samples] : groups) {
      std::vector<double> factors, of_unit;
      for (sample const& one : samples) {
        factors.push_back(computation_factor(one.length / unit, share));
        of_unit.push_back(one.seconds / factors.back());
      }
      double const cost = median(std::move(of_unit));
      for (std::size_t i = 0; i < samples.size(); ++i) differences += std::abs(samples[i].seconds - cost * factors[i]);
    }
    if (differences < least * (1 - 1e-9)) {
      least = differences;
      best = share;
    }
  }
  return best;
}

}  // namespace chevron
