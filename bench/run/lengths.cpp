// The gain of planning for microbatches of unequal length, and of choosing the order in which they enter; means over drawn batches, as
// shares above a lower bound of all orders. The table of docs/guides/unequal-lengths.md:
//
//   bench-lengths                                  lengths log-normal, P = 4 and 8, M = 2P and 4P, one stage a rank and a V
//   bench-lengths --spread 0.3 --attention 0       other lengths
#include <chevron/plan/gradient_order.hpp>
#include <chevron/plan/lengths.hpp>
#include <chevron/search.hpp>

#include <sys/resource.h>

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <vector>

#include <CLI/CLI.hpp>

#include "sampled_lengths.hpp"

namespace {

double cpu_milliseconds() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  return 1e3 * static_cast<double>(used.ru_utime.tv_sec) + 1e-3 * static_cast<double>(used.ru_utime.tv_usec);
}

}  // namespace

int main(int argc, char** argv) {
  double spread = .7, attention = .2;
  int draws = 8, trials = 5000;
  CLI::App app("Gain of planning for lengths, and of an order of microbatches, above the bound");
  app.add_option("--spread", spread, "standard deviation of the logarithm of a length")->capture_default_str();
  app.add_option("--attention", attention, "share of the costs that goes with the square of a length")->capture_default_str();
  app.add_option("--draws", draws, "batches")->capture_default_str();
  app.add_option("--trials", trials, "of each search")->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  chevron::costs const each{10, 13, 7, 1};
  std::printf("%-22s %10s %8s %8s %8s   %14s %12s\n", "P, M, stages, chunks", "fixed plan", "replan", "search", "ordered", "replan, CPU ms",
              "order, CPU ms");
  for (bool const vee : {false, true}) {
    for (int const ranks : {4, 8}) {
      for (int const times : {2, 4}) {
        int const stages = vee ? 2 * ranks : ranks;
        int const micro_batches = times * ranks;
        auto const where = chevron::placement::mapped([&](chevron::shape) { return stages; },
                                                      [&](int s, chevron::shape) { return s < ranks ? s : 2 * ranks - 1 - s; });
        chevron::activation_limit const memory{static_cast<double>(stages), 1};
        chevron::search::effort const effort{.trials = trials};
        chevron::plan const placed = chevron::placed_on(where, {ranks, micro_batches});
        chevron::plan const fixed =
            chevron::in_ascending_order(chevron::search::find({.where = placed, .costs = each, .memory = memory}, effort).best);
        double above[4] = {}, took[2] = {};
        for (int draw = 0; draw < draws; ++draw) {
          auto const lengths = bench::sampled_lengths(micro_batches, spread, static_cast<std::uint64_t>(draw) + 1);
          auto const factors = chevron::factors_of(lengths, 1000, attention);
          chevron::cost_view costs = each;
          costs.lengths = factors.view();
          double from = cpu_milliseconds();
          auto const again = chevron::search::replan(fixed, {.costs = costs, .memory = memory});
          took[0] += cpu_milliseconds() - from;
          from = cpu_milliseconds();
          chevron::search::reorder(fixed, {.costs = costs, .memory = memory});
          took[1] += cpu_milliseconds() - from;
          auto const ordered = chevron::search::find_order({.where = placed, .costs = costs, .memory = memory}, effort);
          double const all[4] = {makespan(fixed, costs), again.length, ordered.as_given, ordered.length};
          for (int i = 0; i < 4; ++i) above[i] += 100 * (all[i] / again.bound - 1) / draws;
        }
        std::printf("%2d, %2d, %2d, %2d %7s %8.1f %% %6.1f %% %6.1f %% %6.1f %%   %14.1f %12.1f\n", ranks, micro_batches, stages, stages,
                    vee ? "V" : "linear", above[0], above[1], above[2], above[3], took[0] / draws, took[1] / draws);
        std::fflush(stdout);
      }
    }
  }
}
