#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <vector>

#include <chevron/base/format.hpp>
#include <chevron/tools/show/figures.hpp>
#include <chevron/tools/show/html_model.hpp>
#include <chevron/tools/show/picture.hpp>

/// \file
/// Makes a web page of pictures: a timeline to pan, zoom and point at, the figures, and each rank's actions. The page loads
/// nothing, so it can be mailed.

namespace chevron::show {

namespace detail {

// The viewer's files, each a raw string, for reports and for the playground.

/// The style sheet of a report.
inline constexpr char const* viewer_style =
#include <chevron/tools/show/viewer/viewer.css.inc>
    ;
/// The viewer's script: its object `chevron` reads models, draws them, and shows the action under the pointer.
inline constexpr char const* viewer_script =
#include <chevron/tools/show/viewer/viewer.js.inc>
    ;
/// Connects a report's buttons to the viewer.
inline constexpr char const* report_script =
#include <chevron/tools/show/viewer/report.js.inc>
    ;

/// Escapes JSON for a script element, which a `<` in the JSON could end.
inline std::string script_text(std::string const& json) {
  std::string out;
  for (char const c : json) c == '<' ? out += "\\u003c" : out += c;
  return out;
}

/// The page of pictures, with these figures.
inline std::string page(std::span<picture const> pictures, std::vector<figures> const& numbers,
                        std::span<drawn_facts const> facts) {
  picture const none;
  picture const& first = pictures.empty() ? none : pictures.front();
  std::string const name = first.schedule.empty() ? "schedule" : first.schedule;
  std::string out =
      "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n"
      "<meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n"
      "<title>" +
      xml_text(name + ", " + size_words(first)) + "</title>\n<style>\n" + viewer_style + "</style>\n</head>\n<body>\n<h1>" +
      xml_text(name) + "</h1>\n<p>" + xml_text(size_words(first)) +
      "</p>\n<div class=\"sheet\">\n<div class=\"bar\">\n"
      "<button id=\"fit\" title=\"0\">fit</button><button id=\"closer\" title=\"+\">closer</button>"
      "<button id=\"farther\" title=\"-\">farther</button><span class=\"gap\"></span>\n"
      "<button id=\"critical\" title=\"c: the actions that determine the makespan\">critical path</button>"
      "<button id=\"memory\" title=\"m\">in flight</button><button id=\"palette\" title=\"p\">colour-blind</button>"
      "<button id=\"theme\" title=\"t\">dark</button>\n</div>\n"
      "<div id=\"timeline\"></div>\n<div id=\"legend\"></div>\n"
      "<p class=\"hint\">Point at an action, at an idle stretch or at the strip of chunks in flight. Drag to pan; double-click "
      "or Ctrl and "
      "wheel to zoom. Keys: + - 0 arrows c m p t.</p>\n"
      "<noscript><p>The timeline is drawn by this page's own script, which is switched off. The numbers below need "
      "none.</p></noscript>\n</div>\n";
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
      "</table>\n<p style=\"margin-top:8px\">makespan: first start to last end over all ranks, the time of a step whose "
      "optimizer waits for every rank. "
      "span: the longest single rank" +
      std::string(steady ? ". steady: the time of each of many steps without a barrier between them" : "") +
      ".</p>\n<h2>Each rank</h2>\n<div class=\"scroll\"><table>\n";
  bool communicates = false;
  bool held_bytes = false;
  for (figures const& f : numbers) {
    held_bytes = held_bytes || !f.peak_bytes.empty();
    for (idle_time const& t : f.idle) communicates = communicates || t.communicating > 0;
  }
  int const columns = 3 + (steady ? 3 : 0) + (communicates ? 1 : 0) + (held_bytes ? 1 : 0);
  if (pictures.size() > 1) {
    out += "<tr><th></th>";
    for (picture const& p : pictures)
      out += "<th class=\"group\" colspan=\"" + std::to_string(columns) + "\">" + xml_text(p.title) + "</th>";
    out += "</tr>\n";
  }
  out += "<tr><th>rank</th>";
  for (std::size_t i = 0; i < pictures.size(); ++i) {
    out += "<th>computes</th><th>idle in the makespan</th>";
    if (steady) out += "<th>filling</th><th>steady</th><th>draining</th>";
    if (communicates) out += "<th>communicates</th>";
    out += "<th>peak in flight</th>";
    if (held_bytes) out += "<th>peak bytes</th>";
  }
  out += "</tr>\n";
  for (int r = 0; r < first.rows; ++r) {
    out += "<tr>" + cell(std::to_string(r));
    for (std::size_t i = 0; i < pictures.size(); ++i) {
      std::size_t const at = static_cast<std::size_t>(r);
      if (at >= numbers[i].busy.size()) {
        for (int c = 0; c < columns; ++c) out += "<td></td>";
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
  return out +
         "</table></div>\n<details id=\"actions\"><summary>The actions of each rank</summary>\n<pre></pre></details>\n"
         "<script type=\"application/json\" id=\"model\">" +
         script_text(html_model(pictures, facts)) + "</script>\n<script>\n" + viewer_script + report_script +
         "</script>\n</body>\n</html>\n";
}

}  // namespace detail

/// One or more pictures as a page, which lists the actions of the first picture. \param facts one entry for each picture, or none
inline std::string html(std::span<picture const> pictures, std::span<drawn_facts const> facts = {}) {
  std::vector<figures> numbers;
  for (picture const& p : pictures) numbers.push_back(figures_of(p));
  return detail::page(pictures, numbers, facts);
}

/// The page of one picture.
inline std::string html(picture const& one) { return html(std::span<picture const>(&one, 1)); }

/// A plan as a page, with the results of all analyses. `steps` steps back to back are drawn; the figures are those of one step.
/// `unit` is the unit of the costs.
inline std::string html(plan_view const& plan, cost_view const& costs, size_view const& sizes = {}, int steps = 1,
                        std::string unit = {}) {
  picture one = steps > 1 ? picture_of_steps(plan, costs, steps) : picture_of(plan, costs);
  one.unit = std::move(unit);
  drawn_facts const facts = facts_of(plan, costs, steps);
  return detail::page(std::span<picture const>(&one, 1), {figures_of(plan, costs, sizes)},
                      std::span<drawn_facts const>(&facts, 1));
}

}  // namespace chevron::show
