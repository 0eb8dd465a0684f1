// How long it takes to describe, prove and lower a schedule at run time, at P=64, V=2 (or what the schedule has), M=256: what a
// planner does once per candidate. bench/run/plan_beside_torch.py sets PyTorch's generate + validate + add communication beside
// it.
#include <chevron/schedule.hpp>

#include <benchmark/benchmark.h>

namespace {

constexpr chevron::shape size{.ranks = 64, .micro_batches = 256};

template <class Description>
void describe_prove_lower(benchmark::State& state, Description const& schedule) {
  int instructions = 0;
  for (auto _ : state) {
    chevron::plan const made = chevron::expand(schedule, size);
    if (chevron::check(made)) {
      state.SkipWithError("the schedule breaks a law");
      break;
    }
    chevron::program const program = chevron::lower(made);
    instructions = program.view().total();
    benchmark::DoNotOptimize(program.instructions.data);
  }
  state.counters["instructions"] = instructions;
}

}  // namespace

int main(int argc, char** argv) {
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
