// The results of the search for seven sets of costs, in percent above the bound, by the number of chunks in flight; with the CPU
// seconds of the slowest search. The tables of docs/explanation/how-a-search-works.md:
//
//   bench-search --ranks 8                                           every limit from P to 2P, in a V, M = 4P
//   bench-search --ranks 64 --limits 64,96,128 --only 2              beside the catalogue
//   bench-search --limits 32 --span    bench-search --placement wave --limits 32    bench-search --full-backward --limits 16
//   bench-search --limits 8,10,12,14,16,32 --improve                the search of compilers
//
// Ends with an error where more memory gives a longer schedule.
#include <chevron/search.hpp>

#include <sys/resource.h>

#include <cstdio>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

namespace {

double cpu_seconds() {
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  return static_cast<double>(used.ru_utime.tv_sec) + 1e-6 * static_cast<double>(used.ru_utime.tv_usec);
}

constexpr double sets[7][4] = {{10, 10, 10, 0}, {10, 11, 9, .5}, {10, 13, 7, 1},  {20, 18, 12, 2},
                               {10, 20, 10, 1}, {10, 10, 5, .5}, {12, 14, 10, 1}};

}  // namespace

int main(int argc, char** argv) {
  int ranks = 8;
  int micro_batches = 0;
  int only = -1;
  std::string placement = "vee";
  std::vector<int> limits;
  bool span = false;
  bool full = false;
  bool improve = false;
  chevron::search::effort effort;
  CLI::App flags("Lengths that the search finds, in percent above the bound, by costs and chunks in flight.");
  flags.add_option("--ranks", ranks);
  flags.add_option("--microbatches", micro_batches, "microbatches of a step; without this flag, four times the ranks");
  flags.add_option("--placement", placement)->check(CLI::IsMember({"linear", "vee", "wave", "loop"}));
  flags.add_option("--limits", limits, "chunks in flight; without this flag, each number from P to 2P")->delimiter(',');
  flags.add_option("--only", only, "one of the seven sets of costs, from 0: with lengths, bounds and seconds");
  flags.add_option("--seed", effort.seed);
  flags.add_option("--trials", effort.trials);
  flags.add_flag("--span", span, "by the longest rank's span");
  flags.add_flag("--full-backward", full);
  flags.add_flag("--improve", improve, "use search::improve, as compilers do; more memory may then give a longer schedule");
  CLI11_PARSE(flags, argc, argv);
  if (micro_batches == 0) micro_batches = 4 * ranks;
  bool const every = limits.empty();
  for (int limit = ranks; every && limit <= 2 * ranks; ++limit) limits.push_back(limit);
  bool monotone = true;
  double slowest = 0;
  std::printf("| costs |");
  for (int limit : limits) std::printf(" %d |", limit);
  std::printf("\n");
  for (int set = only < 0 ? 0 : only; set < (only < 0 ? 7 : only + 1); ++set) {
    double const* const of = sets[set];
    chevron::costs const each{of[0], of[1], of[2], of[3]};
    std::printf("| (%g,%g,%g,%g) |", of[0], of[1], of[2], of[3]);
    double before = 0;
    for (int limit : limits) {
      double const began = cpu_seconds();
      auto const look = [&](auto const& where, int chunks) {
        chevron::shape const size{ranks, micro_batches, chunks};
        chevron::activation_limit const memory{static_cast<double>(limit), 1};
        auto const goal = span ? chevron::search::objective::span : chevron::search::objective::makespan;
        auto const work = full ? chevron::work_graph::full_backward : chevron::work_graph::split_backward;
        chevron::search::problem const asked{
            .where = chevron::placed_on(where, size), .costs = each, .memory = memory, .goal = goal, .work = work};
        return improve ? chevron::search::improve(asked, effort) : chevron::search::find(asked, effort);
      };
      chevron::search::found const found = placement == "vee"    ? look(chevron::placement::vee, 2)
                                           : placement == "wave" ? look(chevron::placement::waves, 4)
                                           : placement == "loop" ? look(chevron::placement::loop, 2)
                                                                 : look(chevron::placement::linear, 1);
      double const took = cpu_seconds() - began;
      slowest = took > slowest ? took : slowest;
      std::printf(" %.1f", 100 * (found.length / found.bound - 1));
      if (only >= 0) std::printf(" (%g of %g, catalogue %g, %.1f s)", found.length, found.bound, found.published_length, took);
      std::printf(" |");
      std::fflush(stdout);
      monotone = monotone && (improve || before == 0 || found.length <= before * (1 + 1e-12));
      before = found.length;
    }
    std::printf("\n");
  }
  std::printf("CPU seconds at most: %.2f\n", slowest);
  if (!monotone) std::printf("more memory gives a longer schedule\n");
  return monotone ? 0 : 1;
}
