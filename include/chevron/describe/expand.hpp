#pragma once

#include <cstdint>

#include <chevron/describe/schedule.hpp>
#include <chevron/describe/score.hpp>
#include <chevron/describe/sized.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// From a description and a shape to a plan: each rank's score is played against its streams.

namespace chevron {

/// The most actions a description can unroll to at this shape.
template <class Placement, class Order, class Phases, class Limit, class AtLeast>
constexpr int actions_at_most(description<Placement, Order, Phases, Limit, AtLeast> const& what, shape size) {
  return detail::kinds_in<Phases> * size.ranks * chunks_of(what.where, size) * size.micro_batches;
}

/// The stages a description cuts a model into, at this shape.
template <class... Parts>
constexpr int stages_of(description<Parts...> const& what, shape size) {
  return size.ranks * chunks_of(what.where, size);
}

/// Works a description out. What cannot be worked out comes back as an empty plan with `problem` set; `check` reports it.
template <class Placement, class Order, class Phases, class Limit, class AtLeast>
constexpr plan expand(description<Placement, Order, Phases, Limit, AtLeast> const& what, shape size) {
  if (finding const f = detail::check_shape(what.where, size)) return detail::refused(size, what.name, f);
  int const per_rank = chunks_of(what.where, size);
  size.chunks = per_rank;

  int const ranks = size.ranks;
  int const stages = ranks * per_rank;
  plan result;
  result.size = size;
  result.stages = stages;
  result.forward_only = what.forward_only;
  result.name = what.name;
  result.rank_of = buffer<std::int16_t>(stages);
  result.begin = buffer<int>(ranks + 1);
  result.begin.data[0] = 0;

  if (finding const f = detail::place_stages(what.where, size, result.rank_of.data)) return detail::refused(size, what.name, f);
  // Each rank's stages, from the input side.
  buffer<int> stage_memory(ranks * stages);
  buffer<int> held_memory(ranks, zeroed);
  int* const held = held_memory.data;
  int* const stage_of = stage_memory.data;
  for (int s = 0; s < stages; ++s) {
    int const rank = result.rank_of.data[s];
    stage_of[rank * stages + held[rank]++] = s;
  }

  situation const anywhere{0, ranks, size.micro_batches, per_rank};
  int const wanted = what.at_least(anywhere);
  int const played = wanted > size.micro_batches ? wanted : size.micro_batches;  // microbatches the phases are worked out for
  result.in_flight_limit = what.limit(anywhere);

  result.actions = buffer<action>(detail::kinds_in<Phases> * stages * size.micro_batches);
  action* const out = result.actions.data;
  int filled = 0;

  int most_held = per_rank;
  for (int r = 0; r < ranks; ++r) most_held = held[r] > most_held ? held[r] : most_held;
  int const most_cells = most_held * played;
  // Streams, by family and chunk, the plain one last: how far each is drawn, and how long it is.
  buffer<int> length_memory(detail::families * (most_held + 1)), next_memory(detail::families * (most_held + 1));
  int* const length_of = length_memory.data;
  int* const next_of = next_memory.data;
  // Which (chunk, microbatch) the plain streams draw, from the order.
  buffer<drawn> forward_order(most_cells), backward_order(most_cells);
  // Microbatches that a B took, by chunk: their W is done.
  buffer<std::uint8_t> whole_memory(most_cells);
  std::uint8_t* const whole = whole_memory.data;
  int ordered_for = -1;
  bool in_sequence[2] = {false, false};

  for (int r = 0; r < ranks; ++r) {
    int const held_here = held[r];
    situation const here{r, ranks, played, held_here};
    int const cells = held_here * played;
    if (held_here != ordered_for) {
      what.order.fill(here, forward_order.data, backward_order.data);
      ordered_for = held_here;
      in_sequence[0] = in_sequence[1] = held_here == 1;
      for (int m = 0; held_here == 1 && m < played; ++m) {
        in_sequence[0] = in_sequence[0] && forward_order.data[m].micro_batch == m;
        in_sequence[1] = in_sequence[1] && backward_order.data[m].micro_batch == m;
      }
    }
    for (int stream = 0; stream < detail::families * (held_here + 1); ++stream) {
      length_of[stream] = stream % (held_here + 1) == held_here ? cells : played;
      next_of[stream] = 0;
    }
    auto score = detail::score_of(what.how, here);
    int const* const stages_here = stage_of + r * stages;
    if (finding const f = detail::ready(score, r, held_here, played, stages_here, in_sequence))
      return detail::refused(size, what.name, f);
    bool const skips = score.mixes_backwards;
    if (skips) {
      for (int i = 0; i < cells; ++i) whole[i] = 0;
    }

    for (int p = 0; p < score.phases_count; ++p) {
      detail::played_phase const phase = score.phase[p];
      detail::played_token const* const tokens = score.token + phase.first;
      int const token_count = phase.tokens;
      int const count = phase.count;
      for (int round = 0; count < 0 || round < count; ++round) {
        if (count < 0) {
          // Go on while any forward stream of the phase has work or, without forwards, its first stream.
          bool work_left = false;
          for (int t = 0; t < phase.deciding && !work_left; ++t) {
            if (phase.has_forward && tokens[t].what != kind::forward) continue;
            work_left = tokens[t].times > 0 && next_of[tokens[t].stream] < length_of[tokens[t].stream];
          }
          if (!work_left) break;
        }
        bool took = false;
        for (int t = 0; t < token_count; ++t) {
          int const stream = tokens[t].stream;
          int const length = length_of[stream];
          kind const kind_here = tokens[t].what;
          int const fixed_stage = tokens[t].stage;
          drawn const* const order = kind_here == kind::forward ? forward_order.data : backward_order.data;
          for (int time = tokens[t].times; time > 0; --time) {
            int at = next_of[stream];
            if (skips && kind_here == kind::backward_weight) {
              while (at < length &&
                     whole[fixed_stage >= 0 ? tokens[t].cell + at : order[at].chunk * played + order[at].micro_batch] != 0)
                ++at;
            }
            if (at >= length) break;
            next_of[stream] = at + 1;
            took = true;
            int const micro_batch = fixed_stage >= 0 ? at : order[at].micro_batch;
            if (skips && kind_here == kind::backward)
              whole[fixed_stage >= 0 ? tokens[t].cell + at : order[at].chunk * played + micro_batch] = 1;
            if (micro_batch >= size.micro_batches) continue;
            int const stage = fixed_stage >= 0 ? fixed_stage : stages_here[order[at].chunk];
            out[filled++] = action{kind_here, 0, static_cast<std::uint32_t>(stage) & 0x7ffu,
                                   static_cast<std::uint32_t>(micro_batch) & 0xffffu};
          }
        }
        if (!took) break;
      }
    }
    result.begin.data[r + 1] = filled;
  }
  result.actions.count = filled;
  return result;
}

}  // namespace chevron
