#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include <chevron/base/format.hpp>
#include <chevron/prove/critical_path.hpp>
#include <chevron/tools/show/figures.hpp>
#include <chevron/tools/show/picture.hpp>
#include <chevron/tools/show/text.hpp>

/// \file
/// The text below a plan's timeline on a terminal: the time of each rank by use, and the critical path.

namespace chevron::show {

namespace detail {

/// Sets rows of words as a table: columns as wide as their widest word, aligned to the right.
inline std::string right_aligned(std::vector<std::vector<std::string>> const& rows, bool colour) {
  std::vector<int> width(rows.front().size());
  for (auto const& row : rows) {
    for (std::size_t c = 0; c < row.size(); ++c) width[c] = std::max(width[c], columns_of(row[c]));
  }
  std::string out;
  for (auto const& row : rows) {
    std::string line;
    for (std::size_t c = 0; c < row.size(); ++c) line += spaces(width[c] - columns_of(row[c]) + (c > 0 ? 3 : 0)) + row[c];
    out += bold(line, colour && &row == &rows.front()) + "\n";
  }
  return out;
}

}  // namespace detail

/// A table of a plan's figures with one line for each rank: time spent computing, waiting and, if transfers occupy ranks,
/// communicating, and the most chunks in flight.
inline std::string ranks_text(figures const& f, text_style const& style = {}, bool forward_only = false) {
  bool const communicates = std::any_of(f.idle.begin(), f.idle.end(), [](idle_time const& t) { return t.communicating > 0; });
  std::vector<std::vector<std::string>> rows{{"rank", "computes"}};
  if (communicates) rows.front().push_back("communicates");
  for (char const* name : {"idle: filling", "steady", "draining", "peak in flight"}) rows.front().push_back(name);
  if (!f.peak_share.empty()) rows.front().push_back("in microbatches");
  if (!f.peak_bytes.empty()) rows.front().push_back("peak bytes");
  for (std::size_t r = 0; r < f.idle.size(); ++r) {
    idle_time const& t = f.idle[r];
    std::vector<std::string> row{std::to_string(r), number(f.busy[r])};
    if (communicates) row.push_back(number(t.communicating));
    for (double idle : {t.fill, t.steady, t.drain}) row.push_back(number(idle));
    row.push_back(std::to_string(f.peak_in_flight[r]));
    if (!f.peak_share.empty()) row.push_back(number(f.peak_share[r]));
    if (!f.peak_bytes.empty()) row.push_back(bytes(f.peak_bytes[r]));
    rows.push_back(row);
  }
  return detail::right_aligned(rows, style.colour) +
         (forward_only ? "filling: before the first forward" : "filling: before the first backward") +
         "   draining: after the last forward\n";
}

/// Returns the critical path of a plan under these costs as text, such as "0F0 > 1F0 .. 1B7 (12 on rank 1) > 0B7": of
/// consecutive actions on one rank, the first and the last are written, and their number.
inline std::string critical_path_text(plan_view const& plan, cost_view const& costs, text_style const& style = {}) {
  critical_path const path = critical_path_of(plan, costs, simulate(plan, costs));
  auto const spelled = [&](int i) {
    std::string const one = to_text(plan.actions[i], plan.size.slices).str();
    return plan.actions[i].fused != 0 ? one + "+" + to_text(plan.actions[i + 1], plan.size.slices).str() : one;
  };
  std::string const dots = style.unicode ? " \xe2\x80\xa6 " : " .. ";
  std::string const arrow = style.unicode ? "\xe2\x86\x92 " : "> ";
  std::vector<std::string> groups;
  double communicating = 0;
  for (int i = 0; i < path.count;) {
    int last = i;
    while (last + 1 < path.count && path.steps.data[last + 1].rank == path.steps.data[i].rank) ++last;
    std::string words = spelled(path.steps.data[i].action);
    if (last > i) words += (last == i + 1 ? " " : dots) + spelled(path.steps.data[last].action);
    if (last > i + 1) words += " (" + std::to_string(last - i + 1) + " on rank " + std::to_string(path.steps.data[i].rank) + ")";
    groups.push_back(words);
    i = last + 1;
  }
  for (path_step const& step : path) communicating += step.communicating;
  constexpr std::size_t most = 16;
  if (groups.size() > most) {
    std::string const left_out = std::to_string(groups.size() - most + 2) + " more stretches on one rank each";
    groups.erase(groups.begin() + most / 2 - 1, groups.end() - static_cast<std::ptrdiff_t>(most / 2 - 1));
    groups.insert(groups.begin() + most / 2 - 1, left_out);
  }
  std::string out = "critical path, " + std::to_string(path.count) + (path.count == 1 ? " action" : " actions");
  if (communicating > 0) out += " and " + number(communicating) + (costs.unshard ? " for messages and gathers" : " for messages");
  out += ":\n";
  std::string line = " ";
  for (std::size_t i = 0; i < groups.size(); ++i) {
    std::string const word = (i > 0 ? arrow : "") + groups[i];
    if (columns_of(line) + 1 + columns_of(word) > style.width) {
      out += line + "\n";
      line = " ";
    }
    line += " " + word;
  }
  return out + line + "\n";
}

}  // namespace chevron::show
