#include "job.hpp"

#include <string>
#include <utility>

#include <chevron/plan/forward_part.hpp>
#include <chevron/schedule.hpp>

#include "common/programs.hpp"

namespace chevron::train {
namespace {

// The default job. If a law broke, or sends and receives did not match, this file would not compile.
constexpr shape default_shape{.ranks = 2, .micro_batches = 4};
constexpr auto default_plan = checked<catalogue::one_f_one_b, default_shape>;
constexpr auto default_program = lowered<catalogue::one_f_one_b, default_shape>;
static_assert(!check(default_program.view()), "receives and sends of the default program match");
static_assert(peak_in_flight(default_plan, 0) == 2 && peak_in_flight(default_plan, 1) == 1);

}  // namespace

programs make_programs(options const& o) {
  proved_plan const training = proved_by_options(o);
  int const stages = training.view().stages;
  for (int s = 0; s < stages; ++s) (void)cut_of(o.model.layers, stages, s, o.cut);  // throws where they do not fit
  bool const is_default =
      catalogue::same_name(o.schedule, catalogue::one_f_one_b.name) &&
      shape{.ranks = o.ranks, .micro_batches = o.micro_batches, .chunks = o.chunks, .slices = o.slices} == default_shape;
  return {.training = is_default ? default_program : lower_and_check(training),
          .evaluation = lower_and_check(prove(forward_part(training))),
          .sampling = lower_and_check(prove(forward_part(training, 1))),
          .proved_while_compiling = is_default};
}

}  // namespace chevron::train
