#include "job.hpp"

#include <string>
#include <utility>

#include <chevron/plan/forward_part.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/schedule.hpp>
#include <chevron/show/csv/csv_read.hpp>

namespace chevron::train {
namespace {

// The default job. If a law broke, or sends and receives did not match, this file would not compile.
constexpr shape default_shape{.ranks = 2, .micro_batches = 4};
constexpr auto default_plan = checked<catalogue::one_f_one_b, default_shape>;
constexpr auto default_program = lowered<catalogue::one_f_one_b, default_shape>;
static_assert(!check(default_program.view()), "receives and sends of the default program match");
static_assert(peak_in_flight(default_plan, 0) == 2 && peak_in_flight(default_plan, 1) == 1);

/// A proof, or an error of the command line.
proved_plan prove_option(plan made, shape size, std::string const& name) {
  try {
    return prove(std::move(made));
  } catch (invalid_schedule_error const& e) {
    throw usage_error("--schedule " + name + " cannot be run with " + to_text(size).str() + ": law " + name_of(e.found().broken) +
                      " is broken: " + e.what() + ". Remedy: another --ranks, --chunks or --microbatches");
  }
}

/// Its program, whose laws are looked at once more: messages match, slots are free when they are used.
proved_program lower_and_check(proved_plan const& from) {
  proved_program made = lower(from);
  if (finding const found = check(made.view())) {
    throw usage_error(std::string("--schedule ") + from.view().name + ": law " + name_of(found.broken) +
                      " is broken: " + describe(found).str() + ". Remedy: another schedule");
  }
  return made;
}

}  // namespace

programs make_programs(options const& o) {
  shape size{.ranks = o.ranks, .micro_batches = o.micro_batches, .chunks = o.chunks};
  // A placement that takes any number of chunks has none of its own: two, then.
  if (size.chunks == 0 && catalogue::same_name(o.schedule, catalogue::interleaved_1f1b.name)) size.chunks = 2;

  plan made = o.schedule_text.empty() ? catalogue::make_plan(o.schedule, size) : read_csv(o.schedule_text).plan;
  if (!o.schedule_text.empty()) made.name = o.schedule.c_str();
  proved_plan const training = prove_option(std::move(made), size, o.schedule);
  int const stages = training.view().stages;
  for (int s = 0; s < stages; ++s) (void)cut_of(o.model.layers, stages, s);  // throws if there are too many
  bool const is_default = catalogue::same_name(o.schedule, catalogue::one_f_one_b.name) && size == default_shape;
  return {.training = is_default ? default_program : lower_and_check(training),
          .evaluation = lower_and_check(prove(forward_part(training))),
          .sampling = lower_and_check(prove(forward_part(training, 1))),
          .proved_while_compiling = is_default};
}

}  // namespace chevron::train
