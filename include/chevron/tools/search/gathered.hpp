#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/lower/gather_times.hpp>
#include <chevron/plan/step_graph.hpp>
#include <chevron/tools/search/find.hpp>
#include <chevron/tools/search/held.hpp>
#include <chevron/tools/search/problem/effort.hpp>
#include <chevron/tools/search/start.hpp>

/// \file
/// Searches for a schedule of stages under FSDP: the makespan includes the waits for gathers of parameters, whose number depends
/// on the order.

namespace chevron::search {
namespace detail {

/// The makespan of an order with the fewest gathers for so many resident stages, and the gathers' number. Computes anew only the
/// gathers of ranks whose order changed.
class gathered_time {
 public:
  gathered_time(plan_view const& plan, cost_view const& costs, int resident)
      : costs_(costs), resident_(resident), gathers_(fewest_gathers(plan, resident)) {}

  /// Whether each computation's stages fit among the resident stages.
  bool possible() const { return !gathers_.problem; }
  /// To be called after the order of this rank changed.
  void changed(plan_view const& plan, int rank) {
    gathers_.of_rank[static_cast<std::size_t>(rank)] =
        chevron::detail::fewest_gathers(plan, chevron::detail::stage_requests(plan, rank), resident_);
  }
  std::vector<gather_event>& events(int rank) { return gathers_.of_rank[static_cast<std::size_t>(rank)]; }
  timeline play(plan_view const& plan) const { return simulate(plan, costs_, gathers_); }
  int count() const { return count_gathers(gathers_); }

 private:
  cost_view costs_;
  int resident_;
  gather_plan gathers_;
};

/// Simulated annealing of one order by its makespan with gathers. A trial moves up to three neighbouring actions, one of them on
/// a critical path or, in a quarter of the trials, anywhere, to another place of their rank's list, and simulates the whole
/// order. Of orders of equal length the one with fewer gathers is the better.
class gathered_annealing {
 public:
  /// \param start lawful, within the memory, without fused pairs
  gathered_annealing(plan const& start, problem const& asked, int resident, std::uint64_t seed)
      : now_(copy_of(start)), best_(copy_of(start)), memory_(asked.memory), costs_(asked.costs), time_(now_, costs_, resident),
        random_(seed), when_(time_.play(now_)) {
    at_.resize(static_cast<std::size_t>(3 * now_.stages * now_.size.units()));
    for (int i = 0; i < now_.actions.count; ++i) at_[cell(now_.actions.data[i])] = i;
    for (int i = 0; i < now_.actions.count; ++i) longest_ = std::max(longest_, costs_.of_action(now_.actions.data[i]));
    for (int s = 0; s < now_.stages; ++s) longest_ = std::max(longest_, costs_.unshard[s * costs_.unshard_stride]);
    merit_ = best_merit_ = judge(when_);
    find_path();
  }

  /// Runs this many trials, unless a length of `bound` is reached or the watcher stops them. \returns the trials run
  int run(int trials, double bound, watched& watch) {
    for (int trial = 0; trial < trials; ++trial) {
      if (best_merit_.length <= bound * (1 + 1e-12)) return trial;
      if (trial % watched::every == 0 && watch.stop()) return trial;
      try_one(longest_ * (trials - trial) / trials);
    }
    return trials;
  }
  plan const& best() const { return best_; }
  double length() const { return best_merit_.length; }
  int gathers() const { return best_merit_.gathers; }

 private:
  static constexpr double weight_of_mean = 0.05;
  static constexpr int longest_block = 3;
  static constexpr int near = 4;
  static constexpr int far = 40;

  struct merit {
    double length = 0;
    double energy = 0;
    int gathers = 0;
  };
  merit judge(timeline const& when) const {
    merit out;
    double sum = 0;
    for (int r = 0; r < now_.size.ranks; ++r) {
      if (now_.begin.data[r] == now_.begin.data[r + 1]) continue;
      double const end = when.end.data[now_.begin.data[r + 1] - 1];
      out.length = std::max(out.length, end);
      sum += end;
    }
    out.gathers = time_.count();
    out.energy = out.length + weight_of_mean * sum / now_.size.ranks;
    return out;
  }
  std::size_t cell(action a) const {
    int const k = a.kind == kind::forward ? 0 : a.kind == kind::backward_weight ? 2 : 1;
    return static_cast<std::size_t>((k * now_.stages + static_cast<int>(a.stage)) * now_.size.units() +
                                    static_cast<int>(a.micro_batch));
  }
  int rank_of(int position) const { return now_.rank_of.data[static_cast<int>(now_.actions.data[position].stage)]; }

  /// Finds a chain of actions back from the one that ends last: before each the action whose message it waited for, else the
  /// previous action of its rank.
  void find_path() {
    path_.clear();
    int at = 0;
    for (int i = 0; i < now_.actions.count; ++i) at = when_.end.data[i] > when_.end.data[at] ? i : at;
    while (at >= 0) {
      path_.push_back(at);
      action const a = now_.actions.data[at];
      int cause = at == now_.begin.data[rank_of(at)] ? -1 : at - 1;
      int const feeder = step_graph(now_.rank_of.data, now_.stages, now_.size.units()).from(a);
      if (feeder >= 0 && now_.rank_of.data[feeder] != rank_of(at) &&
          (cause < 0 || when_.start.data[at] > when_.end.data[cause])) {
        action from = a;
        from.stage = static_cast<std::uint32_t>(feeder) & 0x3ffu;
        cause = at_[cell(from)];
      }
      at = cause;
    }
  }

  /// Puts the actions [first, middle) behind [middle, last).
  void rotate(int first, int middle, int last) {
    action* const all = now_.actions.data;
    std::rotate(all + first, all + middle, all + last);
    for (int i = first; i < last; ++i) at_[cell(all[i])] = i;
  }
  /// Whether [first, middle) and [middle, last) may change places: those of a stage and kind stay in the order of microbatches,
  /// and F, I and W of a microbatch and stage in their order.
  bool may_swap(int first, int middle, int last) const {
    for (int i = first; i < middle; ++i) {
      action const one = now_.actions.data[i];
      for (int k = middle; k < last; ++k) {
        action const other = now_.actions.data[k];
        if (one.stage == other.stage && (one.kind == other.kind || one.micro_batch == other.micro_batch)) return false;
      }
    }
    return true;
  }

  void try_one(double hot) {
    int const from = random_.below(4) == 0 ? random_.below(now_.actions.count)
                                           : path_[static_cast<std::size_t>(random_.below(static_cast<int>(path_.size())))];
    int const rank = rank_of(from);
    int const begin = now_.begin.data[rank], end = now_.begin.data[rank + 1];
    int const last_moved = std::min(from + (random_.coin() ? 1 : 1 + random_.below(longest_block)), end);
    int const distance = random_.coin() ? 1 : 1 + random_.below(random_.below(4) != 0 ? near : far);
    bool const earlier = random_.coin();
    int const first = earlier ? from - distance : from;
    int const middle = earlier ? from : last_moved;
    int const last = earlier ? last_moved : last_moved + distance;
    if (first < begin || last > end || !may_swap(first, middle, last)) return;
    rotate(first, middle, last);
    if (keeps(memory_, now_, rank)) {
      std::vector<gather_event> before = time_.events(rank);
      time_.changed(now_, rank);
      timeline then = time_.play(now_);
      double const chance = random_.share();
      if (then.complete) {
        merit const made = judge(then);
        if (made.energy <= merit_.energy + hot * 3 * chance * chance) {
          merit_ = made;
          when_ = std::move(then);
          find_path();
          bool const as_short = made.length <= best_merit_.length * (1 + 1e-12);
          if (made.length < best_merit_.length * (1 - 1e-12) || (as_short && made.gathers < best_merit_.gathers)) {
            best_merit_ = made;
            best_ = copy_of(now_);
          }
          return;
        }
      }
      time_.events(rank) = std::move(before);
    }
    rotate(first, first + last - middle, last);
  }

  plan now_, best_;
  activation_limit memory_;
  cost_view costs_;
  gathered_time time_;
  random_numbers random_;
  timeline when_;
  merit merit_, best_merit_;
  double longest_ = 0;
  std::vector<int> at_, path_;
};

/// The lawful plans passed to `consider`, on the problem's placement and within its limits, each with its makespan with gathers.
class gathered_starts {
 public:
  struct start {
    plan made;
    plan_name name;
    double length = 0;
    int gathers = 0;
  };

  gathered_starts(problem const& asked, int resident) : asked_(asked), resident_(resident) {}

  /// \returns the length with gathers; negative: refused
  double consider(plan const& made, char const* name) {
    starting_point lawful(asked_);
    if (!lawful.consider(made, name)) return -1;
    double const length = add(lawful.shortest, name);
    if (lawful.apart.actions.count != lawful.shortest.actions.count || holds_pairs(lawful.shortest)) add(lawful.apart, name);
    return length;
  }
  /// Sorts by length, then by gathers; those considered first stay in front.
  std::vector<start>& sorted() {
    // (Not std::stable_sort, of which clang 19 warns in the library of g++ 12.)
    auto const precedes = [](start const& one, start const& other) {
      if (one.length < other.length * (1 - 1e-12)) return true;
      return one.length <= other.length * (1 + 1e-12) && one.gathers < other.gathers;
    };
    std::vector<start> out;
    for (start& one : all_) out.insert(std::upper_bound(out.begin(), out.end(), one, precedes), std::move(one));
    all_ = std::move(out);
    return all_;
  }
  static bool holds_pairs(plan const& made) {
    return std::any_of(made.actions.data, made.actions.data + made.actions.count, [](action a) { return a.fused != 0; });
  }

 private:
  double add(plan const& made, char const* name) {
    gathered_time const time(made, asked_.costs, resident_);
    if (!time.possible()) return -1;
    double const length = makespan(made, time.play(made));
    all_.push_back({copy_of(made), {}, length, time.count()});
    all_.back().name = name;
    return length;
  }

  problem const& asked_;
  int resident_;
  std::vector<start> all_;
};

}  // namespace detail

/// Searches for the schedule of the shortest step of stages under FSDP: its makespan with gathers of parameters (`simulate` of
/// lower/gather_times.hpp), of which each order has the fewest for `resident` stages (`fewest_gathers`). Begins with the schedule
/// that `find` finds without gathers, the catalogue's, interleaved 1F1B with larger groups of microbatches, and list schedules;
/// local search improves the best of them, and then fewer gathers count among equal lengths. So the result is never longer, with
/// its gathers, than the catalogue's best.
///
/// \param asked `costs.unshard` is the time of a gather; the goal is the makespan
/// \param resident the most stages of a rank that may be gathered at once, at least 1
/// \returns as `find`; lengths include gathers. `bound` is that of schedules without gathers, after the first stage's gather,
/// before which no rank computes
inline found find_gathered(problem const& asked, int resident, effort how_hard = {}) {
  using namespace detail;
  cost_view without = asked.costs;
  without.unshard = nullptr;
  found const plain = find(asked.at(without), how_hard);
  found out;
  out.bound = plain.bound + asked.costs.unshard[0];
  out.trials = plain.trials;
  out.stopped = plain.stopped;
  if (plain.best.problem) {
    out.best = copy_of(plain.best);
    return out;
  }
  gathered_starts starts(asked, resident);
  starts.consider(plain.best, plain.start.characters);
  shape const size = asked.where.size;
  catalogue::for_each([&](auto const& one) {
    plan made = to_begin_with(expand(one, size), without);
    double const length = starts.consider(made, one.name);
    if (length < 0 || (out.published_length > 0 && length >= out.published_length * (1 - 1e-12))) return;
    out.published = std::move(made);
    out.published.name = one.name;
    out.published_length = length;
  });
  for (int group = size.ranks + 1; group <= size.micro_batches && size.chunks > 1; ++group)
    starts.consider(to_begin_with(expand(catalogue::interleaved_1f1b_with(group), size), without),
                    "Interleaved1F1B, larger groups");
  add_list_schedules(starts, asked);

  watched watch(how_hard.watch);
  watch.now.bound = out.bound;
  std::vector<gathered_starts::start>& sorted = starts.sorted();
  if (sorted.empty()) {
    out.best = chevron::detail::refused(size, "searched", nothing_found(asked, out.stopped));
    return out;
  }
  out.best = copy_of(sorted.front().made);
  out.length = watch.now.length = sorted.front().length;
  out.start = sorted.front().name;
  int gathers = sorted.front().gathers;
  // Of starts with equal figures one is improved: mostly they are one order.
  constexpr std::size_t most_starts = 3;
  int const actions = actions_of(asked.where.stages, size.units(), asked.work);
  int const trials = (how_hard.trials > 0 ? how_hard.trials : usual_trials(actions)) / 6 + 1;
  std::vector<gathered_starts::start const*> chosen;
  for (gathered_starts::start const& one : sorted) {
    bool const whole = asked.split() && std::any_of(one.made.actions.data, one.made.actions.data + one.made.actions.count,
                                                    [](action a) { return a.kind == kind::backward; });
    if (chosen.size() == most_starts || whole || gathered_starts::holds_pairs(one.made)) continue;
    if (!chosen.empty() && chosen.back()->length == one.length && chosen.back()->gathers == one.gathers) continue;
    chosen.push_back(&one);
  }
  std::uint64_t seed = how_hard.seed;
  for (gathered_starts::start const* one : chosen) {
    if (out.length <= out.bound * (1 + 1e-12) || watch.stop()) break;
    gathered_annealing search(one->made, asked, resident, seed++);
    out.trials += search.run(trials, out.bound, watch);
    bool const as_short = search.length() <= out.length * (1 + 1e-12);
    if (search.length() >= out.length * (1 - 1e-12) && !(as_short && search.gathers() < gathers)) continue;
    out.best = copy_of(search.best());
    out.length = watch.now.length = search.length();
    out.start = one->name;
    gathers = search.gathers();
  }
  out.stopped = out.stopped || watch.stopped();
  return finished(out, asked.memory);
}

}  // namespace chevron::search
