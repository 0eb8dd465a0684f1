// `chevron-plan explain`: why a run stopped, from what its ranks left.

#include <algorithm>
#include <map>

#include <chevron/base/format.hpp>
#include <chevron/csv/csv_read.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/tools/show/picture.hpp>
#include <chevron/tools/show/svg.hpp>

#include "explain_recorder.hpp"
#include "flight_logs.hpp"
#include "recorded_schedule.hpp"
#include "request.hpp"
#include "table.hpp"
#include "waits.hpp"

namespace plan_program {
namespace {

using chevron::action;
using chevron::show::progress;

std::string rank_name(int r) { return "rank " + std::to_string(r); }
std::string capital(std::string words) {
  if (!words.empty() && words[0] >= 'a' && words[0] <= 'z') words[0] = static_cast<char>(words[0] - 'a' + 'A');
  return words;
}
std::string time_words(double seconds) {
  if (seconds < 0) return "an unknown time";
  if (seconds < 0.1) return chevron::show::number(seconds * 1e3, 2) + " ms";
  return chevron::show::number(seconds, seconds < 100 ? 2 : 4) + " s";
}
/// `a`, `a and b`, `a, b and c`.
std::string listed(std::vector<std::string> const& all) {
  std::string out;
  for (std::size_t i = 0; i < all.size(); ++i) out += (i == 0 ? "" : i + 1 == all.size() ? " and " : ", ") + all[i];
  return out;
}

/// The plan that the ranks had; nothing where no flight log holds it.
std::optional<chevron::plan> plan_in(flight_log const& of) {
  if (of.plan.empty()) return std::nullopt;
  std::string csv;
  for (std::string const& row : of.plan) csv += row + "\n";
  chevron::csv_schedule read = chevron::read_csv(csv);
  chevron::finding broken = read.plan.problem;
  if (!broken) broken = check(read.plan);
  if (!broken && (read.dialect != chevron::csv_dialect::compute_only || read.plan.size.ranks != of.pipeline_ranks)) {
    throw usage("'" + of.file +
                "' holds a plan of another shape than it says: name files that a run with CHEVRON_FLIGHT_LOGS wrote");
  }
  if (broken) {
    throw usage("'" + of.file + "' holds an unlawful plan (" + describe(broken).str() +
                "): name files that a run with CHEVRON_FLIGHT_LOGS wrote");
  }
  return std::move(read.plan);
}

struct explained {
  flight_logs all;
  std::optional<chevron::plan> plan;
  std::optional<plan_index> index;
  story what;

  std::optional<flight_log> const& log_of(int r) const { return all.by_rank[static_cast<std::size_t>(r)]; }
  rank_story const& of(int r) const { return what.ranks[static_cast<std::size_t>(r)]; }
  int world() const { return static_cast<int>(all.by_rank.size()); }
  std::string name_of(action a) const { return to_text(a, all.any().slices).str(); }
};

/// What the picture and the words say of a rank: `waited 1.2 s for 2I0 of rank 2`.
std::string rank_words(explained const& e, int r) {
  rank_story const& one = e.of(r);
  switch (one.state) {
    case rank_state::absent:
      return "left no flight log: it was killed or lost";
    case rank_state::failed:
      return "failed" + (one.at ? " in " + e.name_of(one.at->op) : std::string());
    case rank_state::waiting: {
      std::string out = "waited " + (one.seconds < 0 ? "" : time_words(one.seconds) + " ") + "for ";
      if (one.needs) return out + e.name_of(*one.needs) + " of " + rank_name(one.waits_for);
      ring_wait const& mine = *e.log_of(r)->waiting;
      out += mine.peer >= 0 ? mine.action : "\"" + mine.action + "\"";
      if (mine.peer >= 0) return out + " of " + rank_name(mine.peer);
      return out + (one.waits_for >= 0 ? ", where " + rank_name(one.waits_for) + " was missing" : "");
    }
    case rank_state::going_on:
      return "was running, and learned of the failure at " + e.name_of(one.at->op);
    case rank_state::busy:
      return (one.began ? "was computing " : "stayed at ") + e.name_of(one.at->op) + " for " + time_words(one.seconds);
    case rank_state::between:
      return "was between two actions for " + time_words(one.seconds);
  }
  return {};
}

/// `Everyone`, where that is so, else `Ranks 1 and 3`.
std::string who_waited(explained const& e) {
  int left = 0;
  for (int r = 0; r < e.world(); ++r) left += r != e.what.root && e.log_of(r) ? 1 : 0;
  if (static_cast<int>(e.what.led.size()) == left && left > 1) return "Everyone";
  std::vector<std::string> names;
  for (int const r : e.what.led) names.push_back(std::to_string(r));
  return (names.size() == 1 ? "Rank " : "Ranks ") + listed(names);
}

/// One sentence without a full stop: for what all waited.
std::string headline(explained const& e) {
  story const& what = e.what;
  if (what.root < 0) {
    std::vector<std::string> names;
    for (int const r : what.circle) names.push_back(rank_name(r));
    return names.empty() ? "No rank waited, and no rank is known to have failed"
                         : capital(listed(names)) + " waited for each other";
  }
  std::string const in_step = what.step >= 0 ? ", in step " + std::to_string(what.step) : "";
  if (e.of(what.root).state == rank_state::failed) {
    std::string who = who_waited(e);
    who[0] = who[0] == 'E' ? 'e' : 'r';
    return capital(rank_name(what.root)) + " failed" + (what.awaited ? " in " + e.name_of(*what.awaited) : "") + in_step +
           (what.led.empty() ? "" : ", and " + who + " waited for it");
  }
  if (what.led.empty()) return capital(rank_name(what.root)) + " ended the run before any rank waited for it" + in_step;
  if (what.awaited) return who_waited(e) + " waited for " + e.name_of(*what.awaited) + " of " + rank_name(what.root) + in_step;
  return who_waited(e) + " waited for " + rank_name(what.root) + in_step +
         (what.meeting.empty() ? "" : ": it did not come to \"" + what.meeting + "\"");
}

/// What is known of the rank where all waits lead.
std::string root_words(explained const& e) {
  int const r = e.what.root;
  if (r < 0) return {};
  rank_story const& one = e.of(r);
  std::string const name = capital(rank_name(r));
  switch (one.state) {
    case rank_state::absent:
      return name + " left no flight log: it was killed or lost, ended by itself, or could not write any more." +
             (e.what.awaited ? " " + e.name_of(*e.what.awaited) + " is its first action for which a rank waited." : "") +
             "\nRemedy: find out how the process of this rank ended, from the launcher's report of a signal or an exit code, and "
             "from the "
             "machine's log of memory.";
    case rank_state::failed:
    case rank_state::going_on:
      return {};
    case rank_state::busy:
      return name + (one.began ? " had begun to compute " : " had come to ") + e.name_of(one.at->op) +
             " and waited for no rank; " + time_words(one.seconds) + " later the rank was still in this action.\n" +
             "Remedy: a debugger on this rank's process shows the call that hangs; if the action only takes long, a longer "
             "deadline.";
    case rank_state::between:
      return name + " was in no action and waited for no rank, for " + time_words(one.seconds) +
             ": the program was busy outside of the step's actions.";
    case rank_state::waiting:
      return name + " waited itself, in " + e.log_of(r)->waiting->action + ", for no particular rank.";
  }
  return {};
}

/// `rank 0 for 1B0 of rank 1, which waited for 2F1 of rank 2`: the longest chain of waits.
std::string chain_words(explained const& e) {
  std::vector<int> longest;
  for (int r = 0; r < e.world(); ++r) {
    std::vector<int> way{r};
    while (e.of(way.back()).state == rank_state::waiting && e.of(way.back()).waits_for >= 0) {
      int const next = e.of(way.back()).waits_for;
      bool const seen = std::find(way.begin(), way.end(), next) != way.end();
      way.push_back(next);
      if (seen) break;
    }
    if (way.size() > longest.size()) longest = way;
  }
  if (longest.size() < 2) return {};
  std::string out = capital(rank_name(longest.front()));
  std::size_t const most = 12;
  for (std::size_t i = 0; i + 1 < longest.size() && i < most; ++i) {
    rank_story const& one = e.of(longest[i]);
    out += i == 0 ? " waited for " : ", which waited for ";
    out += (one.needs ? e.name_of(*one.needs) + " of " : "") + rank_name(longest[i + 1]);
  }
  return out + (longest.size() > most + 1 ? ", and so on" : "") + ".";
}

/// The failures as they were told, each once, and by whom.
std::vector<std::pair<ring_failure, std::vector<std::string>>> told(explained const& e) {
  std::vector<std::pair<ring_failure, std::vector<std::string>>> out;
  for (int r = 0; r < e.world(); ++r) {
    if (!e.log_of(r)) continue;
    ring_failure const& mine = e.log_of(r)->told;
    auto const same = std::find_if(out.begin(), out.end(), [&](auto const& one) { return one.first == mine; });
    if (same != out.end())
      same->second.push_back(std::to_string(r));
    else
      out.push_back({mine, {std::to_string(r)}});
  }
  std::stable_sort(out.begin(), out.end(), [](auto const& a, auto const& b) { return a.second.size() > b.second.size(); });
  return out;
}

std::vector<std::string> remarks_of(explained const& e) {
  std::vector<std::string> out;
  auto const all_told = told(e);
  if (all_told.size() > 1) {
    std::string words = "The ranks report different failures: ";
    for (std::size_t i = 0; i < all_told.size(); ++i) {
      auto const& [what, ranks] = all_told[i];
      words += (i == 0 ? "" : "; ") + std::string(ranks.size() == 1 ? "rank " : "ranks ") + listed(ranks) + ": " + what.reason;
    }
    out.push_back(words + ".");
  }
  int const blamed = all_told.front().first.rank;
  if (e.what.root >= 0 && blamed >= 0 && blamed != e.what.root) {
    out.push_back("The failure blames " + rank_name(blamed) + ", but the waits lead to " + rank_name(e.what.root) +
                  ": look at both.");
  }
  if (e.what.root >= 0 && !e.what.circle.empty()) {
    std::vector<std::string> names;
    for (int const r : e.what.circle) names.push_back(rank_name(r));
    out.push_back(capital(listed(names)) + " waited for each other.");
  }
  for (int const r : e.what.others) out.push_back("Waits lead to " + rank_name(r) + ", too: it " + rank_words(e, r) + ".");
  for (int r = 0; r < e.world(); ++r) {
    bool const is_other = std::find(e.what.others.begin(), e.what.others.end(), r) != e.what.others.end();
    if (e.of(r).state == rank_state::absent && r != e.what.root && !is_other)
      out.push_back(capital(rank_name(r)) + " " + rank_words(e, r) + ".");
  }
  std::map<long, std::vector<std::string>> steps;
  for (int r = 0; r < e.world(); ++r) {
    if (e.log_of(r) && !e.log_of(r)->actions.empty()) steps[e.log_of(r)->actions.back().step].push_back(std::to_string(r));
  }
  if (steps.size() > 1) {
    std::vector<std::string> words;
    for (auto const& [step, ranks] : steps) {
      words.push_back((ranks.size() == 1 ? "rank " : "ranks ") + listed(ranks) + " in step " + std::to_string(step));
    }
    out.push_back("Not all were in the same step: " + listed(words) + ".");
  }
  for (std::string const& remark : e.all.remarks) out.push_back(capital(remark) + ".");
  return out;
}

std::string words_of(explained const& e) {
  flight_log const& any = e.all.any();
  std::string out;
  if (!any.plan.empty()) {
    out += (any.schedule.empty() ? "a schedule of its own" : any.schedule) + ", " + std::to_string(any.pipeline_ranks) +
           " ranks, " + std::to_string(any.micro_batches) + " microbatches" +
           (any.slices > 1 ? ", " + std::to_string(any.slices) + " slices" : "") +
           (any.replicas > 1 ? ", " + std::to_string(any.replicas) + " replicas" : "") +
           (any.shards > 1 ? ", " + std::to_string(any.shards) + " shards" : "") + "\n\n";
  }
  out += headline(e) + ".\n";
  if (std::string const words = root_words(e); !words.empty()) out += words + "\n";
  if (std::string const words = chain_words(e); !words.empty()) out += words + "\n";
  out += "\n";

  std::vector<table_row> rows{{"rank", "step", "in", "done", "and then"}};
  std::map<std::pair<int, long>, std::vector<std::vector<progress>>> known;  // by pipeline and step
  for (int r = 0; r < e.world(); ++r) {
    auto const& mine = e.log_of(r);
    bool const has = mine && !mine->actions.empty();
    std::string done;  // of a rank without a flight log only what others show
    if (e.plan && (has || e.of(r).state == rank_state::absent)) {
      int const p = e.all.any().pipeline_rank_of(r), first = e.all.any().first_of_pipeline(r);
      long const step = has ? mine->actions.back().step : e.what.step;
      auto& all = known[{first, step}];
      if (all.empty()) all = how_far(e.all, e.what, *e.index, first, step);
      auto const& so_far = all[static_cast<std::size_t>(p)];
      done = (has ? "" : "at least ") + std::to_string(std::count(so_far.begin(), so_far.end(), progress::done)) + " of " +
             std::to_string(so_far.size());
    }
    rows.push_back({std::to_string(r), has ? std::to_string(mine->actions.back().step) : "?",
                    e.of(r).at ? e.name_of(e.of(r).at->op) : std::string("-"), done, rank_words(e, r)});
  }
  out += table_text(rows, {align::right, align::right, align::left, align::right, align::left}) + "\n";

  ring_failure const failure = told(e).front().first;
  out += "The reported failure" + (failure.step >= 0 ? " in step " + std::to_string(failure.step) : "") + ", exit code " +
         std::to_string(failure.code) + ": " + failure.reason + ".\n";
  for (std::string const& remark : remarks_of(e)) out += remark + "\n";
  return out;
}

chevron::show::picture picture_of(explained const& e) {
  if (!e.plan) {
    throw usage(
        "no flight log holds the plan, which a picture needs: no step had begun, or the plan is larger than 600 KiB; without -o "
        "the text is printed");
  }
  chevron::plan const& plan = *e.plan;
  int const ranks = plan.size.ranks;
  int const focus = e.what.root >= 0 ? e.what.root : e.what.circle.empty() ? 0 : e.what.circle.front();
  int const first_rank = e.all.any().first_of_pipeline(focus), apart = e.all.any().shards;
  chevron::costs const costs;
  auto out = chevron::show::picture_of(plan, costs.view());
  flight_log const& any = e.all.any();
  out.schedule = any.schedule.empty() ? "schedule" : any.schedule;
  out.critical_path.clear();
  out.first_rank = first_rank;
  out.ranks_apart = apart;
  out.note = headline(e);
  long step = e.what.step;
  if (step < 0) {
    for (auto const& one : e.all.by_rank) {
      if (one && !one->actions.empty()) step = std::max(step, one->actions.back().step);
    }
  }
  auto const so_far = how_far(e.all, e.what, *e.index, first_rank, step);
  std::map<std::pair<int, int>, int> box_at;  // by pipeline rank and position
  std::vector<int> seen(static_cast<std::size_t>(ranks));
  for (std::size_t i = 0; i < out.boxes.size(); ++i) {
    auto& box = out.boxes[i];
    if (!is_compute(box.op.kind)) continue;
    int const position = seen[static_cast<std::size_t>(box.rank)]++;
    box.so_far = so_far[static_cast<std::size_t>(box.rank)][static_cast<std::size_t>(position)];
    box_at[{box.rank, position}] = static_cast<int>(i);
  }
  auto const box_of = [&](int rank, std::optional<action> const& what) {
    if (!what || rank < 0 || any.first_of_pipeline(rank) != first_rank) return -1;
    int const p = any.pipeline_rank_of(rank);
    auto const found = box_at.find({p, e.index->position_of(*what, p)});
    return found == box_at.end() ? -1 : found->second;
  };
  for (int r = first_rank; r < first_rank + ranks * apart; r += apart) {
    out.row_notes.push_back(rank_words(e, r));
    rank_story const& one = e.of(r);
    if (one.state != rank_state::waiting || !one.at) continue;
    int const from = box_of(r, one.at->op), to = box_of(one.waits_for, one.needs);
    if (from >= 0 && to >= 0) out.waits.emplace_back(from, to);
  }
  out.awaited = box_of(e.what.root, e.what.awaited);
  return out;
}

/// `chevron-plan explain --flight-recorder`: a job of PyTorch.
int explain_recorder(request const& asked) {
  if (!asked.flight_logs.empty()) {
    throw usage("'" + asked.flight_logs.front() +
                "' stands beside --flight-recorder. Remedy: explain either flight logs of Chevron or dumps of PyTorch");
  }
  std::int64_t patience = -1;
  if (!asked.patience.empty()) {
    std::optional<double> const seconds = number_in(asked.patience);
    if (!seconds || !(*seconds >= 0) || *seconds > 1e9)
      throw usage("--patience '" + asked.patience + "' is no time. Remedy: give seconds from 0 to 1e9, such as 30");
    patience = static_cast<std::int64_t>(*seconds * 1e9);
  }
  std::string const format = format_of(asked, recorder_formats);
  recorder_dumps dumps = read_recorder_dumps(asked.flight_recorder);
  hang_story const story = find_cause(dumps, patience);
  if (!asked.schedule.empty()) {
    chevron::plan const plan = plan_of(asked);
    if (chevron::finding const broken = check(plan)) throw usage(law_words(asked, broken));
    chevron::proved_program const program = lower(prove(plan));
    write_planned_actions(dumps, program, story.rounds);
  }
  write(asked, format == "svg" ? hang_svg(dumps, story) : format == "json" ? hang_json(dumps, story) : hang_text(dumps, story));
  return exit_ok;
}

}  // namespace

int run_explain(request const& asked) {
  if (!asked.flight_recorder.empty()) return explain_recorder(asked);
  if (!asked.schedule.empty())
    throw usage("--schedule is about dumps of PyTorch's flight recorder. Remedy: name their folder with --flight-recorder");
  if (!asked.patience.empty())
    throw usage("--patience is about dumps of PyTorch's flight recorder. Remedy: name their folder with --flight-recorder");
  explained e;
  e.all = read_flight_logs(asked.flight_logs);
  e.plan = plan_in(e.all.any());
  if (e.plan) e.index.emplace(*e.plan);
  e.what = follow_waits(e.all, e.index ? &*e.index : nullptr);
  std::string const format = format_of(asked, flight_log_formats);
  if (format == "svg")
    write(asked, chevron::show::svg(picture_of(e), {.width = 1100}));
  else
    write(asked, words_of(e));
  return exit_ok;
}

}  // namespace plan_program
