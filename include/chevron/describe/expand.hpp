#pragma once

#include <cstdint>

#include <boost/hana/for_each.hpp>
#include <boost/hana/size.hpp>

#include <chevron/describe/schedule.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// From a description and a shape to a plan. Hana walks the few phases of a description once per rank; what they unroll to
/// is worked out on plain values.

namespace chevron {

namespace detail {

/// A token with its count, ready to be played.
struct played_token {
  kind what{};
  int chunk = any_chunk;
  int times = 1;
  int stream = 0;          // which stream it draws from
  std::uint8_t marks = 0;  // what taking it marks as done
  std::uint8_t passes = 0; // what it passes over
};
/// A phase worked out for one rank: tokens [first, first + tokens), `count` times, or -1: while there is work.
struct played_phase {
  int first = 0;
  int tokens = 0;
  int count = -1;
};

template <class Item>
inline constexpr int tokens_in = 1;
template <class... Tokens>
inline constexpr int tokens_in<sequence<Tokens...>> = sizeof...(Tokens);
template <class Count, class... Tokens>
inline constexpr int tokens_in<repeated<Count, Tokens...>> = sizeof...(Tokens);

template <class Phases>
struct score_size;
template <stage_of_step Last, class... Phases>
struct score_size<phases<Last, Phases...>> {
  template <class Phase>
  struct of;
  template <stage_of_step Role, class... Items>
  struct of<phase<Role, Items...>> {
    static constexpr int value = (0 + ... + tokens_in<Items>);
  };
  static constexpr int phases_count = sizeof...(Phases);
  static constexpr int tokens_count = (0 + ... + of<Phases>::value);
};

/// A description worked out for one rank: what Hana's part of the job leaves behind.
template <class Phases>
struct score {
  static constexpr int phases_count = score_size<Phases>::phases_count;
  played_phase phase[phases_count]{};
  played_token token[score_size<Phases>::tokens_count]{};
};

template <kind What>
constexpr void play(token<What> item, situation const&, played_token* out, int& used, int& count, bool) {
  out[used].what = What;
  out[used++].chunk = item.chunk;
  count = -1;
}
template <class... Tokens>
constexpr void play(sequence<Tokens...> const& item, situation const& s, played_token* out, int& used, int& count, bool) {
  hana::for_each(item.tokens, [&](auto t) { play(t, s, out, used, count, false); });
  count = -1;
}
template <class Count, class... Tokens>
constexpr void play(repeated<Count, Tokens...> const& item, situation const& s, played_token* out, int& used, int& count,
                    bool alone) {
  static_assert(sizeof...(Tokens) > 0);
  int const times = item.count(s);
  int const before = used;
  hana::for_each(item.tokens, [&](auto t) { play(t, s, out, used, count, false); });
  count = times;
  if (!alone) {
    for (int i = before; i < used; ++i) out[i].times = times;
  }
}

template <class Phases>
constexpr score<Phases> score_of(Phases const& how, situation const& s) {
  score<Phases> result;
  int used = 0;
  int at = 0;
  hana::for_each(how.list, [&](auto const& one) {
    constexpr bool alone = decltype(hana::size(one.items))::value == 1;
    played_phase& p = result.phase[at++];
    p.first = used;
    hana::for_each(one.items, [&](auto const& item) {
      int count = -1;
      play(item, s, result.token, used, count, alone);
      p.count = alone ? count : -1;
    });
    p.tokens = used - p.first;
  });
  return result;
}

/// The largest number of actions a description can unroll to per stage and microbatch: 2 (F, B) or 3 (F, I, W).
template <class Phases>
inline constexpr int kinds_in = 3;
template <class Item>
inline constexpr bool splits_backward = false;
template <>
inline constexpr bool splits_backward<token<kind::backward_weight>> = true;
template <class... Tokens>
inline constexpr bool splits_backward<sequence<Tokens...>> = (false || ... || splits_backward<Tokens>);
template <class Count, class... Tokens>
inline constexpr bool splits_backward<repeated<Count, Tokens...>> = (false || ... || splits_backward<Tokens>);
template <stage_of_step Role, class... Items>
inline constexpr bool splits_backward<phase<Role, Items...>> = (false || ... || splits_backward<Items>);
template <stage_of_step Last, class... Phases>
inline constexpr int kinds_in<phases<Last, Phases...>> = (false || ... || splits_backward<Phases>) ? 3 : 2;

/// Families of kinds that draw from one stream: forwards; B and I; W. Work taken through one token of a family is passed over
/// by the others, so `F` and `F(0)`, or `B` and `I` with `W`, may be mixed.
inline constexpr int families = 3;
constexpr int family_of(kind what) { return what == kind::forward ? 0 : what == kind::backward_weight ? 2 : 1; }
/// What taking a kind marks as done, by family: a full backward leaves no weight gradient behind.
constexpr std::uint8_t marks_of(kind what) {
  return what == kind::forward ? 1 : what == kind::backward_weight ? 4 : what == kind::backward ? 6 : 2;
}

constexpr plan refused(shape size, char const* name, finding problem) {
  plan nothing;
  nothing.size = size;
  nothing.size.ranks = 0;
  nothing.name = name;
  nothing.begin = buffer<int>(1);
  nothing.problem = problem;
  return nothing;
}

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
  if (size.ranks < 1) return detail::refused(size, what.name, shape_problem("ranks must be at least 1", size.ranks));
  if (size.micro_batches < 1) return detail::refused(size, what.name, shape_problem("micro_batches must be at least 1", size.micro_batches));
  if (size.micro_batches > max_micro_batches) return detail::refused(size, what.name, shape_problem("micro_batches must be at most 65535", size.micro_batches));
  int const per_rank = chunks_of(what.where, size);
  if (per_rank < 1) return detail::refused(size, what.name, shape_problem("chunks must be at least 1", per_rank));
  if (!what.where.allows(per_rank)) return detail::refused(size, what.name, shape_problem("this placement does not exist with that many chunks per rank", per_rank));
  if (per_rank > max_stages / size.ranks) return detail::refused(size, what.name, shape_problem("ranks x chunks must be at most 2048", size.ranks));
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

  // Placement: each stage's rank, and each rank's stages from the input side.
  buffer<int> stage_memory(ranks * stages);
  buffer<int> held_memory(ranks);
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
  // Streams, by family and chunk, the plain one last: the cells (chunk x played + microbatch) in the order they are drawn.
  buffer<int> forward_cells(most_cells), backward_cells(most_cells), in_sequence(most_cells);
  buffer<drawn> forward_order(most_cells), backward_order(most_cells);
  buffer<std::uint8_t> done_memory(most_cells);
  buffer<int const*> cells_memory(detail::families * (most_held + 1));
  buffer<int> length_memory(detail::families * (most_held + 1)), next_memory(detail::families * (most_held + 1));
  std::uint8_t* const done = done_memory.data;
  int const** const cells_of = cells_memory.data;
  int* const length_of = length_memory.data;
  int* const next_of = next_memory.data;
  for (int i = 0; i < most_cells; ++i) in_sequence.data[i] = i;
  int ordered_for = -1;

  for (int r = 0; r < ranks; ++r) {
    int const held_here = held[r];
    situation const here{r, ranks, played, held_here};
    int const cells = held_here * played;
    if (held_here != ordered_for) {
      what.order.fill(here, forward_order.data, backward_order.data);
      for (int i = 0; i < cells; ++i) {
        forward_cells.data[i] = forward_order.data[i].chunk * played + forward_order.data[i].micro_batch;
        backward_cells.data[i] = backward_order.data[i].chunk * played + backward_order.data[i].micro_batch;
      }
      ordered_for = held_here;
    }
    for (int i = 0; i < cells; ++i) done[i] = 0;
    for (int family = 0; family < detail::families; ++family) {
      for (int chunk = 0; chunk <= held_here; ++chunk) {
        int const stream = family * (held_here + 1) + chunk;
        bool const plain = chunk == held_here;
        cells_of[stream] = plain ? (family == 0 ? forward_cells.data : backward_cells.data) : in_sequence.data + chunk * played;
        length_of[stream] = plain ? cells : played;
        next_of[stream] = 0;
      }
    }
    auto score = detail::score_of(what.how, here);
    int const* const stages_here = stage_of + r * stages;

    for (int p = 0; p < score.phases_count; ++p) {
      detail::played_phase const phase = score.phase[p];
      detail::played_token* const tokens = score.token + phase.first;
      int const token_count = phase.tokens;
      int const count = phase.count;
      bool has_forward = false;
      for (int t = 0; t < token_count; ++t) {
        has_forward = has_forward || tokens[t].what == kind::forward;
        finding f;
        f.broken = law::description;
        f.rank = r;
        if (tokens[t].chunk >= held_here) {
          f.words = "a token names a chunk this rank does not have, chunk ";
          f.number = tokens[t].chunk;
          return detail::refused(size, what.name, f);
        }
        if (tokens[t].times < 0 || count < -1) {
          f.words = "a phase has a negative count, see max_of; it is ";
          f.number = tokens[t].times < 0 ? tokens[t].times : count;
          return detail::refused(size, what.name, f);
        }
        tokens[t].stream = detail::family_of(tokens[t].what) * (held_here + 1) + (tokens[t].chunk < 0 ? held_here : tokens[t].chunk);
        tokens[t].marks = detail::marks_of(tokens[t].what);
        tokens[t].passes = tokens[t].what == kind::backward ? 2 : tokens[t].marks;
      }
      for (int round = 0; count < 0 || round < count; ++round) {
        if (count < 0) {
          // Go on while any forward stream of the phase has work or, without forwards, its first stream.
          bool work_left = false;
          int const last = has_forward ? token_count : 1;
          for (int t = 0; t < last && !work_left; ++t) {
            if ((has_forward && tokens[t].what != kind::forward) || tokens[t].times == 0) continue;
            int const stream = tokens[t].stream;
            int const* const drawn_cells = cells_of[stream];
            int const length = length_of[stream];
            int at = next_of[stream];
            while (at < length && (done[drawn_cells[at]] & tokens[t].passes) != 0) ++at;
            next_of[stream] = at;
            work_left = at < length;
          }
          if (!work_left) break;
        }
        bool took = false;
        for (int t = 0; t < token_count; ++t) {
          detail::played_token const& token = tokens[t];
          int const stream = token.stream;
          int const* const drawn_cells = cells_of[stream];
          int const length = length_of[stream];
          for (int time = 0; time < token.times; ++time) {
            int at = next_of[stream];
            while (at < length && (done[drawn_cells[at]] & token.passes) != 0) ++at;
            next_of[stream] = at + 1;
            if (at >= length) break;
            int const cell = drawn_cells[at];
            done[cell] = static_cast<std::uint8_t>(done[cell] | token.marks);
            took = true;
            int const micro_batch = cell % played;
            if (micro_batch < size.micro_batches) out[filled++] = make_action(token.what, stages_here[cell / played], micro_batch);
          }
        }
        if (!took) break;
      }
    }
    result.begin.data[r + 1] = filled;
  }
  return result;
}

// How the gate (prove/gate.hpp) turns a description into a plan.
namespace detail {
template <class... Parts>
constexpr plan make_plan_from(description<Parts...> const& what, shape size) {
  return expand(what, size);
}
template <class... Parts>
constexpr int actions_needed(description<Parts...> const& what, shape size) {
  return actions_at_most(what, size) > 0 ? actions_at_most(what, size) : 0;
}
template <class... Parts>
constexpr int stages_needed(description<Parts...> const& what, shape size) {
  return stages_of(what, size) > 0 ? stages_of(what, size) : 0;
}
}  // namespace detail

}  // namespace chevron
