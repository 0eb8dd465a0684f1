// The gain of slices of long sequences: a small GPT of one long sequence a microbatch, on ranks that are threads of a core each,
// under 1F1B and in slices under Seq1F1B, in turns within one run. Tokens a second, and the bytes of tensors that the fullest
// rank has at the worst moment of a step above those before it.
//
//   bench-slices                                16,384 tokens, 2 ranks, 2 microbatches, 4 slices
//   bench-slices --slices 8 --context 8192 --attention 0.6 --json
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <span>
#include <string>
#include <vector>

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/cross_entropy_loss.h>
#include <ATen/ops/randint.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <chevron/jobs/run_main.hpp>
#include <chevron/run.hpp>
#include <chevron/schedule.hpp>

#include "chevron-train/gpt.hpp"
#include "counting_allocator.hpp"
#include "job.hpp"

namespace {

using bench::counting_allocator;
using bench::this_rank;

struct options {
  chevron::train::gpt_size model{.layers = 2, .width = 64, .heads = 2, .context = 16384};
  int ranks = 2, micro_batches = 2, slices = 4, rounds = 5;
  double attention = -1;
  bool json = false;
};

struct measured {
  std::vector<double> seconds;  // by round
  std::int64_t bytes = 0;       // of the fullest rank
  double loss = 0;
  double median() const {
    std::vector<double> sorted = seconds;
    std::sort(sorted.begin(), sorted.end());
    return sorted.size() % 2 == 1 ? sorted[sorted.size() / 2] : (sorted[sorted.size() / 2 - 1] + sorted[sorted.size() / 2]) / 2;
  }
};

/// Trains two steps and measures the second.
void one_round(options const& o, std::string const& schedule, int slices, measured& out) {
  using namespace chevron;
  proved_program const program =
      lower(prove(catalogue::make_plan(schedule, {.ranks = o.ranks, .micro_batches = o.micro_batches, .slices = slices})));
  int const stages = program.view().plan.stages;
  at::Tensor const bytes = at::randint(256, {o.micro_batches, o.model.context}, at::kLong);
  at::Tensor const following = bytes.roll(-1, 1);
  std::vector<std::int64_t> grown(static_cast<std::size_t>(o.ranks));
  std::vector<double> all(static_cast<std::size_t>(o.ranks));
  double seconds = 0, loss = 0;
  run_threads({.pipeline_ranks = o.ranks}, [&](transport& comm) {
    this_rank = comm.topology().pipeline_rank();
    auto const build = [&](int s) {
      train::layer_cut const cut = train::cut_of(o.model.layers, stages, s);
      train::gpt_stage made(o.model, cut, train::shard_layout{shard_group(comm)}, 1, slices > 1);
      stage of(made, [made](std::span<at::Tensor const> given) mutable { return made->forward(given); });
      if (slices > 1 && cut.embeds) of.side_inputs({slice_start});
      return of.carries(train::slice_cache::names(cut.last - cut.first, slices));
    };
    trainer train({.program = program,
                   .transport = comm,
                   .stages = build,
                   .loss = [](at::Tensor const& logits,
                              at::Tensor const& next) { return at::cross_entropy_loss(logits.flatten(0, 1), next.flatten()); },
                   .optimizer = optimizer<fused_adamw>(torch::optim::AdamWOptions(1e-3)),
                   .options = {.clip_grad_norm = 1,
                               .slice_cuts = slices_by_cost(o.attention >= 0 ? o.attention : o.model.attention_share())}});
    double const here = 0;
    train.step({bytes}, {following});
    comm.all_gather({&here, 1}, all);
    counting_allocator::peak[this_rank] = counting_allocator::live[this_rank].load();
    std::int64_t const before = counting_allocator::peak[this_rank];
    comm.all_gather({&here, 1}, all);
    auto const begin = std::chrono::steady_clock::now();
    step_report const report = train.step({bytes}, {following});
    comm.all_gather({&here, 1}, all);
    grown[static_cast<std::size_t>(this_rank)] = counting_allocator::peak[this_rank] - before;
    if (comm.topology().global_rank != 0) return;
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
    loss = report.loss;
  });
  out.seconds.push_back(seconds);
  out.bytes = std::max(out.bytes, *std::max_element(grown.begin(), grown.end()));
  out.loss = loss;
}

}  // namespace

int main(int argc, char** argv) {
  return chevron::run_main(argc, argv, [](int count, char** values) {
    options o;
    CLI::App app("Time that slices of long sequences save.");
    app.add_option("--ranks", o.ranks)->check(CLI::Range(1, 16));
    app.add_option("--microbatches", o.micro_batches)->check(CLI::Range(1, 64));
    app.add_option("--slices", o.slices)->check(CLI::Range(2, 64));
    app.add_option("--context", o.model.context)->check(CLI::Range(64, 1 << 20));
    app.add_option("--layers", o.model.layers)->check(CLI::Range(1, 64));
    app.add_option("--width", o.model.width)->check(CLI::Range(8, 4096));
    app.add_option("--heads", o.model.heads)->check(CLI::Range(1, 64));
    app.add_option("--attention", o.attention, "share of attention in a sequence's time; without it, in its operations");
    app.add_option("--rounds", o.rounds)->check(CLI::Range(1, 100));
    app.add_flag("--json", o.json);
    int code = 0;
    if (!bench::parsed(app, count, values, code)) return code;
    static counting_allocator counting;
    c10::SetCPUAllocator(&counting, 1);
    at::set_num_threads(1);
    measured whole, sliced;
    for (int round = 0; round < o.rounds; ++round) {
      one_round(o, "1F1B", 1, whole);
      one_round(o, "Seq1F1B", o.slices, sliced);
    }
    std::vector<double> ratios;
    for (std::size_t i = 0; i < whole.seconds.size(); ++i) ratios.push_back(whole.seconds[i] / sliced.seconds[i]);
    std::sort(ratios.begin(), ratios.end());
    double const tokens = static_cast<double>(o.micro_batches) * o.model.context;
    double const faster = ratios[ratios.size() / 2], kept = static_cast<double>(sliced.bytes) / static_cast<double>(whole.bytes);
    if (o.json) {
      nlohmann::json const out{{"tokens_per_second", {{"1F1B", tokens / whole.median()}, {"Seq1F1B", tokens / sliced.median()}}},
                               {"bytes", {{"1F1B", whole.bytes}, {"Seq1F1B", sliced.bytes}}},
                               {"faster", faster},
                               {"memory", kept}};
      std::printf("%s\n", out.dump().c_str());
      return 0;
    }
    std::printf("%d ranks, %d microbatches of %d tokens, %d layers of width %d; medians of %d rounds in turns\n\n", o.ranks,
                o.micro_batches, o.model.context, o.model.layers, o.model.width, o.rounds);
    std::printf("%-16s %12s %16s %10s\n", "schedule", "tokens/s", "MiB a rank", "loss");
    auto const row = [&](std::string const& name, measured const& of) {
      std::printf("%-16s %12.0f %16.1f %10.5f\n", name.c_str(), tokens / of.median(), static_cast<double>(of.bytes) / (1 << 20),
                  of.loss);
    };
    row("1F1B", whole);
    row("Seq1F1B, k=" + std::to_string(o.slices), sliced);
    std::printf("\nSeq1F1B: %.3f times 1F1B's tokens a second (rounds: %.3f to %.3f), %.3f of its memory\n", faster,
                ratios.front(), ratios.back(), kept);
    return 0;
  });
}
