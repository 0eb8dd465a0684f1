#include <chevron/prove/in_flight.hpp>

#include "analysis_claims.hpp"
#include "by_hand.hpp"

using namespace chevron;
using namespace chevron::catalogue;
using namespace chevron::tests;

// Claims on shapes small enough for the compiler; the large grid is in unit/prove/analysis_test.cpp.
template <class Claim>
constexpr bool for_some(Claim claim, auto const&... schedules) {
  for (shape const size : {shape{1, 1}, shape{2, 3}, shape{3, 2}, shape{4, 8}}) {
    if (!(claim(expand(schedules, size)) && ...)) return false;
  }
  return true;
}
static_assert(for_some(accounted_for, gpipe, interleaved_1f1b, zb_v));
static_assert(for_some(idle_of_one_f_one_b, one_f_one_b));
static_assert(for_some(steady_is_busy, zb_h2, zb_v));
static_assert(for_some(steady_is_span, gpipe, one_f_one_b, zb_h1));

// Steps in a row are a plan that keeps the laws.
static_assert(lawful(back_to_back(checked<zb_v, shape{.ranks = 4, .micro_batches = 8}>, 5)));
static_assert(back_to_back(expand(gpipe, shape{1, 70}), 937).problem.broken == law::shape);
static_assert(back_to_back(expand(gpipe, shape{1, 4}), 0).problem.broken == law::shape);

// The path of 1F1B at equal costs: down with the first forward, along the last rank, up with the last backward.
constexpr bool goes_down_along_and_up() {
  plan const made = expand(one_f_one_b, shape{3, 4});
  critical_path const path = critical_path_of(made, equal_costs, simulate(made, equal_costs));
  action const expected[] = {
      make_action(kind::forward, 0, 0),  make_action(kind::forward, 1, 0),  make_action(kind::forward, 2, 0),
      make_action(kind::backward, 2, 0), make_action(kind::forward, 2, 1),  make_action(kind::backward, 2, 1),
      make_action(kind::forward, 2, 2),  make_action(kind::backward, 2, 2), make_action(kind::forward, 2, 3),
      make_action(kind::backward, 2, 3), make_action(kind::backward, 1, 3), make_action(kind::backward, 0, 3)};
  int i = 0;
  for (path_step const& step : path) {
    if (i == 12 || !(made.actions.data[step.action] == expected[i])) return false;
    if (step.by_message != (i == 1 || i == 2 || i == 10 || i == 11)) return false;
    ++i;
  }
  return i == 12;
}
static_assert(goes_down_along_and_up());

// Ties stay on the rank: with one rank only, the path is its whole list, nothing received.
constexpr bool stays_on_the_rank() {
  plan const made = expand(gpipe, shape{1, 3});
  critical_path const path = critical_path_of(made, equal_costs, simulate(made, equal_costs));
  for (int i = 0; i < 6; ++i) {
    if (path.count != 6 || path.steps.data[i].action != i || path.steps.data[i].by_message) return false;
  }
  return true;
}
static_assert(stays_on_the_rank());

// The resource that a transfer occupies: two ranks, F=1, B=2 and a transfer of 1/2.
constexpr plan two_and_two() { return by_hand({"0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"}, {0, 1}, 2); }
constexpr bool starts(costs const& c, std::initializer_list<double> wanted) {
  plan const made = two_and_two();
  timeline const when = simulate(made, c);
  int i = 0;
  for (double start : wanted) {
    if (when.start.data[i++] != start) return false;
  }
  return i == made.view().total();
}
static_assert(starts({.communication = 0.5}, {0, 1, 5, 8, 1.5, 2.5, 4.5, 5.5}));
// Rank 0 sends until 1.5, only then runs F1; rank 1 sends its gradient from 4.5 to 5.
static_assert(starts({.communication = 0.5, .communication_occupies = occupies::sender}, {0, 1.5, 5, 8.5, 1.5, 2.5, 5, 6}));
// Rank 1 receives from 1 to 1.5, and F1 from 4.5 to 5 although it was made at 2; rank 0 receives from 4.5 to 5.
static_assert(starts({.communication = 0.5, .communication_occupies = occupies::receiver}, {0, 1, 5, 8.5, 1.5, 2.5, 5, 6}));
static_assert(starts({.communication = 0.5, .communication_occupies = occupies::both}, {0, 1.5, 5, 9, 1.5, 2.5, 5.5, 6.5}));

// Latency comes after the transfer, whomever that occupies.
static_assert(starts({.communication = 0.25, .latency = 0.25}, {0, 1, 5, 8, 1.5, 2.5, 4.5, 5.5}));
static_assert(starts({.communication = 0.5, .communication_occupies = occupies::sender, .latency = 1},
                     {0, 1.5, 7, 10.5, 2.5, 3.5, 6, 7}));
static_assert(starts({.communication = 0.5, .communication_occupies = occupies::receiver, .latency = 1},
                     {0, 1, 7, 10.5, 2.5, 3.5, 6, 7}));
// A wire carries one transfer at a time: of two messages that were sent at 1 and 2, the second goes from 5 to 9, and arrives at
// 9.5.
static_assert(starts({.communication = 4, .latency = 0.5}, {0, 1, 13, 16, 5.5, 6.5, 8.5, 9.5}));
static_assert(starts({.communication = 4, .communication_occupies = occupies::wire, .latency = 0.5},
                     {0, 1, 13, 17, 5.5, 6.5, 9.5, 10.5}));

// Costs a boundary, and a first stage without an input gradient: its I takes no time, its W the whole backward.
inline constexpr stage_costs<3> uneven_links{{1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {0.5, 4}};
static_assert(makespan(by_hand({"0F0 0B0", "1F0 1B0", "2F0 2B0"}, {0, 1, 2}, 1), uneven_links) == 3 + 6 + 2 * 4.5);
inline constexpr costs real_model{.forward = 1, .backward_input = 2, .backward_weight = 1, .first_input_gradient = false};
static_assert(real_model.view().of(kind::backward_input, 0) == 0 && real_model.view().of(kind::backward_weight, 0) == 3 &&
              real_model.view().of(kind::backward, 0) == 3 && real_model.view().of(kind::backward_input, 1) == 2);
static_assert(busy(expand(zb_h1, shape{2, 5}), real_model, 0) == busy(expand(zb_h1, shape{2, 5}), real_model, 1));

// Bytes: a V keeps its turn on one rank, and each stage counts with its own size.
inline constexpr stage_sizes<4> sized{{100, 10, 20, 40}, {7, 1000, 3, 0}};
static_assert(message_bytes(expand(zb_v, shape{2, 5}), sized) == 2 * 5 * (7 + 3));
static_assert(peak_bytes(by_hand({"0F0 0F1 3F0 3B0 0B0 3F1 3B1 0B1", "1F0 1F1 2F0 2B0 1B0 2F1 2B1 1B1"}, {0, 1, 1, 0}, 2), sized,
                         0) == 240);
static_assert(peak_bytes(expand(one_f_one_b, shape{4, 8}), sizes{.activation = 3}) == 12 &&
              message_bytes(expand(one_f_one_b, shape{4, 8}), sizes{.message = std::int64_t{1} << 40}) == std::int64_t{48} << 40);

// In flight over time, by hand: chunks enter at the start of their F, leave at the end of their W. The peak is the largest entry.
constexpr bool in_flight_is(int rank, std::initializer_list<in_flight_from> wanted) {
  plan const made = by_hand({"0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1I0 1F1 1I1 1W0 1W1"}, {0, 1}, 2);
  buffer<in_flight_from> const found = in_flight_over_time(made, simulate(made, costs{}), rank);
  int i = 0;
  int most = 0;
  for (in_flight_from const& one : wanted) {
    if (i == found.count || found.data[i].time != one.time || found.data[i].chunks != one.chunks) return false;
    most = one.chunks > most ? one.chunks : most;
    ++i;
  }
  return i == found.count && most == peak_in_flight(made, rank);
}
static_assert(in_flight_is(0, {{0, 1}, {1, 2}, {7, 1}, {8, 0}}));
static_assert(in_flight_is(1, {{1, 1}, {3, 2}, {6, 1}, {7, 0}}));
