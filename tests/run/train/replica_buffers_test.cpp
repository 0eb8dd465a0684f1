// Buffers of replicas: between two steps all have those of replica 0, whatever they are made of and however they travel.
#include "support/gloo_ranks.hpp"
#include "support/small_model.hpp"

#include <chevron/checkpoint/checkpoint.hpp>
#include <chevron/transports/gloo/gloo_transport.hpp>
#include <chevron/transports/streams/stream_transport.hpp>
#include "support/host_streams.hpp"

#include <torch/nn/modules/batchnorm.h>

#include <cstdlib>
#include <filesystem>
#include <memory>

#include <doctest/doctest.h>

using namespace small_model;
using namespace std::chrono_literals;

namespace {

/// Counts, remembers and scribbles, as no sum of floating-point numbers could carry it over.
struct watching_impl : torch::nn::Module {
  explicit watching_impl(bool expanded = true) {
    samples = register_buffer("samples", at::zeros({}, at::kLong));
    positive = register_buffer("positive", at::zeros({width}, at::kBool));
    bits = register_buffer("bits", at::zeros({3}, at::kFloat));
    column = register_buffer("column", at::zeros({width, 2}, at::kDouble).select(1, 0));
    constant = register_buffer("constant", expanded ? at::ones({1}).expand({4}) : at::ones({4}));
    register_buffer("nothing", at::zeros({0}));
  }
  at::Tensor forward(at::Tensor x) {
    auto const seen = x.detach();
    samples.add_(x.size(0));
    positive.logical_xor_(seen.select(0, 0) > 0);
    // NaNs that say something in their lower bits, and a zero with a sign.
    auto const words = bits.view(at::kInt);
    words[0].fill_(0x7fc00000 + static_cast<int>(seen.abs().sum().item<float>() * 1000) % 0x3fffff);
    words[1].fill_(static_cast<int>(0x80000000));
    words[2].add_(1);  // the smallest number above the one before
    column.add_(seen.mean(0));
    return x + 0.1 * constant[0];
  }
  at::Tensor samples, positive, bits, column, constant;
};

chevron::stage build_watching_with(int number, bool expanded) {
  at::manual_seed(100 + number);
  return torch::nn::Sequential(torch::nn::Linear(width, width), torch::nn::BatchNorm1d(width),
                               std::make_shared<watching_impl>(expanded),
                               torch::nn::Functional([](at::Tensor const& x) { return x.tanh(); }));
}
chevron::stage build_watching(int number) { return build_watching_with(number, true); }

/// Its bytes.
at::Tensor bytes_of(at::Tensor const& t) {
  return t.numel() == 0 ? at::empty({0}, at::kByte) : t.detach().contiguous().view({-1}).view(at::kByte).clone();
}
tensors buffers_of(std::vector<chevron::stage> const& stages) {
  tensors out;
  for (auto const& s : stages) {
    for (auto const& b : s.buffers()) out.push_back(bytes_of(b.value));
  }
  return out;
}
bool same(tensors const& a, tensors const& b) {
  return a.size() == b.size() &&
         std::equal(a.begin(), a.end(), b.begin(), [](auto const& x, auto const& y) { return at::equal(x, y); });
}

struct setting {
  int replicas = 2;
  int passes = 1;  // runs of the program in a step
  bool recompute = false;
  static constexpr int ranks = 2, micro_batches = 3, steps = 3;
  static constexpr std::int64_t samples = 12;

  batch data(int step, int pass, int replica) const { return make_batch(samples, 100 * step + 10 * pass + replica); }
  double all() const { return static_cast<double>(samples) * passes * replicas; }
};

/// A plain loop in which replica 0's buffers are copied to all after each step.
struct plain_outcome {
  std::vector<double> losses;
  std::vector<tensors> buffers;  // by step
};
plain_outcome plain_loop(setting const& what) {
  std::vector<std::vector<chevron::stage>> replicas(static_cast<std::size_t>(what.replicas));
  std::vector<std::unique_ptr<torch::optim::Optimizer>> optimizers;
  auto const parameters_of = [](std::vector<chevron::stage> const& stages) {
    tensors out;
    for (auto const& s : stages) {
      for (auto const& p : s.parameters()) out.push_back(p.value);
    }
    return out;
  };
  for (auto& stages : replicas) {
    for (int s = 0; s < setting::ranks; ++s) stages.push_back(build_watching_with(s, false));
    for (auto& s : stages) s.training(true);
    optimizers.push_back(sgd(parameters_of(stages)));
  }
  plain_outcome out;
  for (int step = 0; step < setting::steps; ++step) {
    double loss = 0;
    for (std::size_t r = 0; r < replicas.size(); ++r) {
      for (auto& p : parameters_of(replicas[r])) p.mutable_grad() = at::zeros_like(p);
      for (int pass = 0; pass < what.passes; ++pass) {
        auto const whole = what.data(step, pass, static_cast<int>(r));
        for (int m = 0; m < setting::micro_batches; ++m) {
          auto const part = chevron::samples_of(setting::samples, setting::micro_batches, m);
          tensors values{whole.input.narrow(0, part.first, part.count)}, next;
          for (auto& s : replicas[r]) {
            s.forward(values, next);
            values = next;
          }
          auto const one = mean_square(values[0], whole.target.narrow(0, part.first, part.count));
          double const weight = static_cast<double>(part.count) / what.all();
          loss += one.item<double>() * weight;
          torch::autograd::backward({one}, {at::full({}, weight)});
        }
      }
    }
    at::NoGradGuard const off;
    auto const first = parameters_of(replicas[0]);
    for (std::size_t q = 0; q < first.size(); ++q) {
      at::Tensor sum = first[q].grad().clone();
      for (std::size_t r = 1; r < replicas.size(); ++r) sum.add_(parameters_of(replicas[r])[q].grad());
      for (auto& stages : replicas) parameters_of(stages)[q].mutable_grad().copy_(sum);
    }
    for (auto& one : optimizers) one->step();
    for (std::size_t r = 1; r < replicas.size(); ++r) {
      for (std::size_t s = 0; s < replicas[r].size(); ++s) {
        auto const& from = replicas[0][s].buffers();
        auto const& to = replicas[r][s].buffers();
        for (std::size_t b = 0; b < from.size(); ++b) to[b].value.detach().copy_(from[b].value);
      }
    }
    out.losses.push_back(loss);
    out.buffers.push_back(buffers_of(replicas[0]));
  }
  return out;
}

using driver = std::function<void(setting const&, std::function<void(transport&)> const&)>;

void on_threads(setting const& what, std::function<void(transport&)> const& body) {
  chevron::run_threads({.pipeline_ranks = setting::ranks, .replicas = what.replicas}, body);
}
driver over_gloo(bool near) {
  return [near](setting const& what, std::function<void(transport&)> const& body) {
    gloo_ranks::check_all_well(gloo_ranks::on_ranks(
        setting::ranks, what.replicas, [near](int) { return near; }, [&](auto& comm) { body(comm); }));
  };
}
void over_streams(setting const& what, std::function<void(transport&)> const& body) {
  auto const thrown = thread_ranks::run(setting::ranks, what.replicas, [&](auto const& where, auto const& store, auto const& watch) {
    chevron::stream_transport<chevron::host_streams> comm(where, store, watch, 60000ms);
    body(comm);
    comm.close();
  });
  gloo_ranks::check_all_well(thread_ranks::said(thrown));
}

chevron::proved_program const& training() {
  static auto const one = chevron::lower(chevron::prove(plan_of("1F1B", setting::ranks, setting::micro_batches)));
  return one;
}

chevron::stage_builder builder_of(setting const& what) {
  return [again = what.recompute](int s) { return build_watching_with(s, !again).recompute(again); };
}

void run_step(chevron::trainer& train, setting const& what, int step) {
  int const replica = train.comm().topology().replica();
  for (int pass = 0; pass + 1 < what.passes; ++pass) {
    auto const data = what.data(step, pass, replica);
    train.accumulate({data.input}, {data.target}, what.all());
  }
  auto const data = what.data(step, what.passes - 1, replica);
  train.step({data.input}, {data.target}, what.all());
}

}  // namespace

TEST_CASE("after each step all replicas have replica 0's buffers to the last bit, as in a plain loop that copies them") {
  at::set_num_threads(1);
  struct {
    char const* name;
    driver run;
    setting what;
  } const cases[] = {{"threads", on_threads, {2}},
                     {"threads", on_threads, {3, 2}},
                     {"threads, recomputed", on_threads, {2, 1, true}},
                     {"shared memory", over_gloo(true), {3}},
                     {"Gloo", over_gloo(false), {2, 2}},
                     {"streams", over_streams, {3}}};
  for (auto const& one : cases) {
    CAPTURE(one.name);
    setting const what = one.what;
    auto const plain = plain_loop(what);
    complaints wrong;
    one.run(what, [&](transport& comm) {
      chevron::trainer train(
          {.program = training(), .transport = comm, .stages = builder_of(what), .loss = mean_square, .optimizer = sgd});
      for (int step = 0; step < setting::steps; ++step) {
        run_step(train, what, step);
        auto const mine = buffers_of(train.stages());
        auto const each = plain.buffers[static_cast<std::size_t>(step)].size() / 2;
        auto const from = plain.buffers[static_cast<std::size_t>(step)].begin() +
                          static_cast<std::ptrdiff_t>(each * static_cast<std::size_t>(comm.topology().pipeline_rank()));
        std::string const where = "rank " + std::to_string(comm.topology().global_rank) + ", step " + std::to_string(step);
        wrong.require(mine.size() == each, where + ": number of buffers");
        for (std::size_t b = 0; b < std::min(mine.size(), each); ++b)
          wrong.require(at::equal(mine[b], from[static_cast<std::ptrdiff_t>(b)]), where + ": buffer " + std::to_string(b));
      }
    });
    CHECK(plain.buffers[0].size() == 18);
    for (auto const& complaint : wrong.all) FAIL_CHECK(complaint);
  }
}

TEST_CASE("a step that is done over begins from the buffers that all replicas had") {
  std::vector<tensors> by_rank[2];
  std::vector<double> losses[2];
  int clipped = 0;
  for (bool const early : {false, true}) {
    by_rank[early].resize(4);
    std::mutex guard;
    on_threads({}, [&](transport& comm) {
      chevron::trainer train(small_model::setup(training(), comm, build_watching,
                                                {.clip_grad_norm = 1, .post_validation = early, .stable_steps = 1}));
      for (int step = 0; step < 9; ++step) {
        auto data = make_batch(12, 10 * step + comm.topology().replica());
        if (step % 3 == 2) data.target.mul_(40);  // a gradient above the limit: the step is done over
        train.step({data.input}, {data.target});
        auto const report = step % 4 == 3 ? train.synchronize() : chevron::step_report{};
        std::lock_guard const hold(guard);
        if (comm.topology().global_rank == 0 && step % 4 == 3) losses[early].push_back(report.loss);
      }
      auto const last = train.synchronize();
      std::lock_guard const hold(guard);
      if (comm.topology().global_rank == 0) clipped += last.clipped ? 1 : 0;
      by_rank[early][static_cast<std::size_t>(comm.topology().global_rank)] = buffers_of(train.stages());
    });
  }
  CHECK(clipped == 2);
  CHECK(losses[0].size() == 2);
  CHECK(losses[0] == losses[1]);
  for (std::size_t r = 0; r < 4; ++r) {
    CAPTURE(r);
    CHECK(same(by_rank[0][r], by_rank[1][r]));
    CHECK(same(by_rank[1][r], by_rank[1][r % 2]));
  }
}

TEST_CASE("a resumed run of replicas evaluates as the uninterrupted one, to the last bit") {
  auto const evaluation =
      chevron::lower(chevron::prove(chevron::forward_part(plan_of("1F1B", setting::ranks, setting::micro_batches))));
  std::string name = (std::filesystem::temp_directory_path() / "chevron-buffers-XXXXXX").string();
  std::filesystem::path const folder = ::mkdtemp(name.data());
  for (int const replicas : {2, 3}) {
    setting const what{replicas};
    double held_out[2] = {0, 1};
    auto const at = folder / std::to_string(replicas);
    for (bool const resumed : {false, true}) {
      on_threads(what, [&](transport& comm) {
        chevron::trainer train(
            {.program = training(), .transport = comm, .stages = build_watching, .loss = mean_square, .optimizer = sgd});
        chevron::evaluator evaluate(evaluation, train);
        if (resumed) {
          chevron::load_checkpoint(train, at);
        } else {
          run_step(train, what, 0);
          chevron::save_checkpoint(train, at);
        }
        run_step(train, what, 1);
        auto const unseen = make_batch(12, 77);
        double const loss = evaluate.loss({unseen.input}, {unseen.target});
        if (comm.topology().global_rank == 0) held_out[resumed] = loss;
      });
    }
    CHECK(held_out[0] == held_out[1]);
  }
  std::filesystem::remove_all(folder);
}

TEST_CASE("replicas that keep buffers of their own cannot be saved once they differ, and it is said which") {
  std::string name = (std::filesystem::temp_directory_path() / "chevron-buffers-XXXXXX").string();
  std::filesystem::path const folder = ::mkdtemp(name.data());
  setting const what{3};
  complaints wrong;
  on_threads(what, [&](transport& comm) {
    chevron::trainer train(small_model::setup(training(), comm, build_watching, {.broadcast_buffers = false}));
    chevron::save_checkpoint(train, folder / "equal");
    run_step(train, what, 0);
    auto const count = [&] {
      return comm.all_gather_text(
          std::to_string(chevron::fingerprint(train.stages()[0] ? train.stages()[0].buffers()[0].value : at::zeros({}))));
    };
    auto const all = count();
    wrong.require(all[0] != all[2] && all[2] != all[4], "replicas have one another's buffers");
    std::string said;
    try {
      chevron::save_checkpoint(train, folder / "other");
    } catch (chevron::checkpoint_error const& e) {
      said = e.what();
    }
    for (char const* word : {"stage 0", "1.running_mean", "replica 1", "broadcast_buffers", "Remedy"})
      wrong.require(said.find(word) != std::string::npos, std::string(word) + " is not in: " + said);
    wrong.require(!chevron::last_checkpoint(folder / "other"), "it was saved");
    run_step(train, what, 1);
  });
  for (auto const& complaint : wrong.all) FAIL_CHECK(complaint);
  std::filesystem::remove_all(folder);
}

TEST_CASE("replicas that begin with other buffers are told apart before the first step") {
  auto const begin = [](chevron::trainer_options const& options) {
    on_threads({}, [&](transport& comm) {
      auto const other = [&](int s) {
        auto made = build_watching(s);
        if (s == 1 && comm.topology().replica() == 1) made.buffers()[1].value.detach().add_(0.5);
        return made;
      };
      chevron::trainer const train({.program = training(),
                                    .transport = comm,
                                    .stages = other,
                                    .loss = mean_square,
                                    .optimizer = sgd,
                                    .options = options});
    });
  };
  CHECK_THROWS_WITH_AS(begin({}), doctest::Contains("values of stage 1 buffer 1.running_var"), chevron::preflight_error);
  begin({.broadcast_buffers = false});

  auto const sparse = [](int s) {
    auto module = std::make_shared<watching_impl>();
    if (s == 1) module->register_buffer("table", at::eye(3).to_sparse());
    return chevron::stage(module);
  };
  CHECK_THROWS_WITH_AS(
      on_threads({},
                 [&](transport& comm) {
                   chevron::trainer const train({.program = training(),
                                                 .transport = comm,
                                                 .stages = sparse,
                                                 .loss = mean_square,
                                                 .optimizer = sgd});
                 }),
      doctest::Contains("stage 1's buffer table is sparse"), chevron::usage_error);
}
