#pragma once

#include <array>
#include <exception>
#include <filesystem>
#include <string>
#include <vector>

#include <chevron/base/new_file.hpp>
#include <chevron/plan/profile.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/tools/profile/measured_picture.hpp>
#include <chevron/tools/profile/trace_window.hpp>
#include <chevron/tools/show/chrome_trace.hpp>
#include <chevron/tools/show/html.hpp>
#include <chevron/tools/show/svg.hpp>

#include "trainer.hpp"

/// \file
/// Drawings of a schedule and of a pipeline's last step.

namespace chevron_pipelining {

/// The plan as SVG, in units of a forward's time: I and W take as long as F each.
inline std::string drawn_plan(chevron::plan_view const& plan) { return chevron::show::svg(plan, chevron::costs{}.view()); }

/// The share of a step in which ranks idle by the plan, with the times of `drawn_plan`, 0 to 1.
inline double planned_bubble(chevron::proved_program const& of) {
  return bubble_makespan(of.view().plan, chevron::costs{}.view());
}

/// A step in the form that `ending` names: predicted from its measured times above measured. \param texts all ranks' traces
/// \throws chevron::usage_error for another ending than .svg, .html and .json
inline std::string drawn_step(chevron::plan_view const& plan, std::vector<std::string> const& texts, std::string const& ending) {
  namespace show = chevron::show;
  chevron::all_steps const all = chevron::steps_of(texts);
  chevron::profiled_costs const costs = costs_of(profile_of(plan, all), split_stages(plan));
  std::array both{show::picture_of(plan, costs.view(), "predicted from measured times"), show::measured_picture(plan, all, 0)};
  both[0].unit = "ms";
  if (ending == ".svg") return show::svg(both);
  if (ending == ".json") return show::chrome_trace(both);
  std::array const known{show::facts_of(plan, costs.view())};
  if (ending == ".html") return show::html(both, known);
  throw chevron::usage_error("`" + ending + "` names no drawing. Remedy: a file that ends in .svg, .html or .json");
}

/// Writes the last step of all ranks; rank 0's `path` counts. Collective.
/// \throws chevron::usage_error on every rank where no step has run, and where rank 0 cannot write
inline void write_timeline(pipeline& of, std::string const& path) {
  of.of().check_owner();
  auto const texts = of.of().transport().all_gather_text(of.trace_text());
  std::string problem;
  if (of.of().rank() == 0) {
    try {
      std::filesystem::path const file(path);
      chevron::detail::write_file(file, drawn_step(of.plan(), texts, file.extension().string()));
    } catch (std::exception const& e) {
      problem = "the timeline " + path + " cannot be written: " + e.what();
    }
  }
  problem = of.of().transport().all_gather_text(problem).front();
  if (!problem.empty()) throw chevron::usage_error(problem);
}

/// A pipeline as SVG, from this rank's knowledge alone: the plan, then this rank's row of the last step, if a step has run. With
/// one rank in all, the step as `drawn_step` draws it.
inline std::string drawn_here(pipeline& of) {
  if (!of.has_trace()) return drawn_plan(of.plan());
  std::vector<std::string> const mine{of.trace_text()};
  if (of.of().world() == 1) return drawn_step(of.plan(), mine, ".svg");
  chevron::show::picture row = chevron::show::measured_picture(of.plan(), chevron::steps_of(mine), 0);
  row.first_rank = of.of().rank();
  row.schedule = row.title;  // the heading; the plan above has the schedule's name
  return drawn_plan(of.plan()) + chevron::show::svg(row);
}

}  // namespace chevron_pipelining
