#include "programs.hpp"

#include <string>
#include <utility>

#include <chevron/run/core/error.hpp>
#include <chevron/show/csv/csv_read.hpp>

namespace chevron::train {
namespace {

/// A proof, or an error of the command line.
proved_plan prove_option(plan made, shape size, std::string const& name) {
  try {
    return prove(std::move(made));
  } catch (invalid_schedule_error const& e) {
    throw usage_error("--schedule " + name + " cannot be run with " + to_text(size).str() + ": law " + name_of(e.found().broken) +
                      " is broken: " + e.what() + ". Remedy: another --ranks, --chunks or --microbatches");
  }
}

}  // namespace

proved_plan proved_by_options(job_options const& o) {
  shape size{.ranks = o.ranks, .micro_batches = o.micro_batches, .chunks = o.chunks};
  // A placement that takes any number of chunks has none of its own: two, then.
  if (size.chunks == 0 && catalogue::same_name(o.schedule, catalogue::interleaved_1f1b.name)) size.chunks = 2;

  plan made = o.schedule_text.empty() ? catalogue::make_plan(o.schedule, size) : read_csv(o.schedule_text).plan;
  if (!o.schedule_text.empty()) made.name = o.schedule.c_str();
  return prove_option(std::move(made), size, o.schedule);
}

proved_program lower_and_check(proved_plan const& from) {
  proved_program made = lower(from);
  if (finding const found = check(made.view())) {
    throw usage_error(std::string("--schedule ") + from.view().name + ": law " + name_of(found.broken) +
                      " is broken: " + describe(found).str() + ". Remedy: another schedule");
  }
  return made;
}

}  // namespace chevron::train
