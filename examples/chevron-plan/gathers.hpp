#pragma once

#include <string>

#include <chevron/lower/gathers.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>

#include "request.hpp"

/// \file
/// Gathers of stages under FSDP, as `--resident` and `--unshard` ask for them.

namespace plan_program {

/// The number that `--resident` gives; 0 without the flag.
int resident_asked(request const& asked);
/// The fewest gathers of a plan for `--resident`. Throws `usage` if a fused pair needs more stages.
chevron::gather_plan gathers_asked(request const& asked, chevron::plan_view const& plan);
/// A program as PyTorch's CSV with communication, with the gathers that `--resident` asks for. Reads the text back, and throws
/// `std::logic_error` if it breaks a law.
/// \param format csv-comms or csv-comms-2.15
std::string csv_with_gathers(request const& asked, chevron::program_view const& program, std::string const& format);
/// The gathers of a plan for `--resident`, and the makespan with them.
struct gathered_figures {
  int gathers = 0;      ///< of all ranks in a step
  double makespan = 0;  ///< waits for gathers included
  std::string problem;  ///< why `--resident` is too few for the plan; empty: it is not
};
/// \param costs with `unshard`
gathered_figures gathered_figures_of(request const& asked, chevron::plan_view const& plan, chevron::cost_view const& costs);
/// A line on the gathers of a plan, and on the makespan with them; empty without `--resident`.
/// \param costs with `unshard`
std::string gather_time_words(request const& asked, chevron::plan_view const& plan, chevron::cost_view costs);

}  // namespace plan_program
