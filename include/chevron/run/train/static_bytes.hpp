#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/core/measured_bytes.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/stage/storage_set.hpp>
#include <chevron/run/train/gradient_buckets.hpp>
#include <chevron/run/train/gradient_place.hpp>
#include <chevron/run/train/rank_gradients.hpp>
#include <chevron/run/train/rank_optimizer.hpp>

/// \file
/// Measures the memory that a stage occupies all the time, between microbatches, too.

namespace chevron::detail {

/// Measures the bytes of this rank's stages now: parameters, buffers, gradients, optimizer state and post-validation's copies,
/// each storage once. Gradients that are freed between backwards count as if allocated. A parameter that two stages share
/// counts for both stages, since a plan may put the stages on different ranks.
/// \param counted measured bytes of microbatches by stage; empty: not measured
/// \returns by stage the figures of `counted`, and `fixed` with its parts `gradient` and `state` (of the optimizer, with
/// masters and post-validation's copies); `fixed` and `state` are `unknown` for an optimizer of an unknown class, whose state
/// cannot be listed
inline std::vector<measured_bytes> bytes_by_stage(std::vector<stage> const& stages, rank_gradients const& all_gradients,
                                                  rank_optimizer const& optimizer, std::vector<measured_bytes> const& counted) {
  std::vector<measured_bytes> all_stages;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    if (!stages[s]) continue;
    measured_bytes& out = all_stages.emplace_back(counted.empty() ? measured_bytes{} : counted[s]);
    out.stage = static_cast<int>(s);
    gradient_buckets const& gradients = *all_gradients[s];
    storage_set all, state;
    bool known = true;
    for (parameter const& p : stages[s].parameters()) {
      all.add(p.value);
      all.add(p.value.grad());
      known = optimizer.each_tensor_of(p.value, [&](at::Tensor const& t) { state.add(t); }) && known;
    }
    for (parameter const& b : stages[s].buffers()) all.add(b.value);
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
  return all_stages;
}

}  // namespace chevron::detail
