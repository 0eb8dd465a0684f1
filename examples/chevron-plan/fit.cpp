#include "fit.hpp"

#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <memory>
#include <set>
#include <span>
#include <utility>

#include <chevron/csv/csv.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/prove/footprint.hpp>
#include <chevron/search.hpp>

#include "layers.hpp"
#include "memory.hpp"
#include "rank_list.hpp"
#include "request.hpp"
#include "table.hpp"
#include "within_memory.hpp"

namespace plan_program {
namespace {

/// What a step costs and takes, for any number of stages: from a profile, or from what is said of a rank's whole share.
struct model {
  explicit model(request const& typed)
      : asked(typed), profile(profile_of(typed)), bytes(typed, profile), layered(typed, profile) {}

  request const& asked;
  std::optional<chevron::profile> profile;
  memory_model bytes;
  layered_profile layered;
};

/// The model cut into stages.
struct cut {
  std::vector<int> layers;  ///< by stage; empty: the profile's stages were united
  owned_costs costs;
  chevron::stage_bytes bytes;
  std::vector<chevron::stage_bytes> slices;  ///< of each slice; empty: a slice takes its share of `bytes` by tokens
  freed_gradients freed;
  std::string problem;

  /// The most bytes of a rank at any time. \param recomputed by stage: whether it is recomputed; null: no stage is
  std::int64_t peak(chevron::plan_view const& plan, int rank, bool const* recomputed = nullptr) const {
    if (slices.empty()) return freed.peak(plan, bytes.view(recomputed), rank, chevron::slice_factors(plan, costs.view()));
    std::vector<chevron::footprint_view> takes;
    for (chevron::stage_bytes const& one : slices) takes.push_back(one.view(recomputed));
    return freed.peak(plan, takes, rank);
  }

  /// The least bytes of a rank before any activation: its static memory, and of freed gradients those of one stage.
  std::int64_t fixed(chevron::plan_view const& plan, chevron::footprint_view const& takes, int rank) const {
    return chevron::static_bytes(plan, takes, rank) - freed.sum(plan, rank) + freed.largest(plan, rank);
  }
};

/// \param where says on which rank a stage is, for links that are slower than others; layers are divided so that its actions are
/// short, or are `layers`
/// \param recompute layers are divided for stages that are all recomputed
cut cut_of(model const& of, std::vector<bool> const& split, int chunks, chevron::plan_view const& where, bool recompute = false,
           std::vector<int> const& layers = {}) {
  std::span<std::int16_t const> const rank_of(where.rank_of, static_cast<std::size_t>(where.stages));
  cut out;
  int const stages = static_cast<int>(split.size());
  request const& asked = of.asked;
  if (of.layered.cuts(stages)) {
    cut_model made = layers.empty() ? of.layered.cut_for(where, &of.bytes, recompute)
                                    : of.layered.cut_into(layers, split, rank_of, &of.bytes);
    out.problem = made.problem;
    if (!out.problem.empty()) return out;
    out.layers = std::move(made.layers);
    out.costs = std::move(made.costs);
    out.bytes = std::move(made.bytes);
    apply_lengths(asked, where.size, out.costs);
    out.slices = of.bytes.of_slices(where.size.slices, stages, out.layers);
    if (of.bytes.frees_gradients()) out.freed = {out.bytes.gradient, of.bytes.shard()};
    return out;
  }
  if (of.profile) {
    out.costs = costs_of(asked, *of.profile, split, rank_of, out.problem);
    if (!out.problem.empty()) return out;
  } else {
    out.costs = costs_of(asked, split, rank_of);
    for (auto* list : {&out.costs.forward, &out.costs.backward_input, &out.costs.backward_weight}) {
      for (double& cost : *list) cost /= chunks;
    }
  }
  apply_lengths(asked, where.size, out.costs);
  out.bytes = of.bytes.of_stages(stages, chunks);
  out.problem = out.bytes.problem;
  if (out.problem.empty()) out.slices = of.bytes.of_slices(where.size.slices, stages, {});
  if (of.bytes.frees_gradients()) out.freed = {out.bytes.gradient, of.bytes.shard()};
  return out;
}

/// A plan's time and memory, some of its ranks recomputing all their stages: each of their backwards then begins with an F.
fit_point look_at(chevron::plan_view const& plan, cut const& of, std::vector<bool> const& recomputing) {
  fit_point out;
  out.schedule = plan.name;
  out.layers = of.layers;
  out.plan = std::make_shared<chevron::plan const>(copy_of(plan));
  std::vector<int> ranks;
  for (int r = 0; r < plan.size.ranks; ++r) {
    if (recomputing[static_cast<std::size_t>(r)]) ranks.push_back(r);
  }
  out.all = static_cast<int>(ranks.size()) == plan.size.ranks;
  if (!ranks.empty()) out.recomputed = out.all ? "all" : rank_list(ranks);
  owned_costs costs = of.costs;
  chevron::buffer<bool> recomputed(plan.stages);
  for (int s = 0; s < plan.stages; ++s) {
    auto const i = static_cast<std::size_t>(s);
    recomputed.data[s] = recomputing[static_cast<std::size_t>(plan.rank_of[s])];
    if (recomputed.data[s]) costs.backward_input[i] += costs.forward[i];
  }
  if (plan.size.slices > 1) out.schedule += " k=" + std::to_string(plan.size.slices);
  out.time = chevron::makespan(plan, costs.view());
  chevron::footprint_view const takes = of.bytes.view(recomputed.data);
  for (int r = 0; r < plan.size.ranks; ++r) {
    std::int64_t const one = of.peak(plan, r, recomputed.data);
    if (one <= out.bytes) continue;
    out.bytes = one;
    out.rank = r;
    out.fixed = of.fixed(plan, takes, r);
  }
  return out;
}

struct found_all {
  std::vector<fit_point> points;
  std::vector<std::pair<std::string, std::string>> left_out;  ///< a schedule, and why
};

/// A plan as it is, with recomputation where it is needed, and everywhere.
void look_at_ways(found_all& out, chevron::plan_view const& plan, cut const& of, model const& with) {
  auto const ranks = static_cast<std::size_t>(plan.size.ranks);
  out.points.push_back(look_at(plan, of, std::vector<bool>(ranks, false)));
  if (!with.bytes.recomputes()) return;
  std::vector<bool> needed(ranks);
  for (std::size_t r = 0; r < ranks; ++r) needed[r] = of.peak(plan, static_cast<int>(r)) > with.bytes.memory;
  auto const count = std::count(needed.begin(), needed.end(), true);
  if (count > 0 && count < plan.size.ranks) out.points.push_back(look_at(plan, of, needed));
  cut const again = of.layers.empty() || !with.layered.given().empty()
                        ? of
                        : cut_of(with, chevron::split_stages(plan), plan.size.chunks, plan, /*recompute=*/true);
  out.points.push_back(look_at(plan, again, std::vector<bool>(ranks, true)));
}

/// What a search on one placement finds that fits, without recomputation or with all of it.
struct hunt {
  char const* placement;
  int chunks;
  bool recompute;
};

/// The shortest time of the points that fit; 0: none does.
double shortest_that_fits(found_all const& all, std::int64_t memory) {
  double out = 0;
  for (fit_point const& p : all.points) {
    if (p.bytes <= memory && (out == 0 || p.time < out)) out = p.time;
  }
  return out;
}

/// A searched schedule as a point. \param chunks by which costs of a rank's whole share are divided in the command; 1: as they
/// are
fit_point point_of(chevron::plan const& best, cut const& of, hunt const& how, chevron::shape size, model const& with,
                   int chunks) {
  fit_point out = look_at(best, of, std::vector<bool>(static_cast<std::size_t>(size.ranks), how.recompute));
  out.schedule = std::string("searched, ") + how.placement;
  out.searched = true;
  request typed = with.asked;
  typed.layers = chevron::search::layers_text(of.layers);
  out.again = command_text(typed, "search", size, chunks) + " --placement " + how.placement + " --chunks " +
              std::to_string(how.chunks) + (how.recompute ? " --recompute" : "");
  return out;
}

/// The same as `search_on` for a profile that is cut by layers: looks for the layers of each stage, too. Whatever the cut and the
/// order, a rank has the mean of the ranks' work and bytes, or more: the line.
void search_layers_on(chevron::plan const& placed, hunt const& how, model const& with, chevron::search::effort const& effort,
                      found_all& out, std::vector<fit_bound>& bound) {
  using namespace chevron;
  shape const size = placed.size;
  std::vector<bool> const split(static_cast<std::size_t>(placed.stages), !how.recompute);
  std::span<std::int16_t const> const rank_of(placed.rank_of.data, static_cast<std::size_t>(placed.stages));
  std::string const name = std::string("searched, ") + how.placement;
  search::layer_costs layers = with.layered.costs(!how.recompute, rank_of);
  search::layer_bytes const bytes = with.layered.bytes();
  std::string problem =
      !layers.problem.empty() ? layers.problem : with.bytes.of_layers(std::vector<int>(1, with.layered.layers())).problem;
  if (problem.empty() && placed.stages > with.layered.layers() + 2)
    problem = "more stages than " + std::to_string(with.layered.layers()) + " layers, embedding and head";
  if (!problem.empty()) {
    out.left_out.emplace_back(name, problem);
    return;
  }
  double work = 0;
  std::int64_t fixed = with.bytes.of_layers({with.layered.layers()}).fixed.front();
  if (how.recompute) layers.recompute();
  auto const add = [&](search::piece_costs const& piece) {
    work += piece.forward + piece.backward_input + piece.backward_weight;
  };
  add(layers.embedding);
  for (search::piece_costs const& one : layers.layers) add(one);
  add(layers.head);
  if (with.bytes.frees_gradients()) {
    fixed -= bytes.embedding.gradient + bytes.head.gradient;
    for (search::piece_bytes const& one : bytes.layers) fixed -= one.gradient;
  }
  double const least = work * size.micro_batches / size.ranks, known = shortest_that_fits(out, with.bytes.memory);
  if (!(layers.hidden > 0)) bound.push_back({fixed / size.ranks, least});
  if (known > 0 && least >= known) return;  // a shorter one does without so much recomputation

  auto const graph = how.recompute ? work_graph::full_backward : work_graph::split_backward;
  find_in_bytes_of_layers const find{with.bytes, placed, how.recompute, known};
  plan best;
  std::vector<int> cut_layers = with.layered.given();
  if (!cut_layers.empty()) {
    if (static_cast<int>(cut_layers.size()) != placed.stages) {
      out.left_out.emplace_back(name, "it has " + std::to_string(placed.stages) + " stages, and --layers " +
                                          std::to_string(cut_layers.size()) + " numbers");
      return;
    }
    owned_costs const costs = layers.of(cut_layers);
    best = find({.where = placed, .costs = costs.view(), .work = graph}, cut_layers, effort).best;
  } else {
    // Each search goes through many limits; the even cut and the most promising one are worth that.
    search::layer_effort const how_hard{.brief = effort, .thorough = effort, .most_looked_at = 1, .most_searched = 0};
    search::layers_found found = search::find_layers(layers, {.where = placed, .work = graph}, how_hard, find);
    cut_layers = found.layers;
    best = std::move(found.best);
  }
  if (best.problem) return;
  out.points.push_back(point_of(best, cut_of(with, split, how.chunks, placed, how.recompute, cut_layers), how, size, with, 1));
}

template <class Placement>
void search_on(Placement const& where, hunt const& how, chevron::shape size, model const& with, chevron::search::effort effort,
               found_all& out, std::vector<fit_bound>& bound) {
  size.chunks = how.chunks;
  int const stages = size.ranks * how.chunks;
  chevron::plan const placed = chevron::placed_on(where, size);
  if (placed.problem) return;
  if (with.layered.cuts(stages)) {
    search_layers_on(placed, how, with, effort, out, bound);
    return;
  }
  // Recomputed stages run their backward whole: between I and W they would hold more than their F left.
  bool const split = !how.recompute;
  cut const of = cut_of(with, std::vector<bool>(static_cast<std::size_t>(stages), split), how.chunks, placed);
  if (!of.problem.empty()) {
    out.left_out.emplace_back(std::string("searched, ") + how.placement, of.problem);
    return;
  }
  owned_costs costs = of.costs;
  if (how.recompute) recompute_all(costs);
  chevron::buffer<bool> recomputed(stages);
  for (int s = 0; s < stages; ++s) recomputed.data[s] = how.recompute;
  chevron::footprint_view const takes = of.bytes.view(recomputed.data);
  std::int64_t most_fixed = 0, least_fixed = std::numeric_limits<std::int64_t>::max(), smallest = least_fixed;
  for (int s = 0; s < stages; ++s) smallest = std::min(smallest, std::max<std::int64_t>(takes.after_forward(s), 1));
  for (int r = 0; r < size.ranks; ++r) {
    most_fixed = std::max(most_fixed, of.fixed(placed, takes, r));
    // Freed gradients need not exist while the most chunks are in flight.
    least_fixed = std::min(least_fixed, chevron::static_bytes(placed, takes, r) - of.freed.sum(placed, r));
  }
  double const least_kept = chunks_within(placed, takes, with.bytes.memory).least_kept;
  auto const work = split ? chevron::work_graph::split_backward : chevron::work_graph::full_backward;

  // The line: with so many bytes no rank holds more chunks than the emptiest one could, of the smallest.
  int const all = size.micro_batches * how.chunks;
  // A backward that stays whole is one of I and W, so the bound of those is one of both; where only whole ones are known, of
  // them.
  cut line = cut_of(with, std::vector<bool>(static_cast<std::size_t>(stages), true), how.chunks, placed);
  bool const halves = line.problem.empty();
  if (!halves) line = of;
  if (how.recompute) recompute_all(line.costs);
  if (!halves) line.costs = unsplit(line.costs.view(), stages);
  for (int limit = chevron::least_in_flight(placed); limit <= all; ++limit) {
    chevron::activation_limit const memory{static_cast<double>(limit), least_kept};
    double const time = chevron::bounds(placed, line.costs.view(), memory).makespan;
    std::int64_t const from = least_fixed + limit * smallest;
    bound.push_back({std::max(from, most_fixed), time});
    if (from > 4 * with.bytes.memory) break;
  }

  double const shortest = shortest_that_fits(out, with.bytes.memory);
  auto const found =
      find_within({.where = placed, .costs = costs.view(), .work = work}, takes, with.bytes.memory, effort, shortest);
  if (found.best.problem) return;
  // A profile's costs are those of stages; a number given here is of a rank's whole share, and there of a chunk.
  out.points.push_back(point_of(found.best, of, how, size, with, with.profile ? 1 : how.chunks));
}

/// The best of several lines: from each number of bytes on, the least time of any.
std::vector<fit_bound> lowest(std::vector<fit_bound> line) {
  std::sort(line.begin(), line.end(),
            [](fit_bound const& a, fit_bound const& b) { return a.bytes < b.bytes || (a.bytes == b.bytes && a.time < b.time); });
  std::vector<fit_bound> out;
  for (fit_bound const& one : line) {
    if (out.empty() || one.time < out.back().time * (1 - 1e-12)) out.push_back(one);
  }
  return out;
}

std::string table_of(fit_chart const& chart, std::vector<fit_point const*> const& rows, chevron::show::text_style const& style) {
  std::vector<table_row> cells{{"schedule", "recomputed", "time", "slower", "fullest rank", "bytes", "in the way"}};
  double const best = rows.front()->time;
  bool fits = rows.front()->bytes <= chart.memory;
  for (fit_point const* p : rows) {
    double const more = p->time / best - 1;
    std::int64_t const over = p->bytes - chart.memory;
    cells.push_back({p->schedule, p->recomputed.empty() ? "-" : p->recomputed, number(p->time),
                     !fits || over > 0 ? ""
                     : more > 1e-9     ? percent(more)
                                       : "-",
                     std::to_string(p->rank), bytes(p->bytes), over > 0 ? bytes(over) + " too many" : "-"});
  }
  std::string lines = table_text(cells, {align::left, align::left, align::right, align::right, align::right, align::right});
  std::size_t const end = lines.find('\n');
  return style.colour ? "\x1b[1m" + lines.substr(0, end) + "\x1b[0m" + lines.substr(end) : lines;
}

std::string json_of(fit_chart const& chart) {
  std::string out = "{\n  \"memory\": " + std::to_string(chart.memory) + ",\n  \"schedules\": [";
  bool first = true;
  for (fit_point const& p : chart.points) {
    out += std::string(first ? "" : ",") + "\n    {\"schedule\": " + json_string(p.schedule) +
           ", \"recomputed\": " + (p.recomputed.empty() ? "null" : json_string(p.recomputed)) +
           ", \"searched\": " + (p.searched ? "true" : "false") + ", \"time\": " + exact(p.time) +
           ", \"bytes\": " + std::to_string(p.bytes) + ", \"static_bytes\": " + std::to_string(p.fixed) +
           ", \"rank\": " + std::to_string(p.rank) +
           (p.layers.empty() ? "" : ", \"layers\": [" + chevron::search::layers_text(p.layers) + "]") +
           ", \"fits\": " + (p.bytes <= chart.memory ? "true" : "false") + "}";
    first = false;
  }
  auto const line = [](std::vector<fit_bound> const& bound) {
    std::string list;
    for (fit_bound const& one : bound)
      list += (list.empty() ? "[" : ", [") + std::to_string(one.bytes) + ", " + exact(one.time) + "]";
    return "[" + list + "]";
  };
  return out + "\n  ],\n  \"bound\": " + line(chart.bound) + ",\n  \"bound_recomputed\": " + line(chart.bound_recomputed) +
         "\n}\n";
}

/// Where the bytes of slices come from, a line for each number of them; empty unless the profile has bytes of slices.
std::string words_of_slices(fit_chart const& chart, model const& with) {
  if (!with.asked.activation_bytes.empty() || !with.profile || with.profile->slices.empty()) return {};
  int const known = static_cast<int>(with.profile->slices.size());
  std::set<int> counts;
  for (fit_point const& p : chart.points) counts.insert(p.plan->size.slices);
  counts.erase(1);
  std::string out;
  for (int const slices : counts) {
    out += "\nBytes of " + std::to_string(slices) + " slices: " +
           (slices == known ? "of each slice, from the profile."
                            : "shares of a microbatch's bytes, by tokens; the profile has the bytes of each of " +
                                  std::to_string(known) + " slices.");
  }
  return out;
}

/// Why nothing fits, and what helps.
std::string remedy(fit_chart const& chart, model const& with) {
  fit_point const& least =
      *std::min_element(chart.points.begin(), chart.points.end(), [](auto const& a, auto const& b) { return a.bytes < b.bytes; });
  std::string out = "Nothing fits in " + bytes(chart.memory) + ". The least that is needed is " + bytes(least.bytes) + ", " +
                    least.schedule + (least.recomputed.empty() ? "" : " with recomputation (" + least.recomputed + ")") +
                    " on rank " + std::to_string(least.rank) + ", of which parameters, gradients and the optimizer take " +
                    bytes(least.fixed) + ". Remedy: ";
  if (least.fixed >= chart.memory) return out + "more ranks, so that each has a smaller share of the model";
  return out + std::string(with.bytes.recomputes() ? "" : "recomputation (--input-bytes), ") +
         "smaller microbatches, or more ranks";
}

}  // namespace

int run_fit(request const& asked) {
  std::string const format = format_of(asked, fit_formats);
  chevron::show::text_style const style = style_of(asked);
  model const with(asked);
  foreign from;
  chevron::shape size;
  if (asked.schedule.empty()) {
    size = whole_shape_of(asked);
  } else {
    if (!is_file(asked.schedule)) throw no_csv_file(asked);
    from = read_file(asked);
    if (from.broken) {
      std::cerr << law_words(asked, from.broken) << "\n";
      return exit_broken_law;
    }
    size = from.read.plan.size;
    size.chunks = asked.chunks.empty() ? 0 : size.chunks;
  }
  int const chunks = size.chunks > 0 ? size.chunks : 2;

  found_all found;
  fit_chart chart;
  auto const consider = [&](std::string const& name, chevron::plan plan) {
    plan.in_flight_limit = 0;
    chevron::finding const broken = plan.problem ? plan.problem : check(plan);
    if (broken) {
      found.left_out.emplace_back(name, describe(broken).str());
      return;
    }
    if (plan.stages != plan.size.ranks * plan.size.chunks && !with.layered.cuts(plan.stages)) {
      found.left_out.emplace_back(name,
                                  "its ranks have different numbers of stages; a rank's whole share then means different things");
      return;
    }
    plan.name = name.c_str();
    cut const of = cut_of(with, chevron::split_stages(plan), plan.size.chunks, plan);
    if (of.problem.empty())
      look_at_ways(found, plan, of, with);
    else
      found.left_out.emplace_back(name, of.problem);
  };
  if (!asked.schedule.empty()) consider(asked.schedule, std::move(from.read.plan));
  std::vector<std::string> const names = schedule_names();
  for (std::string const& name : names) {
    chevron::plan plan = plan_named(name, size);
    if (plan.problem && size.chunks != 0) plan = plan_named(name, {size.ranks, size.micro_batches, 0});
    consider(name, std::move(plan));
  }
  for (int const slices : slice_counts(asked)) {
    if (slices == 1) continue;
    chart.sliced = true;
    boost::hana::for_each(chevron::catalogue::sliced, [&](auto const* one) {
      consider(one->name, plan_named(one->name, {size.ranks, size.micro_batches, size.chunks, slices}));
    });
  }
  if (found.points.empty())
    throw usage("no schedule can be looked at; " + found.left_out.front().first + ": " + found.left_out.front().second);

  chevron::search::effort const effort = effort_of(asked);
  for (bool const recompute : {false, true}) {
    if (recompute && !with.bytes.recomputes()) break;
    std::vector<fit_bound> line;
    using namespace chevron;
    search_on(placement::linear, {"linear", 1, recompute}, size, with, effort, found, line);
    if (chunks == 2) search_on(placement::vee, {"vee", chunks, recompute}, size, with, effort, found, line);
    if (chunks > 2 && chunks % 2 == 0) search_on(placement::waves, {"wave", chunks, recompute}, size, with, effort, found, line);
    if (chunks > 1) search_on(placement::loop, {"loop", chunks, recompute}, size, with, effort, found, line);
    (recompute ? chart.bound_recomputed : chart.bound) = lowest(std::move(line));
  }

  chart.memory = with.bytes.memory;
  chart.unit = with.profile ? "ms" : "";
  chart.title = std::to_string(size.ranks) + (size.ranks == 1 ? " rank, " : " ranks, ") + std::to_string(size.micro_batches) +
                (size.micro_batches == 1 ? " microbatch" : " microbatches") + ": what fits in " + bytes(with.bytes.memory);
  chart.points = std::move(found.points);
  std::stable_sort(chart.points.begin(), chart.points.end(), [](fit_point const& a, fit_point const& b) {
    return a.time < b.time * (1 - 1e-12) || (a.time <= b.time * (1 + 1e-12) && a.bytes < b.bytes);
  });

  // What fits, the fastest first; a schedule recomputes no more than it must. Then what does not, the nearest first.
  std::vector<fit_point const*> fit, unfit;
  auto const less_recomputed = [&](fit_point const& p) {
    return std::any_of(chart.points.begin(), chart.points.end(), [&](fit_point const& other) {
      return !p.searched && other.schedule == p.schedule && other.bytes <= chart.memory && other.time < p.time;
    });
  };
  for (fit_point const& p : chart.points) {
    if (p.bytes <= chart.memory) {
      if (!less_recomputed(p)) fit.push_back(&p);
    } else if (std::none_of(chart.points.begin(), chart.points.end(), [&](fit_point const& other) {
                 return other.schedule == p.schedule && (other.bytes <= chart.memory || other.bytes < p.bytes);
               })) {
      unfit.push_back(&p);
    }
  }
  std::stable_sort(unfit.begin(), unfit.end(), [](auto const* a, auto const* b) { return a->bytes < b->bytes; });
  bool const any = !fit.empty();
  std::string sentence;
  if (any) {
    fit_point const& best = *fit.front();
    std::set<std::string> looked_at;
    for (fit_point const& p : chart.points) looked_at.insert(p.schedule);
    // Not the fastest of all where most were not looked at.
    sentence = (found.left_out.size() > looked_at.size()
                    ? std::to_string(found.left_out.size()) + " schedules are left out, see below; of the " +
                          std::to_string(looked_at.size()) + " others the fastest found that fits: "
                    : std::string("The fastest found that fits: ")) +
               best.schedule + (best.recomputed.empty() ? "" : ", recomputing " + best.recomputed) +
               ", " + number(best.time) + (chart.unit.empty() ? "" : " " + chart.unit) + ", " + bytes(best.bytes) + " on rank " +
               std::to_string(best.rank) + ".";
    chart.subtitle = sentence;
    if (!best.layers.empty()) sentence += "\nLayers of its stages: " + chevron::search::layers_text(best.layers) + ".";
    if (best.searched)
      sentence += "\nIts schedule: " + best.again + " -o FILE.csv";
  } else {
    sentence = remedy(chart, with) + ".";
    chart.subtitle = sentence.substr(0, sentence.find(". ") + 1);
  }
  sentence += words_of_slices(chart, with);
  if (!with.bytes.recomputes()) sentence += "\nRecomputation was not looked at: add --input-bytes, the input of a stage.";

  std::vector<fit_point const*> rows = fit;
  rows.insert(rows.end(), unfit.begin(), unfit.end());
  std::string words = chart.title + ".\n\n" + table_of(chart, rows, style) +
                      "\nbytes: parameters, gradients, the optimizer's state, and activations at the worst moment\n" + sentence +
                      "\n";
  if (!found.left_out.empty()) {
    words += "\nleft out:\n";
    std::vector<table_row> why;
    for (auto const& [name, reason] : found.left_out) why.push_back({"  " + name, reason});
    words += table_text(why, {align::left}, "   ");
  }
  if (format == "csv" && any)
    write(asked, chevron::show::csv(*fit.front()->plan));
  else if (format == "json")
    write(asked, json_of(chart));
  else if (format == "text" || format == "csv")
    write(asked, words);
  else
    write(asked, fit_picture(chart, format == "html"));
  if (!asked.output.empty()) std::cout << words;
  if (!any) std::cerr << "chevron-plan: " << remedy(chart, with) << "\n";
  return any ? exit_ok : exit_nothing_fits;
}

}  // namespace plan_program
