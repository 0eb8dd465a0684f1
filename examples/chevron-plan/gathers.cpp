#include "gathers.hpp"

#include <stdexcept>

#include <chevron/csv/csv.hpp>
#include <chevron/csv/csv_check.hpp>
#include <chevron/csv/csv_gathers.hpp>
#include <chevron/lower/gather_times.hpp>
#include <chevron/tools/show/text_scale.hpp>

namespace plan_program {
namespace {

std::string too_few(request const& asked, chevron::gather_plan const& of) {
  return "--resident " + asked.resident + " is too few: " + describe(of.problem).str();
}

}  // namespace

int resident_asked(request const& asked) {
  return asked.resident.empty() ? 0 : whole_number(asked.resident, "--resident", 1, chevron::max_stages);
}

chevron::gather_plan gathers_asked(request const& asked, chevron::plan_view const& plan) {
  chevron::gather_plan out = fewest_gathers(plan, resident_asked(asked));
  if (out.problem) throw usage(too_few(asked, out));
  return out;
}

gathered_figures gathered_figures_of(request const& asked, chevron::plan_view const& plan, chevron::cost_view const& costs) {
  chevron::gather_plan const gathers = fewest_gathers(plan, resident_asked(asked));
  if (gathers.problem) return {.problem = too_few(asked, gathers)};
  return {.gathers = count_gathers(gathers), .makespan = makespan(plan, simulate(plan, costs, gathers))};
}

std::string csv_with_gathers(request const& asked, chevron::program_view const& program, std::string const& format) {
  using chevron::show::csv_waits;
  csv_waits const waits = format == "csv-comms" ? csv_waits::left_out : csv_waits::written;
  if (asked.resident.empty()) return chevron::show::csv_with_communication(program, waits);
  std::string out = chevron::show::csv_with_communication(program, waits, gathers_asked(asked, program.plan));
  chevron::csv_schedule const read = chevron::read_csv(out);
  chevron::finding broken = check(read, out);
  if (!broken) broken = judge_gathers(read, out, resident_asked(asked)).broken;
  if (broken) throw std::logic_error("the file with gathers breaks a law: " + describe(broken, read, out));
  return out;
}

std::string gather_time_words(request const& asked, chevron::plan_view const& plan, chevron::cost_view costs) {
  if (asked.resident.empty()) return {};
  gathered_figures const with = gathered_figures_of(asked, plan, costs);
  if (!with.problem.empty()) throw usage(with.problem);
  costs.unshard = nullptr;
  double const more = with.makespan - makespan(plan, costs);
  return "gathers: " + std::to_string(with.gathers) + " UNSHARD, at most " + asked.resident +
         " stages of a rank gathered at once; makespan with them " + chevron::show::number(with.makespan) +
         (more > 0 ? ", " + chevron::show::number(more) + " of it waits for gathers" : ", and no rank waits for one") + "\n";
}

}  // namespace plan_program
