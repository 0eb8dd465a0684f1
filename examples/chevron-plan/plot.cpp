// computes: means over windows of a hundred thousand steps
#include <algorithm>
#include <cmath>
#include <filesystem>
#include <iostream>
#include <iterator>
#include <limits>
#include <map>
#include <optional>
#include <utility>

#include <range/v3/range/conversion.hpp>
#include <range/v3/view/join.hpp>
#include <range/v3/view/split.hpp>
#include <range/v3/view/transform.hpp>

#include "../common/nearest.hpp"
#include "converted_picture.hpp"
#include "metrics.hpp"
#include "plot_picture.hpp"
#include "request.hpp"
#include "table.hpp"
#include "value_list.hpp"

namespace plan_program {
namespace {

constexpr char const *loss = "loss_metrics/global_avg_loss", *seconds = "time_metrics/end_to_end(s)", *tokens = "n_tokens_seen";

std::vector<std::string> words_of_list(std::string const& typed) {
  return typed | ranges::views::split(',') |
         ranges::views::transform([](auto&& word) { return word | ranges::to<std::string>(); }) | ranges::to<std::vector>();
}

std::string listed(std::vector<std::string> const& words) {
  return words | ranges::views::join(std::string(", ")) | ranges::to<std::string>();
}

/// The last part of a figure's name, without its unit: `end_to_end` of `time_metrics/end_to_end(s)`.
std::string short_name(std::string const& figure) {
  std::size_t const slash = figure.rfind('/');
  std::string const part = slash == figure.npos ? figure : figure.substr(slash + 1);
  return part.substr(0, part.find('('));
}

/// The figure's name in words, for axes and tables.
std::string words_for(std::string const& figure) {
  static std::map<std::string, std::string> const known = {
      {loss, "loss"},
      {"validation_metrics/loss", "validation loss"},
      {"grad_norm", "norm of the gradient"},
      {"lr", "learning rate"},
      {tokens, "tokens seen"},
      {"throughput(tps)", "tokens a second and rank"},
      {"tflops", "TFLOP/s of a rank"},
      {seconds, "seconds a step"},
      {"time_metrics/data_loading(s)", "seconds of loading data"},
      {"bubble", "bubble as a share of the step"},
  };
  auto const found = known.find(figure);
  return found == known.end() ? figure : found->second;
}

/// The file's name of a figure that `--y` names: that name, its last part without the unit, or `loss` and `learning_rate`.
std::string figure_named(std::string const& typed, std::vector<std::string> const& figures) {
  auto const has = [&](std::string const& name) { return std::find(figures.begin(), figures.end(), name) != figures.end(); };
  if (has(typed)) return typed;
  if (typed == "loss" && has(loss)) return loss;
  if (typed == "learning_rate" && has("lr")) return "lr";
  std::vector<std::string> like;
  std::copy_if(figures.begin(), figures.end(), std::back_inserter(like),
               [&](std::string const& figure) { return short_name(figure) == typed; });
  if (like.size() == 1) return like.front();
  if (!like.empty()) throw usage("--y " + quoted(typed) + " may be any of " + listed(like) + ": choose one of them");
  std::string const nearest = unknown::nearest(typed, figures);
  throw usage("--y " + quoted(typed) + " is no figure of the files" + (nearest.empty() ? "" : "; did you mean " + nearest + "?") +
              (nearest.empty() ? ": choose of " : " There are ") + listed(figures));
}

/// All figures of all runs.
std::vector<std::string> figures_of(std::vector<metrics> const& runs) {
  std::vector<std::string> out;
  for (metrics const& run : runs) {
    for (std::string const& figure : run.figures) {
      if (std::find(out.begin(), out.end(), figure) == out.end()) out.push_back(figure);
    }
  }
  return out;
}

/// A name for each run: its file's path less the folders at its front and the parts at its end that all files share.
std::vector<std::string> names_of(std::vector<std::string> const& files) {
  std::vector<std::vector<std::string>> parts;
  for (std::string const& file : files) {
    std::filesystem::path const path(file);
    std::vector<std::string> names;
    for (auto const& part : path.parent_path()) names.push_back(part.string());
    names.push_back(path.extension() == ".jsonl" ? path.stem().string() : path.filename().string());
    parts.push_back(std::move(names));
  }
  if (files.size() == 1) return {parts.front().back()};
  auto const shared = [&](auto part) {
    return std::all_of(parts.begin(), parts.end(),
                       [&](auto const& names) { return names.size() > 1 && part(names) == part(parts.front()); });
  };
  while (shared([](auto const& names) { return names.back(); })) {
    for (auto& names : parts) names.pop_back();
  }
  while (shared([](auto const& names) { return names.front(); })) {
    for (auto& names : parts) names.erase(names.begin());
  }
  std::vector<std::string> out;
  for (auto const& names : parts) {
    std::string name = names | ranges::views::join(std::string("/")) | ranges::to<std::string>();
    out.push_back(name.starts_with("//") ? name.substr(1) : name);
  }
  return out;
}

std::vector<std::string> legend_of(request const& asked) {
  plot_request const& typed = asked.plot;
  if (typed.names.empty()) return names_of(typed.files);
  std::vector<std::string> out = words_of_list(typed.names);
  if (out.size() != typed.files.size())
    throw usage("--names " + quoted(typed.names) + " has " + std::to_string(out.size()) + " names, and " +
                std::to_string(typed.files.size()) + " files are given: give one for each, with commas between");
  return out;
}

/// The column of a figure. \throws usage if the run's lines lack it
std::vector<double> const& column_of(metrics const& run, std::string const& figure) {
  std::size_t const at = run.index_of(figure);
  if (at == run.figures.size())
    throw usage(quoted(run.file) + " has no figure " + figure + ": leave the file out, or choose of " + listed(run.figures));
  return run.values[at];
}

/// Where each step stands on the axis of x.
std::vector<double> positions(metrics const& run, std::string const& x) {
  if (x == "step") return {run.steps.begin(), run.steps.end()};
  std::vector<double> out = column_of(run, x == "seconds" ? seconds : tokens);
  double sum = 0;
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (!std::isfinite(out[i]))
      throw usage(quoted(run.file) + " does not have the " + x + " of step " + std::to_string(run.steps[i]) +
                  ": choose --x step");
    if (x == "seconds") out[i] = sum += out[i];
    if (i > 0 && out[i] < out[i - 1])
      throw usage(quoted(run.file) + ": the " + x + " of step " + std::to_string(run.steps[i]) +
                  " are fewer than before: choose --x step");
  }
  return out;
}

/// Seconds in a unit that suits the longest run.
struct unit_of_time {
  double seconds = 1;
  char const* words = "seconds";
};
unit_of_time unit_for(double longest) {
  if (longest >= 3 * 3600) return {3600, "hours"};
  if (longest >= 300) return {60, "minutes"};
  return {};
}

/// The difference of steps that most lines have, the larger of two that are as frequent; 0 for less than two steps.
long usual_stride(std::vector<long> const& steps) {
  std::map<long, long> counts;
  for (std::size_t i = 1; i < steps.size(); ++i) ++counts[steps[i] - steps[i - 1]];
  auto const most = std::max_element(counts.begin(), counts.end(), [](auto const& a, auto const& b) {
    return a.second != b.second ? a.second < b.second : a.first < b.first;
  });
  return most == counts.end() ? 0 : most->first;
}

/// A figure of one run, by the lines that have it.
struct series {
  std::vector<long> steps;
  std::vector<double> x, y;
};

series series_of(metrics const& run, std::vector<double> const& x, std::string const& figure) {
  series out;
  std::vector<double> const& column = column_of(run, figure);
  for (std::size_t i = 0; i < column.size(); ++i) {
    if (std::isnan(column[i])) continue;
    out.steps.push_back(run.steps[i]);
    out.x.push_back(x[i]);
    out.y.push_back(column[i]);
  }
  return out;
}

/// Means of each value and those of the `window - 1` steps before it, within a part.
std::vector<plot_point> smooth(std::vector<plot_point> const& part, std::vector<long> const& steps, int window) {
  std::vector<plot_point> out;
  double sum = 0;
  std::size_t from = 0;
  for (std::size_t i = 0; i < part.size(); ++i) {
    sum += part[i].y;
    while (steps[from] <= steps[i] - window) sum -= part[from++].y;
    out.push_back({part[i].x, sum / static_cast<double>(i + 1 - from)});
  }
  return out;
}

/// Sentences on values that a curve cannot show go to `notes`.
plot_curve curve_of(series const& of, std::string const& name, std::size_t run, int window, bool logarithmic,
                    std::vector<std::string>& notes) {
  plot_curve out;
  out.name = name;
  out.run = run;
  long const stride = usual_stride(of.steps);
  std::vector<std::vector<plot_point>> parts;
  std::vector<std::vector<long>> steps;
  long missing = 0, not_above_0 = 0, first_not_finite = -1;
  bool open = false;
  for (std::size_t i = 0; i < of.y.size(); ++i) {
    plot_point const p{of.x[i], of.y[i]};
    bool const finite = std::isfinite(p.y), shown = finite && !(logarithmic && p.y <= 0);
    if (finite && !shown) ++not_above_0;
    if (!finite) {
      out.not_finite.push_back(p.x);
      if (first_not_finite < 0) first_not_finite = of.steps[i];
    }
    long const left_out = i > 0 && stride > 0 ? (of.steps[i] - of.steps[i - 1] - 1) / stride : 0;
    if (left_out > 0) ++missing;
    if (shown && open && left_out > 0) {
      out.gaps.emplace_back(parts.back().back(), p);
      open = false;
    }
    if (shown && !open) {
      parts.emplace_back();
      steps.emplace_back();
    }
    open = shown;
    if (!shown) continue;
    parts.back().push_back(p);
    steps.back().push_back(of.steps[i]);
  }
  if (missing > 0)
    notes.push_back("steps are missing in " + std::to_string(missing) + (missing == 1 ? " place" : " places") +
                    ", which dots join");
  if (first_not_finite >= 0)
    notes.push_back(std::to_string(out.not_finite.size()) + (out.not_finite.size() == 1 ? " value is" : " values are") +
                    " not finite, the first at step " + std::to_string(first_not_finite) + ": marked by ×");
  if (not_above_0 > 0)
    notes.push_back(std::to_string(not_above_0) + (not_above_0 == 1 ? " value is" : " values are") +
                    " not above 0, and not shown with --log");
  if (window == 1) {
    out.parts = std::move(parts);
    return out;
  }
  for (std::size_t i = 0; i < parts.size(); ++i) out.parts.push_back(smooth(parts[i], steps[i], window));
  for (auto& [before, after] : out.gaps) {  // from the mean before the gap to the first value behind it
    for (auto const& part : out.parts) {
      if (part.back().x == before.x) before = part.back();
    }
  }
  out.behind = std::move(parts);
  return out;
}

/// The row of a table for a run.
table_row row_of(std::string const& name, series const& of) {
  std::optional<std::size_t> least, most, last;
  for (std::size_t i = 0; i < of.y.size(); ++i) {
    if (!std::isfinite(of.y[i])) continue;
    if (!least || of.y[i] < of.y[*least]) least = i;
    if (!most || of.y[i] > of.y[*most]) most = i;
    last = i;
  }
  auto const value = [&](std::optional<std::size_t> at) { return at ? number(of.y[*at]) : std::string("-"); };
  auto const with_step = [&](std::optional<std::size_t> at) {
    return at ? number(of.y[*at]) + " at " + std::to_string(of.steps[*at]) : std::string("-");
  };
  std::string const range = of.steps.empty() ? "-" : std::to_string(of.steps.front()) + "-" + std::to_string(of.steps.back());
  return {name, range, std::to_string(of.steps.size()), with_step(least), with_step(most), value(last)};
}

std::string x_of(request const& asked) {
  std::string const x = unknown::lower_case(asked.plot.x);
  for (std::string const& known : plot_axes) {
    if (x == known) return x;
  }
  throw usage("--x " + quoted(asked.plot.x) + " is not known: choose one of " + listed(plot_axes));
}

}  // namespace

int run_plot(request const& asked) {
  plot_request const& typed = asked.plot;
  std::string const format = format_of(asked, plot_formats);
  std::string const x = x_of(asked);
  int const window = typed.smooth.empty() ? 1 : whole_number(typed.smooth, "--smooth", 1, 1'000'000);
  if (typed.files.empty())
    throw usage("no file is given: name files that chevron-train --metrics or chevron-finetune --metrics wrote");
  if (typed.files.size() > most_runs)
    throw usage(std::to_string(typed.files.size()) + " files are given, and colours and dashes tell " +
                std::to_string(most_runs) + " runs apart: give fewer");
  if (std::count(typed.files.begin(), typed.files.end(), "-") > 1) throw usage("standard input is given twice: give - once");
  std::vector<std::string> const names = legend_of(asked);

  std::vector<metrics> runs;
  for (std::string const& file : typed.files) runs.push_back(read_metrics(file));
  std::vector<std::string> const known = figures_of(runs);
  std::vector<std::string> figures;
  for (std::string const& word : words_of_list(typed.y)) figures.push_back(figure_named(word, known));
  std::vector<std::vector<double>> places;
  double longest = 0;
  for (metrics const& run : runs) {
    places.push_back(positions(run, x));
    longest = std::max(longest, places.back().back());
  }
  plot_chart chart;
  chart.logarithmic = typed.logarithmic;
  chart.x_words = x;
  if (x == "seconds") {
    unit_of_time const unit = unit_for(longest);
    chart.x_words = unit.words;
    for (auto& run : places) {
      for (double& at : run) at /= unit.seconds;
    }
  }

  std::vector<std::vector<std::string>> notes;
  for (metrics const& run : runs) notes.push_back(run.notes);
  std::string words;
  for (std::string const& figure : figures) {
    std::vector<table_row> rows = {{words_for(figure), "steps", "lines", "least", "greatest", "last"}};
    plot_panel panel;
    panel.words = words_for(figure);
    for (std::size_t i = 0; i < runs.size(); ++i) {
      series const of = series_of(runs[i], places[i], figure);
      rows.push_back(row_of(names[i], of));
      std::vector<std::string> found;
      panel.curves.push_back(curve_of(of, names[i], i, window, typed.logarithmic, found));
      for (std::string const& note : found) {
        std::string const all = figures.size() > 1 ? words_for(figure) + ": " + note : note;
        notes[i].push_back(all);
      }
    }
    bool const any = std::any_of(panel.curves.begin(), panel.curves.end(),
                                 [](plot_curve const& c) { return !c.parts.empty() || !c.not_finite.empty(); });
    if (!any) throw usage("--log shows values above 0, and " + figure + " has none: leave --log out");
    words += (words.empty() ? "" : "\n") + table_text(rows, {align::left, align::right});
    chart.panels.push_back(std::move(panel));
  }
  std::string remarks;
  for (std::size_t i = 0; i < runs.size(); ++i) {
    for (std::string const& note : notes[i]) remarks += names[i] + ": " + note + ".\n";
  }
  if (!remarks.empty()) words += "\n" + remarks;
  if (format == "text") {
    write(asked, words);
    return exit_ok;
  }

  std::vector<std::string> titles;
  for (std::string const& figure : figures) titles.push_back(words_for(figure));
  for (std::string const& title : titles)
    chart.title += (chart.title.empty() ? "" : &title == &titles.back() ? " and " : ", ") + title;
  chart.title[0] = static_cast<char>(std::toupper(static_cast<unsigned char>(chart.title[0])));
  chart.title += " over " + std::string(x == "step" ? "steps" : chart.x_words);
  if (runs.size() == 1) chart.title += ": " + names.front();
  std::size_t most = 0;
  for (metrics const& run : runs) most = std::max(most, run.steps.size());
  chart.subtitle = (runs.size() == 1 ? "" : std::to_string(runs.size()) + " runs, ") + (runs.size() == 1 ? "" : "up to ") +
                   with_commas(std::to_string(most)) + (most == 1 ? " step" : " steps") +
                   (window > 1 ? "; means over " + std::to_string(window) + " steps, the values themselves behind them" : "") +
                   (typed.logarithmic ? "; logarithmic" : "");
  plot_drawing const drawn = plot_picture(chart);
  write(asked, format == "svg" ? drawn.svg : converted_picture(drawn.svg, drawn.width, drawn.height, format));
  (asked.output.empty() ? std::cerr : std::cout) << (asked.output.empty() ? remarks : words);
  return exit_ok;
}

}  // namespace plan_program
