#pragma once

#include <cstdint>

#include <chevron/describe/schedule.hpp>
#include <chevron/describe/score.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// From a description and a shape to a plan: each rank's score is played against its streams.

namespace chevron {

namespace detail {

constexpr plan refused(shape size, char const* name, finding problem) {
  plan nothing;
  nothing.size = size;
  nothing.size.ranks = 0;
  nothing.name = name;
  nothing.begin = buffer<int>(1, zeroed);
  nothing.problem = problem;
  return nothing;
}

/// a × b, or the largest int where that does not fit.
constexpr int product_or_most(int a, int b) { return a > 2147483647 / b ? 2147483647 : a * b; }

constexpr finding shape_problem(char const* words, int value) {
  finding f;
  f.broken = law::shape;
  f.words = words;
  f.number = value;
  return f;
}

}  // namespace detail

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
  using detail::shape_problem;
  if (size.ranks < 1) return detail::refused(size, what.name, shape_problem("ranks must be at least 1, not ", size.ranks));
  if (size.micro_batches < 1) return detail::refused(size, what.name, shape_problem("micro_batches must be at least 1, not ", size.micro_batches));
  if (size.micro_batches > max_micro_batches) return detail::refused(size, what.name, shape_problem("micro_batches must be at most 65535, not ", size.micro_batches));
  int const per_rank = chunks_of(what.where, size);
  if (per_rank < 1) return detail::refused(size, what.name, shape_problem("chunks must be at least 1, not ", per_rank));
  if (!what.where.allows(per_rank)) return detail::refused(size, what.name, shape_problem("this placement does not exist with that many chunks per rank; the shape asks for ", per_rank));
  if (per_rank > max_stages / size.ranks) return detail::refused(size, what.name, shape_problem("ranks x chunks must be at most 2048, not ", detail::product_or_most(size.ranks, per_rank)));
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

  // Placement: each stage's rank, and each rank's stages from the input side.
  buffer<int> stage_memory(ranks * stages);
  buffer<int> held_memory(ranks, zeroed);
  int* const held = held_memory.data;
  int* const stage_of = stage_memory.data;
  for (int s = 0; s < stages; ++s) {
    int const rank = what.where.rank_of(s, size);
    if (rank < 0 || rank >= ranks) {
      finding f;
      f.broken = law::placement;
      f.words = rank < 0 ? "the placement puts a stage on a negative rank, stage " : "the placement puts a stage on a rank that does not exist, stage ";
      f.number = s;
      f.limit = ranks;
      return detail::refused(size, what.name, f);
    }
    result.rank_of.data[s] = static_cast<std::int16_t>(rank);
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
    if (finding const f = detail::ready(score, r, held_here, played, stages_here, in_sequence)) return detail::refused(size, what.name, f);
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
              while (at < length && whole[fixed_stage >= 0 ? tokens[t].cell + at : order[at].chunk * played + order[at].micro_batch] != 0) ++at;
            }
            if (at >= length) break;
            next_of[stream] = at + 1;
            took = true;
            int const micro_batch = fixed_stage >= 0 ? at : order[at].micro_batch;
            if (skips && kind_here == kind::backward) whole[fixed_stage >= 0 ? tokens[t].cell + at : order[at].chunk * played + micro_batch] = 1;
            if (micro_batch >= size.micro_batches) continue;
            int const stage = fixed_stage >= 0 ? fixed_stage : stages_here[order[at].chunk];
            out[filled++] = action{kind_here, 0, static_cast<std::uint32_t>(stage) & 0x7ffu, static_cast<std::uint32_t>(micro_batch) & 0xffffu};
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
