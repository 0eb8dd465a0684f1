#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <vector>

#include <chevron/base/format.hpp>
#include <chevron/prove/bounds/bound.hpp>
#include <chevron/tools/show/picture.hpp>

/// \file
/// Pictures as the data that a page's viewer draws, in a compact form: a page with 100,000 actions can be mailed.

namespace chevron::show {

/// Facts about a plan that its picture does not contain, as far as they are known.
struct drawn_facts {
  double bound = 0;             ///< lower bound of all schedules' lengths, in the picture's unit; 0: not known
  int limit = 0;                ///< limit of chunks in flight on a rank; 0: no limit
  std::vector<double> message;  ///< time of a message, by boundary, or by boundary and microbatch; empty: not known
};

namespace detail {

/// Whole numbers as text. Each letter encodes five bits, the lowest first; a sixth bit is set if another letter follows.
class number_text {
 public:
  void add(std::uint64_t value) {
    static constexpr char const* letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    do {
      std::uint64_t const low = value & 31u;
      value >>= 5;
      out += letters[low | (value > 0 ? 32u : 0u)];
    } while (value > 0);
  }
  /// Adds a signed number, with the sign in the lowest bit.
  void add_signed(std::int64_t value) {
    add(value < 0 ? static_cast<std::uint64_t>(-(value + 1)) * 2 + 1 : static_cast<std::uint64_t>(value) * 2);
  }
  std::string out;
};

/// One row of a picture: the sorts of its boxes (`works`, five numbers each), and for each box its sort and, unless the box is
/// as expected, its difference from the previous box of that sort. Expected are the next microbatch, no gap, and an equal
/// duration.
inline std::string model_row(picture const& p, std::vector<int> const& boxes, double zero, double tick) {
  std::map<std::tuple<int, int, int, int, int>, std::size_t> known;
  struct last_of {
    std::int64_t micro_batch = -1, length = 0;
  };
  std::vector<last_of> last;
  number_text works;
  number_text list;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  for (int const i : boxes) {
    box const& b = p.boxes[static_cast<std::size_t>(i)];
    std::tuple const work{static_cast<int>(b.op.kind), static_cast<int>(b.of_pair), static_cast<int>(b.op.stage), b.chunk,
                          b.step};
    auto const [at, fresh] = known.try_emplace(work, last.size());
    if (fresh) {
      std::apply([&](auto... part) { (works.add(static_cast<std::uint64_t>(part)), ...); }, work);
      last.push_back({});
    }
    std::int64_t const start = std::llround((b.start - zero) / tick);
    std::int64_t const stop = std::llround((b.end - zero) / tick);
    last_of& before = last[at->second];
    std::int64_t const micro_batch = static_cast<std::int64_t>(b.op.micro_batch) - before.micro_batch - 1;
    std::int64_t const wait = start - (b.of_pair == half::second ? begin : end);
    std::int64_t const longer = stop - start - before.length;
    bool const as_before = micro_batch == 0 && wait == 0 && longer == 0;
    list.add(at->second * 2 + (as_before ? 0 : 1));
    if (!as_before) {
      for (std::int64_t const difference : {micro_batch, wait, longer}) list.add_signed(difference);
    }
    before = {b.op.micro_batch, stop - start};
    begin = start;
    end = stop;
  }
  return "[\"" + works.out + "\",\"" + list.out + "\"]";
}

}  // namespace detail

/// Pictures as JSON, which `decode` of `viewer/viewer.js.inc` reads back. Times are whole numbers of `tick`, counted from
/// each picture's first computation. `facts` has one entry for each picture, or none.
inline std::string html_model(std::span<picture const> pictures, std::span<drawn_facts const> facts = {}) {
  double longest = 0;
  for (picture const& p : pictures) {
    double const zero = first_start(p);
    for (box const& b : p.boxes) longest = std::max(longest, b.end - zero);
  }
  // A tick is decimal, and times have eight or nine digits, so that times typed by people remain exact.
  double const tick = longest > 0 ? std::pow(10.0, std::floor(std::log10(longest)) - 7) : 1;
  std::string out = "{\"tick\":" + exact(tick) + ",\"pictures\":[";
  for (std::size_t which = 0; which < pictures.size(); ++which) {
    picture const& p = pictures[which];
    drawn_facts const known = which < facts.size() ? facts[which] : drawn_facts{};
    double const zero = first_start(p);
    out += which > 0 ? ",{" : "{";
    auto const entry = [&](char const* key, std::string const& value) {
      out += std::string(out.back() == '{' ? "\"" : ",\"") + key + "\":" + value;
    };
    entry("title", json_string(p.title));
    entry("schedule", json_string(p.schedule));
    entry("unit", json_string(p.unit));
    entry("rows", std::to_string(p.rows));
    size_entries(p.size, p.stages, entry);
    entry("slices", std::to_string(p.size.slices));
    entry("steps", std::to_string(p.steps));
    entry("first_rank", std::to_string(p.first_rank));
    entry("ranks_apart", std::to_string(p.ranks_apart));
    entry("forward_only", p.forward_only ? "1" : "0");
    entry("bound", exact(known.bound));
    entry("limit", std::to_string(known.limit));
    entry("message", json_list(known.message, exact, ","));
    std::vector<std::vector<int>> rows(static_cast<std::size_t>(std::max(p.rows, 0)));
    for (std::size_t i = 0; i < p.boxes.size(); ++i)
      rows[static_cast<std::size_t>(p.boxes[i].rank)].push_back(static_cast<int>(i));
    // The number of a box in the model: row after row.
    std::vector<std::int64_t> number_of(p.boxes.size());
    std::int64_t count = 0;
    std::string lists;
    for (auto const& row : rows) {
      lists += (lists.empty() ? "" : ",") + detail::model_row(p, row, zero, tick);
      for (int const i : row) number_of[static_cast<std::size_t>(i)] = count++;
    }
    detail::number_text path;
    std::int64_t before = 0;
    for (int const i : p.critical_path) {
      std::int64_t const now = number_of[static_cast<std::size_t>(i)];
      path.add_signed(now - before);
      before = now;
    }
    entry("path", "\"" + path.out + "\"");
    entry("lists", "[" + lists + "]");
    out += "}";
  }
  return out + "]}";
}

/// The facts of a plan under its costs, for a picture of `steps` steps. With several steps there is no bound.
inline drawn_facts facts_of(plan_view const& plan, cost_view const& costs, int steps = 1) {
  drawn_facts out;
  out.limit = plan.in_flight_limit;
  int const each = costs.lengths.alike() ? 1 : plan.size.units();
  for (int s = 0; s + 1 < plan.stages; ++s) {
    for (int m = 0; m < each; ++m) out.message.push_back(costs.of_delay(s, m));
  }
  if (!plan.forward_only && !plan.problem && steps == 1) out.bound = bounds(plan, costs).makespan;
  return out;
}

}  // namespace chevron::show
