#include <algorithm>

#include <chevron/tools/show/svg_drawing.hpp>

#include "explain_recorder.hpp"

namespace plan_program {
namespace {

using chevron::show::detail::drawing;
using chevron::show::detail::fitting;
using chevron::show::detail::text_width;

constexpr char const* style = R"(<style>
.sheet { fill: #ffffff; } .ink { fill: #1f2630; } .soft { fill: #5b6472; } .row { fill: #f3f5f8; } .blame { fill: #fdecee; }
.red { fill: #c0182b; } .missing { fill: none; stroke: #c0182b; stroke-dasharray: 4 3; }
.send { fill: #9cc0f2; } .receive { fill: #83d3cd; } .collective { fill: #f8c182; } .box { fill: #10233f; }
.pending-send { fill: none; stroke: #2858a6; } .pending-receive { fill: none; stroke: #16716b; }
.pending-collective { fill: none; stroke: #b06012; }
@media (prefers-color-scheme: dark) {
.sheet { fill: #14181f; } .ink { fill: #e6eaf0; } .soft { fill: #98a2b1; } .row { fill: #1b212b; } .blame { fill: #3a1a20; }
.red { fill: #ff6b78; } .missing { stroke: #ff6b78; }
.pending-send { stroke: #9cc0f2; } .pending-receive { stroke: #83d3cd; } .pending-collective { stroke: #f8c182; }
}
</style>
)";

constexpr int most_rows = 64, most_boxes = 8;
constexpr double box_width = 96, box_gap = 4, row_height = 34, left = 76, label_size = 11;

char const* class_of(recorded_operation const& one) {
  return one.is_send() ? "send" : one.is_receive() ? "receive" : "collective";
}
/// An operation in words that fit into a box after `before`: of a long name the end is left out, and its number stays.
std::string label_of(recorded_operation const& one, std::string const& before = {}) {
  auto const label = [&](std::string const& name, std::string const& number) {
    return fitting(before + name, label_size, box_width - 6 - text_width(number, label_size)) + number;
  };
  if (!one.planned.empty()) return label(one.planned, "");
  if (one.is_send()) return label("send", " → " + std::to_string(one.peer));
  if (one.is_receive()) return label("recv", " ← " + std::to_string(one.peer));
  return label(one.name, " " + std::to_string(one.sequence));
}

/// Culprits first, then ranks that wait, then all others; drawn in the order of the ranks.
std::vector<int> rows_of(recorder_dumps const& dumps, hang_story const& story) {
  std::vector<int> out;
  auto const take = [&](int r) {
    if (static_cast<int>(out.size()) < most_rows && std::find(out.begin(), out.end(), r) == out.end()) out.push_back(r);
  };
  for (int const r : story.culprits) take(r);
  for (recorded_wait const& w : story.waits) take(w.from.rank), take(w.to);
  for (int r = 0; r < dumps.world(); ++r) take(r);
  std::sort(out.begin(), out.end());
  return out;
}

/// The index of the first operation in which a rank waits; `otherwise` if it waits for no rank.
int first_wait(hang_story const& story, int rank, int otherwise) {
  for (recorded_wait const& w : story.waits) {
    if (w.from.rank == rank) otherwise = std::min(otherwise, w.from.index);
  }
  return otherwise;
}

}  // namespace

std::string hang_svg(recorder_dumps const& dumps, hang_story const& story) {
  auto const at = [](int index) { return static_cast<std::size_t>(index); };
  std::vector<int> const rows = rows_of(dumps, story);
  double const words_at = left + (most_boxes + 1) * (box_width + box_gap) + 12;
  double const width = words_at + 400, top = 78;
  std::string const centred = "text-anchor=\"middle\" font-size=\"" + drawing::at(label_size) + "\" class=\"";
  int const left_out = dumps.world() - static_cast<int>(rows.size());
  double const height = top + static_cast<double>(rows.size()) * (row_height + 4) + 52 + (left_out > 0 ? 18 : 0);
  std::string const headline = hang_headline(dumps, story) + ".";

  drawing d;
  d.out += "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " + drawing::at(width) + " " + drawing::at(height) +
           "\" width=\"" + drawing::at(width) + "\" height=\"" + drawing::at(height) + "\" role=\"img\">\n<title>" +
           chevron::show::xml_text(headline) + "</title>\n" + style +
           "<rect class=\"sheet\" width=\"100%\" height=\"100%\" rx=\"6\"/>\n"
           "<g font-family=\"system-ui, 'Segoe UI', 'Helvetica Neue', Arial, 'DejaVu Sans', sans-serif\" font-size=\"12\" "
           "class=\"soft\">\n";
  d.text(20, 32, fitting(headline, 16, width - 40), "font-size=\"15\" font-weight=\"600\" class=\"ink\"");
  d.text(20, 56, "The last operations of each rank, or those around the one in which it waits; newest on the right");
  double y = top;
  for (int const r : rows) {
    bool const culprit = std::find(story.culprits.begin(), story.culprits.end(), r) != story.culprits.end();
    d.rect(12, y, width - 24, row_height, culprit ? "rx=\"4\" class=\"blame culprit\"" : "rx=\"4\" class=\"row\"");
    d.text(20, y + 21, "rank " + std::to_string(r), culprit ? "font-weight=\"600\" class=\"red\"" : "class=\"ink\"");
    if (auto const& dump = dumps.by_rank[at(r)]) {
      int const n = static_cast<int>(dump->operations.size());
      bool const blamed = culprit && story.at && story.at->rank == r;
      bool const departed = blamed && story.cause == hang_cause::departed;
      int const shown = blamed ? story.at->index : first_wait(story, r, n);
      int const first = std::max(0, std::min(n - most_boxes, shown - 2));
      double x = left;
      auto const missing = [&](std::string const& words) {
        d.rect(x, y + 5, box_width, row_height - 10, "rx=\"3\" class=\"missing\" stroke-width=\"1.5\"");
        d.text(x + box_width / 2, y + 21, words, centred + "red\"");
        x += box_width + box_gap;
      };
      int i = first;
      for (int boxes = 0; i < n && boxes < most_boxes; ++i, ++boxes) {
        recorded_operation const& one = dump->operations[at(i)];
        if (departed && i == story.at->index) {  // the operation of the rounds before
          missing(label_of(dump->operations[at(*story.rounds[at(r)].expected)], "no "));
          if (++boxes == most_boxes) break;
        }
        d.rect(x, y + 5, box_width, row_height - 10,
               "rx=\"3\" class=\"" + std::string(one.completed ? "" : "pending-") + class_of(one) + "\"" +
                   (one.completed ? "" : " stroke-width=\"1.5\""));
        if (blamed && i == story.at->index)
          d.rect(x - 1.5, y + 3.5, box_width + 3, row_height - 7, "rx=\"4\" class=\"missing\" stroke-width=\"2\"");
        d.text(x + box_width / 2, y + 21, label_of(one), centred + (one.completed ? "box\"" : "ink\""));
        x += box_width + box_gap;
      }
      if (i < n) d.text(x + 4, y + 21, "and " + std::to_string(n - i) + " more");
      if (culprit && story.cause == hang_cause::silent_rank) missing("no operation");
    } else {
      d.text(left, y + 21, "no dump", culprit ? "class=\"red\"" : "");
    }
    d.text(words_at, y + 21, fitting(hang_rank_words(dumps, story, r), 12, width - words_at - 20),
           culprit ? "class=\"red\"" : "class=\"ink\"");
    y += row_height + 4;
  }
  if (left_out > 0) {
    d.text(20, y + 14, std::to_string(left_out) + " more ranks are left out");
    y += 18;
  }
  double x = 20;
  for (auto const& [name, words] :
       {std::pair("send", "send"), std::pair("receive", "receive"), std::pair("collective", "collective"),
        std::pair("pending-collective", "pending: outlined")}) {
    d.rect(x, y + 14, 14, 14, std::string("rx=\"2\" class=\"") + name + "\"");
    d.text(x + 20, y + 25, words);
    x += 40 + text_width(words, 12);
  }
  d.rect(x, y + 14, 14, 14, "rx=\"2\" class=\"blame\"");
  d.text(x + 20, y + 25, "first cause");
  return d.out + "</g>\n</svg>\n";
}

}  // namespace plan_program
