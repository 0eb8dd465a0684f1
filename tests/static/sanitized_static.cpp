// Schedules as constants in a program that is compiled with -fsanitize=undefined: tests/CMakeLists.txt has each compiler read this
// file so, too. GCC then takes no address beside nullptr for a constant, so nothing on this way may ask for one.
#include <chevron/csv.hpp>
#include "accelerator/check_streams.hpp"
#include <chevron/schedule.hpp>
#include <chevron/search.hpp>

using namespace chevron;
using namespace chevron::letters;

namespace {

constexpr shape small{.ranks = 4, .micro_batches = 8};
constexpr auto by_phases = checked<catalogue::zb_v, small>;
constexpr auto by_slots = checked<catalogue::v_half, small>;
constexpr auto by_list = checked<catalogue::hanayo, small>;
static_assert(makespan(by_phases, costs{}) < makespan(by_slots, costs{}) && makespan(by_list, costs{}) > 0);
static_assert(steady_step_time(by_phases, costs{}).settled());

constexpr bool twice_is_lawful(plan_view const& one) { return !check(back_to_back(one, 2)); }

constexpr auto in_bytes = schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady(F, B) | cooldown(B))
                              .at_most_bytes_in_flight(40, sizes{.activation = 10});
constexpr auto listed_in_bytes =
    schedule_of(work_graph::split_backward).prefer(I, F, W).at_most_bytes_in_flight(40, sizes{.activation = 10});
static_assert(twice_is_lawful(by_phases) && twice_is_lawful(checked<in_bytes, small>));
static_assert(lowered<listed_in_bytes, small>.view().begin[4] > 0);

constexpr auto written = from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n");
static_assert(peak_in_flight(checked<written, shape{.ranks = 2, .micro_batches = 2}>, 0) == 2);

static_assert(!check_streams(lowered<catalogue::dual_pipe_v, shape{2, 4}>));

constexpr auto searched = search::best(placement::vee, costs{}).at_most_in_flight(3).trying({.trials = 20});
static_assert(peak_in_flight(checked<searched, shape{.ranks = 2, .micro_batches = 3}>) == 3);

}  // namespace
