// computes: what every schedule takes, with --jitter a thousand times
#include <algorithm>
#include <cmath>
#include <iostream>
#include <optional>
#include <string>
#include <vector>

#include <range/v3/algorithm/any_of.hpp>
#include <range/v3/algorithm/max.hpp>
#include <range/v3/algorithm/stable_sort.hpp>
#include <range/v3/range/conversion.hpp>
#include <range/v3/view/concat.hpp>
#include <range/v3/view/filter.hpp>
#include <range/v3/view/remove_if.hpp>
#include <range/v3/view/transform.hpp>

#include <chevron/base/format.hpp>
#include <chevron/catalogue/catalogue.hpp>
#include <chevron/catalogue/slack.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/tools/show/picture.hpp>

#include "gathers.hpp"
#include "jitter.hpp"
#include "layers.hpp"
#include "links.hpp"
#include "request.hpp"
#include "shorter.hpp"
#include "table.hpp"
#include "value_list.hpp"

namespace plan_program {
namespace {

/// One schedule of the table: its numbers, or why it has none.
struct entry {
  std::string name;
  int chunks = 0;
  chevron::show::figures numbers;
  int slices = 1;
  int peak = 0;                 ///< chunks, on the rank that has most
  double share = 0;             ///< the same in microbatches of a rank's whole share
  std::int64_t peak_bytes = 0;  ///< on the rank that has most
  std::string reason;
  std::vector<double> drawn;                ///< makespans by draw, where times vary
  std::optional<shorter_schedule> shorter;  ///< that a search finds within its memory
  std::vector<int> layers;  ///< of its stages, where they were divided for it
  std::string measured;  ///< of the schedule that a profile was taken under: what it took beside what is predicted
  std::optional<gathered_figures> gathered{};  ///< with --resident

  /// What schedules are compared by.
  double length() const { return gathered ? gathered->makespan : numbers.makespan; }
};

/// What all schedules are given: costs and sizes of a rank's whole share of the model, and of a message.
struct conditions {
  chevron::costs whole;
  std::int64_t activation_bytes = -1;  ///< -1: not declared
  std::int64_t message_bytes = -1;
  bool by_stage = false;  ///< costs are a list, one a stage, and those of a chunk
  int stages = 0;         ///< which has so many
  request const* asked = nullptr;
  std::optional<chevron::profile> profile;  ///< if given, costs come from there
  std::optional<layered_profile> layered{};  ///< the same, by layers
  chevron::search::jitter jitter;
  std::vector<double> slow;  ///< what each rank multiplies its times by
  double unshard = 0;        ///< time to gather a rank's whole share of the parameters; if `by_stage`, those of a stage
};

bool is_list(std::string const& typed) { return typed.find(',') != std::string::npos; }

/// One value for all: a list a stage would mean different things to schedules that cut the model differently.
std::string const& single(std::string const& typed, std::string const& flag, char const* of = "a rank's whole share") {
  if (is_list(typed)) {
    throw usage(flag + " '" + typed +
                "' is a list, but schedules cut the model into different numbers of stages: give one number, that of " + of);
  }
  return typed;
}

/// Refuses `--resident` and `--unshard` alone, and flags under which schedules are not compared by their makespan with gathers.
void check_gathers(request const& asked) {
  if (asked.resident.empty()) {
    if (asked.unshard.empty()) return;
    throw usage("--unshard " + asked.unshard +
                " of compare needs the number of stages that may be gathered at once: add --resident STAGES");
  }
  (void)resident_asked(asked);
  if (asked.unshard.empty())
    throw usage("--resident " + asked.resident + " of compare needs the time of a gather: add --unshard COST");
  if (varies(jitter_of(asked))) throw usage("--resident does not go with --jitter: leave one of them out");
}

conditions conditions_of(request const& asked, chevron::shape size) {
  conditions out;
  out.asked = &asked;
  out.jitter = jitter_of(asked);
  out.slow = slow_ranks(asked, size.ranks);
  out.profile = profile_of(asked);
  out.layered.emplace(asked, out.profile);
  bool listed = false;
  for (auto const& [typed, flag] : {std::pair{&asked.forward, "--forward"}, std::pair{&asked.backward_input, "--backward-input"},
                                    std::pair{&asked.backward_weight, "--backward-weight"},
                                    std::pair{&asked.communication, "--communication"}, std::pair{&asked.latency, "--latency"},
                                    std::pair{&asked.bandwidth, "--bandwidth"}, std::pair{&asked.unshard, "--unshard"}}) {
    if (is_list(*typed) && asked.chunks.empty()) {
      throw usage(std::string(flag) + " '" + *typed +
                  "' is a list, but schedules cut the model into different numbers of stages: give one number, of a rank's whole "
                  "share or a message, or add --chunks to compare those with so many stages on each rank");
    }
    listed = listed || is_list(*typed);
  }
  out.by_stage = listed;
  if (listed) out.stages = size.ranks * whole_number(asked.chunks, "--chunks", 1, 64);
  if (!listed) {
    out.whole.forward = cost_number(asked.forward, "--forward");
    out.whole.backward_input = cost_number(asked.backward_input, "--backward-input");
    out.whole.backward_weight = cost_number(asked.backward_weight, "--backward-weight");
  }
  check_gathers(asked);
  if (!asked.unshard.empty() && !is_list(asked.unshard)) out.unshard = cost_number(asked.unshard, "--unshard");
  if (!is_list(asked.communication)) out.whole.communication = cost_number(asked.communication, "--communication");
  out.whole.hidden = share_number(asked.hidden, "--hidden");
  out.whole.communication_occupies = occupies_of(asked);
  out.whole.first_input_gradient = !asked.no_first_input_gradient;
  if (!listed && !(out.whole.forward + out.whole.backward_input + out.whole.backward_weight > 0)) {
    throw usage("--forward, --backward-input and --backward-weight are all 0: give at least one cost above 0");
  }
  if (!asked.activation_bytes.empty())
    out.activation_bytes = byte_number(single(asked.activation_bytes, "--activation-bytes"), "--activation-bytes");
  if (!asked.message_bytes.empty())
    out.message_bytes = byte_number(single(asked.message_bytes, "--message-bytes", "a message"), "--message-bytes");
  return out;
}

/// Costs of a plan's stages, for microbatches that are alike; `problem` where there are none.
owned_costs stage_costs_of(conditions const& given, chevron::plan_view const& plan, std::string& problem,
                           std::vector<int>& layers) {
  request const& asked = *given.asked;
  if (given.layered->cuts(plan.stages)) {
    cut_model cut = given.layered->cut_for(plan);
    problem = cut.problem;
    layers = std::move(cut.layers);
    return std::move(cut.costs);
  }
  std::span<std::int16_t const> const rank_of(plan.rank_of, static_cast<std::size_t>(plan.stages));
  if (given.profile) return costs_of(asked, *given.profile, chevron::split_stages(plan), rank_of, problem);
  if (given.by_stage) return costs_of(asked, chevron::split_stages(plan), rank_of);
  auto const of_each = [&](double whole) { return chevron::buffer<double>(plan.stages, whole / plan.size.chunks); };
  owned_costs out{.forward = of_each(given.whole.forward),
                  .backward_input = of_each(given.whole.backward_input),
                  .backward_weight = of_each(given.whole.backward_weight),
                  .communication = chevron::buffer<double>(plan.stages, given.whole.communication),
                  .hidden = given.whole.hidden,
                  .communication_occupies = given.whole.communication_occupies,
                  .first_input_gradient = given.whole.first_input_gradient};
  apply_links(asked, rank_of, out);
  return out;
}

/// The same with the factors of its microbatches, and with the times of gathers.
owned_costs costs_of(conditions const& given, chevron::plan_view const& plan, std::string& problem, std::vector<int>& layers) {
  owned_costs out = stage_costs_of(given, plan, problem, layers);
  if (!problem.empty()) return out;
  if (std::string const& typed = given.asked->unshard; is_list(typed)) {
    out.unshard = value_list(typed, "--unshard", plan.stages, "stages", cost_number);
  } else if (!typed.empty()) {
    double const of_each = given.by_stage ? given.unshard : given.unshard / plan.size.chunks;
    out.unshard = chevron::buffer<double>(plan.stages, of_each);
  }
  apply_lengths(*given.asked, plan.size, out);
  return out;
}

/// The numbers of one plan, or why it has none.
entry look_at(std::string const& name, chevron::plan plan, conditions const& given) {
  entry out;
  out.name = name;
  if (plan.problem) {
    out.reason = describe(plan.problem).str();
    return out;
  }
  out.chunks = plan.size.chunks;
  out.slices = plan.size.slices;
  plan.in_flight_limit = 0;
  if (chevron::finding const broken = check(plan)) {
    out.reason = describe(broken).str();
    return out;
  }
  if (given.by_stage && plan.stages != given.stages) {
    out.reason = "has " + std::to_string(plan.stages) + " stages; the costs given are those of " + std::to_string(given.stages);
    return out;
  }
  owned_costs const planned = costs_of(given, plan, out.reason, out.layers);
  if (!out.reason.empty()) return out;
  chevron::owned_costs const slowed = with_slower_ranks(plan, planned.view(), given.slow);
  chevron::cost_view costs = slowed.view();
  if (!given.asked->resident.empty()) {
    out.gathered = gathered_figures_of(*given.asked, plan, costs);
    if (out.reason = out.gathered->problem; !out.reason.empty()) return out;
    costs.unshard = nullptr;  // all other numbers are without gathers
  }
  out.numbers = chevron::show::figures_of(plan, costs);
  if (varies(given.jitter)) out.drawn = chevron::search::sampled_lengths(plan, costs, given.jitter);
  request brief = *given.asked;
  brief.layers = chevron::search::layers_text(out.layers);
  if (!out.gathered) out.shorter = shorter_than(brief, plan, costs, given.by_stage || given.profile ? 1 : out.chunks);
  if (given.profile && out.layers.empty()) out.measured = measured_words(*given.profile, plan, out.numbers.makespan);
  out.peak = ranges::max(out.numbers.peak_in_flight);
  bool const sliced = !out.numbers.peak_share.empty();
  out.share = (sliced ? ranges::max(out.numbers.peak_share) : static_cast<double>(out.peak)) / out.chunks;
  out.peak_bytes = sliced ? std::llround(static_cast<double>(given.activation_bytes) * out.share)
                          : given.activation_bytes * out.peak / out.chunks;
  int const limit = chunk_limit(*given.asked, out.chunks);
  if (sliced && limit > 0 && out.share * out.chunks > limit + 1e-9) {
    out.reason = "peak " + number(out.share) + " is above the limit of " + given.asked->memory_limit;
  } else if (limit > 0 && !sliced && out.peak > limit) {
    out.reason = "peak " + number(static_cast<double>(out.peak) / out.chunks);
    if (out.chunks > 1) out.reason += " (" + std::to_string(out.peak) + " chunks of 1/" + std::to_string(out.chunks) + ")";
    out.reason += " is above the limit of " + given.asked->memory_limit;
  }
  return out;
}

/// A schedule of the catalogue.
entry look_at(std::string const& name, chevron::shape size, conditions const& given) {
  chevron::plan plan = plan_named(name, size);
  // A schedule whose number of chunks is fixed takes part with its own.
  if (plan.problem && size.chunks != 0) plan = plan_named(name, {size.ranks, size.micro_batches, 0, size.slices});
  return look_at(name, std::move(plan), given);
}

/// Those of the catalogue that slack makes fit for the slow links that `--link` names, with as much of it as they need.
std::vector<std::string> names_with_slack(chevron::shape size, conditions const& given) {
  std::vector<std::string> out;
  if (given.asked->links.empty()) return out;
  for (char const* name : {"1F1B", "ZB-H1"}) {
    chevron::plan const plain = plan_named(name, {size.ranks, size.micro_batches, 1});
    std::string problem;
    std::vector<int> layers;
    if (plain.problem || (given.by_stage && plain.stages != given.stages)) continue;
    owned_costs const costs = costs_of(given, plain, problem, layers);
    if (!problem.empty()) continue;
    auto const needed = chevron::catalogue::slack_for(costs.view(), size.ranks, chevron::split_stages(plain)[0]);
    if (needed.count > 0) out.emplace_back(chevron::catalogue::name_with_slack(name, needed.begin(), needed.end()));
  }
  return out;
}

/// A schedule from a file, which must cut the model evenly: the costs are of a rank's whole share.
entry look_at(foreign const& from, conditions const& given) {
  entry out;
  out.name = from.file;
  chevron::plan const& plan = from.read.plan;
  if (from.broken) {
    out.reason = describe(from.broken, from.read, from.text);
  } else if (plan.stages != plan.size.ranks * plan.size.chunks && !given.layered->cuts(plan.stages)) {
    out.reason = "its ranks have different numbers of stages; a rank's whole share then means different things";
  } else {
    return look_at(from.file, plan, given);
  }
  return out;
}

/// Words as one field of CSV. A file's name may hold anything.
std::string field(std::string const& words) {
  std::string out = "\"";
  for (char c : words) out += c == '"' ? std::string(2, c) : std::string(1, c);
  return out + "\"";
}

/// From which gain on more slices are worth their messages.
constexpr double slices_worth_it = .02;

/// Which number of slices to take, and why: the fewest with which the best schedule takes little more than the best of all.
/// \param fit the schedules that were compared \param length what they are compared by
template <class Length>
std::string chosen_slices(std::vector<entry> const& fit, std::vector<int> const& counts, Length const& length) {
  std::vector<entry const*> best;
  for (int const slices : counts) {
    entry const* least = nullptr;
    for (entry const& e : fit) {
      if (e.slices == slices && (least == nullptr || length(e) < length(*least))) least = &e;
    }
    if (least != nullptr) best.push_back(least);
  }
  if (best.empty()) return {};
  auto const less = [&](entry const* a, entry const* b) { return length(*a) < length(*b); };
  double const shortest = length(**std::min_element(best.begin(), best.end(), less));
  auto const worth_it = [&](entry const* e) { return length(*e) <= shortest * (1 + slices_worth_it); };
  entry const& chosen = **std::find_if(best.begin(), best.end(), worth_it);
  std::string out = "slices: take " + std::to_string(chosen.slices) + " with " + chosen.name + ", the fewest within " +
                    percent(slices_worth_it) + " of the shortest";
  bool first = true;
  for (entry const* const e : best) {
    if (e == &chosen) continue;
    double const more = length(*e) / length(chosen) - 1;
    out += std::string(first ? "; " : ", ") + (e->slices == 1 ? "whole sequences" : std::to_string(e->slices) + " slices") +
           (first ? " take " : " ") + percent(std::abs(more)) + (more < 0 ? " less" : " more") + " (" + e->name + ")";
    first = false;
  }
  return out + "\n";
}

}  // namespace

int run_compare(request const& asked) {
  std::string const format = format_of(asked, compare_formats);
  std::vector<foreign> files;
  chevron::shape size;
  std::vector<int> const counts = slice_counts(asked);
  if (asked.files.empty()) size = whole_shape_of(asked);
  for (std::string const& file : asked.files) {
    request one = asked;
    one.schedule = file;
    if (!is_file(file)) throw no_csv_file(one);
    foreign const& from = files.emplace_back(read_file(one));
    if (from.read.plan.problem) {
      std::cout << law_words(one, from.broken) << "\n";
      return exit_broken_law;
    }
    chevron::shape const has{from.read.plan.size.ranks, from.read.plan.size.micro_batches, 0};
    if (files.size() > 1 && (has.ranks != size.ranks || has.micro_batches != size.micro_batches)) {
      throw usage(file + " has " + std::to_string(has.ranks) + " ranks and " + std::to_string(has.micro_batches) +
                  " microbatches, " + asked.files.front() + " " + std::to_string(size.ranks) + " and " +
                  std::to_string(size.micro_batches) + ": compare schedules of one size");
    }
    size = has;
  }
  conditions const given = conditions_of(asked, size);
  chevron::show::text_style const style = style_of(asked);

  auto names = schedule_names();
  for (std::string& name : names_with_slack(size, given)) names.push_back(std::move(name));
  auto all = names | ranges::views::transform([&](std::string const& name) { return look_at(name, size, given); }) |
             ranges::to<std::vector>();
  for (int const slices : counts) {
    chevron::shape const of_slices{size.ranks, size.micro_batches, size.chunks, slices};
    if (slices == 1) continue;
    boost::hana::for_each(chevron::catalogue::sliced,
                          [&](auto const* one) { all.push_back(look_at(one->name, of_slices, given)); });
  }
  for (foreign const& from : files) all.push_back(look_at(from, given));
  auto const fits = [](entry const& e) { return e.reason.empty(); };
  auto const unfit = all | ranges::views::remove_if(fits) | ranges::to<std::vector>();
  auto fit = all | ranges::views::filter(fits) | ranges::to<std::vector>();
  ranges::stable_sort(fit, [](entry const& a, entry const& b) {
    if (std::abs(a.length() - b.length()) > 1e-9 * a.length()) return a.length() < b.length();
    return a.share < b.share - 1e-12;
  });
  bool const drawn = varies(given.jitter);
  auto const p90 = [](entry const& e) { return chevron::search::quantile(e.drawn, chevron::search::target_percentile); };
  if (drawn) ranges::stable_sort(fit, [&](entry const& a, entry const& b) { return p90(a) < p90(b); });
  struct drawn_numbers {
    chevron::search::sampled_figures figures;
    chevron::search::sampled_difference above;  ///< the first
  };
  auto const drawn_of = [&](entry const& e) {
    return drawn_numbers{chevron::search::sampled_figures(e.drawn), chevron::search::difference(e.drawn, fit.front().drawn)};
  };

  auto const share = [](entry const& e) { return e.share; };
  bool const held = given.activation_bytes >= 0;
  bool const sent = given.message_bytes >= 0;
  bool const gathered = !asked.resident.empty();
  auto const sent_bytes = [&](entry const& e) { return given.message_bytes * e.numbers.messages / e.slices; };
  std::string out;
  if (format == "json") {
    out = "[";
    for (entry const& e : ranges::views::concat(fit, unfit)) {
      out += std::string(out.size() > 1 ? "," : "") + "\n  {\"schedule\": " + json_string(e.name);
      if (e.reason.empty()) {
        out += ", \"chunks\": " + std::to_string(e.chunks) + ", \"slices\": " + std::to_string(e.slices) +
               ", \"makespan\": " + exact(e.numbers.makespan) + ", \"bubble_makespan\": " + exact(e.numbers.bubble_makespan) +
               ", \"span\": " + exact(e.numbers.span) + ", \"bubble_span\": " + exact(e.numbers.bubble_span) +
               ", \"steady_step_time\": " + exact(e.numbers.steady) + ", \"bubble_steady\": " + exact(e.numbers.bubble_steady) +
               ", \"peak_in_flight\": " + std::to_string(e.peak) + ", \"peak_share\": " + exact(share(e)) +
               ", \"peak_bytes\": " + (held ? std::to_string(e.peak_bytes) : "null") +
               ", \"messages\": " + std::to_string(e.numbers.messages) +
               ", \"message_bytes\": " + (sent ? std::to_string(sent_bytes(e)) : "null");
        if (e.gathered) {
          out +=
              ", \"unshard\": " + std::to_string(e.gathered->gathers) + ", \"gathered_makespan\": " + exact(e.gathered->makespan);
        }
        if (!e.layers.empty()) out += ", \"layers\": [" + chevron::search::layers_text(e.layers) + "]";
        if (drawn) {
          auto const [figures, above] = drawn_of(e);
          out += ", \"median\": " + exact(figures.median) + ", \"p90\": " + exact(figures.p90) +
                 ", \"spread\": " + exact(figures.spread) + ", \"p90_above_first\": " + exact(above.by) +
                 ", \"p90_above_first_error\": " + exact(above.error);
        }
        out += "}";
      } else {
        out += ", \"reason\": " + json_string(e.reason) + "}";
      }
    }
    out += "\n]\n";
  } else if (format == "csv") {
    out =
        "schedule,chunks,makespan,bubble_makespan,span,bubble_span,steady_step_time,bubble_steady,peak_in_flight,"
        "peak_share,peak_bytes,messages,message_bytes,slices," +
        std::string(drawn ? "median,p90,spread,p90_above_first,p90_above_first_error," : "") +
        (gathered ? "unshard,gathered_makespan," : "") + "reason\n";
    auto const name = [](entry const& e) { return is_file(e.name) ? field(e.name) : e.name; };
    for (entry const& e : fit) {
      out += name(e) + "," + std::to_string(e.chunks) + "," + exact(e.numbers.makespan) + "," + exact(e.numbers.bubble_makespan) +
             "," + exact(e.numbers.span) + "," + exact(e.numbers.bubble_span) + "," + exact(e.numbers.steady) + "," +
             exact(e.numbers.bubble_steady) + "," + std::to_string(e.peak) + "," + exact(share(e)) + "," +
             (held ? std::to_string(e.peak_bytes) : "") + "," + std::to_string(e.numbers.messages) + "," +
             (sent ? std::to_string(sent_bytes(e)) : "") + "," + std::to_string(e.slices) + ",";
      if (drawn) {
        auto const [figures, above] = drawn_of(e);
        for (double const value : {figures.median, figures.p90, figures.spread, above.by, above.error}) out += exact(value) + ",";
      }
      if (gathered) out += std::to_string(e.gathered->gathers) + "," + exact(e.gathered->makespan) + ",";
      out += "\n";
    }
    for (entry const& e : unfit)
      out += name(e) + ",,,,,,,,,,,,,," + (drawn ? ",,,,," : "") + (gathered ? ",," : "") + field(e.reason) + "\n";
  } else {
    auto const some = [](int n, char const* one, char const* ending) {
      return std::to_string(n) + " " + one + (n == 1 ? "" : ending);
    };
    out = some(size.ranks, "rank", "s") + ", " + some(size.micro_batches, "microbatch", "es") + ". ";
    if (given.profile) {
      chevron::profile const& measured = *given.profile;
      out += "Costs in ms as " + asked.profile + " has them";
      if (!measured.schedule.empty()) out += ", measured under " + measured.schedule;
      if (measured.size.ranks > 0) out += " on " + some(measured.size.ranks, "rank", "s");
    } else {
      out += std::string(given.by_stage ? "A stage" : "A rank's share of the model") + " costs F=" + asked.forward +
             " I=" + asked.backward_input + " W=" + asked.backward_weight;
    }
    if (given.whole.communication > 0 || is_list(asked.communication)) {
      out += ", a message " + asked.communication;
      using chevron::occupies;
      if (occupies const who = given.whole.communication_occupies; who == occupies::wire) {
        out += ", during which its wire carries nothing else";
      } else if (who != occupies::nobody) {
        out += ", during which ";
        out += who == occupies::both ? "both its ends compute" : std::string("its ") + name_of(who) + " computes";
        out += " nothing";
      }
    }
    out += link_words(asked) + ".\n";
    if (given.whole.hidden > 0) out += "A fused pair hides " + percent(given.whole.hidden) + " of its shorter half.\n";
    if (!given.whole.first_input_gradient) out += "The first stage has no input gradient.\n";
    if (gathered) {
      out += "The gathers of " + std::string(given.by_stage ? "a stage" : "a rank's share of the model") + " take " +
             asked.unshard + ", with at most " + asked.resident + (asked.resident == "1" ? " stage" : " stages") +
             " of a rank gathered at once.\n";
    }
    out += length_words(asked) + slice_words(asked, counts) + jitter_words(asked, given.jitter) + "\n";
    if (!fit.empty() && drawn) {
      auto const row = [&](entry const& e) { return drawn_row{e.name, e.chunks, e.numbers.makespan, e.drawn, share(e)}; };
      out += drawn_table(fit | ranges::views::transform(row) | ranges::to<std::vector>(), style);
      if (chooses_slices(asked) && counts.size() > 1) out += "\n" + chosen_slices(fit, counts, p90);
    } else if (!fit.empty()) {
      std::vector<table_row> rows{{"schedule", "chunks"}};
      for (char const* const heading :
           gathered ? std::vector{"gathered", "slower", "UNSHARD", "makespan"} : std::vector{"makespan", "slower"})
        rows.front().emplace_back(heading);
      for (char const* const heading : {"bubble", "span", "steady", "bubble", "peak", "messages"})
        rows.front().emplace_back(heading);
      bool const sliced = ranges::any_of(fit, [](entry const& e) { return e.slices > 1; });
      if (sliced) rows.front().push_back("slices");
      if (held) rows.front().push_back("peak bytes");
      if (sent) rows.front().push_back("bytes sent");
      double const best = fit.front().length();
      for (entry const& e : fit) {
        double const more = e.length() / best - 1;
        table_row& row =
            rows.emplace_back(table_row{e.name, std::to_string(e.chunks), number(e.length()), more > 1e-9 ? percent(more) : "-"});
        if (gathered) {
          row.push_back(std::to_string(e.gathered->gathers));
          row.push_back(number(e.numbers.makespan));
        }
        for (std::string const& cell : {percent(e.numbers.bubble_makespan), number(e.numbers.span), number(e.numbers.steady),
                                        percent(e.numbers.bubble_steady), number(share(e)), std::to_string(e.numbers.messages)})
          row.push_back(cell);
        if (sliced) rows.back().push_back(std::to_string(e.slices));
        if (held) rows.back().push_back(chevron::show::bytes(e.peak_bytes));
        if (sent) rows.back().push_back(chevron::show::bytes(sent_bytes(e)));
      }
      std::string lines = table_text(rows, {align::left, align::right});
      if (style.colour) lines = "\x1b[1m" + lines.substr(0, lines.find('\n')) + "\x1b[0m" + lines.substr(lines.find('\n'));
      if (chooses_slices(asked) && counts.size() > 1)
        lines += "\n" + chosen_slices(fit, counts, [](entry const& e) { return e.length(); });
      out += lines + (gathered ? "\ngathered: the makespan with waits for gathers; all else is without gathers" : "") +
             "\nmakespan: first start to last end over all ranks   span: the longest single rank\n"
             "steady: each of many steps without a barrier between\n"
             "peak: activations on the fullest rank, in microbatches of a rank's whole share\n";
      if (!fit.front().layers.empty()) {
        out += "layers: divided for each schedule; of " + fit.front().name + " " +
               chevron::search::layers_text(fit.front().layers) + "\n";
      }
      for (entry const& e : fit) {
        if (!e.measured.empty()) out += "profile: " + e.name + " " + e.measured + "\n";
      }
      std::string shorter, command;
      for (entry const& e : fit) {
        if (!e.shorter) continue;
        shorter += (shorter.empty() ? "" : ", ") + number(e.shorter->length) + " in that of " + e.name;
        if (command.empty()) command = e.name + ": " + e.shorter->command;
      }
      if (!shorter.empty()) out += "search finds, within a schedule's memory, " + shorter + "; in that of " + command + "\n";
    }
    if (!unfit.empty()) {
      out += std::string(fit.empty() ? "" : "\n") + "left out:\n";
      auto const row = [](entry const& e) { return table_row{"  " + e.name, e.reason}; };
      out += table_text(unfit | ranges::views::transform(row) | ranges::to<std::vector>(), {align::left}, "   ");
    }
  }
  write(asked, out);
  return exit_ok;
}

}  // namespace plan_program
