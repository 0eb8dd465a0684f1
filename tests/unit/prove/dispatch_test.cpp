// The dispatcher with a policy of a few lines: forwards it gives list scheduling's orders, backwards in time lawful ones.
#include <chevron/describe/list.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/prove/dispatch.hpp>
#include <chevron/prove/timeline.hpp>

#include <vector>

#include <doctest/doctest.h>

using namespace chevron;
using namespace chevron::letters;

namespace {

/// Takes the first ready action by kind (`prefers`: families), forwards of the latest stage first, else of the earliest.
struct first_ready {
  detail::rows const& of;
  std::vector<int> prefers;
  std::vector<std::vector<int>> lists{};  // by rank: numbers
  std::vector<double> began{};            // by number

  int number(int row, int k) const { return row * of.micro_batches + k; }
  int take(int rank, double now, double const* ready, int const* taken, double& until) {
    for (int const family : prefers) {
      for (int i = 0; i < of.stages; ++i) {
        int const row = family * of.stages + (family == 0 ? of.stages - 1 - i : i);
        if (of.rank_of.data[row] != rank) continue;
        if (ready[row] <= now) {
          lists[static_cast<std::size_t>(rank)].push_back(number(row, taken[row]));
          began[static_cast<std::size_t>(number(row, taken[row]))] = now;
          return row;
        }
        until = ready[row] < until ? ready[row] : until;
      }
    }
    return detail::sleeps;
  }
  double free_again(int, double, double end) const { return end; }
};

struct never_does_anything : first_ready {
  bool gives_up = false;
  int take(int, double, double const*, int const*, double&) { return gives_up ? detail::gives_up : detail::sleeps; }
};

template <class Where, class Each>
void over_sizes(Where const& where, Each const& each) {
  for (int p : {1, 2, 3, 5}) {
    for (int m : {1, 2, 7}) {
      for (costs const& c : {costs{}, costs{2, 1, 0.5, 0.25}, costs{1, 1, 1, 6}, costs{0, 1, 0}}) {
        auto const split = schedule_of(work_graph::split_backward).place(where).assuming(c);
        each(expand(split.prefer(I, F, W), shape{p, m}), c, true, std::vector{1, 0, 2});
        each(expand(split.prefer(W, F, I), shape{p, m}), c, true, std::vector{2, 0, 1});
        auto const whole = schedule_of(work_graph::full_backward).place(where).assuming(c);
        each(expand(whole.prefer(B, F), shape{p, m}), c, false, std::vector{1, 0});
      }
    }
  }
}

template <class Each>
void over_placements(Each const& each) {
  over_sizes(placement::linear, each);
  over_sizes(placement::vee, each);
  over_sizes(placement::loop, each);
}

}  // namespace

TEST_CASE("a policy that takes the first ready action gives the list schedule") {
  over_placements([](plan const& listed, costs const& c, bool split, std::vector<int> const& prefers) {
    detail::rows const rows(listed, split, c);
    first_ready policy{rows, prefers};
    policy.lists.resize(static_cast<std::size_t>(listed.size.ranks));
    policy.began.resize(static_cast<std::size_t>(rows.count * rows.micro_batches));
    REQUIRE(detail::dispatch(rows, policy));
    for (int r = 0; r < listed.size.ranks; ++r) {
      auto const& list = policy.lists[static_cast<std::size_t>(r)];
      REQUIRE(static_cast<int>(list.size()) == listed.view().length(r));
      for (int i = 0; i < listed.view().length(r); ++i)
        CHECK(rows.action_of(list[static_cast<std::size_t>(i)]) == listed.view().at(r, i));
    }
  });
}

TEST_CASE("played backwards, what needs an action comes before it, and turned round the step is lawful") {
  over_placements([](plan const& listed, costs const& c, bool split, std::vector<int> const& prefers) {
    detail::rows const rows(listed, split, c);
    first_ready policy{rows, prefers};
    policy.lists.resize(static_cast<std::size_t>(listed.size.ranks));
    policy.began.resize(static_cast<std::size_t>(rows.count * rows.micro_batches));
    REQUIRE(detail::dispatch(rows, policy, true));
    step_graph const graph(listed);
    for (int number = 0; number < rows.count * rows.micro_batches; ++number) {
      int const source = graph.source_of(rows.action_of(number));
      if (source < 0) continue;
      int const time = rows.time_at(number);
      double const there = policy.began[static_cast<std::size_t>(number)] + rows.lasts.data[time] + rows.lag.data[time];
      CHECK(policy.began[static_cast<std::size_t>(source)] >= there);
    }
    plan turned = copy_of(listed);
    for (int r = 0; r < listed.size.ranks; ++r) {
      auto const& list = policy.lists[static_cast<std::size_t>(r)];
      for (std::size_t i = 0; i < list.size(); ++i) {
        action a = rows.action_of(list[list.size() - 1 - i]);
        turned.actions.data[turned.begin.data[r] + static_cast<int>(i)] = a;
      }
    }
    CHECK(describe(check(turned)).str() == describe(finding{}).str());
    CHECK(simulate(turned, c).complete);
  });
}

TEST_CASE("a step in which all ranks sleep, or whose policy gives up, is not played") {
  plan const like = expand(schedule_of(work_graph::split_backward), shape{2, 3});
  detail::rows const rows(like, true, costs{});
  never_does_anything policy{{rows, {}}};
  CHECK_FALSE(detail::dispatch(rows, policy));
  policy.gives_up = true;
  CHECK_FALSE(detail::dispatch(rows, policy));
}
