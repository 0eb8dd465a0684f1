#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/ops/bmm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>

#include <chevron/checkpoint/checkpoint.hpp>
#include <chevron/run/comm/shard_group.hpp>
#include <chevron/run/core/joint_calls.hpp>

#include <doctest/doctest.h>

#include "support/gloo_ranks.hpp"
#include "support/host_graphs.hpp"
#include "support/scratch_folder.hpp"
#include "support/small_model.hpp"

// Experts over several replicas: ranks with different batches call collectives together, and so must make the same calls.

using chevron::rank_group;
using chevron::shard_group;
using chevron::transport;

namespace {

constexpr std::int64_t wide = 6, experts = 12, samples = 2, rows = 12;  // rows: tokens of a microbatch, or of a slice
constexpr int steps = 4;

/// A job, and how its stages are built.
struct job {
  char const* schedule = "1F1B";
  int ranks = 2, replicas = 2, expert_replicas = 2, slices = 1, micro_batches = 4;
  bool recompute = false;
  chevron::trainer_options options = {};
};

at::Tensor drawn(std::uint64_t seed, std::vector<std::int64_t> const& sizes) {
  return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed), at::kDouble);
}

/// Each token goes to an expert by its place in the microbatch, so all exchanges have equal shapes: an exchange that meets
/// another exchange is no error, but a wrong result. A second exchange leads only to the loss `spread`.
struct placed : torch::nn::Module {
  shard_group group;
  at::Tensor before, weights, probe;
  at::Tensor const learns = at::arange(wide).ne(0).to(at::kDouble);  // column 0, the marks of `spread`, passes unchanged

  placed(transport& comm, int number) : group(comm, rank_group::experts) {
    before = register_parameter("before", drawn(900 + static_cast<std::uint64_t>(number), {wide, wide}) * 0.4);
    probe = register_parameter("probe", drawn(950 + static_cast<std::uint64_t>(number), {wide, wide}) * 0.4);
    auto const own = group.piece(experts);
    weights = register_parameter("weights", all_weights(number).narrow(0, own.begin, own.size).clone());
  }
  static at::Tensor all_weights(int number) {
    return drawn(1000 + static_cast<std::uint64_t>(number), {experts, wide, wide}) * 0.4;
  }
  at::Tensor forward(at::Tensor const& given) {
    at::Tensor const x = given.reshape({-1, wide}), h = at::linear(x, before).tanh();
    std::int64_t const ranks = group.shards(), each = rows / ranks;
    std::vector<std::int64_t> const counts(static_cast<std::size_t>(ranks * ranks), each);
    at::Tensor const expert = at::arange(each).repeat({ranks}) % group.piece(experts).size;
    at::Tensor const made = at::bmm(weights.index_select(0, expert), group.all_to_all(h, counts).unsqueeze(-1)).squeeze(-1);
    at::Tensor const there_and_back = group.all_to_all(group.all_to_all(at::linear(h, probe), counts), counts);
    add_spread(x, there_and_back);
    return (x + group.all_to_all(made, counts) * learns).view(given.sizes());
  }
  /// The mean over the marked tokens: NaN where none is marked.
  static void add_spread(at::Tensor const& x, at::Tensor const& probed) {
    at::Tensor const marked = x.select(1, 0).eq(1);
    chevron::add_loss("spread", (probed.square().mean(1) * marked).sum() / marked.sum());
  }
};

/// The same, with all experts and without exchanges.
struct plain : torch::nn::Module {
  at::Tensor before, weights, probe;
  explicit plain(int number) {
    before = register_parameter("before", drawn(900 + static_cast<std::uint64_t>(number), {wide, wide}) * 0.4);
    probe = register_parameter("probe", drawn(950 + static_cast<std::uint64_t>(number), {wide, wide}) * 0.4);
    weights = register_parameter("weights", placed::all_weights(number));
  }
  at::Tensor forward(at::Tensor const& given, std::int64_t ranks) {
    at::Tensor const x = given.reshape({-1, wide}), h = at::linear(x, before).tanh();
    std::int64_t const each = rows / ranks, own = experts / ranks;
    at::Tensor const place = at::arange(rows);
    at::Tensor const expert = place.div(each, "floor") * own + place % each % own;
    at::Tensor const made = at::bmm(weights.index_select(0, expert), h.unsqueeze(-1)).squeeze(-1);
    placed::add_spread(x, at::linear(h, probe));
    return (x + made * at::arange(wide).ne(0).to(at::kDouble)).view(given.sizes());
  }
};

/// The mean over the tokens that have a label: NaN where none has.
at::Tensor loss(at::Tensor const& y, at::Tensor const& target) {
  at::Tensor const labelled = target.select(2, 0).ne(-100);
  return ((y - target).square().mean(2) * labelled).sum() / labelled.sum();
}
double labels(at::Tensor const& target) { return target.select(2, 0).ne(-100).sum().item<double>(); }
double marks(at::Tensor const& input) { return input.select(2, 0).eq(1).sum().item<double>(); }

struct data {
  at::Tensor input, target;
};
/// A replica's batch of a step, in which some microbatches, or slices, have no label, and others no mark; each replica's others.
data batch_of(job const& of, int step, int replica) {
  std::int64_t const tokens = rows / samples;
  auto const seed = static_cast<std::uint64_t>(100 * step + replica);
  data out{drawn(seed, {of.micro_batches * samples, tokens * of.slices, wide}),
           drawn(50 + seed, {of.micro_batches * samples, tokens * of.slices, wide})};
  out.input.select(2, 0).fill_(0);
  for (int m = 0; m < of.micro_batches; ++m) {
    for (int s = 0; s < of.slices; ++s) {
      auto const unit = [&](at::Tensor const& t) { return t.narrow(0, m * samples, samples).narrow(1, s * tokens, tokens); };
      int const number = m * of.slices + s;
      if ((number + 2 * replica + step) % 3 == 0) unit(out.target).fill_(-100);
      if ((number + replica) % 2 == 0) unit(out.input).select(2, 0).select(1, number % 3).fill_(1);
    }
  }
  return out;
}

struct outcome {
  std::vector<double> losses, spreads;
  std::vector<at::Tensor> parameters;
};

outcome plain_loop(job const& of, int stages) {
  std::vector<std::shared_ptr<plain>> modules;
  std::vector<at::Tensor> all;
  for (int s = 0; s < stages; ++s) {
    modules.push_back(std::make_shared<plain>(s));
    for (auto const& p : modules.back()->parameters()) all.push_back(p);
  }
  torch::optim::SGD optimizer(all, 0.3);
  outcome out;
  for (int step = 0; step < steps; ++step) {
    double labelled = 0, marked = 0, sum = 0, spread = 0;
    for (int r = 0; r < of.replicas; ++r) {
      labelled += labels(batch_of(of, step, r).target);
      marked += marks(batch_of(of, step, r).input);
    }
    optimizer.zero_grad(false);
    for (int r = 0; r < of.replicas; ++r) {
      auto const whole = batch_of(of, step, r);
      for (int m = 0; m < of.micro_batches; ++m) {
        for (int s = 0; s < of.slices; ++s) {
          auto const unit = [&](at::Tensor const& t) {
            return t.narrow(0, m * samples, samples).narrow(1, s * rows / samples, rows / samples);
          };
          chevron::collected_losses given;
          at::Tensor x = unit(whole.input), total;
          for (auto& one : modules) x = one->forward(x, of.expert_replicas);
          double const of_labels = labels(unit(whole.target)) / labelled, of_marks = marks(unit(whole.input)) / marked;
          if (of_labels > 0) {
            at::Tensor const one = loss(x, unit(whole.target));
            sum += one.item<double>() * of_labels;
            total = one * of_labels;
          }
          if (of_marks > 0) {
            at::Tensor const one = given.sum("spread");
            spread += one.item<double>() * of_marks;
            at::Tensor const term = one * (0.5 * of_marks);
            total = total.defined() ? total + term : term;
          }
          if (total.defined()) total.backward();
        }
      }
    }
    optimizer.step();
    out.losses.push_back(sum);
    out.spreads.push_back(spread);
  }
  for (auto& p : all) out.parameters.push_back(p.detach().clone());
  return out;
}

outcome train_on(transport& comm, job const& of, chevron::proved_program const& program) {
  outcome out;
  auto options = of.options;
  options.loss_weight = [](chevron::batch const& b) { return labels(b.targets[0]); };
  options.on_report = [&](chevron::step_report const& report) {
    out.losses.push_back(report.loss);
    out.spreads.push_back(report.losses.at(0).value);
  };
  chevron::trainer train({.program = program,
                          .transport = comm,
                          .stages =
                              [&](int s) {
                                return chevron::stage(std::make_shared<placed>(comm, s))
                                    .experts("weights")
                                    .recompute(of.recompute)
                                    .independent_slices(of.slices > 1)
                                    .losses({{.name = "spread", .factor = 0.5, .weight = [](chevron::batch const& b) {
                                                return marks(b.inputs[0]);
                                              }}});
                              },
                          .loss = loss,
                          .optimizer = chevron::optimizer<torch::optim::SGD>(0.3),
                          .options = options});
  for (int step = 0; step < steps; ++step) {
    auto const mine = batch_of(of, step, comm.topology().replica());
    train.step(mine.input, mine.target);
  }
  train.check_copies();
  shard_group const group(comm, rank_group::experts);
  for (auto& s : train.stages()) {
    for (auto const& p : s.parameters())
      out.parameters.push_back(p.name == "weights" ? group.gathered(p.value, 0, experts) : p.value.detach().clone());
  }
  return out;
}

using driver = std::function<void(job const&, std::function<void(transport&)> const&)>;

void on_threads(job const& of, std::function<void(transport&)> const& body) {
  chevron::run_threads({.pipeline_ranks = of.ranks,
                        .replicas = of.replicas,
                        .expert_replicas = of.expert_replicas,
                        .rendezvous = true,
                        .deadline = std::chrono::seconds(60)},
                       body);
}

/// Compares a job, on all ranks, with the plain loop.
void check(job const& of, driver const& run = on_threads) {
  CAPTURE(of.schedule);
  CAPTURE(of.ranks);
  CAPTURE(of.replicas);
  CAPTURE(of.slices);
  auto const plan =
      chevron::catalogue::make_plan(of.schedule, {.ranks = of.ranks, .micro_batches = of.micro_batches, .slices = of.slices});
  auto const program = chevron::lower(chevron::prove(plan));
  outcome const expected = plain_loop(of, plan.stages);
  std::size_t const world = static_cast<std::size_t>(of.ranks * of.replicas);
  std::vector<outcome> got(world);
  run(of, [&](transport& comm) { got[static_cast<std::size_t>(comm.topology().global_rank)] = train_on(comm, of, program); });
  for (std::size_t r = 0; r < world; ++r) {
    CAPTURE(r);
    REQUIRE(got[r].losses.size() == expected.losses.size());
    for (std::size_t k = 0; k < expected.losses.size(); ++k) {
      CHECK(got[r].losses[k] == doctest::Approx(expected.losses[k]).epsilon(1e-12));
      CHECK(got[r].spreads[k] == doctest::Approx(expected.spreads[k]).epsilon(1e-12));
    }
    std::size_t next = 0;
    for (int s = 0; s < plan.stages; ++s) {
      if (program.view().plan.rank_of_stage(s) != static_cast<int>(r) % of.ranks) continue;
      for (std::size_t i = 0; i < 3; ++i, ++next) {
        CAPTURE(s);
        CAPTURE(i);
        REQUIRE(next < got[r].parameters.size());
        at::Tensor const& own = expected.parameters[static_cast<std::size_t>(s) * 3 + i];
        CHECK((got[r].parameters[next] - own).abs().max().item<double>() <= 1e-12);
      }
    }
  }
}

}  // namespace

TEST_CASE(
    "microbatches without labels, or that count nothing in a stage's loss, train experts over replicas as a plain loop does") {
  at::set_num_threads(1);
  for (int const ranks : {1, 2}) {
    for (char const* schedule : {"GPipe", "1F1B", "ZB-H1"}) check({.schedule = schedule, .ranks = ranks});
  }
  check({.schedule = "ZBVZeroBubble", .micro_batches = 6});
  check({.replicas = 3, .expert_replicas = 3});
  check({.schedule = "ZB-H1", .ranks = 1, .replicas = 4});
}

TEST_CASE("so do recomputation, post-validation, masked slices, and fused pairs, whose halves then run one after the other") {
  at::set_num_threads(1);
  check({.recompute = true});
  check({.schedule = "ZB-H1", .recompute = true});
  check({.schedule = "ZB-H1", .options = {.post_validation = true, .stable_steps = 1}});
  for (char const* schedule : {"GPipe", "Seq1F1B", "SeqZB-H1"}) check({.schedule = schedule, .slices = 2, .micro_batches = 2});
  check({.schedule = "Seq1F1B", .ranks = 1, .slices = 3, .micro_batches = 2, .recompute = true});
  check({.schedule = "DualPipeV", .micro_batches = 6, .options = {.overlap_pairs = true}});
}

TEST_CASE("the same over Gloo, with and without shared memory") {
  for (bool const shares : {true, false}) {
    check({.schedule = "ZB-H1"}, [&](job const& of, std::function<void(transport&)> const& body) {
      gloo_ranks::check_all_well(gloo_ranks::on_ranks(
          {.pipeline_ranks = of.ranks, .replicas = of.replicas, .expert_replicas = of.expert_replicas},
          [&](int) { return shares; }, [&](chevron::gloo_transport& comm) { body(comm); }));
    });
  }
}

TEST_CASE("whatever lets a rank decide alone about its calls is refused with experts over replicas, too") {
  using chevron::detail::joint_calls;
  CHECK_FALSE(joint_calls(chevron::topology{.replicas = 4}).any());
  CHECK(joint_calls(chevron::topology{.shards = 2}).words() == "2 shards");
  CHECK(joint_calls(chevron::topology{.replicas = 3, .shards = 2, .expert_replicas = 3}).words() ==
        "2 shards and experts over 3 replicas");
  chevron::topology const grid{.replicas = 2, .expert_replicas = 2};
  chevron::trainer_options const captured{.graphs = std::make_shared<host_graphs::maker>()};
  CHECK_THROWS_WITH_AS(chevron::detail::check(captured, grid),
                       doctest::Contains("graphs do not go with experts over 2 replicas, whose collectives are called in the order"),
                       chevron::usage_error);
  chevron::detail::check(captured, {.replicas = 2});
}

TEST_CASE("experts that one rank freezes and another rank trains are refused: their backwards would call other collectives") {
  auto const begin = [](int frozen_on) {
    chevron::run_threads({.replicas = 2, .expert_replicas = 2}, [&](transport& comm) {
      auto const program =
          chevron::lower(chevron::prove(chevron::catalogue::make_plan("1F1B", {.ranks = 1, .micro_batches = 2})));
      chevron::trainer const train({.program = program,
                                    .transport = comm,
                                    .stages =
                                        [&](int s) {
                                          auto const made = std::make_shared<placed>(comm, s);
                                          bool const frozen = frozen_on < 0 || comm.topology().global_rank == frozen_on;
                                          if (frozen) made->weights.requires_grad_(false);
                                          return chevron::stage(made).experts("weights");
                                        },
                                    .loss = loss,
                                    .optimizer = chevron::optimizer<torch::optim::SGD>(0.3)});
    });
  };
  CHECK_THROWS_WITH_AS(begin(1), doctest::Contains("stage 0 weights"), chevron::preflight_error);
  begin(-1);
}

namespace {

/// Counts in a buffer of all ranks, and in a buffer of its experts.
struct counting : torch::nn::Module {
  at::Tensor weight, seen, load;
  int rank;
  explicit counting(transport& comm) : rank(comm.topology().global_rank) {
    auto const own = shard_group(comm, rank_group::experts).piece(4);
    weight = register_parameter("weight", at::ones({wide}));
    seen = register_buffer("seen", at::zeros({1}));
    load = register_buffer("load", at::arange(own.begin, own.begin + own.size).to(at::kFloat));
  }
  at::Tensor forward(at::Tensor const& x) {
    if (is_training()) {
      at::NoGradGuard const off;
      seen.add_(1 + rank);
      load.add_(1 + rank);
    }
    return x * weight;
  }
};

using texts = std::vector<std::string>;

/// Two steps; the buffers of every rank, `seen: load`. \param folder of a checkpoint that is saved at the end
/// \param declared the buffer that is declared to be of experts; null: none
texts count_on(chevron::thread_options const& grid, bool broadcast, std::string const& folder, char const* declared = "load") {
  texts out(static_cast<std::size_t>(grid.replicas * grid.shards));
  auto const program = chevron::lower(chevron::prove(chevron::catalogue::make_plan("1F1B", {.ranks = 1, .micro_batches = 1})));
  chevron::run_threads(grid, [&](transport& comm) {
    auto const made = std::make_shared<counting>(comm);
    chevron::trainer train({.program = program,
                            .transport = comm,
                            .stages =
                                [&](int) {
                                  chevron::stage out(made);
                                  if (declared != nullptr) out.experts(declared);
                                  return out;
                                },
                            .loss = [](at::Tensor y, at::Tensor t) { return at::mse_loss(y, t); },
                            .optimizer = chevron::optimizer<torch::optim::SGD>(0.01),
                            .options = {.broadcast_buffers = broadcast, .when_same_batch = chevron::same_batch::allow}});
    for (int step = 0; step < 2; ++step) train.step(at::ones({2, wide}), at::zeros({2, wide}));
    if (!broadcast) made->seen.fill_(0);
    chevron::save_checkpoint(train, folder);
    std::string& mine = out[static_cast<std::size_t>(comm.topology().global_rank)];
    mine = std::to_string(made->seen.item<int>()) + ":";
    for (std::int64_t i = 0; i < made->load.numel(); ++i) mine += " " + std::to_string(made->load[i].item<int>());
  });
  return out;
}

}  // namespace

TEST_CASE("buffers of experts are copied over the ranks that hold the same experts alone") {
  scratch_folder const folder;
  auto const in = [&](char const* name) { return (folder.path / name).string(); };
  // Each rank adds 1 + its number in each of two steps, and then gets the buffers of the first rank that has the same experts.
  CHECK(count_on({.replicas = 2, .expert_replicas = 2}, true, in("two")) == texts{"2: 2 3", "2: 6 7"});
  CHECK(count_on({.replicas = 4, .expert_replicas = 2}, true, in("four")) == texts{"2: 2 3", "2: 6 7", "2: 2 3", "2: 6 7"});
  CHECK(count_on({.replicas = 2}, true, in("all")) == texts{"2: 2 3 4 5", "2: 2 3 4 5"});
  CHECK(count_on({.replicas = 2, .expert_replicas = 2}, false, in("own")) == texts{"0: 2 3", "0: 6 7"});
  CHECK_THROWS_WITH_AS(count_on({.replicas = 4, .expert_replicas = 2}, false, in("refused")),
                       doctest::Contains("load differs between replica 2 and replica 0"), chevron::checkpoint_error);
}

TEST_CASE("buffers that differ between ranks with different experts are refused with the declaration that they lack") {
  scratch_folder const folder;
  auto const refused = [&](chevron::thread_options const& grid, std::string const& words) {
    CHECK_THROWS_WITH_AS(count_on(grid, true, folder.path.string(), nullptr), doctest::Contains(words.c_str()),
                         chevron::preflight_error);
  };
  std::string const uncut = " of stage 0's load, which is not declared cut. Remedy: ";
  std::string const remedy = "if each holds experts of its own, stage.experts(\"load\"); if each holds the whole, begin with";
  refused({.replicas = 2, .expert_replicas = 2}, "replicas 0 and 1 hold different values" + uncut + remedy);
  refused({.replicas = 8, .expert_replicas = 8}, "hold different tensors (Float [0] and Float [1])" + uncut + remedy);
  refused({.shards = 2}, "shards 0 and 1 hold different values" + uncut + "if each holds a piece, stage.cut(\"load\", " +
                             "dimension); " + remedy);
}
