#include "engine.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>

#include <chevron/csv/csv.hpp>
#include <chevron/schedule.hpp>
#include <chevron/tools/show/figures.hpp>
#include <chevron/tools/show/html_model.hpp>
#include <chevron/tools/show/json.hpp>

#include "../common/placements.hpp"

namespace playground {

namespace show = chevron::show;

namespace {

/// Numbers between commas. `good` is cleared where something else stands there.
template <class Number>
std::vector<Number> numbers(std::string_view text, bool& good) {
  std::vector<Number> out;
  while (!text.empty()) {
    std::size_t const comma = std::min(text.find(','), text.size());
    std::string const one(text.substr(0, comma));
    char* end = nullptr;
    double const value = std::strtod(one.c_str(), &end);
    good = good && end != one.c_str() && *end == 0 && std::isfinite(value) && std::abs(value) <= 1e12;
    out.push_back(good ? static_cast<Number>(value) : Number{});
    text.remove_prefix(std::min(comma + 1, text.size()));
  }
  return out;
}

/// The same of a model cut into `to` stages instead: what a stage costs is spread over it evenly.
std::vector<double> cut_anew(std::vector<double> const& from, int to) {
  std::size_t const has = from.size(), wanted = static_cast<std::size_t>(to);
  if (has == wanted) return from;
  std::vector<double> out(wanted);
  for (std::size_t s = 0; s < wanted; ++s) {
    // Boundaries counted in 1 / (has × wanted) of the model, so that they are whole numbers.
    std::size_t const begin = s * has, end = (s + 1) * has;
    for (std::size_t t = begin / wanted; t * wanted < end; ++t) {
      std::size_t const low = std::max(begin, t * wanted), high = std::min(end, (t + 1) * wanted);
      out[s] += from[t] * static_cast<double>(high - low) / static_cast<double>(wanted);
    }
  }
  return out;
}

/// The laws that a plan may break and still be played, at least to where it stops.
bool can_be_played(chevron::finding const& f) {
  using chevron::law;
  for (law const stops : {law::shape, law::description, law::placement, law::ids_in_range, law::no_duplicate}) {
    if (f.broken == stops) return false;
  }
  return true;
}

void move_actions(chevron::plan& plan, std::vector<int> const& moves) {
  for (std::size_t i = 0; i + 2 < moves.size(); i += 3) {
    int const rank = moves[i], from = moves[i + 1], to = moves[i + 2];
    if (rank < 0 || rank >= plan.size.ranks) continue;
    chevron::action* const list = plan.actions.data + plan.begin.data[rank];
    int const length = plan.begin.data[rank + 1] - plan.begin.data[rank];
    if (from < 0 || to < 0 || from >= length) continue;
    int const moved = list[from].fused != 0 ? 2 : 1;  // a fused pair moves as one
    if (from + moved > length || to + moved > length) continue;
    if (from < to)
      std::rotate(list + from, list + from + moved, list + to + moved);
    else
      std::rotate(list + to, list + from, list + from + moved);
  }
}

std::string list(std::span<double const> values) {
  return show::json_list(
      values, [](double v) { return show::exact(v); }, ",");
}

}  // namespace

settings read_settings(std::string_view text) {
  settings out;
  while (!text.empty() && out.problem.empty()) {
    std::size_t const stop = std::min(text.find('\n'), text.size());
    std::string_view const line = text.substr(0, stop);
    text.remove_prefix(std::min(stop + 1, text.size()));
    if (line == "csv") {
      out.csv = text;
      break;
    }
    if (line.empty()) continue;
    std::size_t const equals = std::min(line.find('='), line.size());
    std::string_view const key = line.substr(0, equals);
    std::string const value(line.substr(std::min(equals + 1, line.size())));
    bool good = true;
    auto const whole = [&](int least, int most) {
      auto const all = numbers<double>(value, good);
      good = good && all.size() == 1 && all[0] >= least && all[0] <= most && all[0] == std::floor(all[0]);
      return good ? static_cast<int>(all[0]) : least;
    };
    auto const real = [&](double most) {
      auto const all = numbers<double>(value, good);
      good = good && all.size() == 1 && all[0] >= 0 && all[0] <= most;
      return good ? all[0] : 0;
    };
    auto const costs = [&] {
      auto const all = numbers<double>(value, good);
      for (double const one : all) good = good && one >= 0;
      good = good && !all.empty() && all.size() <= static_cast<std::size_t>(chevron::max_stages);
      return all;
    };
    if (key == "schedule")
      out.schedule = value;
    else if (key == "placement")
      out.placement = value;
    else if (key == "ranks")
      out.ranks = whole(1, 1024);
    else if (key == "micro_batches")
      out.micro_batches = whole(1, 4096);
    else if (key == "chunks")
      out.chunks = whole(0, 64);
    else if (key == "forward")
      out.forward = costs();
    else if (key == "backward_input")
      out.backward_input = costs();
    else if (key == "backward_weight")
      out.backward_weight = costs();
    else if (key == "cost_stages")
      out.cost_stages = whole(0, chevron::max_stages);
    else if (key == "latency")
      out.latency = real(1e12);
    else if (key == "message")
      out.message = real(1e12);
    else if (key == "slow_link")
      out.slow_link = whole(-1, 1024);
    else if (key == "slow_factor")
      out.slow_factor = real(1e6);
    else if (key == "occupies")
      out.occupies = static_cast<chevron::occupies>(whole(0, 4));
    else if (key == "hidden")
      out.hidden = real(1);
    else if (key == "first_input_gradient")
      out.first_input_gradient = whole(0, 1) == 1;
    else if (key == "memory_limit")
      out.memory_limit = real(1e6);
    else if (key == "trials")
      out.trials = whole(0, 1'000'000'000);
    else if (key == "seed")
      out.seed = whole(0, 2'000'000'000);
    else if (key == "moves")
      out.moves = numbers<int>(value, good);
    else
      out.problem = "there is no setting '" + std::string(key) + "'";
    if (!good) out.problem = std::string(key) + " '" + value + "' is not usable";
  }
  if (static_cast<long>(out.ranks) * out.micro_batches * std::max(1, out.chunks) > 65'536)
    out.problem = "ranks, microbatches and chunks make more than 65,536: as large a schedule is for chevron-plan";
  return out;
}

judged make(settings const& asked) {
  judged out;
  chevron::shape const size{asked.ranks, asked.micro_batches, asked.chunks};
  chevron::csv_schedule read;
  bool const from_csv = asked.schedule == "csv";
  if (from_csv) {
    read = chevron::read_csv(asked.csv);
    out.plan = read.plan;
    out.plan.name = "from CSV";
  } else if (asked.schedule == "listed") {
    using namespace chevron::letters;
    out.plan = placements::on(asked.placement, [&](auto where) {
      auto const all =
          chevron::schedule_of(chevron::work_graph::split_backward).place(where).prefer(I, F, W).named("list schedule");
      int const chunks = asked.chunks > 0 ? asked.chunks : where.default_chunks;
      int const limit = static_cast<int>(asked.memory_limit * chunks + 1e-9);
      chevron::plan made = limit > 0 ? expand(all.at_most_in_flight(limit), size) : expand(all, size);
      return made;
    });
  } else {
    out.plan = chevron::catalogue::make_plan(asked.schedule, size);
  }
  if (!out.plan.problem && !asked.moves.empty()) {
    move_actions(out.plan, asked.moves);
    out.plan.in_flight_limit = 0;
  }
  if (!out.plan.problem) {
    int const limit = static_cast<int>(asked.memory_limit * out.plan.size.chunks + 1e-9);
    if (asked.memory_limit > 0) out.plan.in_flight_limit = std::max(1, limit);
  }
  out.broken = out.plan.problem;
  bool const as_pasted = from_csv && asked.moves.empty();
  if (!out.broken && as_pasted) out.broken = check(read, asked.csv);
  if (!out.broken) out.broken = check(out.plan);  // within the limit that was asked for, too
  if (out.broken)
    out.sentence = as_pasted ? describe(out.broken, read, asked.csv) : describe(out.broken).str();
  out.playable = !out.plan.problem && can_be_played(out.broken);
  return out;
}

owned_costs prices(settings const& asked, chevron::plan_view const& plan) {
  owned_costs out;
  auto const by_stage = [&](std::vector<double> values) {
    int const known = asked.cost_stages > 0 ? asked.cost_stages : plan.stages;
    if (values.size() == 1) values.resize(static_cast<std::size_t>(known), values[0]);
    return cut_anew(values, plan.stages);
  };
  out.forward = by_stage(asked.forward);
  out.backward_input = by_stage(asked.backward_input);
  out.backward_weight = by_stage(asked.backward_weight);
  out.communication = chevron::buffer<double>(std::max(plan.stages - 1, 1), 0);
  out.latency = chevron::buffer<double>(std::max(plan.stages - 1, 1), 0);
  for (int s = 0; s + 1 < plan.stages; ++s) {
    int const link = std::min(plan.rank_of[s], plan.rank_of[s + 1]);
    bool const slow = link == asked.slow_link && std::abs(plan.rank_of[s] - plan.rank_of[s + 1]) == 1;
    out.communication[s] = asked.message * (slow ? asked.slow_factor : 1);
    out.latency[s] = asked.latency * (slow ? asked.slow_factor : 1);
  }
  out.hidden = asked.hidden;
  out.communication_occupies = asked.occupies;
  out.first_input_gradient = asked.first_input_gradient;
  return out;
}

std::string answer(settings const& asked, judged const& of) {
  std::string out = "{\"name\":" + show::json_string(of.plan.name.characters);
  auto const entry = [&](char const* key, std::string const& value) { out += std::string(",\"") + key + "\":" + value; };
  entry("law", of.broken ? show::json_string(name_of(of.broken.broken)) : "null");
  entry("sentence", show::json_string(of.sentence));
  if (of.broken && of.broken.rank >= 0)
    entry("at", "[" + std::to_string(of.broken.rank) + "," + std::to_string(of.broken.position) + "]");
  entry("playable", of.playable ? "true" : "false");
  if (!of.playable) return out + "}";
  chevron::plan_view const plan = of.plan;
  owned_costs const costs = prices(asked, plan);
  chevron::timeline const when = simulate(plan, costs.view());
  show::picture drawn = when.complete ? show::picture_of(plan, costs.view()) : show::picture_of(plan, when);
  show::drawn_facts facts = show::facts_of(plan, costs.view());
  entry("actions", std::to_string(plan.total()));
  entry("complete", when.complete ? "true" : "false");
  entry("bound", show::exact(facts.bound));
  show::figures const f = when.complete ? show::figures_of(plan, costs.view()) : show::figures_of(drawn);
  show::detail::length_entries(f, entry);
  entry("messages", std::to_string(f.messages));
  entry("peak_in_flight", show::json_list(
                              f.peak_in_flight, [](int n) { return std::to_string(n); }, ","));
  show::size_entries(plan.size, plan.stages, entry);
  entry("forward", list(costs.forward));
  entry("backward_input", list(costs.backward_input));
  entry("backward_weight", list(costs.backward_weight));
  entry("communication", list(costs.communication));
  entry("latency", list(costs.latency));
  std::string homes;
  for (int s = 0; s < plan.stages; ++s) homes += (s > 0 ? "," : "") + std::to_string(plan.rank_of[s]);
  entry("rank_of", "[" + homes + "]");
  entry("model", show::html_model({&drawn, 1}, {&facts, 1}));
  return out + "}";
}

std::string as_program(settings const& asked, judged const& of) {
  chevron::plan_view const plan = of.plan;
  owned_costs const costs = prices(asked, plan);
  auto const row = [](char const* name, std::span<double const> values) {
    std::string out = std::string("    .") + name + " = {";
    for (std::size_t i = 0; i < values.size(); ++i) out += (i > 0 ? ", " : "") + show::exact(values[i]);
    return out + "}";
  };
  std::string const limit =
      plan.total() > 20'000
          ? "// As large as this it needs -fconstexpr-ops-limit=4294967296 (g++) or -fconstexpr-steps=2147483647 (clang).\n"
          : "";
  return "// " + std::string(plan.name) +
         ", from Chevron's playground: proved while this file compiles, and its timeline printed.\n"
         "//   g++ -std=c++20 -I<chevron>/include schedule.cpp && ./a.out\n" +
         limit +
         "#include <iostream>\n\n#include <chevron/csv.hpp>\n#include <chevron/schedule.hpp>\n\n"
         "using namespace chevron;\n\n"
         "inline constexpr auto mine = from_csv(R\"csv(" +
         show::csv(plan) + ")csv\");\n\nconstexpr auto proved = checked<mine, shape{.ranks = " + std::to_string(plan.size.ranks) +
         ", .micro_batches = " + std::to_string(plan.size.micro_batches) + "}>;\n\nconstexpr stage_costs<" +
         std::to_string(plan.stages) + "> measured{\n" + row("forward", costs.forward) + ",\n" +
         row("backward_input", costs.backward_input) + ",\n" + row("backward_weight", costs.backward_weight) + ",\n" +
         row("communication", costs.communication) + ",\n    .hidden = " + show::exact(costs.hidden) +
         ",\n    .communication_occupies = occupies::" + name_of(costs.communication_occupies) +
         ",\n    .first_input_gradient = " + (costs.first_input_gradient ? "true" : "false") + ",\n" +
         row("latency", costs.latency) +
         "};\n\nint main() { std::cout << show::timeline_text(proved, measured) << '\\n'; }\n";
}

}  // namespace playground
