#include <algorithm>
#include <iostream>

#include <chevron/csv/csv.hpp>
#include <chevron/describe/recomputed.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/prove/steps.hpp>
#include <chevron/tools/search/recomputation.hpp>
#include <chevron/tools/show/analysis_text.hpp>
#include <chevron/tools/show/chrome_trace.hpp>
#include <chevron/tools/show/html.hpp>
#include <chevron/tools/show/json.hpp>
#include <chevron/tools/show/svg.hpp>
#include <chevron/tools/show/text.hpp>

#include "gathers.hpp"
#include "layers.hpp"
#include "request.hpp"
#include "shorter.hpp"
#include "value_list.hpp"

namespace plan_program {
namespace {

/// The time of the gathers of a sharded optimizer, and the part of it by which a step is longer; empty without gathers.
std::string unshard_text(chevron::plan_view const& plan, chevron::cost_view costs, chevron::show::picture const& drawn) {
  using chevron::show::number;
  if (costs.unshard == nullptr) return {};
  double gathers = 0;  // of the rank with the longest
  for (chevron::show::box const& one : drawn.boxes) {
    if (one.op.kind == chevron::kind::unshard) gathers = std::max(gathers, one.end);
  }
  double const longer = makespan(plan, costs);
  costs.unshard = nullptr;
  double const left = longer - makespan(plan, costs);
  return "gathers of parameters take " + number(gathers) + " on a rank; " +
         (left > 0 ? number(left) + " of it makes the step longer" : "the pipeline's fill hides all of it") + "\n";
}

/// Numbers, timeline, each rank's time and the critical path, one below the other.
/// \param gathers a line about gathers of parameters
std::string as_text(request const& asked, chevron::plan_view const& plan, chevron::cost_view const& costs,
                    chevron::size_view const& sizes, int steps, chevron::show::text_style const& style,
                    chevron::show::picture const& drawn, std::optional<chevron::profile> const& measured,
                    std::vector<int> const& layers, std::string const& gathers) {
  chevron::show::figures const numbers = chevron::show::figures_of(plan, costs, sizes);
  std::string out = header_text(drawn, numbers, style);
  if (measured) {
    std::string const words = measured_words(*measured, plan, numbers.makespan);
    if (!words.empty()) out += "profile: makespan " + words + "\n";
    if (!layers.empty()) out += "layers of the stages: " + chevron::search::layers_text(layers) + "\n";
    if (layers.empty() && is_file(asked.schedule))
      out += "profile: each stage has the costs of the same stage in the profile; how many layers a stage of " + asked.schedule +
             " holds its file does not say\n";
  }
  request brief = asked;
  brief.layers = chevron::search::layers_text(layers);
  if (auto const other = asked.unshard.empty() ? shorter_than(brief, plan, costs, 1) : std::nullopt)
    out += "search finds " + chevron::show::number(other->length) + " within this memory: " + other->command + "\n";
  if (steps > 1) {
    double const all = makespan(back_to_back(plan, steps), costs);
    out += std::to_string(steps) + " steps back to back: " + chevron::show::number(all) + ", or " +
           chevron::show::number(all / steps) + " each; they are drawn, all else is about one step\n";
  }
  return out + gathers + "\n" + rows_text(drawn, style) + "\n" +
         ranks_text(numbers, style, plan.forward_only) + "\n" + chevron::show::critical_path_text(plan, costs, style);
}

}  // namespace

int run_show(request const& asked) {
  std::string const format = format_of(asked, show_formats);
  if (is_file(asked.schedule)) {
    // Pictures are of schedules that can be played.
    if (chevron::finding const broken = read_file(asked).broken) {
      std::cerr << law_words(asked, broken) << "\n";
      return exit_broken_law;
    }
  }
  chevron::plan plan = plan_of(asked);
  if (*plan.name == 0) plan.name = asked.schedule.c_str();
  auto const measured = profile_of(asked);
  layered_profile const layered(asked, measured);
  std::vector<int> layers;
  owned_costs const costs = [&] {
    owned_costs out;
    if (layered.cuts(plan.stages)) {
      cut_model cut = layered.cut_for(plan);
      if (!cut.problem.empty()) throw usage("--profile " + quoted(asked.profile) + ": " + cut.problem);
      layers = std::move(cut.layers);
      out = std::move(cut.costs);
      if (!asked.unshard.empty()) out.unshard = value_list(asked.unshard, "--unshard", plan.stages, "stages", cost_number);
    } else {
      chevron::plan_view const view = plan;
      out = costs_of(asked, chevron::split_stages(plan), {view.rank_of, static_cast<std::size_t>(plan.stages)});
    }
    apply_lengths(asked, plan.size, out);
    return out;
  }();
  if (!asked.recompute.empty() && !plan.forward_only) {
    if (plan.view().holds(chevron::kind::recompute))
      throw usage("--recompute does not go with " + asked.schedule + ", which has R's already");
    plan = chevron::search::place_recomputation(chevron::with_recomputation(plan), costs.view());
  }
  if (!asked.unshard.empty() && plan.forward_only)
    throw usage("--unshard does not go with " + asked.schedule + ", which has no optimizer to shard: leave it out");
  owned_sizes const sizes = sizes_of(asked, plan.stages);
  int const steps = steps_of(asked, plan);
  if (steps > 1 && !asked.unshard.empty())
    throw usage("--unshard does not go with --steps " + asked.steps + ": gathers are those of one step");
  if (steps > 1 && (format.starts_with("csv") || format == "steps")) {
    throw usage("--steps " + asked.steps + " does not go with --format " + format +
                ": it is for text, svg, html, trace and json");
  }
  if (asked.critical_path && format != "svg") {
    throw usage("--critical-path does not go with --format " + format +
                ": it is for svg; html has it always, text and json name it");
  }
  if (!asked.resident.empty()) {
    if (asked.unshard.empty())
      throw usage("--resident " + asked.resident + " of show needs the time of a gather: add --unshard COST");
    if (format != "text")
      throw usage("--resident " + asked.resident + " does not go with --format " + format + ": it is for text");
  }
  chevron::show::text_style const style = style_of(asked);
  chevron::finding const broken = check(plan);
  chevron::cost_view view = costs.view();
  std::string const gathers =
      asked.resident.empty() || broken ? "" : gather_time_words(asked, plan, view) + "all else is without gathers\n";
  if (!asked.resident.empty()) view.unshard = nullptr;
  auto const drawn = [&] {
    auto out =
        steps > 1 ? chevron::show::picture_of_steps(plan, view, steps) : chevron::show::picture_of(plan, view);
    if (measured) out.unit = "ms";
    return out;
  };
  if (format == "steps")
    write(asked, chevron::show::steps_text(plan, broken));
  else if (format == "csv")
    write(asked, chevron::show::csv(plan));
  else if (format == "csv-steps")
    write(asked, chevron::show::csv(plan, chevron::show::idle_cells::written));
  else if (format == "json")
    write(asked, chevron::show::json(plan, view, sizes.view(), steps));
  else if (format == "svg")
    write(asked, chevron::show::svg(drawn(), {.critical_path = asked.critical_path}));
  else if (format == "html")
    write(asked, chevron::show::html(plan, view, sizes.view(), steps, measured ? "ms" : ""));
  else if (format == "trace")
    write(asked, chevron::show::chrome_trace(drawn()));
  else
    write(asked, as_text(asked, plan, view, sizes.view(), steps, style, drawn(), measured, layers,
                         asked.resident.empty() ? unshard_text(plan, view, drawn()) : gathers));
  if (!broken) return exit_ok;
  std::cerr << law_words(asked, broken) << "\n";
  return exit_broken_law;
}

}  // namespace plan_program
