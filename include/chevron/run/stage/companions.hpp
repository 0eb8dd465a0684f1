#pragma once

#include <memory>
#include <vector>

#include <chevron/run/stage/companion.hpp>
#include <chevron/run/stage/declared_losses.hpp>
#include <chevron/run/stage/skip.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/stage/stage_carries.hpp>

/// \file
/// The list of a stage's companions.

namespace chevron::detail {

/// The companions that a stage's declarations ask for. The gradients of losses come before those of carries, at the end of a
/// section's gradients.
inline std::vector<std::unique_ptr<companion>> companions_of(stage const& owner) {
  std::vector<std::unique_ptr<companion>> out;
  skip_marks const& skips = owner.skips();
  if (!skips.arriving.empty() || !skips.departing.empty()) out.push_back(std::make_unique<passing_tensors>());
  if (!owner.losses().empty()) out.push_back(std::make_unique<declared_losses>());
  if (owner.carries_before(owner.parts()) > 0) out.push_back(std::make_unique<stage_carries>());
  return out;
}

}  // namespace chevron::detail
