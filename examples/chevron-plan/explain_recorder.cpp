#include "explain_recorder.hpp"

#include <algorithm>

#include <nlohmann/json.hpp>

#include "rank_list.hpp"
#include "table.hpp"

namespace plan_program {
namespace {

std::size_t at(int index) { return static_cast<std::size_t>(index); }
recorded_operation const& operation(recorder_dumps const& dumps, operation_place p) {
  return dumps.by_rank[at(p.rank)]->operations[at(p.index)];
}
bool contains(std::vector<int> const& all, int one) { return std::find(all.begin(), all.end(), one) != all.end(); }

std::string capital(std::string words) {
  if (!words.empty() && words[0] >= 'a' && words[0] <= 'z') words[0] = static_cast<char>(words[0] - 'a' + 'A');
  return words;
}
std::string seconds_words(std::int64_t ns) { return number(static_cast<double>(ns) * 1e-9, 3) + " s"; }

std::string group_words(recorder_dumps const& dumps, std::string const& key) {
  recorded_group const& group = dumps.groups.at(key);
  bool const described = !group.description.empty() && group.description != "undefined" && group.description != group.name;
  return "group " + group.name + (described ? " (" + group.description + ")" : "");
}

/// `Float [4, 8], Float [2]`.
std::string tensor_words(recorded_tensors const& all) {
  std::string out;
  for (std::size_t i = 0; i < all.sizes.size(); ++i) {
    if (i == 4) return out + " and " + std::to_string(all.sizes.size() - i) + " more";
    out += std::string(i == 0 ? "" : ", ") + (i < all.types.size() ? all.types[i] + " [" : "[");
    for (std::size_t k = 0; k < all.sizes[i].size(); ++k) out += (k == 0 ? "" : ", ") + std::to_string(all.sizes[i][k]);
    out += "]";
  }
  return out;
}
/// The tensors, and the line of the program.
std::string details(recorded_operation const& one) {
  std::string const in = tensor_words(one.inputs), out = tensor_words(one.outputs);
  std::string words = in.empty() || out.empty() || in == out ? in + (in.empty() ? out : "") : in + " to " + out;
  if (!one.called_at.empty()) words += (words.empty() ? "" : ", ") + one.called_at;
  return words.empty() ? "" : " (" + words + ")";
}

std::string short_name(recorded_operation const& one) {
  std::string const action = one.planned.empty() ? "" : one.planned + ", ";
  if (one.is_send()) return action + "send to rank " + std::to_string(one.peer);
  if (one.is_receive()) return action + "recv from rank " + std::to_string(one.peer);
  return one.name;
}

/// The last operation of a rank, if it has any.
std::optional<operation_place> last_of(recorder_dumps const& dumps, int rank) {
  auto const& dump = dumps.by_rank[at(rank)];
  if (!dump || dump->operations.empty()) return std::nullopt;
  return operation_place{rank, static_cast<int>(dump->operations.size()) - 1};
}

/// The operation that the rank would call next if its rounds went on.
std::optional<operation_place> next_of(hang_story const& story, int rank) {
  recorded_rounds const& mine = story.rounds[at(rank)];
  if (mine.period == 0 || mine.departure || !mine.expected) return std::nullopt;
  return operation_place{rank, *mine.expected};
}

/// Ranks other than `rank` of which no file was found.
std::vector<int> without_dump(recorder_dumps const& dumps, int rank) {
  std::vector<int> out;
  for (int r = 0; r < dumps.world(); ++r) {
    if (r != rank && !dumps.by_rank[at(r)]) out.push_back(r);
  }
  return out;
}

char const* cause_name(hang_cause cause) {
  switch (cause) {
    case hang_cause::none:
      return "none";
    case hang_cause::running:
      return "running";
    case hang_cause::patient:
      return "patient";
    case hang_cause::absent_rank:
      return "absent_rank";
    case hang_cause::silent_rank:
      return "silent_rank";
    case hang_cause::mismatch:
      return "mismatch";
    case hang_cause::departed:
      return "departed";
    case hang_cause::cycle:
      return "cycle";
    case hang_cause::undecided:
      return "undecided";
  }
  return "";
}

std::vector<std::string> all_remarks(recorder_dumps const& dumps, hang_story const& story) {
  std::vector<std::string> out = dumps.remarks;
  out.insert(out.end(), story.remarks.begin(), story.remarks.end());
  return out;
}

/// What follows the headline: facts of the culprit and a remedy, a line each.
std::string more_words(recorder_dumps const& dumps, hang_story const& story) {
  std::string out;
  int const first = story.culprits.empty() ? -1 : story.culprits.front();
  switch (story.cause) {
    case hang_cause::none:
      return "";
    case hang_cause::running:
      return "Remedy: look at the network and at the devices; if ranks have no dump, collect all dumps first.\n";
    case hang_cause::patient:
      return "Remedy: if the job does hang, dump later, or give --patience SECONDS, the time from which a wait counts as a "
             "hang.\n";
    case hang_cause::absent_rank:
      out = capital(operation_words(dumps, *story.at)) + " of rank " + std::to_string(story.at->rank) +
            " is the first operation that waits for it" + details(operation(dumps, *story.at)) + ".\n";
      if (std::vector<int> const others = without_dump(dumps, first); !others.empty()) {
        return out + "Remedy: collect the dumps of " + rank_list(others) +
               ", too, since the first cause may be among these ranks; then find out how the process of rank " +
               std::to_string(first) + " ended.\n";
      }
      return out + "Remedy: find out how the process of rank " + std::to_string(first) +
             " ended, from the launcher's report of a signal or an exit code; if it still runs, collect its dump.\n";
    case hang_cause::silent_rank: {
      if (auto const last = last_of(dumps, first)) {
        out = "The last operation of rank " + std::to_string(first) + " is " + operation_words(dumps, *last) +
              details(operation(dumps, *last)) + ".\n";
      }
      if (auto const next = next_of(story, first)) {
        out += "If the rank's rounds of " + std::to_string(story.rounds[at(first)].period) +
               " operations went on, the next would be " + short_name(operation(dumps, *next)) +
               details(operation(dumps, *next)) + ".\n";
      }
      std::string called;
      for (recorded_operation const& one : dumps.by_rank[at(first)]->operations) {
        if (!one.completed && called.empty()) called = short_name(one);
      }
      if (!called.empty()) {
        out += "An operation of rank " + std::to_string(first) +
               " is pending, too, though all of its ranks have called it: " + called + ".\n";
      }
      return out + "Remedy: rank " + std::to_string(first) +
             " computes, sleeps, or has left its loop: look at its log and at its stack (py-spy dump --pid).\n";
    }
    case hang_cause::mismatch:
      out = "Rank " + std::to_string(story.at->rank) + ": " + operation_words(dumps, *story.at) +
            details(operation(dumps, *story.at)) + ".\n" + "Rank " + std::to_string(story.other->rank) + ": " +
            operation_words(dumps, *story.other) + details(operation(dumps, *story.other)) + ".\n";
      return out +
             (operation(dumps, *story.at).is_collective()
                  ? "Remedy: all ranks of a group call the same collectives, in the same order, with equal sizes and types.\n"
                  : "Remedy: a receive has the size and the type of its send.\n");
    case hang_cause::departed: {
      recorded_rounds const& rounds = story.rounds[at(first)];
      out = "In the round before, of " + std::to_string(rounds.period) + " operations, the rank called " +
            short_name(operation(dumps, {first, *rounds.expected})) + details(operation(dumps, {first, *rounds.expected})) +
            " at this place.\n";
      return out + "Remedy: look for the condition under which rank " + std::to_string(first) +
             " leaves out, adds or reorders an operation.\n";
    }
    case hang_cause::cycle:
      return "Remedy: give these ranks an order in which one of them sends while its peer receives, or post them together "
             "(batch_isend_irecv).\n";
    case hang_cause::undecided:
      return "Remedy: TORCH_FR_BUFFER_SIZE, the number of operations that each rank keeps, at least three steps of them.\n";
  }
  return out;
}

/// `Rank 0 waits for rank 1, which waits for rank 2 in recv from rank 2.`: the longest chain to the first cause, or the cycle.
std::string chain_words(recorder_dumps const& dumps, hang_story const& story) {
  auto const wait_of = [&](int rank) {
    return std::find_if(story.waits.begin(), story.waits.end(), [rank](recorded_wait const& w) { return w.from.rank == rank; });
  };
  std::vector<int> longest;
  for (int start = 0; start < dumps.world(); ++start) {
    std::vector<int> way{start};
    for (auto w = wait_of(start); w != story.waits.end(); w = wait_of(way.back())) {
      bool const seen = contains(way, w->to);
      way.push_back(w->to);
      if (seen) break;
    }
    bool const leads =
        story.cause == hang_cause::cycle ? way.front() == way.back() && way.size() > 1 : contains(story.culprits, way.back());
    if (leads && way.size() > longest.size()) longest = way;
  }
  if (longest.size() < 2) return {};
  constexpr std::size_t most = 12;
  std::string out;
  for (std::size_t i = 0; i + 1 < longest.size() && i < most; ++i) {
    auto const w = wait_of(longest[i]);
    out += (i == 0 ? "Rank " + std::to_string(longest[0]) : std::string(", which")) + " waits for rank " +
           std::to_string(longest[i + 1]) + " in " + operation_words(dumps, w->from);
  }
  return out + (longest.size() > most + 1 ? ", and so on" : "") + ".\n";
}

}  // namespace

std::string operation_words(recorder_dumps const& dumps, operation_place place) {
  recorded_operation const& one = operation(dumps, place);
  if (one.peer >= 0) return short_name(one);
  return one.name + " " + std::to_string(one.sequence) + " of " + group_words(dumps, one.group);
}

std::string hang_headline(recorder_dumps const& dumps, hang_story const& story) {
  std::string const names = rank_list(story.culprits);
  bool const all =
      story.followers.size() > 1 && static_cast<int>(story.followers.size() + story.culprits.size()) == dumps.world();
  std::string const wait = story.followers.empty() ? ""
                           : all                   ? ", and all other ranks wait"
                                 : ", and " + rank_list(story.followers) + (story.followers.size() == 1 ? " waits" : " wait");
  std::string const for_it = story.followers.empty() ? "" : wait + (story.culprits.size() == 1 ? " for it" : " for them");
  switch (story.cause) {
    case hang_cause::none:
      return "No rank waits: all recorded operations are complete";
    case hang_cause::running:
      return "No rank is missing: each pending operation was called by all of its ranks";
    case hang_cause::patient:
      return "No rank is named: ranks wait, but the oldest wait lasts " + seconds_words(story.waited) + ", and " +
             seconds_words(story.longest_gap) + " passed between two operations of a rank before";
    case hang_cause::absent_rank:
      return capital(names) + " left no dump" + for_it;
    case hang_cause::silent_rank: {
      bool const any = last_of(dumps, story.culprits.front()).has_value();
      return capital(names) + (any ? " waits for no rank and calls no further operation" : " has no operation in its dump") +
             for_it;
    }
    case hang_cause::mismatch: {
      bool const both = contains(story.culprits, story.other->rank);  // which of them is wrong is not known
      std::string const than = both ? "" : " than " + rank_list({story.other->rank});
      std::string const kind = both ? "different " : "other ";
      if (story.difference == "operations") return capital(names) + " called " + kind + "operations" + than + for_it;
      return capital(names) + " called " + (both ? "operations" : "an operation") + " with " + kind + story.difference + than +
             for_it;
    }
    case hang_cause::departed:
      return capital(names) + " called " + operation_words(dumps, *story.at) + details(operation(dumps, *story.at)) +
             ", unlike in the rounds before" + for_it;
    case hang_cause::cycle:
      return capital(names) + " wait for each other" + for_it;
    case hang_cause::undecided:
      return "Which rank is the first cause is not in the dumps, since buffers have wrapped" +
             (story.suspects.empty() ? std::string() : ": it is one of " + rank_list(story.suspects));
  }
  return {};
}

std::string hang_rank_words(recorder_dumps const& dumps, hang_story const& story, int rank) {
  if (!dumps.by_rank[at(rank)]) return "left no dump";
  std::string out;
  std::vector<int> all;
  for (recorded_wait const& w : story.waits) {
    if (w.from.rank != rank) continue;
    if (out.empty()) out = operation_words(dumps, w.from);
    if (!contains(all, w.to)) all.push_back(w.to);
  }
  std::sort(all.begin(), all.end());
  if (!all.empty()) return "waits for " + rank_list(all) + " in " + out;
  auto const last = last_of(dumps, rank);
  if (!last) return "has no operation in its dump";
  auto const& mine = dumps.by_rank[at(rank)]->operations;
  bool const pending = std::any_of(mine.begin(), mine.end(), [](auto const& one) { return !one.completed; });
  return (pending ? "waits for no rank, after " : "went on after ") + operation_words(dumps, *last);
}

std::string hang_text(recorder_dumps const& dumps, hang_story const& story) {
  int present = 0;
  std::vector<std::string> versions;
  for (auto const& dump : dumps.by_rank) {
    if (!dump) continue;
    ++present;
    if (std::find(versions.begin(), versions.end(), dump->version) == versions.end()) versions.push_back(dump->version);
  }
  std::string formats;
  for (std::string const& one : versions) formats += (formats.empty() ? "" : ", ") + one;
  std::string out = "PyTorch's flight recorder, format " + formats + ": dumps of " + std::to_string(present) + " of " +
                    std::to_string(dumps.world()) + " ranks\n\n";
  out += hang_headline(dumps, story) + ".\n" + more_words(dumps, story);
  if (!story.culprits.empty()) {
    if (story.cause != hang_cause::cycle && story.cycle.size() > 1)
      out += capital(rank_list(story.cycle)) + " wait for each other.\n";
    out += chain_words(dumps, story);
  }
  out += "\n";
  std::vector<table_row> rows{{"", "rank", "operations", "pending", "state"}};
  for (int r = 0; r < dumps.world(); ++r) {
    auto const& dump = dumps.by_rank[at(r)];
    auto const pending = [&] {
      return std::count_if(dump->operations.begin(), dump->operations.end(), [](auto const& one) { return !one.completed; });
    };
    rows.push_back(
        {contains(story.culprits, r) ? ">" : "", std::to_string(r),
         dump ? std::to_string(dump->operations.size() + at(0) + static_cast<std::size_t>(dump->overwritten + dump->left_out))
              : "?",
         dump ? std::to_string(pending()) : "?", hang_rank_words(dumps, story, r)});
  }
  out += table_text(rows, {align::left, align::right, align::right, align::right, align::left});
  std::vector<std::string> remarks = all_remarks(dumps, story);
  if (story.further.size() == 1) {
    remarks.push_back("waits lead to rank " + std::to_string(story.further[0]) + ", too: the rank " +
                      hang_rank_words(dumps, story, story.further[0]));
  } else if (!story.further.empty()) {
    remarks.push_back("waits lead to " + rank_list(story.further) + ", too, which wait for no rank");
  }
  if (!remarks.empty()) out += "\n";
  for (std::string const& one : remarks) out += capital(one) + ".\n";
  return out;
}

std::string hang_json(recorder_dumps const& dumps, hang_story const& story) {
  using json = nlohmann::ordered_json;
  auto const place = [&](std::optional<operation_place> p) -> json {
    if (!p) return nullptr;
    recorded_operation const& one = operation(dumps, *p);
    json out = {{"rank", p->rank},
                {"operation", one.name},
                {"group", dumps.groups.at(one.group).name},
                {"sequence", one.sequence},
                {"input_sizes", one.inputs.sizes},
                {"output_sizes", one.outputs.sizes},
                {"input_types", one.inputs.types},
                {"completed", one.completed}};
    if (one.peer >= 0) out["peer"] = one.peer;
    if (!one.planned.empty()) out["planned"] = one.planned;
    if (!one.called_at.empty()) out["called_at"] = one.called_at;
    return out;
  };
  json out = {{"cause", cause_name(story.cause)},
              {"sentence", hang_headline(dumps, story)},
              {"culprits", story.culprits},
              {"suspects", story.suspects},
              {"operation", place(story.at)},
              {"differs_from", place(story.other)},
              {"difference", story.difference},
              {"followers", story.followers},
              {"cycle", story.cycle},
              {"further", story.further},
              {"waited_seconds", static_cast<double>(story.waited) * 1e-9}};
  out["waits"] = json::array();
  std::optional<operation_place> before;
  for (recorded_wait const& w : story.waits) {  // an entry for each operation
    if (before != w.from) out["waits"].push_back({{"rank", w.from.rank}, {"for", json::array()}, {"operation", place(w.from)}});
    out["waits"].back()["for"].push_back(w.to);
    before = w.from;
  }
  out["ranks"] = json::array();
  for (int r = 0; r < dumps.world(); ++r) {
    auto const& dump = dumps.by_rank[at(r)];
    json one = {{"rank", r}, {"state", hang_rank_words(dumps, story, r)}, {"file", nullptr}};
    if (dump) {
      one["file"] = dump->file;
      one["version"] = dump->version;
      one["operations"] = dump->operations.size();
      one["overwritten"] = dump->overwritten;
      one["left_out"] = dump->left_out;
    }
    out["ranks"].push_back(std::move(one));
  }
  out["remarks"] = all_remarks(dumps, story);
  return out.dump(2) + "\n";
}

}  // namespace plan_program
