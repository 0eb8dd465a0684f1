// The share of a microbatch's time that goes with the square of its length, from steps whose share is known.
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include <chevron/tools/profile/attention_share.hpp>
#include <chevron/tools/profile/trace_window.hpp>

#include <doctest/doctest.h>

namespace {

struct made {
  chevron::all_steps ranks;
  std::vector<std::vector<std::vector<double>>> lengths;  // by replica, step and microbatch
};

/// Steps of a pipeline of two ranks and of its replicas, each with lengths of its own; now and then something takes far longer.
made steps_with(double share, double noise, int replicas, bool equal_lengths = false) {
  made out;
  std::mt19937 random(7);
  std::lognormal_distribution<double> length(std::log(700.), .7), factor(0., noise);
  for (int replica = 0; replica < replicas; ++replica) {
    out.lengths.emplace_back();
    for (int step = 0; step < 10; ++step) {
      out.lengths.back().emplace_back();
      for (int m = 0; m < 8; ++m) out.lengths.back().back().push_back(equal_lengths ? 512 : std::round(length(random)) + 1);
    }
    for (int rank = 0; rank < 2; ++rank) {
      out.ranks.emplace_back();
      for (int step = 0; step < 10; ++step) {
        chevron::step_trace one;
        std::int64_t now = 0;
        for (chevron::kind const what : {chevron::kind::forward, chevron::kind::backward_input, chevron::kind::backward_weight}) {
          for (int m = 0; m < 8; ++m) {
            double const x = out.lengths.back()[static_cast<std::size_t>(step)][static_cast<std::size_t>(m)] / 1000;
            double milliseconds = (3 + rank) * ((1 - share) * x + share * x * x) * factor(random);
            if (noise > 0 && random() % 29 == 0) milliseconds *= 20;
            chevron::trace_event event{};
            event.op = chevron::make_action(what, rank, m);
            event.reached = event.start = now;
            now += static_cast<std::int64_t>(milliseconds * 1e6);
            event.end = now;
            one.entries.push_back(event);
          }
        }
        out.ranks.back().push_back(one);
      }
    }
  }
  return out;
}

}  // namespace

TEST_CASE("the share that times were made with is found, with replicas, noise and outliers") {
  for (double const share : {0., .05, .2, .5, 1.}) {
    for (int const replicas : {1, 2}) {
      CAPTURE(share);
      CAPTURE(replicas);
      made const exact = steps_with(share, 0, replicas), noisy = steps_with(share, .1, replicas);
      CHECK(chevron::attention_share(exact.ranks, 2, exact.lengths, 1000) == doctest::Approx(share).epsilon(1e-6));
      CHECK(std::abs(chevron::attention_share(noisy.ranks, 2, noisy.lengths, 1000) - share) <= .05);
    }
  }
}

TEST_CASE("it is the share at the length that it is asked for: twice as long, more of the time goes with the square") {
  made const steps = steps_with(.2, 0, 1);
  // 0.8 x + 0.2 x² at x = 2y is 1.6 y + 0.8 y²: a third.
  CHECK(chevron::attention_share(steps.ranks, 2, steps.lengths, 2000) == doctest::Approx(.33));
}

TEST_CASE("equal lengths tell nothing: none") {
  made const steps = steps_with(.5, .1, 1, true);
  CHECK(chevron::attention_share(steps.ranks, 2, steps.lengths, 512) == 0);
}
