#include "job.hpp"

#include <chevron/plan/forward_part.hpp>
#include <chevron/run/error.hpp>
#include <chevron/schedule.hpp>
#include <chevron/show/csv_read.hpp>

namespace chevron::train {
namespace {

// The default job. If a law broke, or sends and receives did not match, this file would not compile.
constexpr shape default_shape{.ranks = 2, .micro_batches = 4};
constexpr auto const& default_plan = checked<catalogue::one_f_one_b, default_shape>;
constexpr auto const& default_program = lowered<catalogue::one_f_one_b, default_shape>;
static_assert(!check(default_program.view()), "receives and sends of the default program match");
static_assert(peak_in_flight(default_plan, 0) == 2 && peak_in_flight(default_plan, 1) == 1);

plan proved(std::string const& name, shape size) {
  plan made = catalogue::make_plan(name, size);
  finding found = made.problem ? made.problem : check(made);
  if (found) {
    throw usage_error("--schedule " + name + " cannot be run with " + to_text(size).str() + ": law " + name_of(found.broken) +
                      " is broken: " + describe(found).str() + ". Remedy: another --ranks, --chunks or --microbatches");
  }
  return made;
}

/// A schedule whose file was read, and found lawful, with the options.
plan read_from_file(options const& o) {
  static std::string const name = o.schedule;  // a plan points to its name
  plan made = read_csv(o.schedule_text).plan;
  made.name = name.c_str();
  return made;
}

program lowered_and_checked(plan const& from) {
  program made = lower(from);
  if (finding const found = check(made.view())) {
    throw usage_error(std::string("--schedule ") + from.name + ": law " + name_of(found.broken) +
                      " is broken: " + describe(found).str() + ". Remedy: another schedule");
  }
  return made;
}

}  // namespace

programs make_programs(options const& o) {
  shape size{.ranks = o.ranks, .micro_batches = o.micro_batches, .chunks = o.chunks};
  // A placement that takes any number of chunks has none of its own: two, then.
  if (size.chunks == 0 && catalogue::same_name(o.schedule, catalogue::interleaved_1f1b.name)) size.chunks = 2;

  programs out;
  plan const training = o.schedule_text.empty() ? proved(o.schedule, size) : read_from_file(o);
  for (int s = 0; s < training.stages; ++s) (void)cut_of(o.model.layers, training.stages, s);  // throws if there are too many
  bool const is_default = catalogue::same_name(o.schedule, catalogue::one_f_one_b.name) && size == default_shape;
  if (is_default) {
    out.training = default_program.view();
    out.proved_while_compiling = true;
  } else {
    out.made = lowered_and_checked(training);
    out.training = out.made->view();
  }
  out.evaluation = lowered_and_checked(forward_part(training));
  out.sampling = lowered_and_checked(forward_part(training, 1));
  return out;
}

}  // namespace chevron::train
