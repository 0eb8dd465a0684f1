#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <chevron/plan/profile.hpp>

/// \file
/// Collects the measured bytes of stages from all ranks into a profile.
///
///     train.measure_bytes();                                                              // before a step
///     auto const texts = line.all_gather_text(chevron::text_of(train.bytes_by_stage()));  // at the end, on every rank
///     chevron::add_bytes(measured, texts);                                                // on the rank that writes the file

namespace chevron {

/// The bytes that a stage stores for one slice, the largest over microbatches.
struct measured_slice {
  std::int64_t activation = 0;
  std::int64_t kept = -1;  ///< -1: the backward was not split into I and W
  std::int64_t input = 0;
};

/// The bytes of one stage, with the fields of `footprint_view`; each figure is the largest over microbatches, and of a microbatch
/// in slices the sum over these.
struct measured_bytes {
  static constexpr std::int64_t unknown = -1;

  int stage = 0;
  std::int64_t fixed = unknown;
  std::int64_t activation = unknown;
  std::int64_t kept = unknown;  ///< known only if the backward was split into I and W
  std::int64_t input = unknown;
  std::int64_t state = unknown;          ///< part of `fixed`: the optimizer's state
  std::int64_t gradient = unknown;       ///< part of `fixed`: gradients, without those of tied parameters
  std::vector<measured_slice> slices{};  ///< if sequences are in slices: of each slice
};

namespace detail {

/// Pairs each figure of `measured_bytes` with the profile's list of that figure, in the order of the text form.
inline constexpr std::pair<std::int64_t measured_bytes::*, std::vector<std::int64_t> profile::*> byte_figures[] = {
    {&measured_bytes::fixed, &profile::static_bytes}, {&measured_bytes::activation, &profile::activation_bytes},
    {&measured_bytes::kept, &profile::kept_bytes},    {&measured_bytes::input, &profile::input_bytes},
    {&measured_bytes::state, &profile::state_bytes},  {&measured_bytes::gradient, &profile::gradient_bytes}};
/// Pairs each figure of `measured_slice` with the list of that figure in the profile's slices.
inline constexpr std::pair<std::int64_t measured_slice::*, std::vector<std::int64_t> slice_bytes::*> slice_figures[] = {
    {&measured_slice::activation, &slice_bytes::activation},
    {&measured_slice::kept, &slice_bytes::kept},
    {&measured_slice::input, &slice_bytes::input}};

}  // namespace detail

/// A rank's figures as text, a line per stage, for `transport::all_gather_text`.
inline std::string text_of(std::vector<measured_bytes> const& of_rank) {
  std::ostringstream out;
  for (measured_bytes const& s : of_rank) {
    out << s.stage;
    for (auto const& [figure, list] : detail::byte_figures) out << ' ' << s.*figure;
    out << ' ' << s.slices.size();
    for (measured_slice const& one : s.slices) {
      for (auto const& [figure, list] : detail::slice_figures) out << ' ' << one.*figure;
    }
    out << '\n';
  }
  return out.str();
}

/// Writes all ranks' figures into a profile: for each stage the largest over replicas.
/// \param texts by `text_of`, one per rank; if any stage lacks a figure, the profile's list of that figure becomes empty, and
/// `slices` if any stage lacks those
inline void add_bytes(profile& to, std::vector<std::string> const& texts) {
  auto const stages = static_cast<std::size_t>(to.stages);
  std::vector<measured_bytes> all(stages);
  for (std::string const& text : texts) {
    std::istringstream in(text);
    for (std::size_t stage = 0; in >> stage;) {
      for (auto const& [figure, list] : detail::byte_figures) {
        std::int64_t bytes = measured_bytes::unknown;
        in >> bytes;
        all.at(stage).*figure = std::max(all.at(stage).*figure, bytes);
      }
      std::size_t slices = 0;
      in >> slices;
      if (all.at(stage).slices.size() < slices) all.at(stage).slices.resize(slices);
      for (std::size_t i = 0; i < slices; ++i) {
        for (auto const& [figure, list] : detail::slice_figures) {
          std::int64_t bytes = measured_bytes::unknown;
          in >> bytes;
          all.at(stage).slices[i].*figure = std::max(all.at(stage).slices[i].*figure, bytes);
        }
      }
    }
  }
  for (auto const& [figure, list] : detail::byte_figures) {
    auto& out = to.*list;
    out.clear();
    for (measured_bytes const& s : all) out.push_back(s.*figure);
    if (std::count(out.begin(), out.end(), measured_bytes::unknown) > 0) out.clear();
  }
  to.slices.clear();
  std::size_t const slices = all.empty() ? 0 : all.front().slices.size();
  for (measured_bytes const& s : all) {
    if (s.slices.size() != slices) return;  // a stage was not measured
  }
  for (std::size_t i = 0; i < slices; ++i) {
    slice_bytes& of = to.slices.emplace_back();
    for (auto const& [figure, list] : detail::slice_figures) {
      for (measured_bytes const& s : all) (of.*list).push_back(s.slices[i].*figure);
      if (std::count((of.*list).begin(), (of.*list).end(), measured_bytes::unknown) > 0) (of.*list).clear();
    }
  }
}

}  // namespace chevron
