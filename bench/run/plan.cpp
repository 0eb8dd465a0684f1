// The time to describe, prove and lower a schedule at run time, at P=64, V=2 (or the schedule's own V), M=256: a planner's work for
// each candidate. `./dev bench planning` sets PyTorch's generate + validate + add communication beside it.
//
//   bench-plan                      every schedule, with Google Benchmark's options
//   bench-plan once NAME P M        one schedule at that size, once, in a process of its own: seconds and peak memory as JSON
#include <chevron/schedule.hpp>

#include <sys/resource.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <utility>

#include <benchmark/benchmark.h>

namespace {

constexpr chevron::shape size{.ranks = 64, .micro_batches = 256};

template <class Description>
void describe_prove_lower(benchmark::State& state, Description const& schedule) {
  int instructions = 0;
  for (auto _ : state) {
    chevron::proved_program const program = chevron::lower(chevron::prove(chevron::expand(schedule, size)));
    instructions = program.view().total();
    benchmark::DoNotOptimize(program.view().instructions);
  }
  state.counters["instructions"] = instructions;
}

int once(std::string_view name, chevron::shape at) {
  auto const now = [] { return std::chrono::steady_clock::now(); };
  auto const seconds = [](auto from, auto to) { return std::chrono::duration<double>(to - from).count(); };
  auto const begin = now();
  chevron::plan made = chevron::catalogue::make_plan(name, at);
  auto const described = now();
  chevron::proved_plan proof = chevron::prove(std::move(made));
  auto const proved = now();
  chevron::proved_program const program = chevron::lower(std::move(proof));
  auto const lowered = now();
  auto const of = [](timeval t) { return static_cast<double>(t.tv_sec) + 1e-6 * static_cast<double>(t.tv_usec); };
  rusage used{};
  getrusage(RUSAGE_SELF, &used);
  std::printf(
      "{\"schedule\": \"%s\", \"actions\": %d, \"instructions\": %d, \"describe_s\": %.4f, \"prove_s\": %.4f, "
      "\"lower_s\": %.4f, \"total_s\": %.4f, \"cpu_s\": %.4f, \"peak_mb\": %.1f}\n",
      program.view().plan.name, program.view().plan.total(), program.view().total(), seconds(begin, described), seconds(described, proved),
      seconds(proved, lowered), seconds(begin, lowered), of(used.ru_utime) + of(used.ru_stime),
      static_cast<double>(used.ru_maxrss) / 1024);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 5 && std::string_view(argv[1]) == "once")
    return once(argv[2], {.ranks = std::atoi(argv[3]), .micro_batches = std::atoi(argv[4])});
  chevron::catalogue::for_each([](auto const& schedule) {
    benchmark::RegisterBenchmark(schedule.name, [&](benchmark::State& state) {
      describe_prove_lower(state, schedule);
    })->Unit(benchmark::kMillisecond);
  });
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::RunSpecifiedBenchmarks();
  return 0;
}
