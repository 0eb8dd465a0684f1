#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/execution/gradient_place.hpp>
#include <chevron/run/model/stage.hpp>
#include <chevron/run/model/storage_set.hpp>
#include <chevron/run/optimizer/global_step.hpp>
#include <chevron/run/optimizer/gradient_buckets.hpp>
#include <chevron/run/optimizer/rank_gradients.hpp>
#include <chevron/run/trace/measured_bytes.hpp>

/// \file
/// The memory that a stage takes all the time.

namespace chevron::detail {

/// Measures the bytes of parameters, buffers, gradients, optimizer state and post-validation's copies now: each storage once;
/// gradients that are freed between backwards count as during the stage's backwards. A parameter that two stages share counts for
/// both, as a plan may put the stages on different ranks.
/// \param out gets `fixed` and, as parts of `fixed`, `gradient` and `state` (of the optimizer, with masters and post-validation's
/// copies); `fixed` and `state` are `unknown` where the layout of the optimizer's state is not known
inline void add_static_bytes(stage const& of, gradient_buckets const& gradients, global_step& update, measured_bytes& out) {
  storage_set all, state;
  bool known = true;
  for (parameter const& p : of.parameters()) {
    all.add(p.value);
    all.add(p.value.grad());
    known = update.each_tensor_of(p.value, [&](at::Tensor const& t) { state.add(t); }) && known;
  }
  for (parameter const& b : of.buffers()) all.add(b.value);
  gradients.each_tensor([&](at::Tensor const& t) { all.add(t); });
  all.merge(state);
  out.fixed = known ? all.bytes() + gradients.bytes_freed() : measured_bytes::unknown;
  out.state = known ? state.bytes() : measured_bytes::unknown;
  out.gradient = 0;
  for (parameter const& p : gradients.trained()) {
    if (p.tied_as.empty())
      out.gradient += p.value.numel() * static_cast<std::int64_t>(in_float(p.value) ? 4 : p.value.itemsize());
  }
}

/// The bytes of this rank's stages. \param counted bytes of microbatches by stage, as measured; empty: not measured
inline std::vector<measured_bytes> bytes_by_stage(std::vector<stage> const& stages, rank_gradients const& gradients,
                                                  global_step& update, std::vector<measured_bytes> const& counted) {
  std::vector<measured_bytes> out;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    if (!stages[s]) continue;
    out.push_back(counted.empty() ? measured_bytes{} : counted[s]);
    out.back().stage = static_cast<int>(s);
    add_static_bytes(stages[s], *gradients[s], update, out.back());
  }
  return out;
}

}  // namespace chevron::detail
