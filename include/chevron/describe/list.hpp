#pragma once

#include <cstdint>

#include <chevron/describe/expression.hpp>
#include <chevron/describe/schedule.hpp>
#include <chevron/describe/sized.hpp>
#include <chevron/describe/token.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// List scheduling: say what there is to do, where, what goes first and how much may be in flight; the order follows from
/// playing it, each rank always taking the first ready action in its order of preference.

namespace chevron {

/// What a step consists of: forwards and whole backwards, or forwards, input and weight gradients.
enum class work_graph { full_backward, split_backward };

/// A schedule found by list scheduling. Make one with `schedule_of`.
///
/// ```cpp
/// using namespace chevron::letters;
/// inline constexpr auto mine = chevron::schedule_of(chevron::work_graph::split_backward)
///     .place(chevron::placement::vee).prefer(I, F, W).at_most_in_flight(2 * ranks);
/// ```
///
/// Rules. A kind that `prefer` does not name comes last. Of one kind, forwards take the latest stage that is ready and gradients
/// the earliest: whatever frees memory soonest. Microbatches go in their order. A forward is admitted only if the limit leaves a
/// place for each later stage of its rank, so that a microbatch that entered can leave again. Times are those of
/// `assuming`, by default one unit for each of F, I and W of a chunk.
template <class Placement, class Limit = undeclared>
struct listing {
  Placement where;
  work_graph work;
  int rank_of_kind[compute_kinds];  // smaller is preferred
  Limit limit;
  costs times;
  char const* name;

  template <placement_policy Where>
  constexpr listing<Where, Limit> place(Where new_place) const {
    return {new_place, work, {rank_of_kind[0], rank_of_kind[1], rank_of_kind[2], rank_of_kind[3]}, limit, times, name};
  }
  /// The order in which a rank takes what is ready: `prefer(I, F, W)`.
  template <kind... Kinds>
  constexpr listing prefer(token<Kinds>...) const {
    listing out = *this;
    int place_in_order = 0;
    ((out.rank_of_kind[static_cast<int>(Kinds)] = place_in_order++), ...);
    return out;
  }
  /// The most chunks in flight on any rank; also declared to the gate. At least as many as a rank has chunks.
  template <expression::operand Count>
  constexpr auto at_most_in_flight(Count most) const {
    using node = expression::node_of<Count>;
    return listing<Placement, node>{
        where, work, {rank_of_kind[0], rank_of_kind[1], rank_of_kind[2], rank_of_kind[3]}, expression::as_node(most),
        times, name};
  }
  /// What actions cost, for deciding what is ready first.
  constexpr listing assuming(costs const& c) const {
    listing out = *this;
    out.times = c;
    return out;
  }
  constexpr listing named(char const* as) const {
    listing out = *this;
    out.name = as;
    return out;
  }
};

/// Starts the description of a list schedule: stages in a line, no limit, gradients before forwards before weights.
constexpr listing<placement::linear_t> schedule_of(work_graph work) {
  return {placement::linear, work, {1, 0, 0, 2}, {}, {}, ""};
}

template <class... Parts>
constexpr int stages_of(listing<Parts...> const& what, shape size) {
  return size.ranks * chunks_of(what.where, size);
}
template <class... Parts>
constexpr int actions_at_most(listing<Parts...> const& what, shape size) {
  return (what.work == work_graph::split_backward ? 3 : 2) * stages_of(what, size) * size.micro_batches;
}

namespace detail {

/// What has happened so far in a list schedule, and what a rank could do next.
struct listed_state {
  int stages;
  int micro_batches;
  double* forward_end;  // by cell; negative: not scheduled
  double* input_end;    // of B or I
  int* next;            // by stage and family: the microbatch that comes next

  static constexpr double never = -1;

  /// When the next action of this kind on this stage could start; `never` if what it needs is not scheduled yet.
  constexpr double ready_at(kind what, int stage, std::int16_t const* rank_of, double communication) const {
    int const m = next[stage * 3 + (what == kind::forward ? 0 : what == kind::backward_weight ? 2 : 1)];
    if (m >= micro_batches) return never;
    int const cell = stage * micro_batches + m;
    if (what == kind::backward_weight) return input_end[cell];
    int const from = what == kind::forward ? stage - 1 : stage + 1;
    double ready = 0;
    if (from >= 0 && from < stages) {
      double const made = what == kind::forward ? forward_end[cell - micro_batches] : input_end[cell + micro_batches];
      if (made < 0) return never;
      ready = made + (rank_of[from] != rank_of[stage] ? communication : 0);
    }
    if (what != kind::forward) {
      if (forward_end[cell] < 0) return never;
      ready = forward_end[cell] > ready ? forward_end[cell] : ready;
    }
    return ready;
  }
};

}  // namespace detail

/// Plays a list schedule. One that gets stuck on its own limit comes back with `problem` set.
template <class Placement, class Limit>
constexpr plan expand(listing<Placement, Limit> const& what, shape size) {
  if (finding const f = detail::check_shape(what.where, size)) return detail::refused(size, what.name, f);
  size.chunks = chunks_of(what.where, size);
  int const ranks = size.ranks;
  int const micro_batches = size.micro_batches;
  int const stages = ranks * size.chunks;
  int const cells = stages * micro_batches;
  bool const split = what.work == work_graph::split_backward;

  plan result;
  result.size = size;
  result.stages = stages;
  result.name = what.name;
  result.rank_of = buffer<std::int16_t>(stages);
  if (finding const f = detail::place_stages(what.where, size, result.rank_of.data)) return detail::refused(size, what.name, f);
  std::int16_t const* const rank_of = result.rank_of.data;
  situation const anywhere{0, ranks, micro_batches, size.chunks};
  int const limit = what.limit(anywhere);
  result.in_flight_limit = limit;

  buffer<double> forward_end(cells), input_end(cells), free_at(ranks, zeroed), try_at(ranks, zeroed);
  buffer<int> next(3 * stages, zeroed), in_flight(ranks, zeroed), count(ranks, zeroed), left(ranks, zeroed),
      later(stages, zeroed);
  for (int i = 0; i < cells; ++i) forward_end.data[i] = input_end.data[i] = detail::listed_state::never;
  for (int s = 0; s < stages; ++s) {
    left.data[rank_of[s]] += (split ? 3 : 2) * micro_batches;
    for (int t = s + 1; t < stages; ++t) later.data[s] += rank_of[t] == rank_of[s] ? 1 : 0;
  }
  int const most = (split ? 3 : 2) * stages * micro_batches;
  buffer<action> order(most);  // in the order of time; sorted by rank at the end
  int filled = 0;
  detail::listed_state const state{stages, micro_batches, forward_end.data, input_end.data, next.data};
  kind const kinds[3] = {kind::forward, split ? kind::backward_input : kind::backward, kind::backward_weight};
  double const length[3] = {what.times.forward,
                            split ? what.times.backward_input : what.times.backward_input + what.times.backward_weight,
                            what.times.backward_weight};

  constexpr double asleep = -1;  // until something it needs is scheduled
  while (filled < most) {
    // The rank that can act first; ranks act in the order of time, so what is ready by then is known.
    int rank = -1;
    for (int r = 0; r < ranks; ++r) {
      if (left.data[r] > 0 && try_at.data[r] >= 0 && (rank < 0 || try_at.data[r] < try_at.data[rank])) rank = r;
    }
    if (rank < 0) {
      finding f;
      f.broken = law::description;
      for (int r = ranks - 1; r >= 0; --r) f.rank = left.data[r] > 0 ? r : f.rank;
      f.words = "list scheduling is stuck: allow more than the limit in flight, which is ";
      f.number = limit;
      return detail::refused(size, what.name, f);
    }
    double const now = try_at.data[rank];
    int best = -1;            // family * stages + stage
    double soonest = asleep;  // of what is known to become ready later
    for (int family = 0; family < (split ? 3 : 2); ++family) {
      kind const k = kinds[family];
      for (int step = 0; step < stages; ++step) {
        int const stage = k == kind::forward ? stages - 1 - step : step;
        if (rank_of[stage] != rank) continue;
        if (k == kind::forward && limit > 0 && in_flight.data[rank] + later.data[stage] >= limit) continue;
        double const ready = state.ready_at(k, stage, rank_of, what.times.communication);
        if (ready < 0) continue;
        if (ready > now) {
          if (soonest < 0 || ready < soonest) soonest = ready;
          continue;
        }
        bool const preferred =
            best < 0 || what.rank_of_kind[static_cast<int>(k)] < what.rank_of_kind[static_cast<int>(kinds[best / stages])];
        if (preferred) best = family * stages + stage;
      }
    }
    if (best < 0) {
      try_at.data[rank] = soonest;
      continue;
    }

    int const family = best / stages;
    int const stage = best % stages;
    kind const k = kinds[family];
    int const m = next.data[stage * 3 + family]++;
    double const end = now + length[family];
    int const cell = stage * micro_batches + m;
    if (k == kind::forward)
      forward_end.data[cell] = end;
    else if (k != kind::backward_weight)
      input_end.data[cell] = end;
    if (k == kind::forward)
      ++in_flight.data[rank];
    else if (k != kind::backward_input)
      --in_flight.data[rank];
    order.data[filled++] = make_action(k, stage, m);
    ++count.data[rank];
    --left.data[rank];
    free_at.data[rank] = try_at.data[rank] = end;
    // Whoever needs this may try again when it arrives.
    int const to = k == kind::forward ? stage + 1 : k == kind::backward_weight ? -1 : stage - 1;
    if (to >= 0 && to < stages && rank_of[to] != rank) {
      int const consumer = rank_of[to];
      double const arrives = end + what.times.communication;
      double const wakes = arrives > free_at.data[consumer] ? arrives : free_at.data[consumer];
      if (try_at.data[consumer] < 0 || wakes < try_at.data[consumer]) {
        // A rank that is computing is not disturbed: its next try is at its end anyway.
        if (try_at.data[consumer] < 0 || try_at.data[consumer] > free_at.data[consumer]) try_at.data[consumer] = wakes;
      }
    }
  }

  result.actions = buffer<action>(most);
  result.begin = buffer<int>(ranks + 1);
  result.begin.data[0] = 0;
  for (int r = 0; r < ranks; ++r) result.begin.data[r + 1] = result.begin.data[r] + count.data[r];
  for (int r = 0; r < ranks; ++r) count.data[r] = result.begin.data[r];
  for (int i = 0; i < most; ++i) {
    action const a = order.data[i];
    result.actions.data[count.data[rank_of[a.stage]]++] = a;
  }
  return result;
}

}  // namespace chevron
