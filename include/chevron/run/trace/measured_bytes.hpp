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

/// The bytes of one stage, as in `footprint_view`; of several microbatches the largest figure.
struct measured_bytes {
  static constexpr std::int64_t unknown = -1;

  int stage = 0;
  std::int64_t fixed = unknown;
  std::int64_t activation = unknown;
  std::int64_t kept = unknown;  ///< known if the backward was split into I and W
  std::int64_t input = unknown;
  std::int64_t state = unknown;     ///< part of `fixed`: the optimizer's state
  std::int64_t gradient = unknown;  ///< part of `fixed`: gradients, without those of tied parameters
};

/// The figures of a rank as text, for `transport::all_gather_text`.
inline std::string text_of(std::vector<measured_bytes> const& of_rank) {
  std::ostringstream out;
  for (measured_bytes const& s : of_rank)
    out << s.stage << ' ' << s.fixed << ' ' << s.activation << ' ' << s.kept << ' ' << s.input << ' ' << s.state << ' '
        << s.gradient << '\n';
  return out.str();
}

/// Writes all ranks' figures into a profile; of replicas the largest.
/// \param texts by `text_of`, one of each rank; a list of the profile stays empty where a stage has no figure for it
inline void add_bytes(profile& to, std::vector<std::string> const& texts) {
  auto const stages = static_cast<std::size_t>(to.stages);
  std::vector<measured_bytes> all(stages);
  for (std::string const& text : texts) {
    std::istringstream in(text);
    for (measured_bytes s; in >> s.stage >> s.fixed >> s.activation >> s.kept >> s.input >> s.state >> s.gradient;) {
      measured_bytes& most = all.at(static_cast<std::size_t>(s.stage));
      most.fixed = std::max(most.fixed, s.fixed);
      most.activation = std::max(most.activation, s.activation);
      most.kept = std::max(most.kept, s.kept);
      most.input = std::max(most.input, s.input);
      most.state = std::max(most.state, s.state);
      most.gradient = std::max(most.gradient, s.gradient);
    }
  }
  for (auto const& [list, entry] :
       {std::pair{&to.static_bytes, &measured_bytes::fixed}, std::pair{&to.activation_bytes, &measured_bytes::activation},
        std::pair{&to.kept_bytes, &measured_bytes::kept}, std::pair{&to.input_bytes, &measured_bytes::input},
        std::pair{&to.state_bytes, &measured_bytes::state}, std::pair{&to.gradient_bytes, &measured_bytes::gradient}}) {
    list->clear();
    for (measured_bytes const& s : all) list->push_back(s.*entry);
    if (std::count(list->begin(), list->end(), measured_bytes::unknown) > 0) list->clear();
  }
}

}  // namespace chevron
