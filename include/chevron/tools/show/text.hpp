#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include <chevron/base/format.hpp>
#include <chevron/plan/finding.hpp>
#include <chevron/tools/show/figures.hpp>
#include <chevron/tools/show/picture.hpp>
#include <chevron/tools/show/text_rows.hpp>
#include <chevron/tools/show/text_scale.hpp>

/// \file
/// Timelines for a terminal: one line for each rank, time from left to right.
// The larger functions are templates, so that only programs that draw compile them: <chevron/schedule.hpp> includes them.

namespace chevron::show {

/// The numbers above a picture: schedule and sizes, makespan and span with their bubbles, peak in flight.
template <class = void>
std::string header_text(picture const& p, figures const& f, text_style const& style = {}) {
  std::string const unit = p.unit.empty() ? "" : " " + p.unit;
  std::string out = detail::bold(p.schedule.empty() ? "schedule" : p.schedule, style.colour) + "   " +
                    size_words(p, style.unicode ? "\xc3\x97" : "x") + "\n";
  std::string const makespan = number(f.makespan) + unit;
  std::string const span = number(f.span) + unit;
  std::string const steady = f.steady > 0 ? number(f.steady) + unit : "";
  int const width = std::max({columns_of(makespan), columns_of(span), columns_of(steady)});
  auto const line = [&](char const* name, std::string const& length, double bubble, char const* meaning) {
    std::string const share = percent(bubble);
    std::string const words = std::string(name) + detail::spaces(width - columns_of(length)) + length + "   bubble" +
                              detail::spaces(std::max(7 - columns_of(share), 1)) + share;
    bool const fits = columns_of(words) + 3 + columns_of(meaning) <= style.width;
    return words + (fits ? std::string("   ") + meaning : "") + "\n";
  };
  out += line("makespan ", makespan, f.bubble_makespan, "first start to last end over all ranks");
  out += line("span     ", span, f.bubble_span, "the longest single rank");
  if (f.steady > 0) out += line("steady   ", steady, f.bubble_steady, "each of many steps without a barrier between");
  std::string const sent = f.message_bytes >= 0 ? ", " + bytes(f.message_bytes) : "";
  out += detail::wrapped(
      {"in flight, peak chunks: " + per_rank(f.peak_in_flight), "messages: " + std::to_string(f.messages) + sent}, style.width);
  return out;
}

/// A picture's whole timeline as text: header, rows and legend.
template <class = void>
std::string timeline_text(picture const& p, text_style const& style = {}) {
  return header_text(p, figures_of(p), style) + "\n" + rows_text(p, style);
}

/// The timeline of a plan under these costs, as text.
template <class = void>
std::string timeline_text(plan_view const& plan, cost_view const& costs, text_style const& style = {}) {
  return timeline_text(picture_of(plan, costs), style);
}

/// Each rank's list as a table with a column for each rank and a row for each position. The row of a finding ends in `<--` and
/// the finding's sentence; a `+` joins a fused pair. Nothing is simulated, so plans that break laws can be printed, too.
template <class = void>
std::string steps_text(plan_view const& plan, finding const& mark = {}) {
  int longest = 0;
  for (int r = 0; r < plan.size.ranks; ++r) longest = std::max(longest, plan.length(r));
  int const digits = std::max(2, static_cast<int>(std::to_string(std::max(longest - 1, 0)).size()));
  std::vector<int> width(static_cast<std::size_t>(plan.size.ranks));
  auto const spelled = [&](action a) { return to_text(a, plan.size.slices).str() + (a.fused != 0 ? "+" : ""); };
  for (int r = 0; r < plan.size.ranks; ++r) {
    int& w = width[static_cast<std::size_t>(r)];
    w = columns_of("Rank " + std::to_string(r));
    for (int i = 0; i < plan.length(r); ++i) w = std::max(w, columns_of(spelled(plan.at(r, i))));
  }
  auto const padded = [](std::string s, int w) { return s + detail::spaces(w - columns_of(s)); };
  std::string out = padded("", 6 + digits) + " ";
  for (int r = 0; r < plan.size.ranks; ++r) out += padded("Rank " + std::to_string(r), width[static_cast<std::size_t>(r)] + 1);
  std::string table;
  auto const finish = [&](std::string line) {
    while (!line.empty() && line.back() == ' ') line.pop_back();
    table += line + "\n";
  };
  finish(out);
  for (int i = 0; i < longest; ++i) {
    std::string name = std::to_string(i);
    std::string line = "Step " + std::string(static_cast<std::size_t>(digits) - name.size(), '0') + name + ": ";
    for (int r = 0; r < plan.size.ranks; ++r) {
      line += padded(i < plan.length(r) ? spelled(plan.at(r, i)) : "", width[static_cast<std::size_t>(r)]) + " ";
    }
    if (mark && mark.position == i) line += "<-- " + describe(mark).str();
    finish(line);
  }
  if (mark && (mark.position < 0 || mark.position >= longest)) table += "<-- " + describe(mark).str() + "\n";
  return table;
}

}  // namespace chevron::show
