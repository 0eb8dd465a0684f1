#include "programs.hpp"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include <chevron/base/format.hpp>
#include <chevron/csv/csv_read.hpp>
#include <chevron/plan/gradient_order.hpp>
#include <chevron/plan/profile.hpp>
#include <chevron/plan/slices.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/search.hpp>

#include "placements.hpp"

namespace chevron::train {
namespace {

/// A proof, or an error of the command line.
proved_plan prove_option(plan made, shape size, std::string const& name) {
  try {
    return prove(std::move(made));
  } catch (invalid_schedule_error const& e) {
    throw usage_error("--schedule " + name + " cannot be run with " + to_text(size).str() + ": law " + name_of(e.found().broken) +
                      " is broken: " + describe(e.found()).str() + ". Remedy: another --ranks, --chunks or --microbatches");
  }
}

/// What `--schedule auto` begins with, before anything was measured: the catalogue's best on the placement within the memory if
/// all costs were the same, or what a short search finds. Backwards are split, so that what I and W take can be measured.
plan first_plan(job_options const& o, shape size) {
  search::found made = placements::on(o.placement, [&](auto const& where) {
    return search::find({.where = placed_on(where, size), .memory = {static_cast<double>(chunk_limit(o))}}, {.trials = 2000});
  });
  if (made.best.problem) {
    throw usage_error("--schedule auto: " + std::string(describe(made.best.problem).characters) +
                      ". Remedy: another --placement, --chunks or --memory-limit");
  }
  std::vector<bool> const split = made.published_length > 0 ? split_stages(made.published) : std::vector<bool>{false};
  bool const all = std::find(split.begin(), split.end(), false) == split.end();
  return in_ascending_order(all ? made.published : made.best);
}

/// From which gain on more slices are worth their messages.
constexpr double slices_worth_it = .02;
/// Forward, input gradient and weight gradient cost the same, as in what headers predict.
constexpr costs equal_costs{};

shape shape_of(job_options const& o, int slices) {
  shape size{.ranks = o.ranks, .micro_batches = o.micro_batches, .chunks = o.chunks, .slices = slices};
  // A placement that takes any number of chunks has none of its own: two, then.
  if (size.chunks == 0 && (catalogue::same_name(o.schedule, catalogue::interleaved_1f1b.name) ||
                           catalogue::same_name(o.schedule, catalogue::seq_interleaved_1f1b.name)))
    size.chunks = 2;
  return size;
}

}  // namespace

int chunk_limit(job_options const& o) {
  double const most = o.memory_limit > 0 ? o.memory_limit : o.ranks;
  return static_cast<int>(most * o.chunks + 1e-9);
}

void choose_slices(job_options& o, double attention) {
  if (!o.choose_slices) return;
  o.choose_slices = false;
  struct candidate {
    int slices;
    double makespan;
  };
  std::vector<candidate> tried;
  std::string refused, words;
  for (int const slices : {1, 2, 4, 8}) {
    if (slices > o.context) break;
    plan const made = catalogue::make_plan(o.schedule, shape_of(o, slices));
    if (made.problem || check(made)) {
      if (refused.empty()) refused = describe(made.problem ? made.problem : check(made)).str();
      continue;
    }
    length_factors const factors = factors_of_slices(slice_ends(slices, attention), attention);
    cost_view costs = equal_costs.view();
    costs.lengths = factors.view();
    tried.push_back({slices, makespan(made, costs)});
    words += (words.empty() ? "" : ", ") + std::to_string(slices);
  }
  if (tried.size() < 2) {
    throw usage_error("--slices auto has nothing to choose from: --schedule " + o.schedule + " takes whole sequences" +
                      (refused.empty() ? "" : " (" + refused + ")") +
                      ". Remedy: --schedule Seq1F1B or SeqZB-H1, or leave --slices away");
  }
  auto const less = [](candidate const& a, candidate const& b) { return a.makespan < b.makespan; };
  candidate const shortest = *std::min_element(tried.begin(), tried.end(), less);
  candidate const chosen = *std::find_if(tried.begin(), tried.end(), [&](candidate const& one) {
    return one.makespan <= shortest.makespan * (1 + slices_worth_it);
  });
  o.slices = chosen.slices;
  o.slices_why = std::to_string(chosen.slices) + " of " + words + ": ";
  double const whole = tried.front().makespan;
  if (chosen.slices > 1) {
    o.slices_why +=
        "a step is predicted to take " + show::percent(1 - chosen.makespan / whole) + " less than one in whole sequences";
    if (shortest.slices != chosen.slices) o.slices_why += ", and ";
  }
  if (shortest.slices != chosen.slices) {
    o.slices_why += std::to_string(shortest.slices) + " slices would save no more than " +
                    show::percent(1 - shortest.makespan / chosen.makespan) + (chosen.slices > 1 ? " of that step" : " of a step");
  }
  o.slices_why += "; attention is " + show::percent(attention) + " of the time";
}

proved_plan proved_by_options(job_options const& o) {
  shape const size = shape_of(o, o.slices);
  if (o.automatic) return prove_option(first_plan(o, size), size, o.schedule);
  plan made = o.schedule_text.empty() ? catalogue::make_plan(o.schedule, size) : read_csv(o.schedule_text).plan;
  if (!o.schedule_text.empty()) made.name = o.schedule.c_str();
  return prove_option(std::move(made), size, o.schedule);
}

std::vector<std::pair<std::string, std::string>> facts_of_own_actions(plan_view const& plan) {
  std::string letters;
  for (int k = 0; k < own_kinds; ++k) {
    if (plan.holds(static_cast<kind>(static_cast<int>(kind::own_x) + k)))
      letters += (letters.empty() ? "" : ", ") + std::string(1, static_cast<char>('X' + k));
  }
  if (letters.empty()) return {};
  return {{"own actions",
           letters + ": this program runs nothing for them; a program of your own gives trainer_options::own_actions"}};
}

proved_program lower_and_check(proved_plan const& from) {
  proved_program made = lower(from);
  if (finding const found = check(made.view())) {
    throw usage_error(std::string("--schedule ") + from.view().name + ": law " + name_of(found.broken) +
                      " is broken: " + describe(found).str() + ". Remedy: another schedule");
  }
  return made;
}

}  // namespace chevron::train
