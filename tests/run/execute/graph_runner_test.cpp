// Steps whose computations were captured, on graphs of LibTorch's operators: the same to the last bit as kernel by kernel,
// whatever changes from step to step, and in words why they were not launched.
#include "support/host_graphs.hpp"
#include "support/sliced_model.hpp"
#include "support/small_model.hpp"
#include "support/thread_ranks.hpp"

#include <torch/nn/modules/batchnorm.h>

#include <chevron/run/core/allocator_stats.hpp>
#include <chevron/run/execute/capture_policy.hpp>
#include <chevron/run/execute/memory_meter.hpp>
#include <chevron/transports/streams/stream_transport.hpp>
#include "support/host_streams.hpp"

#include <doctest/doctest.h>

namespace {

using chevron::detail::run_mode;

// A row is 64 bytes. Graphs read a microbatch from memory of its own: where a row begins inside of a line of the cache, the
// products of matrices differ in the last bit.
constexpr int width = 16;

chevron::stage build_stage(int number) {
  at::manual_seed(100 + number);
  return torch::nn::Sequential(torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})), torch::nn::Linear(width, width),
                               torch::nn::Functional([](at::Tensor const& x) { return x.tanh().mul(2); }));
}

small_model::batch make_batch(std::int64_t samples, int seed) {
  auto const generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(seed));
  return {at::randn({samples, width}, generator), at::randn({samples, width}, generator)};
}

/// The results of a job, by rank and step.
struct seen {
  std::vector<std::vector<double>> numbers;       // by rank: loss, norm, factor of each step
  std::vector<std::vector<at::Tensor>> tensors;   // by rank: parameters and buffers at the end
  std::vector<std::vector<std::string>> why_not;  // by rank and step
  std::size_t graphs = 0, operations = 0;         // of rank 0
  explicit seen(int world)
      : numbers(static_cast<std::size_t>(world)),
        tensors(static_cast<std::size_t>(world)),
        why_not(static_cast<std::size_t>(world)) {}
};

struct job {
  chevron::stage_builder build = build_stage;
  chevron::trainer_options options = {};
  int steps = 9;
  std::function<int(int)> samples = [](int) { return 9; };  // by step
  bool accumulates = false;
  bool with_extra = false;
};

void train_on(chevron::transport& comm, chevron::proved_program const& program, job const& what, bool graphs, seen& into) {
  auto const rank = static_cast<std::size_t>(comm.topology().global_rank);
  chevron::trainer_options options = what.options;
  auto const maker = std::make_shared<host_graphs::maker>();
  if (graphs) options.graphs = maker;
  options.learning_rate = [](long step) { return 0.05 / static_cast<double>(step + 1); };
  options.on_report = [&](chevron::step_report const& report) {
    into.numbers[rank].insert(into.numbers[rank].end(), {report.loss, report.grad_norm, report.loss_factor});
    for (auto const& one : report.losses) into.numbers[rank].push_back(one.value);
  };
  chevron::trainer train(small_model::setup(program, comm, what.build, options,
                                            chevron::optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(0.05))));
  for (int step = 0; step < what.steps; ++step) {
    auto const data = make_batch(what.samples(step), 7 * step + comm.topology().replica());
    chevron::batch whole{{data.input}, {data.target}};
    if (what.with_extra) {
      whole.side_inputs.push_back({"shift", at::full({width}, 0.1 * step), true});
      whole.side_inputs.push_back({"each", data.input.narrow(1, 0, 1).cos()});
    }
    double const all = what.accumulates ? 2.0 * what.samples(step) * comm.topology().replicas : 0;
    if (what.accumulates) {
      auto const more = make_batch(what.samples(step), 1000 + step);
      train.accumulate({more.input}, {more.target}, all);
    }
    auto const report = train.step(whole, all);
    into.why_not[rank].push_back(train.graph_fallback_reason());
    // Of several runs in a step all must have been launched.
    if (!what.accumulates) CHECK(report.used_graphs == train.graph_fallback_reason().empty());
    CHECK(report.memory.active == 0);
  }
  train.synchronize();
  for (chevron::stage& s : train.stages()) {
    for (auto const* list : {&s.parameters(), &s.buffers()}) {
      for (auto const& p : *list) into.tensors[rank].push_back(p.value.detach().clone());
    }
  }
  if (rank == 0) {
    into.graphs = maker->graphs;
    into.operations = maker->operations;
  }
}

bool same(seen const& a, seen const& b) {
  bool out = a.numbers == b.numbers && a.tensors.size() == b.tensors.size();
  for (std::size_t r = 0; out && r < a.tensors.size(); ++r) {
    out = a.tensors[r].size() == b.tensors[r].size() && !a.tensors[r].empty();
    for (std::size_t i = 0; out && i < a.tensors[r].size(); ++i) out = at::equal(a.tensors[r][i], b.tensors[r][i]);
  }
  return out;
}

std::string const warming_up = "the first 3 steps with batches of the same shapes run kernel by kernel";

/// With graphs and without, on threads.
seen compared(char const* name, int ranks, int replicas, int micro_batches, job const& what) {
  auto const program = chevron::lower(chevron::prove(small_model::plan_of(name, ranks, micro_batches)));
  seen without(ranks * replicas), with(ranks * replicas);
  for (bool const graphs : {false, true}) {
    chevron::run_threads({.pipeline_ranks = ranks, .replicas = replicas},
                         [&](chevron::transport& comm) { train_on(comm, program, what, graphs, graphs ? with : without); });
  }
  INFO(std::string(name) << " on " << ranks << " × " << replicas);
  CHECK(same(with, without));
  for (auto const& of_rank : without.why_not) CHECK(of_rank.back() == "no graphs were asked for");
  return with;
}

void check_launched_from(seen const& with, std::size_t step) {
  for (auto const& of_rank : with.why_not) {
    for (std::size_t s = 0; s < of_rank.size(); ++s) CHECK(of_rank[s] == (s < step ? warming_up : ""));
  }
}

}  // namespace

TEST_CASE("every schedule, launched, computes what it computes kernel by kernel: other data, rates and clipping in each step") {
  for (char const* const name : small_model::schedules) {
    auto const with = compared(name, 2, 1, 5, {.options = {.clip_grad_norm = 0.5}});
    check_launched_from(with, 3);
    CHECK(with.operations > 4 * with.graphs);
    CHECK(with.graphs >= 10);
  }
  check_launched_from(compared("1F1B", 3, 2, 4, {.options = {.bucket_bytes = 100}}), 3);
  check_launched_from(compared("ZBVZeroBubble", 1, 2, 3, {}), 3);
}

TEST_CASE("the halves of a fused pair are one graph") {
  auto const alone = compared("DualPipeV", 2, 1, 6, {});
  auto const pairs = compared("DualPipeV", 2, 1, 6, {.options = {.overlap_pairs = true}});
  check_launched_from(pairs, 3);
  CHECK(pairs.graphs < alone.graphs);
  CHECK(pairs.operations == alone.operations);
}

TEST_CASE("recomputation, buffers, parts, and tensors of the batch that stages take by name") {
  auto const build = [](int number) {
    at::manual_seed(300 + number);
    chevron::stage first = torch::nn::Sequential(torch::nn::Linear(width, width), torch::nn::BatchNorm1d(width));
    torch::nn::Linear scale(width, width);
    chevron::stage second([scale](at::Tensor const& x, at::Tensor const& shift,
                                  at::Tensor const& each) mutable { return (scale->forward(x) + shift * each).tanh(); },
                          {{"weight", scale->weight}, {"bias", scale->bias}});
    second.side_inputs({"shift", "each"});
    first.recompute(number % 2 == 0);
    second.recompute(number == 1);
    return chevron::in_sequence({first, second});
  };
  for (char const* const name : {"1F1B", "ZB-H1", "ZBVZeroBubble"}) {
    check_launched_from(compared(name, 2, 1, 3, {.build = build, .samples = [](int) { return 13; }, .with_extra = true}), 3);
  }
}

TEST_CASE("losses of stages, whose weights change from step to step, and targets of the batch") {
  auto const build = [](int number) {
    at::manual_seed(500 + number);
    torch::nn::Linear layer(width, width), head(width, width);
    auto const both = std::make_shared<torch::nn::Module>();
    both->register_module("layer", layer.ptr());
    both->register_module("head", head.ptr());
    auto const give = [layer, head](at::Tensor x, at::Tensor target) mutable {
      x = layer(x).tanh();
      chevron::add_loss("size", x.square().mean());
      chevron::add_loss("ahead", at::mse_loss(head(x), target));
      return x;
    };
    auto const counts = [](chevron::batch const& b) { return 1 + b.targets[0].abs().sum().item<double>(); };
    return chevron::stage(both, give)
        .targets()
        .recompute(number % 2 == 1)
        .losses({{.name = "size", .factor = 0.1}, {.name = "ahead", .factor = 2, .weight = counts}});
  };
  for (char const* const name : {"1F1B", "ZB-H1", "ZBVZeroBubble"})
    check_launched_from(compared(name, 2, 2, 3, {.build = build, .options = {.scaling = chevron::loss_scaling{.initial = 64}}}),
                        3);
  check_launched_from(compared("DualPipeV", 2, 1, 6, {.build = build, .options = {.overlap_pairs = true}}), 3);
}

TEST_CASE("half precision with a scaled loss, weighed microbatches, accumulated batches, steps that are taken back") {
  auto const half = [](int number) {
    at::manual_seed(400 + number);
    torch::nn::Linear inner(width, width);
    inner->to(at::kBFloat16);
    return chevron::stage(
        [inner](at::Tensor const& x) mutable { return inner->forward(x.to(at::kBFloat16)).tanh().mul(2).to(at::kFloat); },
        {{"weight", inner->weight}, {"bias", inner->bias}});
  };
  chevron::trainer_options scaled{.scaling = chevron::loss_scaling{.initial = 1024, .growth_interval = 2}};
  auto const with = compared("ZB-H1", 2, 2, 4, {.build = half, .options = scaled});
  check_launched_from(with, 3);
  CHECK(with.numbers[0][2] != with.numbers[0].back());  // its factor grew

  chevron::trainer_options weighed{
      .loss_weight = [](chevron::batch const& m) { return 1 + std::abs(m.inputs[0].sum().item<double>()); }};
  check_launched_from(compared("Interleaved1F1B", 2, 1, 4, {.options = weighed}), 3);

  // Two runs of the program in a step: the third is launched first, in the second step.
  auto const accumulated = compared("1F1B", 2, 2, 3, {.accumulates = true});
  for (auto const& of_rank : accumulated.why_not) {
    CHECK(of_rank[0] == warming_up);
    CHECK(of_rank[1] == "");
    CHECK(of_rank.back() == "");
  }

  chevron::trainer_options undone{.clip_grad_norm = 0.6, .post_validation = true, .stable_steps = 1};
  check_launched_from(compared("ZB-H2", 3, 1, 6, {.options = undone}), 3);
  check_launched_from(compared("1F1B", 2, 1, 4, {.options = undone}), 3);
  // Captured while parameters still have the gradients that the pending step was taken with.
  check_launched_from(compared("ZB-H2", 2, 1, 4, {.build = half, .options = {.post_validation = true, .stable_steps = 1}}), 3);
}

TEST_CASE("a batch of other shapes runs kernel by kernel; those that were captured are launched again, or others instead") {
  auto const with = compared("ZB-H1", 2, 1, 3, {.steps = 15, .samples = [](int step) {
                                                  return step == 5 ? 7 : step >= 8 ? 11 : 9;
                                                }});
  std::string const other = "the batch has other shapes than when the step was captured";
  for (auto const& of_rank : with.why_not) {
    CHECK(of_rank == std::vector<std::string>{warming_up, warming_up, warming_up, "", "", other, "", "", other, other, other, "",
                                              "", "", ""});
  }
}

TEST_CASE("over a transport that moves memory while the next computations run, and sends from where graphs write") {
  for (char const* const name : {"1F1B", "Interleaved1F1B", "ZBVZeroBubble"}) {
    auto const program = chevron::lower(chevron::prove(small_model::plan_of(name, 2, 6)));
    seen without(4), with(4);
    job const what{};
    for (bool const graphs : {false, true}) {
      auto const said = thread_ranks::said(thread_ranks::run(2, 2, [&](chevron::topology const& where, auto const& store, auto const& watch) {
        chevron::stream_transport<chevron::host_streams> comm(where, store, watch, std::chrono::seconds(100));
        comm.deadline(std::chrono::seconds(100));
        train_on(comm, program, what, graphs, graphs ? with : without);
        comm.close();
      }));
      for (auto const& each : said) CHECK(each == "");
    }
    INFO(std::string(name));
    CHECK(same(with, without));
    check_launched_from(with, 3);
  }
}

TEST_CASE("what cannot be captured is said in words, and trains as it would have") {
  auto const drawing =
      compared("1F1B", 2, 1, 3, {.build = [](int s) {
                 at::manual_seed(200 + s);
                 return chevron::stage(torch::nn::Sequential(torch::nn::Linear(width, width), torch::nn::Dropout(0.2)));
               }});
  CHECK(drawing.why_not[0].back() == "stage 0 draws random numbers, and each step has seeds of its own");
  CHECK(drawing.why_not[1].back() == "stage 1 draws random numbers, and each step has seeds of its own");

  auto const looking = [](int number) {
    torch::nn::Linear inner(width, width);
    return chevron::stage(
        [inner, number](at::Tensor const& x) mutable {
          at::Tensor const y = inner->forward(x);
          return number == 1 && y.sum().item<double>() > 1e9 ? y * 2 : y;
        },
        {{"weight", inner->weight}, {"bias", inner->bias}});
  };
  auto const build = [&](int number) {
    at::manual_seed(500 + number);
    return looking(number);
  };
  auto const failed = compared("ZB-H1", 2, 1, 4, {.build = build});
  // Each rank decides for itself.
  check_launched_from(
      [&] {
        seen only(1);
        only.why_not[0] = failed.why_not[0];
        return only;
      }(),
      3);
  CHECK(failed.why_not[1][2] == warming_up);
  CHECK(failed.why_not[1][3] ==
        "capturing failed: rank 1, step 3, 1F0: stage 1 threw: operation not permitted when stream is capturing");
  CHECK(failed.why_not[1].back() == failed.why_not[1][3]);
}

TEST_CASE("from runs kernel by kernel to a capture, and back") {
  chevron::detail::run_signature const one{{1, 2}, {nullptr}};
  chevron::detail::run_signature const other{{1, 3}, {nullptr}};
  int some = 0;
  chevron::detail::run_signature const moved{{1, 2}, {&some}};

  chevron::detail::capture_policy state;
  CHECK(!state.holds());
  for (int i = 0; i < 3; ++i) {
    CHECK(state.next(one) == run_mode::one_by_one);
    CHECK(state.why_not() == warming_up);
  }
  CHECK(state.next(one) == run_mode::capture);
  state.captured();
  CHECK(state.holds());
  CHECK(state.next(one) == run_mode::launch);
  CHECK(state.why_not() == "");
  CHECK(state.next(other) == run_mode::one_by_one);
  CHECK(state.why_not() == "the batch has other shapes than when the step was captured");
  CHECK(state.next(one) == run_mode::launch);
  for (int i = 0; i < 3; ++i) {
    CHECK(state.next(moved) == run_mode::one_by_one);
    CHECK(state.why_not() == "parameters or buffers have other memory than when the step was captured");
  }
  CHECK(state.next(moved) == run_mode::capture);
  state.captured();
  CHECK(state.next(moved) == run_mode::launch);
  CHECK(state.next(one) == run_mode::one_by_one);

  // After a failure, and where it was refused from the beginning, it is not tried again.
  chevron::detail::capture_policy refused("this rank computes on cpu, not on a GPU");
  for (int i = 0; i < 6; ++i) CHECK(refused.next(one) == run_mode::one_by_one);
  CHECK(refused.why_not() == "this rank computes on cpu, not on a GPU");
  state.failed("because");
  CHECK(!state.holds());
  for (int i = 0; i < 6; ++i) CHECK(state.next(moved) == run_mode::one_by_one);
  CHECK(state.why_not() == "capturing failed: because");
}

namespace {

/// As much of a device's allocator as is watched.
struct counting_allocator final : c10::DeviceAllocator {
  c10::CachingDeviceAllocator::DeviceStats stats{};
  void use(std::int64_t bytes) {
    for (auto* const which : {&stats.allocated_bytes[0], &stats.active_bytes[0]})
      bytes > 0 ? which->increase(static_cast<std::size_t>(bytes)) : which->decrease(static_cast<std::size_t>(-bytes));
  }
  c10::DataPtr allocate(std::size_t) override { return {}; }
  void copy_data(void*, void const*, std::size_t) const override {}
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override {}
  void recordStream(c10::DataPtr const&, c10::Stream) override {}
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override { return stats; }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    stats.active_bytes[0].reset_peak();
    stats.reserved_bytes[0].reset_peak();
  }
  std::pair<std::size_t, std::size_t> getMemoryInfo(c10::DeviceIndex) override { return {1, 1000}; }
};

}  // namespace

TEST_CASE("the peak of a step's memory, beside what the schedule keeps") {
  counting_allocator from;
  chevron::detail::allocator_stats memory(&from, 0);
  from.use(500);
  from.use(-400);
  from.stats.reserved_bytes[0].increase(600);
  memory.begin_step();
  CHECK(memory.in_use() == 100);
  from.use(60);
  from.use(-40);
  auto const use = memory.peak(50);
  CHECK(use.active == 160);
  CHECK(use.reserved == 600);
  CHECK(use.planned == 150);
  CHECK(use.total == 1000);
  CHECK(memory.in_use() == 120);

  chevron::detail::allocator_stats none(at::kCPU);
  none.begin_step();
  CHECK(!none.watches());
  CHECK(none.peak(50).planned == 0);
}

TEST_CASE("carries with graphs") {
  at::set_num_threads(1);
  for (char const* name : {"Seq1F1B", "SeqZB-H1"}) {
    auto const plan = sliced_model::plan_of(name, {.ranks = 2, .micro_batches = 2, .slices = 2});
    std::vector<std::vector<double>> losses;
    std::vector<std::vector<at::Tensor>> parameters;  // of rank 0, after all steps
    std::size_t graphs = 0;
    for (bool const with : {false, true}) {
      auto& own = losses.emplace_back();
      auto& trained = parameters.emplace_back();
      chevron::run_threads({.pipeline_ranks = 2}, [&](chevron::transport& comm) {
        auto const maker = std::make_shared<host_graphs::maker>();
        chevron::trainer train(small_model::setup(plan, comm, sliced_model::build_attention, {.graphs = with ? maker : nullptr}));
        for (int step = 0; step < 8; ++step) {
          auto const data = sliced_model::make_sequences(2, 8, step);
          auto const report = train.step(data.input, data.target);
          if (comm.topology().global_rank == 0) own.push_back(report.loss);
        }
        if (comm.topology().global_rank != 0) return;
        for (auto const& p : train.stages()[0].parameters()) trained.push_back(p.value.detach().clone());
        if (!with) return;
        graphs = maker->graphs;
        INFO(train.graph_fallback_reason());
        CHECK(train.graph_fallback_reason().empty());
      });
    }
    CHECK(graphs > 0);
    CHECK(losses[0] == losses[1]);
    REQUIRE(!parameters[0].empty());
    REQUIRE(parameters[0].size() == parameters[1].size());
    for (std::size_t i = 0; i < parameters[0].size(); ++i) CHECK(at::equal(parameters[0][i], parameters[1][i]));
  }
}
