// computes: whole searches
#include <algorithm>
#include <cmath>
#include <iostream>
#include <limits>
#include <optional>
#include <utility>

#include <chevron/csv/csv.hpp>
#include <chevron/lower/gather_times.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/search.hpp>
#include <chevron/tools/show/chrome_trace.hpp>
#include <chevron/tools/show/html.hpp>
#include <chevron/tools/show/json.hpp>
#include <chevron/tools/show/svg.hpp>
#include <chevron/tools/show/text.hpp>

#include "../common/placements.hpp"
#include "gathers.hpp"
#include "jitter.hpp"
#include "layers.hpp"
#include "links.hpp"
#include "memory.hpp"
#include "request.hpp"
#include "search_time.hpp"
#include "table.hpp"
#include "value_list.hpp"
#include "within_memory.hpp"

namespace plan_program {
namespace {

/// What was found on one placement.
struct entry {
  std::string placement;
  owned_costs costs;
  chevron::search::found found;
  owned_costs planned;  ///< where a link is slow depends on what goes along it
  std::optional<chevron::search::robust_found> robust;  ///< where times vary
  std::optional<chevron::search::layers_found> cut;     ///< with --partition; its order is `found`
  std::int64_t most_layers = 0;                      ///< with --partition: that a rank may hold; 0: any number
  std::vector<int> order{};  ///< with --order: which of the microbatches, as they were given, goes in k-th
  double as_given = 0;       ///< with --order: what a search finds without it

  chevron::plan const& best() const { return robust ? robust->best : found.best; }
  /// What the entries are sorted by.
  double length() const {
    return robust ? chevron::search::quantile(robust->best_drawn, chevron::search::target_percentile) : found.length;
  }
};

/// What to search with, from the flags.
struct job {
  chevron::shape size;
  chevron::activation_limit memory;
  chevron::search::objective goal = chevron::search::objective::makespan;
  chevron::search::effort effort;
  chevron::work_graph work = chevron::work_graph::split_backward;
  chevron::search::jitter jitter;
  std::vector<double> slow;  ///< what each rank multiplies its times by
  bool order = false;        ///< the order of microbatches is looked for, too
  std::optional<memory_model> bytes;  ///< with --memory
  bool recompute = false;
  std::vector<int> layers{};  ///< of the stages, with --layers
  int resident = 0;           ///< with --resident: stages of a rank that may be gathered at once; 0: no stage is under FSDP

  /// What is asked on one placement.
  template <class Placement>
  chevron::search::problem on(Placement const& where, chevron::cost_view const& costs) const {
    return {.where = chevron::placed_on(where, size), .costs = costs, .memory = memory, .goal = goal, .work = work};
  }
};

/// The rank of each stage.
std::vector<std::int16_t> homes(std::string const& placement, chevron::shape size) {
  std::vector<std::int16_t> out;
  for (int s = 0; s < size.ranks * size.chunks; ++s) {
    int const rank = placements::on(placement, [&](auto const& where) { return where.rank_of(s, size); });
    out.push_back(static_cast<std::int16_t>(rank));
  }
  return out;
}

/// Whether it goes on in rounds until time is up. A number of trials asks for one search of so many, and time may end it sooner.
bool in_rounds(job const& asked, search_time const& time) { return time.limited() && asked.effort.trials == 0; }

/// Of the first round, an eighth of the trials of a search without a time: a second is enough for many pipelines.
chevron::search::effort first_round(job const& asked) {
  using namespace chevron::search;
  effort out = asked.effort;
  out.trials = usual_trials(actions_of(asked.size.ranks * asked.size.chunks, asked.size.units(), asked.work)) / 8;
  return out;
}

/// The time of `search_time` that is this placement's, from a share of all to another.
struct time_share {
  double from = 0, to = 1;
};

/// Order of microbatches and schedule together, on one placement.
entry order_on(std::string const& placement, job const& asked, owned_costs planned, search_time& time, time_share share) {
  return placements::on(placement, [&](auto const& where) {
    time.begin(placement, share.to);
    owned_costs const given = with_slower_ranks(chevron::placed_on(where, asked.size), planned.view(), asked.slow);
    auto got = chevron::search::find_order(asked.on(where, given.view()), asked.effort);
    planned.lengths = std::move(got.lengths);
    entry out{
        placement, with_slower_ranks(chevron::placed_on(where, asked.size), planned.view(), asked.slow), std::move(got), {}, {},
        {}};
    out.planned = std::move(planned);
    out.order = std::move(got.order);
    out.as_given = got.as_given;
    return out;
  });
}

/// With --memory: within bytes.
template <class Placement>
chevron::search::found find_in_bytes(Placement const& where, job const& asked, chevron::cost_view const& costs,
                                     chevron::search::effort const& trying) {
  int const stages = asked.size.ranks * asked.size.chunks;
  chevron::stage_bytes const bytes =
      asked.layers.empty() ? asked.bytes->of_stages(stages, asked.size.chunks) : asked.bytes->of_layers(asked.layers);
  if (!bytes.problem.empty()) throw usage("--memory: " + bytes.problem);
  chevron::buffer<bool> recomputed(stages);
  for (int s = 0; s < stages; ++s) recomputed.data[s] = asked.recompute;
  return find_within(asked.on(where, costs), bytes.view(recomputed.data), asked.bytes->memory, trying);
}

entry find_on(std::string const& placement, job const& asked, owned_costs planned, search_time& time, time_share share) {
  return placements::on(placement, [&](auto const& where) {
    entry out{placement, with_slower_ranks(chevron::placed_on(where, asked.size), planned.view(), asked.slow), {}, {}, {}, {}};
    chevron::cost_view const costs = out.costs.view();
    auto const find = [&](chevron::search::effort const& trying) {
      if (asked.bytes) return find_in_bytes(where, asked, costs, trying);
      if (asked.resident > 0) return chevron::search::find_gathered(asked.on(where, costs), asked.resident, trying);
      return chevron::search::find(asked.on(where, costs), trying);
    };
    bool const drawn = asked.jitter.spread > 0;
    time.begin(placement, drawn ? (share.from + share.to) / 2 : share.to);
    out.found = in_rounds(asked, time) ? chevron::search::in_rounds(find, first_round(asked)) : find(asked.effort);
    if (drawn) {
      time.begin(placement + ", over draws", share.to);
      chevron::search::effort trying = asked.effort;
      if (in_rounds(asked, time)) trying.trials = std::numeric_limits<int>::max();
      out.robust = chevron::search::find_robust(out.found, asked.on(where, costs), asked.jitter, trying);
    }
    out.planned = std::move(planned);
    return out;
  });
}

/// The placement asked for, or all that have so many chunks on each rank, a schedule of one being another's for none of them.
std::vector<std::string> placements_of(request const& asked, chevron::shape& size) {
  std::string wanted = asked.search.placement;
  for (char& c : wanted) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  if (wanted.empty()) {
    if (size.chunks == 0) size.chunks = 1;
    if (size.chunks == 1) return {"linear"};
    if (size.chunks == 2) return {"vee", "loop"};
    return size.chunks % 2 == 0 ? std::vector<std::string>{"wave", "loop"} : std::vector<std::string>{"loop"};
  }
  std::vector<std::string> const known = {"linear", "loop", "vee", "wave"};
  if (std::find(known.begin(), known.end(), wanted) == known.end()) {
    throw usage("--placement '" + asked.search.placement + "' is not known: choose one of linear, loop, vee, wave");
  }
  bool const in_line = wanted == "linear";
  if (size.chunks == 0) size.chunks = in_line ? 1 : 2;
  if (!placements::exist(wanted, size.chunks)) {
    throw usage("--placement " + wanted + " does not exist with --chunks " + std::to_string(size.chunks) + ": " +
                (in_line           ? "linear has 1 chunk on each rank, loop any number"
                 : wanted == "vee" ? "vee has 2 chunks on each rank, wave any even number"
                                   : "wave has an even number of chunks on each rank, loop any number"));
  }
  return {wanted};
}

/// With --memory: what a model takes, and which flags do not go with it.
std::optional<memory_model> bytes_of(request const& asked, job const& what) {
  if (asked.bytes.memory.empty()) {
    for (auto const& [flag, given] :
         {std::pair{"--static-bytes", !asked.bytes.fixed.empty()}, std::pair{"--kept-bytes", !asked.bytes.kept.empty()},
          std::pair{"--input-bytes", !asked.bytes.input.empty()}, std::pair{"--state-bytes", !asked.bytes.state.empty()},
          std::pair{"--shard", !asked.bytes.shard.empty()}, std::pair{"--recompute", what.recompute}})
      if (given)
        throw usage(std::string(flag) + " has no effect without --memory: give the memory of a rank, such as --memory 80GiB");
    return std::nullopt;
  }
  for (auto const& [flag, given] :
       {std::pair{"--memory-limit", !asked.memory_limit.empty()},
        std::pair{"--kept-for-weight", what.memory.kept_for_weight < 1}, std::pair{"--jitter", what.jitter.spread > 0},
        std::pair{"--order", what.order}})
    if (given) throw usage(std::string("--memory does not go with ") + flag + ": leave one of them out");
  memory_model out(asked, profile_of(asked));
  if (what.recompute && !out.recomputes())
    throw usage("--recompute: the bytes of a stage's input are unknown: add --input-bytes");
  return out;
}

job job_of(request const& asked) {
  job out;
  out.memory.kept_for_weight = share_number(asked.search.kept_for_weight, "--kept-for-weight");
  if (!(out.memory.kept_for_weight > 0)) {
    throw usage("--kept-for-weight '" + asked.search.kept_for_weight +
                "' is not usable: a W needs the activations it multiplies; give a share above 0");
  }
  std::string const& goal = asked.search.objective;
  if (goal != "makespan" && goal != "span") throw usage("--objective '" + goal + "' is not known: choose one of makespan, span");
  if (goal == "span") out.goal = chevron::search::objective::span;
  out.effort = effort_of(asked);
  out.recompute = asked.search.recompute;
  if (asked.search.full_backward || out.recompute) out.work = chevron::work_graph::full_backward;
  out.jitter = jitter_of(asked);
  out.order = asked.search.order;
  out.bytes = bytes_of(asked, out);
  out.resident = resident_asked(asked);
  if (out.resident > 0 && asked.unshard.empty())
    throw usage("--resident " + asked.resident + " of search needs the time of a gather: add --unshard COST");
  if (out.resident == 0 && !asked.unshard.empty())
    throw usage("--unshard " + asked.unshard +
                " of search needs the number of stages that may be gathered at once: add --resident STAGES");
  if (out.resident > 0) {
    for (auto const& [flag, given] : {std::pair{"--objective span", out.goal == chevron::search::objective::span},
                                      std::pair{"--memory", out.bytes.has_value()}, std::pair{"--jitter", out.jitter.spread > 0},
                                      std::pair{"--order", out.order}, std::pair{"--slices", asked.slices != "1"}})
      if (given) throw usage("--resident does not go with " + std::string(flag) + ": leave one of them out");
  }
  if (out.order) {
    if (asked.lengths.empty()) throw usage("--order has nothing to choose where microbatches are alike: give --lengths");
    for (auto const& [flag, given] :
         {std::pair{"--jitter", out.jitter.spread > 0}, std::pair{"--partition", asked.search.partition}})
      if (given) throw usage(std::string("--order does not go with ") + flag + ": leave one of them out");
  }
  return out;
}

std::string above(double length, double bound) {
  double const more = bound > 0 ? length / bound - 1 : 0;
  return more < 1e-9 ? "optimal" : "+" + chevron::show::fixed(more * 100, more < 0.01 ? 2 : 1) + " %";
}

/// Checks that layers can be divided among so many stages, and that no flag is given whose costs belong to stages.
void check_partition(request const& asked, job const& what, layered_profile const& layered, int stages) {
  std::string const name =
      asked.search.partition ? "--partition" : "--profile " + quoted(asked.profile) + ", whose layers are divided,";
  if (asked.profile.empty())
    throw usage("--partition needs the costs of layers: give --profile FILE.json, as chevron-train writes it");
  auto const of_layers = chevron::search::layer_costs_of(*profile_of(asked), what.work == chevron::work_graph::split_backward);
  if (!of_layers.problem.empty()) throw usage("--partition and --profile '" + asked.profile + "': " + of_layers.problem);
  if (stages > layered.layers() + 2) {
    throw usage("--partition: " + std::to_string(layered.layers()) + " layers cannot be cut into " + std::to_string(stages) +
                " stages, of which all but the first and the last need one: ask for fewer --ranks or --chunks");
  }
  if (!layered.given().empty()) throw usage("--layers does not go with --partition, which looks for them: leave one of them out");
  std::string const remedy = asked.search.partition ? ": leave one of them out" : ": give --layers, the number of each stage";
  for (auto const& [flag, given] :
       {std::pair{"--lengths", !asked.lengths.empty()}, std::pair{"--jitter", what.jitter.spread > 0},
        std::pair{"--slow-rank", !asked.jitter.slow_ranks.empty()}, std::pair{"--slices", what.size.slices > 1},
        std::pair{"--resident", what.resident > 0}})
    if (given) throw usage(name + " does not go with " + flag + remedy);
}

/// How many layers a rank may hold at a time: of the limit's microbatches, what the fullest rank has of even layers.
template <class Placement>
std::int64_t layer_limit(Placement const& where, job const& asked, int layers) {
  int const stages = asked.size.ranks * asked.size.chunks;
  std::vector<std::int64_t> of_rank(static_cast<std::size_t>(asked.size.ranks));
  std::vector<int> const even = chevron::search::even_layers(layers, stages);
  for (int s = 0; s < stages; ++s)
    of_rank[static_cast<std::size_t>(where.rank_of(s, asked.size))] += even[static_cast<std::size_t>(s)];
  return static_cast<std::int64_t>(asked.memory.most) * *std::max_element(of_rank.begin(), of_rank.end()) / asked.size.chunks;
}

/// A search in which each chunk counts as the layers that it holds.
chevron::search::found find_in_layers(chevron::search::problem const& asked, std::vector<int> const& layers,
                                      double kept_for_weight, std::int64_t most, chevron::search::effort const& trying) {
  constexpr double one = 1'000'000;  // a layer before its I, as if in bytes; after it a share of that
  std::vector<std::int64_t> whole, kept;
  for (int const count : layers) {
    whole.push_back(std::llround(one * count));
    kept.push_back(std::llround(one * kept_for_weight * count));
  }
  std::vector<std::int64_t> const none(layers.size(), 0);
  return find_within(asked, {none.data(), whole.data(), kept.data(), none.data(), nullptr}, most * std::llround(one), trying);
}

/// Layers and order together, on one placement.
entry part_on(request const& typed, std::string const& placement, job const& asked, layered_profile const& layered,
              search_time& time, time_share share) {
  std::vector<std::int16_t> const rank_of = homes(placement, asked.size);
  chevron::search::layer_costs layers = layered.costs(asked.work == chevron::work_graph::split_backward, rank_of);
  if (!layers.problem.empty()) throw usage("--profile " + quoted(typed.profile) + ": " + layers.problem);
  if (asked.recompute) layers.recompute();
  return placements::on(placement, [&](auto const& where) {
    std::int64_t const most = asked.memory.most > 0 ? layer_limit(where, asked, static_cast<int>(layers.layers.size())) : 0;
    auto const find = [&](chevron::search::problem const& of_cut, std::vector<int> const& cut,
                          chevron::search::effort const& trying) {
      if (most > 0) return find_in_layers(of_cut, cut, asked.memory.kept_for_weight, most, trying);
      return chevron::search::find(of_cut, trying);
    };
    chevron::activation_limit const in_chunks{0, asked.memory.kept_for_weight};  // layers are what the limit counts
    chevron::search::problem const unlimited = asked.on(where, {}).within(in_chunks);
    time.begin(placement, share.to);
    time.hide_bound();
    auto const find_cut = [&](chevron::search::effort const& trying) {
      chevron::search::layer_effort how_hard{.thorough = trying};
      how_hard.brief.seed = trying.seed;
      how_hard.brief.watch = trying.watch;
      if (in_rounds(asked, time)) how_hard.brief.trials = std::max(trying.trials / 50, 1);
      if (asked.bytes) {
        chevron::plan const placed = chevron::placed_on(where, asked.size);
        return chevron::search::find_layers(layers, unlimited, how_hard,
                                            find_in_bytes_of_layers{*asked.bytes, placed, asked.recompute});
      }
      return chevron::search::find_layers(layers, unlimited, how_hard, find);
    };
    chevron::search::layers_found cut =
        in_rounds(asked, time) ? chevron::search::in_rounds(find_cut, first_round(asked)) : find_cut(asked.effort);
    owned_costs planned = cut.best.problem ? owned_costs{} : layers.of(cut.layers);
    if (cut.best.problem) {
      entry none{placement, {}, std::move(static_cast<chevron::search::found&>(cut)), {}, {}, {}};
      return none;
    }
    entry out{placement, with_slower_ranks(chevron::placed_on(where, asked.size), planned.view(), asked.slow), cut, {}, {}, {}};
    out.planned = std::move(planned);
    out.cut = std::move(cut);
    out.most_layers = most;
    return out;
  });
}

/// The same for the layers: what they gain, and the flag that trains with them.
std::string report_of_layers(request const& asked, std::vector<entry> const& entries) {
  std::string out = "\n";
  std::vector<table_row> rows{
      {"placement", "layers of the stages", "with even layers", "gain", "layers in flight", "at most", ""}};
  for (entry const& one : entries) {
    auto const& cut = *one.cut;
    rows.push_back({one.placement, chevron::search::layers_text(cut.layers),
                    std::isinf(cut.even) ? "do not fit" : number(cut.even),
                    std::isinf(cut.even) ? "-" : percent(1 - one.found.length / cut.even),
                    std::to_string(cut.held) + " (" + std::to_string(cut.even_held) + ")",
                    one.most_layers > 0 ? std::to_string(one.most_layers) : "-",
                    cut.nothing_better ? "no other layers can be shorter" : std::to_string(cut.searched) + " cuts searched"});
  }
  out += table_text(rows, {align::left, align::left, align::right, align::right, align::right, align::right, align::left});
  return out +
         "\nIn flight: the most on any rank, whole until W, in brackets that of even layers.\nTrain with them: chevron-train "
         "--schedule " +
         (asked.output.ends_with(".csv") ? asked.output : "FILE.csv") + " --layers " +
         chevron::search::layers_text(entries.front().cut->layers) + "\n";
}

std::string order_text(std::vector<int> const& order) {
  std::string out;
  for (int const m : order) out += (out.empty() ? "" : ",") + std::to_string(m);
  return out;
}

/// With --resident: the number of gathers of the schedule found.
int gathers_of(job const& asked, entry const& one) { return count_gathers(chevron::fewest_gathers(one.best(), asked.resident)); }

/// One line a placement: what was found, what the catalogue has, what no schedule beats.
std::string report(request const& typed, job const& asked, std::vector<entry> const& entries,
                   chevron::show::text_style const& style) {
  std::string out = std::to_string(asked.size.ranks) + (asked.size.ranks == 1 ? " rank, " : " ranks, ") +
                    std::to_string(asked.size.chunks) + (asked.size.chunks == 1 ? " chunk" : " chunks") + " on each, " +
                    std::to_string(asked.size.micro_batches) + (asked.size.micro_batches == 1 ? " microbatch" : " microbatches");
  if (asked.size.slices > 1) out += " of " + std::to_string(asked.size.slices) + " slices";
  bool const in_layers = entries.front().cut.has_value();
  if (asked.memory.most > 0) {
    out += in_layers
               ? ", at most " + number(asked.memory.most / asked.size.chunks) + " microbatches of even layers in flight on a rank"
           : asked.size.slices > 1 ? ", at most " + typed.memory_limit + " microbatches in flight on a rank"
                                   : ", at most " + number(asked.memory.most) + " chunks in flight on a rank";
  }
  if (asked.bytes) {
    out += ", at most " + chevron::show::bytes(asked.bytes->memory) + " on a rank" + (asked.recompute ? ", all recomputed" : "");
  }
  if (asked.memory.kept_for_weight < 1)
    out += std::string(" (after its I a ") + (in_layers ? "layer" : "chunk") + " counts " + number(asked.memory.kept_for_weight) +
           ")";
  out += ".\n" + length_words(typed) + slice_words(typed, {asked.size.slices}) + jitter_words(typed, asked.jitter) + "\n";
  if (entries.front().robust) {
    std::vector<std::pair<std::string, chevron::search::robust_found const*>> all;
    for (entry const& one : entries) all.emplace_back(one.placement, &*one.robust);
    return out + robust_words(all, style);
  }
  std::vector<table_row> rows{{"placement", name_of(asked.goal), "above the bound", "lower bound", "catalogue's best", ""}};
  if (asked.resident > 0) rows.front().push_back("UNSHARD");
  for (entry const& one : entries) {
    chevron::search::found const& found = one.found;
    bool const any = found.published_length > 0;
    rows.push_back({one.placement, number(found.length), above(found.length, found.bound), number(found.bound),
                    any ? number(found.published_length) : "none fits", any ? found.published.name.characters : ""});
    if (asked.resident > 0) rows.back().push_back(std::to_string(gathers_of(asked, one)));
  }
  out += table_text(rows, {align::left, align::right, align::right, align::right, align::right, align::left, align::right});
  if (asked.resident > 0)
    out += "\nLengths include waits for gathers; at most " + std::to_string(asked.resident) +
           (asked.resident == 1 ? " stage" : " stages") + " of a rank gathered at once.";
  chevron::search::found const& best = entries.front().found;
  out += "\nThe " + std::string(entries.size() > 1 ? "first" : "schedule") + " was made from " + best.start.characters +
         (best.trials > 0 ? " in " + std::to_string(best.trials) + " trials" : "") + ".";
  bool const in_order = !length_words(typed).empty();
  if (best.optimal()) {
    out += std::string(" No schedule on this placement ") + (in_order ? "that takes microbatches in this order " : "") +
           "is shorter within this memory.";
  }
  if (entry const& first = entries.front(); !first.order.empty()) {
    out += "\nMicrobatches go in as " + order_text(first.order) + ", counted from 0 as they were given: " +
           percent(1 - first.found.length / first.as_given) + " shorter than in that order (" + number(first.as_given) +
           "). Put the data into this order.";
  }
  return out + "\n";
}

std::string as_json(job const& asked, std::vector<entry> const& entries, chevron::cost_view const& costs) {
  std::string out = "{\n  \"objective\": " + json_string(name_of(asked.goal)) + ",\n  \"placements\": [";
  for (std::size_t i = 0; i < entries.size(); ++i) {
    chevron::search::found const& found = entries[i].found;
    bool const any = found.published_length > 0;
    out += std::string(i > 0 ? "," : "") + "\n    {\"placement\": " + json_string(entries[i].placement) +
           (entries[i].cut ? ", \"layers\": [" + chevron::search::layers_text(entries[i].cut->layers) +
                                 "], \"even\": " + (std::isinf(entries[i].cut->even) ? "null" : exact(entries[i].cut->even))
                           : "") +
           (entries[i].order.empty()
                ? ""
                : ", \"order\": [" + order_text(entries[i].order) + "], \"as_given\": " + exact(entries[i].as_given)) +
           ", \"length\": " + exact(found.length) + ", \"bound\": " + exact(found.bound) +
           ", \"optimal\": " + (found.optimal() ? "true" : "false") + ", \"start\": " + json_string(found.start.characters) +
           ", \"trials\": " + std::to_string(found.trials) +
           ", \"published\": " + (any ? json_string(found.published.name.characters) : "null") +
           ", \"published_length\": " + (any ? exact(found.published_length) : "null") +
           (asked.resident > 0 ? ", \"unshard\": " + std::to_string(gathers_of(asked, entries[i])) : "") +
           (entries[i].robust ? robust_json(*entries[i].robust) : "") + "}";
  }
  if (asked.resident > 0) return out + "\n  ],\n  \"csv\": " + json_string(chevron::show::csv(entries.front().best())) + "\n}\n";
  std::string plan = chevron::show::json(entries.front().best(), costs);
  while (!plan.empty() && plan.back() == '\n') plan.pop_back();
  return out + "\n  ],\n  \"plan\": " + plan + "\n}\n";
}

/// A search counts slices; the limit is one of microbatches, of which slices hold unequal shares. Lowers the search's limit until
/// the schedule found keeps the limit asked for.
template <class Find>
void within_tokens(request const& asked, job& what, entry& one, Find const& find) {
  if (what.size.slices == 1 || !(what.memory.most > 0)) return;
  double const most = *number_in(asked.memory_limit) * what.size.chunks, typed = what.memory.most;
  int const least = what.size.chunks * what.size.slices;
  auto const too_much = [&] {
    return !one.best().problem && peak_share(one.best(), one.costs.view().lengths) > most * (1 + 1e-9);
  };
  while (too_much() && what.memory.most > least && search_time::signal() == 0) {
    --what.memory.most;
    one = find();
  }
  what.memory.most = typed;
  if (too_much()) {
    throw usage("--memory-limit " + asked.memory_limit +
                ": no order was found that keeps it. The first slices are the longest and "
                "are kept the longest: give more, or --slice-ends equal");
  }
}

/// Searches on each placement. Where a signal ended it, says so; there may then be no entry at all.
std::string search_all(request const& asked, job& what, std::vector<std::string> const& placements,
                       layered_profile const* layers, std::vector<entry>& entries) {
  auto const stages = static_cast<std::size_t>(what.size.ranks * what.size.chunks);
  std::vector<bool> const split(stages, what.work == chevron::work_graph::split_backward);
  search_time time(seconds_of(asked));
  what.effort.watch = time.watch();
  auto const count = static_cast<double>(placements.size());
  std::string left_out;
  for (std::size_t i = 0; i < placements.size(); ++i) {
    if (search_time::signal() != 0 && !entries.empty()) break;
    time_share const share{static_cast<double>(i) / count, static_cast<double>(i + 1) / count};
    auto const find_one = [&] {
      if (layers) return part_on(asked, placements[i], what, *layers, time, share);
      std::vector<std::int16_t> const rank_of = homes(placements[i], what.size);
      owned_costs costs;
      if (what.layers.empty()) {
        costs = costs_of(asked, split, rank_of);
      } else {
        cut_model cut = layered_profile(asked, profile_of(asked)).cut_into(what.layers, split, rank_of);
        if (!cut.problem.empty()) throw usage("--layers " + quoted(asked.layers) + ": " + cut.problem);
        costs = std::move(cut.costs);
      }
      if (what.recompute) recompute_all(costs);
      apply_lengths(asked, what.size, costs);
      return (what.order ? order_on : find_on)(placements[i], what, std::move(costs), time, share);
    };
    entry one = find_one();
    within_tokens(asked, what, one, find_one);
    chevron::finding const problem = one.best().problem;
    if (!problem) {
      entries.push_back(std::move(one));
    } else if (search_time::signal() == 0) {
      if (!one.found.stopped && what.bytes)
        throw too_little_memory("--memory " + asked.bytes.memory + ": " + describe(problem).str() +
                                (what.recompute || !what.bytes->recomputes() ? "" : "; add --recompute") +
                                "; give more, or more --ranks");
      if (!one.found.stopped) throw usage(describe(problem).str());
      left_out += (left_out.empty() ? "" : ", ") + placements[i];
    }
  }
  what.effort.watch = {};
  if (!left_out.empty()) {
    std::string const words = "in --seconds " + asked.search.seconds +
                              " no order was found that keeps the memory limit: give more, or a higher --memory-limit";
    if (entries.empty()) throw usage(words);
    std::cerr << "chevron-plan: " << left_out << ": " << words << "\n";
  }
  if (search_time::signal() == 0) return {};
  return "interrupted after " + chevron::show::fixed(time.passed(), 1) + " s";
}

}  // namespace

int run_search(request const& asked) {
  std::string const format = format_of(asked, search_formats);
  chevron::show::text_style const style = style_of(asked);
  job what = job_of(asked);
  what.size = shape_of(asked);
  std::vector<std::string> const placements = placements_of(asked, what.size);
  int const least = what.size.chunks * what.size.slices;
  what.memory.most = chunk_limit(asked, least);
  if (what.size.slices > 1) {
    for (auto const& [flag, given] :
         {std::pair{"--order", what.order}, std::pair{"--partition", asked.search.partition},
          std::pair{"--memory", what.bytes.has_value()}, std::pair{"--jitter", what.jitter.spread > 0}})
      if (given) throw usage(std::string("--slices does not go with ") + flag + ": leave one of them out");
  }
  what.slow = slow_ranks(asked, what.size.ranks);
  if (what.size.ranks * what.size.chunks > chevron::max_stages) {
    throw usage("--ranks " + asked.ranks + " with " + std::to_string(what.size.chunks) + " chunks on each makes more than " +
                std::to_string(chevron::max_stages) + " stages: ask for fewer of either");
  }
  if (what.memory.most > 0 && what.memory.most < least) {
    throw usage("--memory-limit " + asked.memory_limit +
                " is below the smallest possible, 1: a microbatch on its way holds a chunk with each stage of a rank");
  }
  int const stages = what.size.ranks * what.size.chunks;
  layered_profile const layered(asked, profile_of(asked));
  what.layers = layered.given();
  bool const divides = asked.search.partition || (what.layers.empty() && layered.cuts(stages));
  if (divides) check_partition(asked, what, layered, stages);
  layered_profile const* const layers = divides ? &layered : nullptr;
  std::vector<entry> entries;
  std::string const interrupted = search_all(asked, what, placements, layers, entries);
  if (entries.empty()) {
    std::cerr << "chevron-plan: " << interrupted << " before an order was found that keeps the memory limit\n";
    return exit_signal + search_time::signal();
  }
  std::stable_sort(entries.begin(), entries.end(),
                   [](entry const& a, entry const& b) { return a.length() < b.length() * (1 - 1e-12); });
  chevron::plan const& best = entries.front().best();
  chevron::cost_view const real = entries.front().costs.view();
  std::string const words = report(asked, what, entries, style) + (layers ? report_of_layers(asked, entries) : "");
  std::string content;
  if (what.resident > 0 && format != "csv" && format != "csv-comms" && format != "csv-comms-2.15" && format != "json") {
    if (format != "text")
      throw usage("--resident " + asked.resident + " does not go with --format " + format + ", whose pictures have no gathers");
    content = words;
  } else if (format == "csv")
    content = chevron::show::csv(best);
  else if (format.starts_with("csv-comms")) {
    chevron::proved_program const program = lower(chevron::prove(best));
    content = csv_with_gathers(asked, program, format);
  } else if (format == "json")
    content = as_json(what, entries, real);
  else if (format == "svg")
    content = chevron::show::svg(best, real);
  else if (format == "html")
    content = chevron::show::html(best, real);
  else if (format == "trace")
    content = chevron::show::chrome_trace(best, real);
  else
    content = words + "\n" + chevron::show::timeline_text(best, real, style);
  write(asked, content);
  // A file holds the schedule; what was found is then said on the terminal.
  if (!asked.output.empty()) std::cout << words;
  if (interrupted.empty()) return exit_ok;
  std::cerr << "chevron-plan: " << interrupted << "; this is the best found so far"
            << (entries.size() < placements.size() ? ", and not on all placements" : "") << "\n";
  return exit_signal + search_time::signal();
}

}  // namespace plan_program
