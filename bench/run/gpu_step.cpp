// The time of a step on a GPU beside its computations: the host's time to enqueue an action and a message, and the GPU's idle
// time between two actions and over a whole step, from its first computation to the first of the next step.
//
//   bench-gpu_step [--json FILE]                       one rank, which waits for no other: blocks of about one millisecond, and
//                                                      layers next to nothing; kernel by kernel and as CUDA graphs
//   bench-gpu_step --ranks 2 [--backend nccl|copies]   two ranks: threads that share the GPU, or processes over NCCL or copies
//   .venv/bin/python bench/run/gpu_step_beside_torch.py   one rank beside torch.distributed.pipelining
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/randn.h>
#include <ATen/record_function.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <chevron/jobs/run_main.hpp>
#include <chevron/run.hpp>
#include <chevron/run/core/now_ns.hpp>
#include <chevron/schedule.hpp>
#include <chevron/transports/gpu/cuda_graph.hpp>

#include "gpu_job.hpp"
#include "job.hpp"

namespace {

struct options {
  int ranks = 1;
  std::string backend = "threads";
  std::vector<std::string> schedules{"1F1B", "ZB-H1", "ZBVZeroBubble", "DualPipeV"};
  int micro_batches = 8;
  int steps = 20;
  bool small = false;
  bool operations = false;
  std::string json;
};

/// An operation of LibTorch that this thread called: name, begin and end in the clock of traces.
struct called {
  std::string name;
  std::int64_t begin, end;
};

/// Notes LibTorch's operations of this thread while it exists.
class operation_record {
 public:
  operation_record() {
    made_.clear();
    handle_ = at::addThreadLocalCallback(at::RecordFunctionCallback(
        [](at::RecordFunction const&) -> std::unique_ptr<at::ObserverContext> {
          auto out = std::make_unique<begun>();
          out->at = chevron::now_ns();
          return out;
        },
        [](at::RecordFunction const& of, at::ObserverContext* context) {
          made_.push_back({of.name(), static_cast<begun*>(context)->at, chevron::now_ns()});
        }));
  }
  ~operation_record() { at::removeCallback(handle_); }
  operation_record(operation_record const&) = delete;
  operation_record& operator=(operation_record const&) = delete;

  /// Prints the outermost operations that began after `from`: begin, counted from `from`, and duration, in microseconds.
  static void print(std::int64_t from) {
    std::sort(made_.begin(), made_.end(), [](called const& a, called const& b) { return a.begin < b.begin; });
    std::int64_t until = from;
    for (called const& one : made_) {
      if (one.begin < until) continue;
      std::printf("  %8.1f %7.1f  %s\n", static_cast<double>(one.begin - from) * 1e-3,
                  static_cast<double>(one.end - one.begin) * 1e-3, one.name.c_str());
      until = one.end;
    }
    std::fflush(stdout);
  }

 private:
  struct begun : at::ObserverContext {
    std::int64_t at = 0;
  };
  static inline thread_local std::vector<called> made_;
  at::CallbackHandle handle_;
};

constexpr int warm_up = 5;  // graphs are captured before the fourth step

struct stage_size {
  char const* name;
  int layers, width, samples;
};

/// Of a step of one rank.
struct figures {
  std::size_t actions = 0, messages = 0;  ///< computations; sends and receives
  double host_us = 0;                     ///< of the host until all computations are asked for, by action
  double action_us = 0, message_us = 0;   ///< of the host for an action, and for a message at one end
  double end_us = 0;                      ///< of the host for the end of the step: norms, verdict, optimizer
  double action_ms = 0;                   ///< that the GPU takes for an action
  double step_ms = 0;                     ///< from one step's first computation to the next step's
  double boundary_ms = 0;                 ///< of these, from the last computation on
  double idle = 0;                        ///< share of the time from a step's first action to its last with no computation
  double idle_of_step = 0;                ///< the same of `step_ms`
};

chevron::stage layers(stage_size const& size, at::Device device) { return bench::linear_layers(size.layers, size.width, device); }

bool is_message(chevron::kind k) {
  using enum chevron::kind;
  return k == send_forward || k == send_backward || k == receive_forward || k == receive_backward;
}

/// The figures of a step's trace: of the host, in microseconds, and of the GPU, in nanoseconds.
struct step_of_rank {
  std::size_t actions = 0, messages = 0;
  double host = 0, asking = 0, sending = 0, end = 0;
  std::int64_t span = 0, computing = 0, sum = 0;
};

step_of_rank look_at(chevron::rank_trace const& record) {
  step_of_rank out;
  std::vector<std::pair<std::int64_t, std::int64_t>> busy;
  auto const entries = record.entries();
  for (std::size_t i = 0; i < entries.size(); ++i) {
    chevron::trace_event const& r = entries[i];
    // The host goes on with the next instruction when it has asked for this one.
    auto const took = static_cast<double>((i + 1 < entries.size() ? entries[i + 1].reached : r.end) - r.reached) * 1e-3;
    if (chevron::is_compute(r.op.kind)) {
      busy.emplace_back(r.start, r.end);
      out.asking += took;
    } else if (r.op.kind == chevron::kind::optimizer_step) {
      out.host = static_cast<double>(r.reached - record.begin()) * 1e-3;
      out.end = took;
    } else if (r.op.kind != chevron::kind::reduce_gradients) {
      out.sending += took;
      if (is_message(r.op.kind)) ++out.messages;
    }
  }
  out.actions = busy.size();
  std::sort(busy.begin(), busy.end());
  std::int64_t until = busy.front().first;
  for (auto const& [from, to] : busy) {
    out.computing += std::max<std::int64_t>(0, to - std::max(from, until));
    until = std::max(until, to);
    out.sum += to - from;
  }
  out.span = until - busy.front().first;
  return out;
}

/// One more step: LibTorch's operations on the host from the end of the last computation on.
void print_end_of_step(chevron::trainer& train, at::Tensor const& batch) {
  operation_record const record;
  train.step({batch}, {batch});
  std::int64_t from = 0;
  for (chevron::trace_event const& r : train.last_trace().entries()) {
    if (r.op.kind == chevron::kind::optimizer_step) from = r.reached;
  }
  std::printf("operations of a step's end: microseconds after it began, of the host in each\n");
  operation_record::print(from);
}

/// One trainer's steps. Events of two steps have no clock in common but the host's, so a step's time is that of all steps,
/// divided by their number, and the GPU's figures are means of all steps. The host's times are those of the median step.
figures measure(options const& wanted, chevron::proved_program const& program, stage_size const& size, bool graphs,
                chevron::transport& comm, at::Device device) {
  chevron::trainer train({.program = program,
                          .transport = comm,
                          .stages = [&](int) { return layers(size, device); },
                          .loss = [](at::Tensor y, at::Tensor target) { return at::mse_loss(y, target); },
                          .optimizer = chevron::optimizer<chevron::fused_adamw>(torch::optim::AdamWOptions(1e-3)),
                          .options = {.device = device, .graphs = graphs ? chevron::cuda_graphs() : nullptr}});
  auto const generator = at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{1});  // the same on all ranks
  at::Tensor const batch = at::randn({wanted.micro_batches * size.samples, size.width}, generator).to(device);
  std::vector<step_of_rank> seen;
  double began = 0;
  for (int step = 0; step < wanted.steps; ++step) {
    if (step == warm_up) began = bench::ms_when_done(device);
    bool const launched = train.step({batch}, {batch}).used_graphs;
    if (step < warm_up) continue;
    if (launched != graphs) throw chevron::usage_error("no CUDA graphs: " + train.graph_fallback_reason());
    seen.push_back(look_at(train.last_trace()));
  }
  if (wanted.operations) print_end_of_step(train, batch);
  auto const steps = static_cast<double>(seen.size());
  double const step_ms = (bench::ms_when_done(device) - began) / steps;
  double span = 0, computing = 0, sum = 0;
  for (step_of_rank const& each : seen) {
    span += static_cast<double>(each.span) * 1e-6 / steps;
    computing += static_cast<double>(each.computing) * 1e-6 / steps;
    sum += static_cast<double>(each.sum) * 1e-6 / steps;
  }
  std::nth_element(seen.begin(), seen.begin() + static_cast<std::ptrdiff_t>(seen.size() / 2), seen.end(),
                   [](step_of_rank const& a, step_of_rank const& b) { return a.host < b.host; });
  step_of_rank const& middle = seen[seen.size() / 2];
  auto const actions = static_cast<double>(middle.actions);
  return {.actions = middle.actions,
          .messages = middle.messages,
          .host_us = middle.host / actions,
          .action_us = middle.asking / actions,
          .message_us = middle.messages == 0 ? 0 : middle.sending / static_cast<double>(middle.messages),
          .end_us = middle.end,
          .action_ms = sum / actions,
          .step_ms = step_ms,
          .boundary_ms = step_ms - span,
          .idle = 1 - computing / span,
          .idle_of_step = 1 - computing / step_ms};
}

void run(options const& wanted, chevron::transport& comm, at::Device device) {
  bool const tells = comm.topology().global_rank == 0;
  nlohmann::json out = nlohmann::json::array();
  if (tells) {
    std::printf("%d rank%s, %s: rank 0's host and GPU\n", wanted.ranks, wanted.ranks == 1 ? "" : "s", wanted.backend.c_str());
    std::printf("%-16s %-17s %-8s %9s %9s %9s %9s %10s %9s %9s %8s %8s\n", "schedule", "stage", "launched", "us/action",
                "action us", "message us", "end us", "ms/action", "step ms", "boundary", "idle", "of step");
  }
  std::vector<stage_size> sizes{{"1 layer of 64", 1, 64, 4}};
  if (!wanted.small) sizes.push_back({"8 layers of 4096", 8, 4096, 512});
  for (std::string const& schedule : wanted.schedules) {
    auto const program = bench::program_of(schedule, wanted.ranks, wanted.micro_batches);
    for (stage_size const& size : sizes) {
      for (bool const graphs : {false, true}) {
        figures const f = measure(wanted, program, size, graphs, comm, device);
        if (!tells) continue;
        std::printf("%-16s %-17s %-8s %9.1f %9.1f %10.1f %9.0f %9.3f %9.3f %9.3f %7.2f%% %7.2f%%\n", schedule.c_str(), size.name,
                    graphs ? "graphs" : "kernels", f.host_us, f.action_us, f.message_us, f.end_us, f.action_ms, f.step_ms,
                    f.boundary_ms, f.idle * 100, f.idle_of_step * 100);
        std::fflush(stdout);
        out.push_back({{"schedule", schedule},
                       {"stage", size.name},
                       {"graphs", graphs},
                       {"ranks", wanted.ranks},
                       {"backend", wanted.backend},
                       {"actions", f.actions},
                       {"messages", f.messages},
                       {"host_us", f.host_us},
                       {"action_us", f.action_us},
                       {"message_us", f.message_us},
                       {"end_us", f.end_us},
                       {"action_ms", f.action_ms},
                       {"step_ms", f.step_ms},
                       {"boundary_ms", f.boundary_ms},
                       {"idle", f.idle},
                       {"idle_of_step", f.idle_of_step}});
      }
    }
  }
  if (tells) bench::write_json(wanted.json, out);
}

}  // namespace

int main(int argc, char** argv) {
  return chevron::run_main(argc, argv, [](int count, char** values) {
    CLI::App app{"time of a step beside its computations, on a GPU", "bench-gpu_step"};
    options wanted;
    app.add_option("--ranks", wanted.ranks)->check(CLI::Range(1, 8))->capture_default_str();
    app.add_option("--backend", wanted.backend, "ranks are threads on one GPU, or processes")
        ->check(CLI::IsMember({"threads", "nccl", "copies"}))
        ->capture_default_str();
    app.add_option("--schedules", wanted.schedules, "of the catalogue")->delimiter(',')->capture_default_str();
    app.add_option("--microbatches", wanted.micro_batches)->check(CLI::Range(1, 1000))->capture_default_str();
    app.add_option("--steps", wanted.steps, "the first five are not counted")
        ->check(CLI::Range(warm_up + 1, 100000))
        ->capture_default_str();
    app.add_flag("--small", wanted.small, "only stages of next to nothing");
    app.add_flag("--operations", wanted.operations, "print LibTorch's operations at the end of a step, of rank 0's thread");
    app.add_option("--json", wanted.json, "write the figures to this file, too");
    int code = 0;
    if (!bench::parsed(app, count, values, code)) return code;
    bench::on_gpu_ranks(wanted.backend, wanted.ranks,
                        [&](chevron::transport& comm, at::Device device) { run(wanted, comm, device); });
    return 0;
  });
}
