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
  kind what;
  int chunk;
  int times;
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
  out[used++] = {What, item.chunk, 1};
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

/// One rank's streams: which (chunk, microbatch) each kind takes next. Work already taken through another token of the same
/// family is passed over, so `F` and `F(0)`, or `B` and `I` with `W`, may be mixed.
struct streams {
  static constexpr int families = 3;  // forward; backward (B and I); weight (W)
  static constexpr std::uint8_t taken[families] = {1, 2, 4};

  int chunks;
  int micro_batches;
  drawn const* order[families];
  std::uint8_t* done;  // by chunk and microbatch
  int* next;           // by family and chunk, plain tokens last

  static constexpr int family_of(kind what) {
    return what == kind::forward ? 0 : what == kind::backward_weight ? 2 : 1;
  }

  /// Where the next piece of work stands; -1 when the stream is spent.
  constexpr int peek(kind what, int chunk) {
    int const family = family_of(what);
    std::uint8_t const bit = taken[family];
    if (chunk == any_chunk) {
      int& at = next[family * (chunks + 1) + chunks];
      drawn const* const sequence = order[family];
      int const length = chunks * micro_batches;
      while (at < length && (done[sequence[at].chunk * micro_batches + sequence[at].micro_batch] & bit) != 0) ++at;
      return at < length ? sequence[at].chunk * micro_batches + sequence[at].micro_batch : -1;
    }
    int& at = next[family * (chunks + 1) + chunk];
    std::uint8_t const* const row = done + chunk * micro_batches;
    while (at < micro_batches && (row[at] & bit) != 0) ++at;
    return at < micro_batches ? chunk * micro_batches + at : -1;
  }
  constexpr void take(kind what, int cell) {
    // A full backward leaves no weight gradient behind.
    done[cell] = static_cast<std::uint8_t>(done[cell] | (what == kind::backward ? 6 : taken[family_of(what)]));
  }
};

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
  buffer<drawn> forward_order(most_held * played);
  buffer<drawn> backward_order(most_held * played);
  buffer<std::uint8_t> done(most_held * played);
  buffer<int> next(detail::streams::families * (most_held + 1));
  int ordered_for = -1;

  for (int r = 0; r < ranks; ++r) {
    situation const here{r, ranks, played, held[r]};
    if (held[r] != ordered_for) {
      what.order.fill(here, forward_order.data, backward_order.data);
      ordered_for = held[r];
    }
    int const cells = held[r] * played;
    for (int i = 0; i < cells; ++i) done.data[i] = 0;
    for (int i = 0; i < detail::streams::families * (held[r] + 1); ++i) next.data[i] = 0;
    detail::streams work{held[r], played, {forward_order.data, backward_order.data, backward_order.data}, done.data, next.data};
    auto const score = detail::score_of(what.how, here);

    for (int p = 0; p < score.phases_count; ++p) {
      auto const& phase = score.phase[p];
      auto const* const tokens = score.token + phase.first;
      bool has_forward = false;
      for (int t = 0; t < phase.tokens; ++t) {
        has_forward = has_forward || tokens[t].what == kind::forward;
        if (tokens[t].chunk >= held[r]) {
          finding f;
          f.broken = law::description;
          f.rank = r;
          f.words = "a token names a chunk this rank does not have, chunk ";
          f.number = tokens[t].chunk;
          return detail::refused(size, what.name, f);
        }
        if (tokens[t].times < 0 || phase.count < -1) {
          finding f;
          f.broken = law::description;
          f.rank = r;
          f.words = "a phase is counted below zero (write max_of(0, ...)): ";
          f.number = tokens[t].times < 0 ? tokens[t].times : phase.count;
          return detail::refused(size, what.name, f);
        }
      }
      for (int round = 0; phase.count < 0 || round < phase.count; ++round) {
        if (phase.count < 0) {
          bool work_left = false;
          if (has_forward) {
            for (int t = 0; t < phase.tokens && !work_left; ++t) {
              work_left = tokens[t].what == kind::forward && tokens[t].times > 0 && work.peek(kind::forward, tokens[t].chunk) >= 0;
            }
          } else {
            work_left = tokens[0].times > 0 && work.peek(tokens[0].what, tokens[0].chunk) >= 0;
          }
          if (!work_left) break;
        }
        bool took = false;
        for (int t = 0; t < phase.tokens; ++t) {
          for (int time = 0; time < tokens[t].times; ++time) {
            int const cell = work.peek(tokens[t].what, tokens[t].chunk);
            if (cell < 0) break;
            work.take(tokens[t].what, cell);
            took = true;
            int const micro_batch = cell % played;
            if (micro_batch >= size.micro_batches) continue;
            out[filled++] = make_action(tokens[t].what, stage_of[r * stages + cell / played], micro_batch);
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
