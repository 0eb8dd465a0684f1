// timeout: 400
// Float32 masters of half-precision parameters in shares, and in checkpoints: the bits of a run without shares, and 1/R of its
// bytes.
#include "support/checkpoint_refusal.hpp"
#include "support/file_content.hpp"
#include "support/own_optimizer.hpp"
#include "support/rank_ends.hpp"
#include "support/scratch_folder.hpp"
#include "support/sharded_training.hpp"

#include <cstdlib>
#include <map>
#include <mutex>

#include <c10/util/intrusive_ptr.h>
#include <torch/optim/adagrad.h>

#include <chevron/transports/gloo/gloo_transport.hpp>

#include <doctest/doctest.h>

using namespace sharded_training;

namespace {

std::map<std::string, chevron::optimizer_factory> const optimizers{
    {"AdamW", chevron::optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-3).weight_decay(0.1))},
    {"SGD", chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(1e-2).momentum(0.9))},
    {"plain SGD", chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(1e-2))},
    {"Adagrad", chevron::optimizer<torch::optim::Adagrad>(torch::optim::AdagradOptions(1e-2).initial_accumulator_value(0.1))},
    {"fused AdamW", chevron::optimizer<chevron::fused_adamw>(torch::optim::AdamWOptions(1e-3).weight_decay(0.1))},
    {"fused SGD", chevron::optimizer<chevron::fused_sgd>(torch::optim::SGDOptions(1e-2).momentum(0.9))}};

setting with_masters(setting what) {
  what.dtype = at::kBFloat16;
  what.options.master_parameters = true;
  return what;
}

std::string const files[] = {"model-0", "optimizer-0", "model-1", "optimizer-1"};

std::string content(fs::path const& folder, int step, std::string const& file) {
  return content_of(folder / ("step-0000000" + std::to_string(step)) / (file + ".safetensors"));
}

/// A step of a job whose stages have one transposed weight each: its memory is not in the order of its elements.
chevron::stage build_transposed(int number) {
  at::manual_seed(700 + number);
  at::Tensor const weight = at::randn({inner, wide}).mul(0.1).to(at::kBFloat16).t().detach().requires_grad_();
  return {[weight](at::Tensor x) { return x.matmul(weight).matmul(weight.t()).tanh(); }, {{"weight", weight}}};
}

}  // namespace

TEST_CASE("50 steps of six schedules over 1 to 4 replicas, some of them clipped: every bit as without shares") {
  for (auto const shard : {chevron::sharding::optimizer, chevron::sharding::gradients})
    check_fifty_steps(shard, true, with_masters({.make = optimizers.at("AdamW")}));
}

TEST_CASE("every kind of optimizer, and one whose parameters are not cut") {
  at::set_num_threads(1);
  for (auto const& [name, make] : optimizers) {
    CAPTURE(name);
    check_same_as_unsharded(with_masters({.replicas = 3, .make = make}));
  }
  check_same_as_unsharded(with_masters({.replicas = 3, .make = [](std::vector<at::Tensor> all) {
                                          return std::make_unique<own_optimizer>(std::move(all),
                                                                                 torch::optim::SGDOptions(0.1).momentum(0.9));
                                        }}));
}

TEST_CASE("ties, scaled losses, skipped steps, accumulated batches, changes by the caller, with post-validation and without") {
  at::set_num_threads(1);
  for (bool const early : {false, true}) {
    for (auto const shard : {chevron::sharding::optimizer, chevron::sharding::gradients}) {
      CAPTURE(early);
      demanding const all(with_masters({.schedule = "ZB-H1", .replicas = 3, .steps = 10, .make = optimizers.at("AdamW")}), early,
                          0.5);
      for (setting const& one : {all.tied, all.skipped, all.accumulated}) check_same_as_unsharded(one, shard);
      setting one = all.skipped;
      one.dtype = at::kHalf;
      one.make = optimizers.at("SGD");
      check_same_as_unsharded(one, shard);
      one = all.clipped;
      one.before_step = [](chevron::trainer& train) {
        train.synchronize();
        at::NoGradGuard const off;
        for (auto& s : train.stages()) {
          if (s && train.next_step() % 3 == 2)
            s.parameters()[2].value.narrow(0, 11, 40).fill_(0.01 * static_cast<double>(train.next_step()));
        }
      };
      check_same_as_unsharded(one, shard);
    }
  }
}

TEST_CASE("steps that are done over leave parameters, masters and states as steps that wait do: the same checkpoints") {
  at::set_num_threads(1);
  scratch_folder const place;
  for (bool const shares : {false, true}) {
    setting what =
        with_masters({.schedule = "ZB-H1", .replicas = 2, .steps = 9, .make = optimizers.at("AdamW"), .spoiled_step = 8});
    what.options.clip_grad_norm = 0.64;
    what.options.stable_steps = 0;
    what.options.when_not_finite = chevron::not_finite::skip;
    if (shares) what = sharded(what);
    what.to = place.path / ("waits" + std::to_string(shares));
    auto const expected = on_threads(what);
    what.options.post_validation = true;
    what.to = place.path / ("early" + std::to_string(shares));
    check_same(expected, on_threads(what));
    CHECK(expected[0].reports.back().skipped);
    int clipped = 0;
    for (auto const& report : expected[0].reports) clipped += report.clipped ? 1 : 0;
    CHECK(clipped > 2);
    CHECK(clipped < 8);
    for (std::string const& file : files)
      CHECK(content(place.path / ("early" + std::to_string(shares)), 9, file) == content(place.path / "waits0", 9, file));
  }
}

TEST_CASE("a write to a parameter of a share before the verdict is refused") {
  auto const ends = rank_ends::run(rank_ends::over::threads, 2, 2, [](transport& comm) {
    setting what = sharded(with_masters({.steps = 4, .make = optimizers.at("AdamW")}));
    what.options.post_validation = true;
    what.options.stable_steps = 0;
    what.before_step = [](chevron::trainer& train) {
      at::NoGradGuard const off;
      if (train.next_step() != 3) return;
      for (auto& s : train.stages()) {
        for (auto& p : s.parameters()) p.value.add_(1);  // each replica has some of them in its share
      }
    };
    train_on(comm, what);
  });
  rank_ends::check_all_say(ends, ", or the optimizer's state for this parameter, was changed after step 2. With post_validation",
                           2);
}

TEST_CASE("a replica holds its share of the bytes of masters and states, and all shares are the whole") {
  at::set_num_threads(1);
  for (bool const early : {false, true}) {
    for (int const replicas : {1, 2, 3, 4}) {
      setting what = with_masters({.replicas = replicas, .steps = 3, .make = optimizers.at("AdamW")});
      what.options.post_validation = early;
      what.options.stable_steps = 0;
      auto const whole = on_threads(what), shares = on_threads(sharded(what));
      constexpr std::int64_t elements = 2 * wide + 2 * wide * inner + wide + inner, each = 3 * 4;
      for (std::size_t stage : {0u, 1u}) {
        CHECK(whole[stage].measured_state == elements * each * (early ? 2 : 1));
        std::int64_t sum = 0;
        for (int replica = 0; replica < replicas; ++replica) {
          auto const bytes = shares[stage + 2 * static_cast<std::size_t>(replica)].measured_state;
          // Each end of a share is at most half a block of 1,024 elements off, and less than an element where R does not divide
          // the elements; nor does R divide the bytes then.
          CHECK(std::abs(bytes - whole[stage].measured_state / replicas) <= each * 1025 * (early ? 2 : 1));
          sum += bytes;
        }
        CHECK(sum == whole[stage].measured_state);
      }
    }
  }
}

TEST_CASE("whole masters are freed once the optimizer has its pieces") {
  using weak = c10::weak_intrusive_ptr<c10::StorageImpl>;
  for (char const* const name : {"AdamW", "Adagrad"}) {
    std::atomic<int> freed = 0, left = 0;
    chevron::run_threads({.pipeline_ranks = 1, .replicas = 2}, [&](transport& comm) {
      std::vector<weak> given;
      auto options = sharded(with_masters({})).options;
      chevron::trainer train({.program = chevron::lower(chevron::prove(plan_of("1F1B", 1, 2))),
                              .transport = comm,
                              .stages = [](int s) { return build_wide_stage(s, at::kBFloat16); },
                              .loss = [](at::Tensor y, at::Tensor t) { return at::mse_loss(y.to(at::kFloat), t); },
                              .optimizer =
                                  [&](std::vector<at::Tensor> all) {
                                    for (at::Tensor const& t : all) given.emplace_back(t.storage().getWeakStorageImpl());
                                    return optimizers.at(name)(all);
                                  },
                              .options = options});
      for (weak const& one : given) {
        auto const whole = one.lock();
        if (!whole) {
          ++freed;
          continue;
        }
        // A master that is whole in this share stays.
        bool stays = false;
        for (at::Tensor const& t : train.optimizer()->param_groups()[0].params())
          stays = stays || (t.storage().unsafeGetStorageImpl() == whole.get() && t.nbytes() == whole->nbytes());
        left += stays ? 0 : 1;
      }
    });
    CHECK(freed.load() >= 6);  // of six parameters on two replicas none is whole on both
    CHECK(left.load() == 0);
  }
}

TEST_CASE("a checkpoint holds masters by name without a trace of the cut; training goes on from it over any number of replicas") {
  at::set_num_threads(1);
  scratch_folder const place;
  for (char const* const name : {"AdamW", "plain SGD", "Adagrad"}) {
    CAPTURE(name);
    auto const folder = [&](int replicas, bool shares, int steps) {
      return place.path / (name + std::to_string(replicas) + (shares ? "s" : "w") + std::to_string(steps));
    };
    for (int const replicas : {1, 2, 3, 4}) {
      for (bool const shares : {false, true}) {
        setting what = with_masters({.replicas = replicas, .steps = 3, .make = optimizers.at(name)});
        if (shares) what = sharded(what);
        what.to = folder(replicas, shares, 3);
        on_threads(what);
        // The same run, uninterrupted.
        what.steps = 6;
        what.to = folder(replicas, shares, 6);
        auto const expected = on_threads(what);
        what.steps = 3;
        what.from = folder(replicas, shares, 3);
        what.to = folder(replicas, shares, 7);
        auto const resumed = on_threads(what);
        for (std::size_t r = 0; r < expected.size(); ++r) {
          for (std::size_t i = 0; i < expected[r].values.size(); ++i) CHECK(expected[r].values[i].equal(resumed[r].values[i]));
        }
        for (std::string const& file : files)
          CHECK(content(folder(replicas, shares, 7), 6, file) == content(folder(replicas, shares, 6), 6, file));
      }
      for (std::string const& file : files)
        CHECK(content(folder(replicas, true, 3), 3, file) == content(folder(replicas, false, 3), 3, file));
    }
    chevron::safetensors_file const saved(folder(3, true, 3) / "step-00000003" / "optimizer-1.safetensors");
    CHECK(saved.shape("master/1.weight") == std::vector<std::int64_t>{inner, wide});
    CHECK((saved.dtype("master/1.weight") == at::kFloat));
    for (int const from : {1, 2, 3, 4}) {
      for (int const to : {1, 2, 3, 4}) {
        CAPTURE(from);
        setting what = with_masters({.replicas = to, .steps = 2, .make = optimizers.at(name)});
        what.from = folder(from, from != 2, 3);
        check_same_as_unsharded(what);
      }
    }
  }
}

TEST_CASE("masters begin with the parameters of a checkpoint that has none; a job without masters refuses one that has some") {
  at::set_num_threads(1);
  scratch_folder const place;
  setting plain{.steps = 3, .make = optimizers.at("AdamW"), .dtype = at::kBFloat16};
  plain.to = place.path / "without";
  on_threads(plain);
  for (bool const shares : {false, true}) {
    setting what = with_masters({.steps = 0, .make = optimizers.at("AdamW")});
    if (shares) what = sharded(what);
    what.from = plain.to;
    what.to = place.path / ("begun" + std::to_string(shares));
    on_threads(what);
    fs::path const at = what.to.value() / "step-00000003", before = place.path / "without" / "step-00000003";
    for (char const* const number : {"0", "1"}) {
      chevron::safetensors_file const begun(at / ("optimizer-" + std::string(number) + ".safetensors")),
          state(before / ("optimizer-" + std::string(number) + ".safetensors")),
          model(before / ("model-" + std::string(number) + ".safetensors"));
      for (char const* const p : {"0.weight", "1.weight", "4.bias"}) {
        std::string const parameter = p;
        CHECK(begun.read("master/" + parameter).equal(model.read(parameter).to(at::kFloat)));
        CHECK(begun.read("exp_avg/" + parameter).equal(state.read("exp_avg/" + parameter).to(at::kFloat)));
        CHECK((begun.read("exp_avg/" + parameter).scalar_type() == at::kFloat));
      }
    }
    what.from = place.path / "begun0";
    what.options.master_parameters = false;
    std::string const said = checkpoint_refusal::failure_of([&] { on_threads(what); });
    checkpoint_refusal::check_says(said, {"optimizer-", "holds a float32 master of 0.weight, which has no master in this job",
                                          "Remedy: trainer_options::master_parameters"});
  }
}

TEST_CASE("what the caller writes into parameters before a checkpoint is saved is in its masters") {
  at::set_num_threads(1);
  scratch_folder const place;
  for (bool const shares : {false, true}) {
    chevron::run_threads({.pipeline_ranks = 1, .replicas = 2}, [&](transport& comm) {
      setting what = with_masters({.ranks = 1});
      if (shares) what = sharded(what);
      chevron::trainer train({.program = chevron::lower(chevron::prove(plan_of("1F1B", 1, 2))),
                              .transport = comm,
                              .stages = [](int s) { return build_wide_stage(s, at::kBFloat16); },
                              .loss = [](at::Tensor y, at::Tensor t) { return at::mse_loss(y.to(at::kFloat), t); },
                              .optimizer = optimizers.at("AdamW"),
                              .options = what.options});
      train.step({at::ones({4, wide}, at::kBFloat16)}, {at::zeros({4, wide})});
      {
        at::NoGradGuard const off;
        train.stages()[0].parameters()[2].value.fill_(0.75);
      }
      chevron::save_checkpoint(train, place.path / std::to_string(shares));
    });
    chevron::safetensors_file const saved(place.path / std::to_string(shares) / "step-00000001" / "optimizer-0.safetensors");
    CHECK(saved.read("master/1.weight").eq(0.75).all().item<bool>());
    CHECK(saved.read("master/4.weight").ne(saved.read("master/4.weight").to(at::kBFloat16)).any().item<bool>());
  }
}

TEST_CASE("a parameter that is transposed in memory is cut, saved and loaded in the order of its elements") {
  at::set_num_threads(1);
  for (bool const masters : {false, true}) {
    scratch_folder const place;
    std::vector<at::Tensor> left;
    for (bool const resumed : {false, true}) {
      for (bool const shares : {false, true}) {
        std::mutex mutex;
        for (int part = 0; part < (resumed ? 2 : 1); ++part) {
          chevron::run_threads({.pipeline_ranks = 2, .replicas = 2}, [&](transport& comm) {
            setting what = with_masters({});
            what.options.master_parameters = masters;
            if (shares) what = sharded(what);
            chevron::trainer train({.program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 2))),
                                    .transport = comm,
                                    .stages = build_transposed,
                                    .loss = [](at::Tensor y, at::Tensor t) { return at::mse_loss(y.to(at::kFloat), t); },
                                    .optimizer = optimizers.at("AdamW"),
                                    .options = what.options});
            if (part == 1) chevron::load_checkpoint(train, place.path);
            auto const generator =
                at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(3 + comm.topology().replica()));
            at::Tensor const input = at::randn({4, wide}, generator).to(at::kBFloat16);
            for (int step = 0; step < (resumed ? 3 : 6); ++step) train.step({input}, {at::zeros({4, wide})});
            if (resumed && part == 0) return void(chevron::save_checkpoint(train, place.path));
            std::lock_guard const hold(mutex);
            if (comm.topology().global_rank == 0) left.push_back(train.stages()[0].parameters()[0].value.detach().clone());
          });
        }
        std::filesystem::remove_all(place.path / "step-00000003");
      }
    }
    REQUIRE(left.size() == 4);
    for (std::size_t i = 1; i < left.size(); ++i) {
      CAPTURE(i);
      CHECK(left[i].equal(left[0]));
    }
  }
}

TEST_CASE("over Gloo, in shared memory and without: as on threads") {
  at::set_num_threads(1);
  setting what = with_masters({.schedule = "ZB-H1", .make = optimizers.at("AdamW")});
  what.options.clip_grad_norm = 0.35;
  for (bool const near : {true, false}) {
    std::vector<outcome> got(4);
    gloo_ranks::check_all_well(gloo_ranks::on_ranks(
        2, 2, [=](int) { return near; },
        [&](chevron::gloo_transport& comm) {
          got[static_cast<std::size_t>(comm.topology().global_rank)] = train_on(comm, sharded(what));
        }));
    check_same(on_threads(what), got);
  }
}
