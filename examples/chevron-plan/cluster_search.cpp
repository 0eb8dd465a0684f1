// computes: a plan and a climb over cuts for each way to divide a cluster
#include <algorithm>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <tuple>

#include "cluster.hpp"

namespace plan_program {
namespace {

constexpr named_schedule schedules[] = {{"1F1B", 1, false, true},
                                        {"Interleaved1F1B", 2, false, true},
                                        {"Interleaved1F1B", 4, false, true},
                                        {"ZB-H1", 1, false, false},
                                        {"ZB-H2", 1, false, false, false, true},
                                        {"ZBVZeroBubble", 2, true, false},
                                        {"DualPipeV", 2, true, false},
                                        {"V-Half", 2, true, false},
                                        {"V-Min", 2, true, false},
                                        {"Seq1F1B", 1, false, true, true},
                                        {"SeqInterleaved1F1B", 2, false, true, true},
                                        {"SeqInterleaved1F1B", 4, false, true, true},
                                        {"SeqZB-H1", 1, false, false, true}};
constexpr std::size_t most_best = 10;

/// The schedules that agree with the choices.
std::vector<named_schedule> schedules_with(fixed_choices const& fixed) {
  std::vector<named_schedule> out;
  for (named_schedule const& one : schedules) {
    if (!fixed.schedule.empty() && fixed.schedule != one.name) continue;
    bool const any_chunks = one.takes_chunks() && fixed.chunks && *fixed.chunks > 1;
    if (any_chunks && !out.empty() && out.back().name == std::string_view(one.name)) continue;
    if (!any_chunks && fixed.chunks && *fixed.chunks != one.chunks) continue;
    out.push_back(one);
    if (any_chunks) out.back().chunks = *fixed.chunks;
  }
  return out;
}

/// Whether a choice is open, or made so.
template <class Value>
bool agrees(std::optional<Value> const& fixed, Value value) {
  return !fixed || *fixed == value;
}

/// Ways that share a plan and costs: with and without post-validation, recomputation and a sharded optimizer.
struct way_group {
  std::size_t first = 0, count = 0;  ///< in the space
  double bound = 0;                  ///< the least of its ways
  costs_key costs{};
};

/// All ways, in the order of the guide's table.
struct way_space {
  std::vector<way> ways;
  std::vector<way_group> groups;
  std::map<costs_key, sharded_costs> costs;

  way_space(described_model const& model, cluster const& on, fixed_choices const& fixed) : fixed_(fixed) {
    for (int shards = 1; shards <= on.gpus; ++shards) {
      if (on.gpus % shards != 0 || model.size.heads % shards != 0 || model.size.key_heads % shards != 0) continue;
      if (!agrees(fixed.shards, shards)) continue;
      for (int ranks = 1; ranks <= on.devices() / shards; ++ranks) {
        if (on.devices() % (ranks * shards) != 0 || ranks > model.size.layers + 2) continue;
        if (!agrees(fixed.ranks, ranks) || !agrees(fixed.replicas, on.devices() / (ranks * shards))) continue;
        for (int const experts : expert_ranks(model, shards, on.devices() / (ranks * shards))) {
          for (int const samples : sample_sizes(on, fixed)) {
            for (int const slices : slice_counts(model, fixed))
              add(model, on, {.ranks = ranks, .shards = shards, .samples = samples, .expert_ranks = experts, .slices = slices});
          }
        }
      }
    }
  }

  sharded_costs const& costs_of(way_group const& of) const { return costs.at(of.costs); }
  sharded_costs const& costs_of(way const& of, cluster const& on) const { return costs.at(costs_key_of(of, on)); }

 private:
  /// The numbers of ranks over which experts may be divided: 1, or the shards of neighbouring replicas.
  static std::vector<int> expert_ranks(described_model const& model, int shards, int replicas) {
    std::vector<int> out{1};
    for (int n = 1; n <= replicas && static_cast<std::int64_t>(n) * shards <= model.size.experts; ++n) {
      if (n * shards > 1 && replicas % n == 0 && model.size.experts % (n * shards) == 0) out.push_back(n * shards);
    }
    return out;
  }

  /// \param any the division of the model; replicas and microbatches follow
  void add(described_model const& model, cluster const& on, way any) {
    int const ranks = any.ranks;
    any.replicas = on.devices() / (ranks * any.shards);
    if (on.sequences % (static_cast<std::int64_t>(any.replicas) * any.samples) != 0) return;
    std::int64_t const count = on.sequences / any.replicas / any.samples;
    if (count * any.slices > most_units) return;
    any.micro_batches = static_cast<int>(count);
    // One rank has nothing to fill; shards that divide experts cut sequences, which does not go with slices.
    if (any.slices > 1 && (ranks == 1 || (any.expert_ranks > 1 && any.shards > 1))) return;
    costs_key const key = costs_key_of(any, on);
    if (!costs.contains(key)) costs.emplace(key, costs_on(model, on, key));
    for (named_schedule const& schedule : schedules_with(fixed_)) {
      if (schedule.sliced != (any.slices > 1)) continue;
      if (ranks == 1 && schedule.name != schedules[0].name) continue;
      if (ranks * schedule.chunks > model.size.layers + 2) continue;
      if (!fixed_.layers.empty() && static_cast<int>(fixed_.layers.size()) != ranks * schedule.chunks) continue;
      way_group group{ways.size(), 0, std::numeric_limits<double>::max(), key};
      for (bool const post_validated : {false, true}) {
        if (!agrees(fixed_.post_validated, post_validated)) continue;
        if (post_validated && ranks == 1) continue;  // no rank waits for another
        if (!post_validated && schedule.overlapping && fixed_.schedule.empty()) continue;
        for (bool const recompute : {false, true}) {
          for (bool const sharded : {false, true}) {
            if (sharded && (any.replicas == 1 || model.setup.state_item() == 0)) continue;
            // The trainer refuses it: experts that replicas divide have no copy on each replica.
            if (sharded && any.expert_replicas() > 1) continue;
            if (!agrees(fixed_.recompute, recompute) || !agrees(fixed_.sharded, sharded)) continue;
            way one = any;
            one.schedule = schedule;
            one.recompute = recompute;
            one.sharded = sharded;
            one.post_validated = post_validated;
            one.layers = fixed_.layers;
            one.bound = time_bound(one, model, on, costs.at(key));
            group.bound = std::min(group.bound, one.bound);
            ways.push_back(std::move(one));
            ++group.count;
          }
        }
      }
      if (group.count > 0) groups.push_back(group);
    }
  }

  fixed_choices const& fixed_;
};

/// Plans that several groups share: made once, by the first that needs one, and forgotten behind the last.
class plan_store {
 public:
  explicit plan_store(way_space const& space) {
    for (way_group const& group : space.groups) ++entries_[key_of(space.ways[group.first])].users;
  }

  /// The plan of a way; null: the schedule does not exist with its ranks and microbatches.
  std::shared_ptr<made_plan const> get(way const& of) {
    entry& one = entry_of(of);
    std::scoped_lock const lock(one.making);
    if (!one.made) {
      if (auto made = plan_of(of)) one.plan = std::make_shared<made_plan const>(std::move(*made));
      one.made = true;
    }
    return one.plan;
  }
  /// To be called once for each group, when its ways are judged.
  void release(way const& of) {
    entry& one = entry_of(of);
    std::scoped_lock const lock(one.making);
    if (--one.users > 0) return;
    one.plan = nullptr;
    one.made = false;
  }

 private:
  struct entry {
    std::mutex making;
    int users = 0;
    bool made = false;
    std::shared_ptr<made_plan const> plan;
  };
  using key = std::tuple<std::string, int, int, int, int>;
  static key key_of(way const& of) { return {of.schedule.name, of.schedule.chunks, of.ranks, of.micro_batches, of.slices}; }
  entry& entry_of(way const& of) { return entries_.at(key_of(of)); }

  std::map<key, entry> entries_;  // no entry is added behind the constructor, so threads may look entries up at the same time
};

/// Judges the groups of a space on several threads.
class way_search {
 public:
  way_search(way_space& space, described_model const& model, cluster const& on, search_window const& window)
      : space_(space), model_(model), on_(on), window_(window), plans_(space), states_(space.ways.size(), state::open) {}

  cluster_search run(int threads) {
    std::vector<std::size_t> order(space_.groups.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::stable_sort(order.begin(), order.end(),
                     [&](std::size_t a, std::size_t b) { return space_.groups[a].bound < space_.groups[b].bound; });
    std::size_t next = 0;
    over_threads(threads, [&] {
      std::size_t mine = 0;
      {
        std::scoped_lock const lock(changing_);
        if (next == order.size() || space_.groups[order[next]].bound > longest()) return false;
        mine = order[next++];
      }
      judge_group(space_.groups[mine]);
      return true;
    });
    cluster_search out;
    out.ways = static_cast<std::int64_t>(space_.ways.size());
    if (best_.empty() && !window_.all) judge_fullest(threads);
    for (std::size_t const i : best_) out.best.push_back(space_.ways[i]);
    double const tenth = best_.size() == most_best ? space_.ways[best_.back()].time : std::numeric_limits<double>::max();
    for (std::size_t i = 0; i < space_.ways.size(); ++i) {
      way const& one = space_.ways[i];
      out.longer += one.bound > tenth;
      // Which ways outside of the window were judged depends on the threads.
      if (states_[i] == state::judged && one.bound <= longest() && (window_.all || !best_.empty())) out.judged.push_back(one);
      if (best_.empty() && states_[i] == state::judged && (!out.least || one.bytes < out.least->bytes)) out.least = one;
    }
    return out;
  }

 private:
  enum class state : unsigned char { open, too_full, judged };

  /// Calls `work` on each thread until it returns false. The first exception ends all threads.
  template <class Work>
  static void over_threads(int threads, Work const& work) {
    std::mutex setting;
    std::exception_ptr failed;
    auto const loop = [&] {
      try {
        for (;;) {
          {
            std::scoped_lock const lock(setting);
            if (failed) return;
          }
          if (!work()) return;
        }
      } catch (...) {
        std::scoped_lock const lock(setting);
        failed = std::current_exception();
      }
    };
    std::vector<std::thread> others;
    for (int i = 1; i < threads; ++i) others.emplace_back(loop);
    loop();
    for (std::thread& one : others) one.join();
    if (failed) std::rethrow_exception(failed);
  }

  /// The largest bound of a way that is judged. To be called under `changing_`.
  double longest() const {
    if (window_.all || best_.size() < most_best) return std::numeric_limits<double>::max();
    return std::max(space_.ways[best_.back()].time, window_.times * space_.ways[best_.front()].time);
  }
  std::int64_t largest() const {
    if (window_.all) return std::numeric_limits<std::int64_t>::max();
    return static_cast<std::int64_t>(std::min(static_cast<double>(on_.memory) * window_.memory, 9e18));
  }

  void judge_group(way_group const& group) {
    way const& any = space_.ways[group.first];
    sharded_costs const& given = space_.costs_of(group);
    std::shared_ptr<made_plan const> made;
    // Of the way before, with as much recomputation and as much overlap, if all numbers of layers that the search met fit.
    std::vector<int> layers;
    bool of_recompute = false, of_overlap = false;
    for (std::size_t i = group.first; i < group.first + group.count; ++i) {
      way one = space_.ways[i];
      if (one.recompute != of_recompute || one.post_validated != of_overlap) layers.clear();
      of_recompute = one.recompute;
      of_overlap = one.post_validated;
      {
        std::scoped_lock const lock(changing_);
        if (one.bound > longest()) continue;
      }
      if (!window_.all && too_full(one, largest(), given, made.get())) {
        keep(i, state::too_full);
        continue;
      }
      if (!made) {
        made = plans_.get(any);
        if (!made) break;
        if (!window_.all && too_full(one, largest(), given, made.get())) {
          keep(i, state::too_full);
          continue;
        }
      }
      // A sharded optimizer takes fewer bytes and leaves the pipeline's times as they are: the search would go the same way.
      if (one.layers.empty()) one.layers = layers;
      layers = judge_way(i, std::move(one), given, *made);
    }
    plans_.release(any);
  }

  /// \returns the way's layers if all numbers of layers that their search met fit
  std::vector<int> judge_way(std::size_t i, way one, sharded_costs const& given, made_plan const& made) {
    bool excess_seen = false;
    if (!judge(one, model_, on_, given, made, excess_seen)) return {};
    std::vector<int> const layers = excess_seen ? std::vector<int>{} : one.layers;
    std::scoped_lock const lock(changing_);
    bool const fits = one.bytes <= on_.memory;
    space_.ways[i] = std::move(one);
    states_[i] = state::judged;
    if (!fits) return layers;
    auto const sooner = [&](std::size_t a, std::size_t b) {
      return std::pair(space_.ways[a].time, a) < std::pair(space_.ways[b].time, b);
    };
    best_.insert(std::upper_bound(best_.begin(), best_.end(), i, sooner), i);
    if (best_.size() > most_best) best_.pop_back();
    return layers;
  }

  void keep(std::size_t i, state what) {
    std::scoped_lock const lock(changing_);
    states_[i] = what;
  }

  /// Nothing fits: judges the ways that are too full in the order of their bytes, until no other can need less memory.
  void judge_fullest(int threads) {
    std::vector<std::pair<std::int64_t, std::size_t>> order;
    std::int64_t least = std::numeric_limits<std::int64_t>::max();
    for (std::size_t i = 0; i < space_.ways.size(); ++i) {
      if (states_[i] == state::judged) least = std::min(least, space_.ways[i].bytes);
      if (states_[i] == state::too_full) order.emplace_back(0, i);
    }
    std::size_t next = 0;
    over_threads(threads, [&] {
      std::size_t mine = 0;
      {
        std::scoped_lock const lock(changing_);
        if (next == order.size()) return false;
        mine = next++;
      }
      way const& one = space_.ways[order[mine].second];
      auto const made = plan_of(one);
      order[mine].first = made ? byte_bound(one, space_.costs_of(one, on_), *made) : std::numeric_limits<std::int64_t>::max();
      return true;
    });
    std::sort(order.begin(), order.end());
    for (auto const& [bound, i] : order) {
      if (bound > least) break;
      if (auto const made = plan_of(space_.ways[i])) judge_way(i, space_.ways[i], space_.costs_of(space_.ways[i], on_), *made);
      if (states_[i] == state::judged) least = std::min(least, space_.ways[i].bytes);
    }
  }

  way_space& space_;
  described_model const& model_;
  cluster const& on_;
  search_window const& window_;
  plan_store plans_;
  std::mutex changing_;  ///< of all below, and of the ways
  std::vector<state> states_;
  std::vector<std::size_t> best_;
};

}  // namespace

std::vector<std::string> searched_schedules() {
  std::vector<std::string> out;
  for (named_schedule const& one : schedules) {
    if (out.empty() || out.back() != one.name) out.push_back(one.name);
  }
  return out;
}

std::vector<int> sample_sizes(cluster const& on, fixed_choices const& fixed) {
  std::vector<int> out;
  if (fixed.samples) {
    if (on.sequences % *fixed.samples == 0) out.push_back(*fixed.samples);
    return out;
  }
  for (int const samples : {1, 2, 4, 8}) {
    if (on.sequences % samples == 0) out.push_back(samples);
  }
  return out;
}

std::vector<int> slice_counts(described_model const& model, fixed_choices const& fixed) {
  std::vector<int> out = fixed.slices ? std::vector<int>{*fixed.slices} : std::vector<int>{1, 2, 4, 8};
  std::erase_if(out, [&](int slices) { return slices > model.setup.tokens; });
  return out;
}

cluster_search search_ways(described_model const& model, cluster const& on, fixed_choices const& fixed,
                           search_window const& window, int threads) {
  way_space space(model, on, fixed);
  return way_search(space, model, on, window).run(threads);
}

}  // namespace plan_program
