// Buffers that count, summed over replicas: after each step every replica has the counts of a plain loop over all samples.
#include "support/gloo_ranks.hpp"
#include "support/small_model.hpp"

#include <chevron/checkpoint/checkpoint.hpp>

#include <torch/nn/modules/batchnorm.h>

#include <cstdlib>
#include <filesystem>
#include <limits>
#include <memory>

#include <doctest/doctest.h>

using namespace small_model;

namespace {

constexpr int experts = 3;

/// Routes samples by a biased gate, and counts the samples of each expert; a norm beside it has buffers that are not summed.
struct routed_impl : torch::nn::Module {
  routed_impl() {
    layer = register_module("layer", torch::nn::Linear(width, width));
    norm = register_module("norm", torch::nn::BatchNorm1d(width));
    gate = register_module("gate", torch::nn::Linear(width, experts));
    counts = register_buffer("counts", at::zeros({experts}, at::kLong));
    load = register_buffer("load", at::zeros({experts, 2}).select(1, 0));
    bias = register_buffer("bias", at::zeros({experts}));
  }
  at::Tensor forward(at::Tensor x) {
    at::Tensor const share = gate(x).softmax(-1);
    if (is_training()) {
      at::NoGradGuard const off;
      at::Tensor const given = at::one_hot((share + bias).argmax(-1), experts).sum(0);
      counts.add_(given);
      load.add_(given);
    }
    return norm(layer(x).tanh()) * share.select(-1, 0).unsqueeze(-1);
  }
  torch::nn::Linear layer{nullptr}, gate{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  at::Tensor counts, load, bias;
};

/// The caller's use of counts between two steps.
void move_bias(routed_impl& m) {
  at::NoGradGuard const off;
  at::Tensor const load = m.counts.to(at::kFloat);
  m.bias.add_((load.mean() - load).sign(), 0.01);
  m.counts.zero_();
}

std::shared_ptr<routed_impl> make_routed(int number) {
  at::manual_seed(400 + number);
  return std::make_shared<routed_impl>();
}

constexpr int ranks = 2, micro_batches = 3, steps = 4;
constexpr std::int64_t samples = 12;  // of each replica and pass

struct setting {
  char const* name;
  int replicas = 2;
  int passes = 1;
  bool recompute = false;
  bool broadcast = true;
  bool undone = false;  // each step is clipped, and with post-validation done over
  bool gloo = false;
  double all() const { return static_cast<double>(samples * passes * replicas); }
};

batch data_of(int step, int pass, int replica) { return make_batch(samples, 100 * step + 10 * pass + replica); }

/// Counts after each step, by stage, by a loop without a trainer; parameters come from trained stages before the step.
using counted = std::vector<at::Tensor>;

counted plain_counts(setting const& what, int step, std::vector<std::shared_ptr<routed_impl>> const& model) {
  counted out;
  for (auto const& m : model) out.push_back(m->counts.clone());
  for (int replica = 0; replica < what.replicas; ++replica) {
    for (int pass = 0; pass < what.passes; ++pass) {
      auto const whole = data_of(step, pass, replica);
      for (int m = 0; m < micro_batches; ++m) {
        auto const part = chevron::samples_of(samples, micro_batches, m);
        at::Tensor x = whole.input.narrow(0, part.first, part.count);
        for (std::size_t s = 0; s < model.size(); ++s) {
          at::NoGradGuard const off;
          at::Tensor const share = model[s]->gate(x).softmax(-1);
          out[s].add_(at::one_hot((share + model[s]->bias).argmax(-1), experts).sum(0));
          at::Tensor const y = model[s]->layer(x).tanh();
          x = at::batch_norm(y, model[s]->norm->weight, model[s]->norm->bias, {}, {}, true, 0.1, 1e-5, false) *
              share.select(-1, 0).unsqueeze(-1);
        }
      }
    }
  }
  return out;
}

}  // namespace

TEST_CASE("counts after each step are those of all replicas' samples, however a step is run") {
  at::set_num_threads(1);
  setting const cases[] = {{"one replica", 1},
                           {"two replicas", 2},
                           {"three replicas, accumulated", 3, 2},
                           {"recomputed", 2, 1, true},
                           {"buffers of each replica", 2, 1, false, false},
                           {"steps done over", 2, 2, false, true, true},
                           {"recomputed, steps done over", 3, 1, true, true, true},
                           {"Gloo", 2, 1, false, true, false, true}};
  for (setting const& what : cases) {
    CAPTURE(what.name);
    complaints wrong;
    auto const body = [&](transport& comm) {
      chevron::topology const& where = comm.topology();
      std::shared_ptr<routed_impl> mine;
      chevron::trainer train(
          small_model::setup(plan_of("1F1B", ranks, micro_batches), comm,
                             [&](int s) {
                               return chevron::stage(mine = make_routed(s)).summed({"counts", "load"}).recompute(what.recompute);
                             },
                             {.clip_grad_norm = what.undone ? 0.01 : 0,
                              .broadcast_buffers = what.broadcast,
                              .post_validation = what.undone,
                              .stable_steps = 0}));
      at::Tensor total = at::zeros({experts});
      for (int step = 0; step < steps; ++step) {
        // The stages of all ranks before the step, for the plain loop.
        train.synchronize();
        std::vector<std::shared_ptr<routed_impl>> model;
        for (int s = 0; s < ranks; ++s) {
          model.push_back(make_routed(s));
          std::vector<double> own(
              static_cast<std::size_t>(width * width + width + 2 * width + experts * width + experts + experts));
          std::vector<double> every(own.size() * static_cast<std::size_t>(where.world()));
          auto const each = [](routed_impl& m, auto const& visit) {
            for (at::Tensor const& t :
                 {m.layer->weight, m.layer->bias, m.norm->weight, m.norm->bias, m.gate->weight, m.gate->bias, m.bias})
              visit(t);
          };
          at::NoGradGuard const off;
          std::size_t at = 0;
          each(*mine, [&](at::Tensor const& t) {
            at::Tensor const flat = t.flatten().to(at::kDouble);
            for (std::int64_t i = 0; i < flat.numel(); ++i) own[at++] = flat[i].item<double>();
          });
          comm.all_gather(own, every);
          at = own.size() * static_cast<std::size_t>(where.rank_at(0, s, 0));
          each(*model.back(), [&](at::Tensor const& t) {
            for (std::int64_t i = 0; i < t.numel(); ++i) t.view({-1})[i].fill_(every[at++]);
          });
        }
        counted const expected = plain_counts(what, step, model);
        for (int pass = 0; pass + 1 < what.passes; ++pass) {
          auto const data = data_of(step, pass, where.replica());
          train.accumulate({data.input}, {data.target}, what.all());
        }
        auto const data = data_of(step, what.passes - 1, where.replica());
        train.step({data.input}, {data.target}, what.all());
        auto const report = train.synchronize();
        wrong.require(report.clipped == what.undone, "clipped");
        std::string const place = "rank " + std::to_string(where.global_rank) + ", step " + std::to_string(step);
        wrong.require(at::equal(mine->counts, expected[static_cast<std::size_t>(where.pipeline_rank())]), place + ": counts");
        wrong.require(mine->counts.sum().item<double>() == what.all(), place + ": all samples");
        total.add_(mine->counts);
        wrong.require(at::equal(mine->load, total), place + ": load");
        move_bias(*mine);
      }
    };
    if (what.gloo) {
      gloo_ranks::check_all_well(gloo_ranks::on_ranks(
          ranks, what.replicas, [](int) { return false; }, [&](auto& comm) { body(comm); }));
    } else {
      chevron::run_threads({.pipeline_ranks = ranks, .replicas = what.replicas}, body);
    }
    for (auto const& complaint : wrong.all) FAIL_CHECK(complaint);
  }
}

TEST_CASE("a step that is skipped leaves counts as they were, and the next step counts once") {
  for (bool const early : {false, true}) {
    for (int const replicas : {1, 2}) {
      CAPTURE(early);
      CAPTURE(replicas);
      complaints wrong;
      chevron::run_threads({.pipeline_ranks = ranks, .replicas = replicas}, [&](transport& comm) {
        std::shared_ptr<routed_impl> mine;
        chevron::trainer train(
            small_model::setup(plan_of("1F1B", ranks, micro_batches), comm,
                               [&](int s) { return chevron::stage(mine = make_routed(s)).summed({"counts"}); },
                               {.when_not_finite = chevron::not_finite::skip, .post_validation = early, .stable_steps = 0}));
        int skipped = 0;
        for (int step = 0; step < 6; ++step) {
          auto data = data_of(step, 0, comm.topology().replica());
          // Replica 0 alone has a loss that is not finite.
          if ((step == 2 || step == 3) && comm.topology().replica() == 0)
            data.target[0][0] = std::numeric_limits<float>::infinity();
          train.step({data.input}, {data.target});
          if (step % 2 == 1 || !early) skipped += train.synchronize().skipped ? 1 : 0;
        }
        train.synchronize();
        wrong.require(skipped == (early ? 1 : 2), "skipped " + std::to_string(skipped));
        wrong.require(mine->counts.sum().item<std::int64_t>() == 4 * samples * replicas,
                      "counts of the other steps: " + std::to_string(mine->counts.sum().item<std::int64_t>()));
      });
      for (auto const& complaint : wrong.all) FAIL_CHECK(complaint);
    }
  }
}

TEST_CASE("counts are saved, and counted on by another number of replicas") {
  std::string name = (std::filesystem::temp_directory_path() / "chevron-summed-XXXXXX").string();
  std::filesystem::path const folder = ::mkdtemp(name.data());
  complaints wrong;
  for (int const replicas : {2, 3, 1}) {
    chevron::run_threads({.pipeline_ranks = ranks, .replicas = replicas}, [&](transport& comm) {
      std::shared_ptr<routed_impl> mine;
      chevron::trainer train(small_model::setup(plan_of("1F1B", ranks, micro_batches), comm,
                                                [&](int s) {
                                                  return chevron::stage(mine = make_routed(s)).summed({"counts", "load"});
                                                },
                                                {.broadcast_buffers = true}));
      if (replicas != 2) chevron::load_checkpoint(train, folder);
      std::int64_t const before = mine->counts.sum().item<std::int64_t>();
      wrong.require(before == (replicas == 2   ? 0
                               : replicas == 3 ? 2 * samples
                                               : 5 * samples),
                    "loaded " + std::to_string(before));
      auto const data = data_of(0, 0, comm.topology().replica());
      train.step({data.input}, {data.target});
      wrong.require(mine->counts.sum().item<std::int64_t>() == before + replicas * samples, "counted on");
      chevron::save_checkpoint(train, folder);
    });
  }
  for (auto const& complaint : wrong.all) FAIL_CHECK(complaint);
  std::filesystem::remove_all(folder);
}

TEST_CASE("what cannot be summed is refused where it is declared, and a declaration on one replica alone before the first step") {
  auto const declared = [](char const* name) { return chevron::stage(make_routed(0)).summed({name}); };
  CHECK_THROWS_WITH_AS(declared("count"),
                       doctest::Contains("a stage has no buffer `count` to be summed; it has counts, load, bias, norm."),
                       chevron::usage_error);
  CHECK_THROWS_WITH_AS(declared("gate.weight"), doctest::Contains("a stage has no buffer `gate.weight`"), chevron::usage_error);
  auto const flags = std::make_shared<torch::nn::Module>();
  flags->register_buffer("seen", at::zeros({2}, at::kBool));
  chevron::stage of_flags(flags, [](at::Tensor x) { return x; });
  CHECK_THROWS_WITH_AS(of_flags.summed({"seen"}),
                       doctest::Contains("buffer `seen` cannot be summed over the replicas: it is Bool"), chevron::usage_error);
  auto const begin = [] {
    chevron::run_threads({.pipeline_ranks = 1, .replicas = 2}, [](transport& comm) {
      chevron::trainer const train(small_model::setup(plan_of("GPipe", 1, 1), comm, [&](int s) {
        chevron::stage made(make_routed(s));
        return comm.topology().replica() == 0 ? made.summed({"counts"}) : made;
      }));
    });
  };
  CHECK_THROWS_WITH_AS(begin(), doctest::Contains("stage 0 buffer counts"), chevron::preflight_error);
}
