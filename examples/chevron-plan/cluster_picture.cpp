#include <algorithm>
#include <cmath>

#include "cluster.hpp"
#include "plane_drawing.hpp"
#include "table.hpp"

namespace plan_program {
namespace {

using chevron::show::detail::drawing;
using chevron::show::detail::text_width;

std::string division(way const& of) {
  return "P" + std::to_string(of.ranks) + " T" + std::to_string(of.shards) + " R" + std::to_string(of.replicas) + " M" +
         std::to_string(of.micro_batches) + (of.expert_ranks > 1 ? " E" + std::to_string(of.expert_ranks) : "") +
         (of.slices > 1 ? " k" + std::to_string(of.slices) : "");
}
std::string options(way const& of) {
  return schedule_words(of) + (of.recompute ? ", recomputed" : "") + (of.sharded ? ", sharded" : "") +
         (of.post_validated ? ", post-validated" : "");
}
mark_shape shape_of(way const& of) { return of.recompute ? mark_shape::square : mark_shape::circle; }
bool is_same(way const& a, way const& b) {
  return a.ranks == b.ranks && a.shards == b.shards && a.samples == b.samples && a.expert_ranks == b.expert_ranks &&
         a.slices == b.slices && options(a) == options(b);
}

/// The ways of which none is both shorter and smaller, by their bytes.
std::vector<way const*> front_of(std::vector<way const*> shown) {
  std::sort(shown.begin(), shown.end(),
            [](way const* a, way const* b) { return std::pair(a->bytes, a->time) < std::pair(b->bytes, b->time); });
  std::vector<way const*> out;
  for (way const* one : shown) {
    if (out.empty() || one->time < out.back()->time) out.push_back(one);
  }
  return out;
}

}  // namespace

std::string cluster_picture(cluster_search const& found, described_model const& model, cluster const& on, double bound,
                            bool page) {
  double const left = 76, right = 660, top = 84, bottom = 520, panel = 690, width = 1000;
  way const& best = found.best.front();
  double const memory = static_cast<double>(on.memory), slowest = map_times * best.time;
  std::vector<way const*> shown;
  double least = memory, most = 0;
  for (way const& one : found.judged) {
    auto const bytes = static_cast<double>(one.bytes);
    if (one.time > slowest || bytes > map_memory * memory) continue;
    shown.push_back(&one);
    least = std::min(least, bytes);
    most = std::max(most, bytes);
  }
  // The limit is outside of the plane where all ways take far less.
  bool const near = memory < 1.6 * most;
  if (near) most = std::max(most, memory);
  std::vector<way const*> const front = front_of(shown);
  double const x_most = std::min(most + 0.07 * (most - least) + 0.01 * most, map_memory * memory);
  double const x_least = std::max(0.0, least - 0.08 * (most - least) - 0.01 * most);
  double longest = best.time;
  for (way const* one : shown) longest = std::max(longest, one->time);
  double const y_least = bound - 0.06 * (longest - bound), y_most = longest + 0.06 * (longest - bound);
  auto const x_of = [&](double bytes) { return left + (bytes - x_least) / (x_most - x_least) * (right - left); };
  auto const y_of = [&](double time) { return bottom - (time - y_least) / (y_most - y_least) * (bottom - top); };
  auto const at_x = [&](way const& of) { return x_of(static_cast<double>(of.bytes)); };

  drawing d;
  std::string const title = std::to_string(model.size.layers) + " layers of width " + std::to_string(model.size.width) + " on " +
                            (on.nodes > 1 ? std::to_string(on.nodes) + " × " : "") + std::to_string(on.gpus) + " GPUs";
  d.out += plane_begin(title, static_cast<int>(width), 612, page);
  d.out += "<style>.front { stroke: #1f2630; } @media (prefers-color-scheme: dark) { .front { stroke: #e6eaf0; } }</style>\n";
  d.text(20, 34, title, "font-size=\"18\" font-weight=\"600\" class=\"ink\"");
  d.text(20, 56,
         "a step of " + std::to_string(on.sequences) + " sequences of " + std::to_string(model.setup.tokens) + " tokens; " +
             std::to_string(shown.size()) + " of " + std::to_string(found.ways) + " ways take at most " + percent(map_times - 1) +
             " longer than the first, and up to " + bytes(static_cast<std::int64_t>(map_memory * memory)));

  double const limit = near ? x_of(memory) : right;
  d.rect(limit, top, right - limit, bottom - top, "class=\"beyond\"");
  double const bytes_step = byte_step(x_most - x_least, 9);
  for (double b = std::ceil(x_least / bytes_step) * bytes_step; b <= x_most; b += bytes_step) {
    d.line(x_of(b), top, x_of(b), bottom, "class=\"grid\"");
    d.text(x_of(b), bottom + 19, bytes(static_cast<std::int64_t>(b)), "text-anchor=\"middle\" font-size=\"11\"");
  }
  double const time_step = chevron::show::axis_step(y_most - y_least, 8);
  for (double t = std::ceil(y_least / time_step) * time_step; t <= y_most; t += time_step) {
    d.line(left, y_of(t), right, y_of(t), "class=\"grid\"");
    d.text(left - 8, y_of(t) + 4, number(t), "text-anchor=\"end\" font-size=\"11\"");
  }
  d.text(right, bottom + 38, "memory of the fullest rank", "text-anchor=\"end\"");
  d.text(20, top - 8, "step time, ms");
  d.line(left, y_of(bound), right, y_of(bound), "class=\"bound\" stroke-width=\"1.8\" stroke-dasharray=\"5 4\"");
  if (near) d.line(limit, top - 4, limit, bottom, "class=\"limit\" stroke-width=\"1.5\"");
  d.text(limit, top - 10, "a GPU has " + bytes(on.memory) + (near ? "" : ", further right"),
         std::string("text-anchor=\"") + (near ? "middle" : "end") + "\" class=\"limit-text\" font-weight=\"600\"");

  // The front: with more memory the shortest time falls at each of its ways.
  std::vector<area> taken{{limit - 2, top - 4, 4, bottom - top + 4}};
  std::string points;
  for (std::size_t i = 0; i < front.size(); ++i) {
    double const x = at_x(*front[i]), y = y_of(front[i]->time);
    double const from = i > 0 ? y_of(front[i - 1]->time) : top, to = i + 1 < front.size() ? at_x(*front[i + 1]) : right;
    points += drawing::at(x) + "," + drawing::at(from) + " " + drawing::at(x) + "," + drawing::at(y) + " ";
    taken.push_back({x - 1, from, 2, y - from});
    taken.push_back({x, y - 1, to - x, 2});
  }
  if (!front.empty())
    d.out += "<polyline class=\"front\" fill=\"none\" stroke-width=\"1.8\" points=\"" + points + drawing::at(right) + "," +
             drawing::at(y_of(front.back()->time)) + "\"/>\n";

  // Small marks; the ten shortest that fit are large and lie above, with their places in the list at the right.
  auto const place_of = [&](way const& of) {
    for (std::size_t i = 0; i < found.best.size(); ++i) {
      if (is_same(of, found.best[i])) return i + 1;
    }
    return std::size_t{0};
  };
  auto const mark = [&](way const& of, std::size_t place) {
    bool const fits = of.bytes <= on.memory;
    return mark_begin(shape_of(of), at_x(of), y_of(of.time), place > 0 ? 6 : 3.6) + " class=\"" +
           (place > 0      ? "found"
            : of.recompute ? "again"
                           : "plain") +
           " halo\" stroke-width=\"" + (place > 0 ? "1.5" : "0.6") + "\"" +
           (place > 0 ? ""
            : fits    ? " fill-opacity=\"0.75\""
                      : " fill-opacity=\"0.35\"") +
           "><title>" +
           chevron::show::xml_text(division(of) + ", " + std::to_string(of.samples) +
                                   (of.samples == 1 ? " sample, " : " samples, ") + options(of) + ": " + number(of.time) +
                                   " ms, " + bytes(of.bytes)) +
           "</title>" + end_of(shape_of(of));
  };
  std::string small, large;
  std::vector<area> covered;  // by small marks, over which places of the ten may lie
  for (way const* one : shown) {
    std::size_t const place = place_of(*one);
    (place > 0 ? large : small) += mark(*one, place);
    double const x = at_x(*one), y = y_of(one->time), r = place > 0 ? 7 : 4;
    (place > 0 ? taken : covered).push_back({x - r, y - r, 2 * r, 2 * r});
  }
  d.out += small + large;
  drawing names;
  area const frame{left, top, right - left, bottom - top};
  auto const name = [&](way const& of, std::string const& words, char const* look) {
    area at;
    if (take_place(taken, frame, at_x(of), y_of(of.time), text_width(words, 11.5) + 2, at))
      names.text(at.x + 1, at.y + 11, words, look);
  };
  for (std::size_t i = 0; i < found.best.size(); ++i)
    name(found.best[i], std::to_string(i + 1), "class=\"name\" font-weight=\"600\"");
  taken.insert(taken.end(), covered.begin(), covered.end());
  for (way const* one : front) {
    if (place_of(*one) == 0) name(*one, division(*one), "class=\"name\"");
  }
  d.out += "<g font-size=\"11.5\">\n" + names.out + "</g>\n";

  // The ten shortest in words.
  d.text(panel, top + 4, "The shortest that fit", "class=\"ink\" font-weight=\"600\"");
  double y = top + 28;
  for (std::size_t i = 0; i < found.best.size(); ++i) {
    way const& one = found.best[i];
    d.text(panel + 14, y, std::to_string(i + 1), "text-anchor=\"end\" class=\"ink\" font-weight=\"600\"");
    d.text(panel + 24, y, division(one), "class=\"ink\"");
    d.text(width - 20, y, number(one.time) + " ms", "text-anchor=\"end\" class=\"ink\"");
    d.text(panel + 24, y + 16, options(one), "font-size=\"11\"");
    d.text(width - 20, y + 16, bytes(one.bytes), "text-anchor=\"end\" font-size=\"11\"");
    y += 42;
  }

  // The legend.
  double x = left;
  y = bottom + 66;
  auto const entry = [&](std::string const& shape, std::string const& words) {
    d.out += shape;
    d.text(x + 14, y, words);
    x += 14 + text_width(words, 12) + 22;
  };
  auto const key = [&](mark_shape shape, double r, char const* look) {
    return mark_begin(shape, x + 4, y - 4, r) + " class=\"" + look + " halo\" stroke-width=\"0.6\"/>\n";
  };
  auto const stroke = [&](char const* look) {
    return std::string("<line ") + look + " stroke-width=\"1.8\" x1=\"" + drawing::at(x - 8) + "\" x2=\"" + drawing::at(x + 10) +
           "\" y1=\"" + drawing::at(y - 4) + "\" y2=\"" + drawing::at(y - 4) + "\"/>\n";
  };
  entry(key(mark_shape::circle, 6, "found"), "the shortest");
  entry(key(mark_shape::circle, 3.6, "plain"), "others");
  entry(key(mark_shape::square, 3.6, "again"), "with recomputation");
  x += 8;
  entry(stroke("class=\"front\""), "none is shorter and smaller");
  x += 8;
  entry(stroke("class=\"bound\" stroke-dasharray=\"5 4\""), "work divided evenly: no way is shorter");
  d.out += "</g>\n</svg>\n";
  return page ? plane_page(title, d.out, 62) : d.out;
}

}  // namespace plan_program
