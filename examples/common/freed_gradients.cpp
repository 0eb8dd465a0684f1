#include "freed_gradients.hpp"

#include <algorithm>
#include <cstddef>

#include <chevron/prove/footprint.hpp>

namespace chevron::train {

std::int64_t freed_gradients::peak(plan_view const& plan, footprint_view const& takes, int rank,
                                   length_view const& slices) const {
  return walk(plan, std::span(&takes, 1), rank, slices);
}

std::int64_t freed_gradients::peak(plan_view const& plan, std::span<footprint_view const> takes, int rank) const {
  return walk(plan, takes, rank, {});
}

std::int64_t freed_gradients::walk(plan_view const& plan, std::span<footprint_view const> takes, int rank,
                                   length_view const& slices) const {
  footprint_changes changes{takes.front(), plan.forward_only, recomputed_chunks(plan), slices};
  auto const share = [&](std::size_t s) { return (whole[s] + shard - 1) / shard; };
  std::vector<int> left(whole.size(), plan.size.units());  // backwards
  std::vector<bool> there(whole.size());
  std::int64_t held = static_bytes(plan, takes.front(), rank) - sum(plan, rank), most = held;
  auto const free_done = [&] {
    for (std::size_t s = 0; s < whole.size(); ++s) {
      if (!there[s] || left[s] > 0) continue;
      there[s] = false;
      most = std::max(most, held + share(s));  // the share is made before the whole goes
      held += share(s) - whole[s];
    }
  };
  for (int i = plan.begin[rank]; i < plan.begin[rank + 1]; ++i) {
    action const a = plan.actions[i];
    auto const s = static_cast<std::size_t>(a.stage);
    changes.of = takes[static_cast<std::size_t>(a.micro_batch) % takes.size()];
    bool const backward = !whole.empty() && (makes_input_gradient(a.kind) || ends_cell(a.kind));
    if (backward && !there[s] && left[s] == plan.size.units()) {
      free_done();
      there[s] = true;
      held += whole[s];
    }
    most = std::max(most, changes(a, held));
    if (backward && ends_cell(a.kind)) --left[s];
  }
  free_done();
  return most;
}

std::int64_t freed_gradients::sum(plan_view const& plan, int rank) const {
  std::int64_t out = 0;
  for (std::size_t s = 0; s < whole.size(); ++s) out += plan.rank_of[s] == rank ? whole[s] : 0;
  return out;
}

std::int64_t freed_gradients::largest(plan_view const& plan, int rank) const {
  std::int64_t out = 0;
  for (std::size_t s = 0; s < whole.size(); ++s) out = std::max(out, plan.rank_of[s] == rank ? whole[s] : 0);
  return out;
}

}  // namespace chevron::train
