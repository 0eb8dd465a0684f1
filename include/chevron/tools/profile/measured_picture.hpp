#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include <chevron/plan/plan.hpp>
#include <chevron/tools/profile/trace_window.hpp>
#include <chevron/tools/show/picture.hpp>

/// \file
/// Draws a recorded step, for a comparison with the picture of its plan.

namespace chevron::show {
namespace detail {

/// The message that action `a` receives from another rank; empty: none.
inline std::optional<action> message_to(plan_view const& plan, action a) {
  int const stage = static_cast<int>(a.stage), number = static_cast<int>(a.micro_batch);
  if (a.kind == kind::forward && stage > 0 && plan.rank_of[stage - 1] != plan.rank_of[stage])
    return make_action(kind::receive_forward, stage, number);
  if ((a.kind == kind::backward || a.kind == kind::backward_input) && stage + 1 < plan.stages &&
      plan.rank_of[stage + 1] != plan.rank_of[stage])
    return make_action(kind::receive_backward, stage, number);
  return std::nullopt;
}

}  // namespace detail

/// Draws a recorded step, in milliseconds from the first computation. A receive is as long as its rank waited for the message; a
/// fused pair is one box, whether its halves ran at the same time or not.
/// \param plan the plan that the ranks ran \param all the ranks' records, by `steps_of`: a row each; the records of one rank
/// alone are drawn as one row \param k index of the step among the recorded ones \returns the picture, without a critical path
template <class = void>
picture measured_picture(plan_view const& plan, all_steps const& all, std::size_t k) {
  long const step = all.front()[k].step;
  picture out;
  out.title = "measured, step " + std::to_string(step);
  out.schedule = plan.name;
  out.size = plan.size;
  out.stages = plan.stages;
  out.rows = static_cast<int>(all.size());
  out.forward_only = plan.forward_only;
  out.unit = "ms";
  std::int64_t const zero = pipeline_of(all, k, 0, all.size()).first;
  auto const at = [&](std::int64_t time) { return 1e3 * seconds_between(zero, time); };
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    auto const& entries = all[rank][k].entries;
    auto const draw = [&](action what, std::int64_t from, std::int64_t to) {
      int const chunk = is_compute(what.kind) ? plan.chunk_of(static_cast<int>(what.stage)) : 0;
      out.boxes.push_back({static_cast<int>(rank), at(from), at(to), what, chunk, static_cast<int>(step)});
    };
    // The picture begins with the first computation; earlier waits are drawn from there.
    auto const draw_wait = [&](trace_event const& r) {
      if (auto const message = detail::message_to(plan, r.op)) draw(*message, std::max(r.reached, zero), r.start);
    };
    for (std::size_t i = 0; i < entries.size(); ++i) {
      trace_event const& r = entries[i];
      // Posting a receive takes no time; the wait for its message is drawn where the rank waited.
      if (r.op.kind == kind::receive_forward || r.op.kind == kind::receive_backward) continue;
      if (!is_compute(r.op.kind)) {
        draw(r.op, r.reached, r.end);
        continue;
      }
      draw_wait(r);
      if (r.op.fused != 0 && i + 1 < entries.size()) {
        trace_event const& other = entries[++i];
        draw_wait(other);
        for (action const half : {r.op, other.op}) draw(half, std::min(r.start, other.start), std::max(r.end, other.end));
      } else {
        draw(r.op, r.start, r.end);
      }
    }
  }
  mark_pairs(out);
  return out;
}

}  // namespace chevron::show
