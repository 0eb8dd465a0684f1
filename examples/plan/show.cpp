#include <iostream>

#include <chevron/prove/check.hpp>
#include <chevron/show/chrome_trace.hpp>
#include <chevron/show/csv.hpp>
#include <chevron/show/html.hpp>
#include <chevron/show/json.hpp>
#include <chevron/show/svg.hpp>
#include <chevron/show/text.hpp>

#include "request.hpp"

namespace plan_program {

int run_show(request const& asked) {
  std::string const format = format_of(asked, {"text", "svg", "html", "csv", "csv-steps", "trace", "json", "steps"});
  if (is_file(asked.schedule)) {
    // Pictures are of schedules that can be played.
    if (chevron::finding const broken = read_file(asked).broken) {
      std::cerr << law_words(asked, broken) << "\n";
      return exit_broken_law;
    }
  }
  chevron::plan plan = plan_of(asked);
  if (*plan.name == 0) plan.name = asked.schedule.c_str();
  owned_costs const costs = costs_of(asked, plan.stages);
  chevron::show::text_style const style = style_of(asked);
  chevron::finding const broken = check(plan);
  if (format == "steps")
    write(asked, chevron::show::steps_text(plan, broken));
  else if (format == "csv")
    write(asked, chevron::show::csv(plan));
  else if (format == "csv-steps")
    write(asked, chevron::show::csv(plan, chevron::show::idle_cells::written));
  else if (format == "json")
    write(asked, chevron::show::json(plan, costs.view()));
  else if (format == "svg")
    write(asked, chevron::show::svg(plan, costs.view()));
  else if (format == "html")
    write(asked, chevron::show::html(plan, costs.view()));
  else if (format == "trace")
    write(asked, chevron::show::chrome_trace(plan, costs.view()));
  else
    write(asked, chevron::show::timeline_text(plan, costs.view(), style));
  if (!broken) return exit_ok;
  std::cerr << law_words(asked, broken) << "\n";
  return exit_broken_law;
}

}  // namespace plan_program
