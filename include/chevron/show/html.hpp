#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include <chevron/show/figures.hpp>
#include <chevron/show/format.hpp>
#include <chevron/show/in_flight_svg.hpp>
#include <chevron/show/picture.hpp>
#include <chevron/show/svg.hpp>

/// \file
/// A page that stands by itself: the drawing, the numbers, and each rank's actions. Nothing is loaded from elsewhere.

namespace chevron::show {

namespace detail {

/// The page of pictures whose numbers are known.
inline std::string page(std::span<picture const> pictures, std::vector<figures> const& numbers) {
  picture const none;
  picture const& first = pictures.empty() ? none : pictures.front();
  std::string const name = first.schedule.empty() ? "schedule" : first.schedule;
  std::string out =
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>" +
      xml_text(name + ", " + size_words(first)) +
      "</title>\n<style>\n"
      ":root { color-scheme: light; }\n"
      "body { margin: 0 auto; padding: 24px; max-width: 1180px; background: #f5f6f8; color: #1f2630;\n"
      "  font: 15px/1.5 system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif; }\n"
      "h1 { font-size: 24px; margin: 0 0 2px; } h2 { font-size: 16px; margin: 28px 0 8px; }\n"
      "p { margin: 0 0 16px; color: #5b6472; }\n"
      ".sheet { background: #fff; border: 1px solid #dfe3e9; border-radius: 8px; padding: 4px 8px; overflow-x: auto; }\n"
      ".sheet svg { display: block; width: 100%; min-width: 720px; height: auto; }\n"
      "table { border-collapse: collapse; background: #fff; border: 1px solid #dfe3e9; border-radius: 8px; }\n"
      "th, td { padding: 5px 16px; text-align: right; font-variant-numeric: tabular-nums; border-top: 1px solid #edf0f4; }\n"
      "th { font-weight: 600; color: #5b6472; } th:first-child, td:first-child { text-align: left; }\n"
      "tr:first-child th { border-top: 0; }\n"
      "summary { cursor: pointer; color: #5b6472; margin-top: 20px; }\n"
      "pre { background: #fff; border: 1px solid #dfe3e9; border-radius: 8px; padding: 10px 14px; white-space: pre-wrap; "
      "font-size: 13px; }\n"
      "label { color: #5b6472; cursor: pointer; } #critical:not(:checked) ~ .sheet .critical { display: none; }\n"
      "@media print { body { background: #fff; padding: 0; } .sheet, table, pre { border: 0; } }\n"
      "</style>\n</head>\n<body>\n<h1>" +
      xml_text(name) + "</h1>\n<p>" + xml_text(size_words(first)) + "</p>\n";
  // Without a script: the box before the drawing decides whether its line is shown.
  if (!first.critical_path.empty()) {
    out +=
        "<input type=\"checkbox\" id=\"critical\"> <label for=\"critical\">show the critical path: what the makespan hangs "
        "on</label>\n";
  }
  out += "<div class=\"sheet\">\n" + svg(pictures, {1000, false, true}) + "</div>\n";
  for (picture const& p : pictures) {
    std::string const of = pictures.size() > 1 ? ", " + xml_text(p.title) : "";
    out += "<h2>Chunks in flight" + of + "</h2>\n<div class=\"sheet\">\n" + in_flight_svg(p, {1000, false}) + "</div>\n";
  }
  bool const steady = std::any_of(numbers.begin(), numbers.end(), [](figures const& f) { return f.steady > 0; });
  bool const sent_bytes = std::any_of(numbers.begin(), numbers.end(), [](figures const& f) { return f.message_bytes >= 0; });
  out +=
      std::string("<h2>The whole step</h2>\n<table>\n<tr><th></th><th>makespan</th><th>bubble</th><th>span</th><th>bubble</th>") +
      (steady ? "<th>steady</th><th>bubble</th>" : "") + "<th>messages</th>" + (sent_bytes ? "<th>bytes sent</th>" : "") +
      "</tr>\n";
  auto const cell = [](std::string const& words) { return "<td>" + xml_text(words) + "</td>"; };
  for (std::size_t i = 0; i < pictures.size(); ++i) {
    figures const& f = numbers[i];
    std::string const unit = pictures[i].unit.empty() ? "" : " " + pictures[i].unit;
    out += "<tr>" + cell(pictures[i].title) + cell(number(f.makespan) + unit) + cell(percent(f.bubble_makespan)) +
           cell(number(f.span) + unit) + cell(percent(f.bubble_span));
    if (steady) out += cell(number(f.steady) + unit) + cell(percent(f.bubble_steady));
    out += cell(std::to_string(f.messages)) + (sent_bytes ? cell(bytes(f.message_bytes)) : "") + "</tr>\n";
  }
  out +=
      "</table>\n<p style=\"margin-top:8px\">makespan: first start to last end over all ranks, what a step costs when the "
      "optimizer waits for every rank. "
      "span: the longest single rank" +
      std::string(steady ? ". steady: what each of many steps takes without a barrier between them" : "") +
      ".</p>\n<h2>Each rank</h2>\n<table>\n<tr><th>rank</th>";
  bool const several = pictures.size() > 1;
  bool communicates = false;
  bool held_bytes = false;
  for (figures const& f : numbers) {
    held_bytes = held_bytes || !f.peak_bytes.empty();
    for (idle_time const& t : f.idle) communicates = communicates || t.communicating > 0;
  }
  for (picture const& p : pictures) {
    std::string const of = several ? ", " + xml_text(p.title) : "";
    out += "<th>computes" + of + "</th><th>idle in the makespan" + of + "</th>";
    if (steady) out += "<th>filling</th><th>steady</th><th>draining</th>";
    if (communicates) out += "<th>communicates</th>";
    out += "<th>peak in flight" + of + "</th>";
    if (held_bytes) out += "<th>peak bytes</th>";
  }
  out += "</tr>\n";
  for (int r = 0; r < first.rows; ++r) {
    out += "<tr>" + cell(std::to_string(r));
    for (std::size_t i = 0; i < pictures.size(); ++i) {
      std::size_t const at = static_cast<std::size_t>(r);
      if (at >= numbers[i].busy.size()) {
        out += "<td></td><td></td><td></td>";
        continue;
      }
      double const busy = numbers[i].busy[at];
      std::string const unit = pictures[i].unit.empty() ? "" : " " + pictures[i].unit;
      double const idle = numbers[i].makespan > 0 ? 1 - busy / numbers[i].makespan : 0;
      out += cell(number(busy) + unit) + cell(percent(idle));
      idle_time const t = at < numbers[i].idle.size() ? numbers[i].idle[at] : idle_time{};
      if (steady) out += cell(number(t.fill) + unit) + cell(number(t.steady) + unit) + cell(number(t.drain) + unit);
      if (communicates) out += cell(number(t.communicating) + unit);
      out += cell(std::to_string(numbers[i].peak_in_flight[at]));
      if (held_bytes) out += at < numbers[i].peak_bytes.size() ? cell(bytes(numbers[i].peak_bytes[at])) : cell("");
    }
    out += "</tr>\n";
  }
  out += "</table>\n<details><summary>The actions of each rank</summary>\n<pre>";
  std::vector<std::string> lists(static_cast<std::size_t>(std::max(first.rows, 0)));
  for (std::size_t i = 0; i < first.boxes.size(); ++i) {
    box const& b = first.boxes[i];
    if (!is_compute(b.op.kind) || b.of_pair == half::second) continue;
    bool const pair = b.of_pair == half::first;
    lists[static_cast<std::size_t>(b.rank)] +=
        " " + (pair ? to_text(fused_pair{b.op, first.boxes[i + 1].op}) : to_text(b.op)).str();
  }
  for (std::size_t r = 0; r < lists.size(); ++r) out += "rank " + std::to_string(r) + ":" + xml_text(lists[r]) + "\n";
  return out + "</pre></details>\n</body>\n</html>\n";
}

}  // namespace detail

/// One or more pictures as a page; the actions are listed from the first.
inline std::string html(std::span<picture const> pictures) {
  std::vector<figures> numbers;
  for (picture const& p : pictures) numbers.push_back(figures_of(p));
  return detail::page(pictures, numbers);
}

inline std::string html(picture const& one) { return html(std::span<picture const>(&one, 1)); }

/// A plan's page, with all that the analyses know; `steps` back to back are drawn, the numbers are one step's. `unit`: the
/// costs'.
inline std::string html(plan_view const& plan, cost_view const& costs, size_view const& sizes = {}, int steps = 1,
                        std::string unit = {}) {
  picture one = steps > 1 ? picture_of_steps(plan, costs, steps) : picture_of(plan, costs);
  one.unit = std::move(unit);
  return detail::page(std::span<picture const>(&one, 1), {figures_of(plan, costs, sizes)});
}

}  // namespace chevron::show
