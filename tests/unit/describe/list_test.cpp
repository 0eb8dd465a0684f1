// List scheduling against its definition: of all ranks, the one that can act earliest takes its preferred ready action.
#include <chevron/describe/list.hpp>
#include <chevron/prove/check.hpp>

#include <algorithm>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

using namespace chevron;
using namespace chevron::letters;

namespace {

/// The definition, followed to the letter: every candidate of every rank is looked at for every action. Costs above 0.
struct by_definition {
  plan const& like;  // its stages, ranks and limits
  std::vector<kind> prefers;
  costs times;
  bool split = false;

  std::vector<std::vector<action>> lists{};
  std::vector<std::vector<double>> ended[compute_kinds]{};  // by stage: when each microbatch's was done

  double done(kind what, int stage, int m) const {
    auto const& of = ended[static_cast<int>(what)][static_cast<std::size_t>(stage)];
    return m < static_cast<int>(of.size()) ? of[static_cast<std::size_t>(m)] : std::numeric_limits<double>::infinity();
  }
  /// When the next microbatch of this kind on this stage could start, its rank apart.
  double ready(kind what, int stage) const {
    int const m = static_cast<int>(ended[static_cast<int>(what)][static_cast<std::size_t>(stage)].size());
    if (m == like.size.micro_batches) return std::numeric_limits<double>::infinity();
    auto const from = [&](kind made, int other) {
      return done(made, other, m) + (like.rank_of.data[other] != like.rank_of.data[stage] ? times.communication : 0);
    };
    if (what == kind::forward) return stage > 0 ? from(kind::forward, stage - 1) : 0;
    if (what == kind::backward_weight) return done(kind::backward_input, stage, m);
    double const own = done(kind::forward, stage, m);
    return stage + 1 < like.stages ? std::max(own, from(what, stage + 1)) : own;
  }
  double length(kind what) const {
    if (what == kind::forward) return times.forward;
    if (what == kind::backward) return times.backward_input + times.backward_weight;
    return what == kind::backward_input ? times.backward_input : times.backward_weight;
  }
  /// Whether a forward leaves a place for each later stage of its rank.
  bool admitted(int rank, int stage) const {
    int chunks = 1;
    std::int64_t bytes = like.byte_limit > 0 ? like.stage_bytes.data[stage] : 0;
    for (action const a : lists[static_cast<std::size_t>(rank)]) {
      int const change = in_flight_change(a.kind, false);
      chunks += change;
      if (like.byte_limit > 0) bytes += change * like.stage_bytes.data[a.stage];
    }
    for (int s = stage + 1; s < like.stages; ++s) {
      if (like.rank_of.data[s] != rank) continue;
      ++chunks;
      if (like.byte_limit > 0) bytes += like.stage_bytes.data[s];
    }
    return (like.in_flight_limit <= 0 || chunks <= like.in_flight_limit) && (like.byte_limit <= 0 || bytes <= like.byte_limit);
  }

  /// Plays; false if it gets stuck.
  bool play() {
    int const ranks = like.size.ranks;
    lists.resize(static_cast<std::size_t>(ranks));
    for (auto& of : ended) of.resize(static_cast<std::size_t>(like.stages));
    std::vector<double> free_at(static_cast<std::size_t>(ranks), 0);
    for (int left = (split ? 3 : 2) * like.stages * like.size.micro_batches; left > 0; --left) {
      double earliest = std::numeric_limits<double>::infinity();
      int acting = -1;
      for (int r = 0; r < ranks; ++r) {
        for (int s = 0; s < like.stages; ++s) {
          if (like.rank_of.data[s] != r) continue;
          for (kind const what : prefers) {
            if (what == kind::forward && !admitted(r, s)) continue;
            double const start = std::max(free_at[static_cast<std::size_t>(r)], ready(what, s));
            if (start < earliest) earliest = start, acting = r;
          }
        }
      }
      if (acting < 0) return false;
      int taken = -1;
      kind how = kind::forward;
      for (kind const what : prefers) {
        for (int i = 0; i < like.stages && taken < 0; ++i) {
          int const s = what == kind::forward ? like.stages - 1 - i : i;
          if (like.rank_of.data[s] != acting || (what == kind::forward && !admitted(acting, s))) continue;
          if (ready(what, s) <= earliest) taken = s, how = what;
        }
      }
      auto& of = ended[static_cast<int>(how)][static_cast<std::size_t>(taken)];
      lists[static_cast<std::size_t>(acting)].push_back(make_action(how, taken, static_cast<int>(of.size())));
      free_at[static_cast<std::size_t>(acting)] = earliest + length(how);
      of.push_back(earliest + length(how));
    }
    return true;
  }
};

int played = 0, stuck = 0;

template <class Listing>
void as_defined(Listing const& one, std::vector<kind> const& prefers, shape size) {
  plan const made = expand(one, size);
  // Reads the declared limits from a plan that is only begun, since list scheduling may get stuck.
  plan like;
  REQUIRE(!detail::begin_plan_of(one, size, like));
  by_definition definition{like, prefers, one.times, one.work == work_graph::split_backward};
  bool const ends = definition.play();
  INFO(size.ranks << " ranks, " << size.micro_batches << " microbatches, in flight " << like.in_flight_limit << ", bytes "
                  << like.byte_limit << ", times " << one.times.forward << ' ' << one.times.backward_input << ' '
                  << one.times.backward_weight << ' ' << one.times.communication);
  REQUIRE(ends == (made.problem.broken == law::none));
  ++(ends ? played : stuck);
  if (!ends) return;
  REQUIRE(check(made).broken == law::none);
  for (int r = 0; r < size.ranks; ++r) {
    auto const& list = definition.lists[static_cast<std::size_t>(r)];
    REQUIRE(made.view().length(r) == static_cast<int>(list.size()));
    for (int i = 0; i < made.view().length(r); ++i) REQUIRE(made.view().at(r, i) == list[static_cast<std::size_t>(i)]);
  }
}

template <class Listing>
void under_limits(Listing const& one, std::vector<kind> const& prefers, shape size, std::mt19937& random) {
  as_defined(one, prefers, size);
  as_defined(one.at_most_in_flight(1 + static_cast<int>(random() % 4)), prefers, size);
  as_defined(one.at_most_in_flight(2 * ranks), prefers, size);
  std::int64_t const each = 1 + static_cast<std::int64_t>(random() % 3), most = 1 + static_cast<std::int64_t>(random() % 30);
  as_defined(one.at_most_bytes_in_flight(most, sizes{.activation = each}), prefers, size);
  as_defined(one.at_most_bytes_in_flight(most, sizes{.activation = each}).at_most_in_flight(3), prefers, size);
}

template <class Where>
void over_sizes(Where where, int chunks, std::mt19937& random) {
  auto const whole = schedule_of(work_graph::full_backward).place(where);
  auto const split = schedule_of(work_graph::split_backward).place(where);
  auto const some = [&] { return static_cast<double>(1 + random() % 400) / 97; };
  for (int p = 1; p <= 5; ++p) {
    for (int const m : {1, 2, 7}) {
      shape const size{p, m, chunks};
      for (costs const& c :
           {costs{}, costs{1, 0.5, 0.5}, costs{2, 1, 0.5, 0.25}, costs{1, 1, 1, 6}, costs{some(), some(), some(), some()}}) {
        under_limits(whole.prefer(B, F).assuming(c), {kind::backward, kind::forward}, size, random);
        under_limits(whole.prefer(F).assuming(c), {kind::forward, kind::backward}, size, random);
        under_limits(split.prefer(I, F, W).assuming(c), {kind::backward_input, kind::forward, kind::backward_weight}, size,
                     random);
        under_limits(split.prefer(W, F, I).assuming(c), {kind::backward_weight, kind::forward, kind::backward_input}, size,
                     random);
      }
    }
  }
}

}  // namespace

TEST_CASE("a list schedule is what its definition says") {
  std::mt19937 random(20);
  over_sizes(placement::linear, 0, random);
  over_sizes(placement::vee, 0, random);
  over_sizes(placement::loop, 3, random);
  over_sizes(placement::waves, 4, random);
  // Ranks with no, one and many stages next to each other and apart.
  over_sizes(placement::mapped([](shape size) { return 2 * size.ranks + 1; },
                               [](int stage, shape size) { return (stage * stage + stage / 2) % size.ranks; }),
             0, random);
  CHECK(played > 3000);
  CHECK(stuck > 300);
}

// A cost of 0 makes a rank act again at once, and may call one whose turn has passed: every rank still acts in the order of time.
TEST_CASE("costs of nothing") {
  for (costs const& c :
       {costs{0, 0, 0}, costs{0, 1, 1}, costs{1, 0, 0}, costs{1, 0, 1}, costs{1, 1, 0, 0.5}, costs{0, 0, 0, 1}}) {
    for (int p = 1; p <= 9; ++p) {
      CHECK(!check(
          expand(schedule_of(work_graph::split_backward).place(placement::waves).prefer(I, F, W).assuming(c), shape{p, 6, 4})));
      CHECK(
          !check(expand(schedule_of(work_graph::full_backward).prefer(B, F).assuming(c).at_most_in_flight(ranks), shape{p, 6})));
    }
  }
}
