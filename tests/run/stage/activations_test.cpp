#include "support/small_model.hpp"

#include <array>
#include <atomic>

#include <ATen/ops/from_blob.h>
#include <torch/csrc/autograd/custom_function.h>

#include <doctest/doctest.h>

using namespace small_model;

namespace {

/// Tensors of one sort that are alive.
struct census {
  std::atomic<int> live = 0, peak = 0;
  void born() {
    int const now = ++live;
    for (int most = peak; now > most && !peak.compare_exchange_weak(most, now);) {
    }
  }
};

/// The same values in memory that counts itself; saves nothing for the backward.
struct counted : torch::autograd::Function<counted> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x, census* in) {
    auto* const memory = new at::Tensor(x.detach().clone());
    in->born();
    return at::from_blob(
        memory->data_ptr(), memory->sizes(),
        [memory, in](void*) {
          delete memory;
          --in->live;
        },
        memory->options());
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list arriving) {
    return {arriving[0], at::Tensor()};
  }
};

/// Calls something when the backward comes by.
struct on_backward : torch::autograd::Function<on_backward> {
  static at::Tensor forward(torch::autograd::AutogradContext*, at::Tensor x, std::function<void()>* call) {
    calls = call;
    return x.clone();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext*, torch::autograd::variable_list arriving) {
    (*calls)();
    return {arriving[0], at::Tensor()};
  }
  static inline thread_local std::function<void()>* calls = nullptr;
};

}  // namespace

TEST_CASE("activations alive on a rank: the most at a time is what the plan says, exactly") {
  for (char const* name : schedules) {
    for (int const ranks : {1, 2, 4}) {
      for (int const m : {1, 3, 8}) {
        auto const plan = plan_of(name, ranks, m);
        auto const data = make_batch(m, 1);
        for (bool const recompute : {false, true}) {
          std::array<census, 4> saved;
          chevron::run_threads({.pipeline_ranks = ranks}, [&](transport& comm) {
            auto& here = saved[static_cast<std::size_t>(comm.topology().pipeline_rank())];
            auto const build = [&](int) -> chevron::stage {
              torch::nn::Linear layer(width, width);
              // The layer saves its input for the gradient of its weight: from F until B or W.
              chevron::stage made(layer, [layer, &here](at::Tensor x) mutable { return layer(counted::apply(x, &here)); });
              return made.recompute(recompute);
            };
            chevron::trainer train(small_model::setup(plan, comm, build));
            train.step({data.input}, {data.target});
            train.step({data.input}, {data.target});
          });
          bool split = false;
          for (int i = 0; i < plan.view().total(); ++i)
            split = split || plan.actions.data[i].kind == chevron::kind::backward_weight;
          for (int r = 0; r < ranks; ++r) {
            census const& c = saved[static_cast<std::size_t>(r)];
            CAPTURE(name);
            CAPTURE(ranks);
            CAPTURE(m);
            CAPTURE(r);
            CHECK(c.live == 0);
            if (!recompute) CHECK(c.peak == chevron::peak_in_flight(plan, r));
            // Recomputed: none outlives its F, and each lives again in its B; with I and W apart, from I to W.
            if (recompute && !split) CHECK(c.peak == 1);
            if (recompute && split) CHECK(c.peak <= chevron::peak_in_flight(plan, r));
          }
        }
      }
    }
  }
}

TEST_CASE("outputs are let go once the next stage has used them") {
  constexpr int m = 8;
  auto const data = make_batch(m, 1);
  // Under GPipe the first backward of rank 0 comes after all forwards of rank 1.
  auto const plan = plan_of("GPipe", 2, m);
  for (bool const rendezvous : {false, true}) {
    census outputs;
    std::atomic<int> most_at_backward = -1;
    std::atomic<int> backwards = 0;
    std::function<void()> const look = [&] {
      ++backwards;
      if (outputs.live > most_at_backward) most_at_backward = outputs.live.load();
    };
    chevron::run_threads({.pipeline_ranks = 2, .rendezvous = rendezvous}, [&](transport& comm) {
      std::function<void()> mine = look;
      auto const build = [&](int s) -> chevron::stage {
        torch::nn::Linear layer(width, width);
        if (s == 0) {
          return {layer, [layer, &mine, &outputs](at::Tensor x) mutable {
                    return counted::apply(on_backward::apply(layer(x), &mine), &outputs);
                  }};
        }
        return {layer, [layer](at::Tensor x) mutable { return layer(x.clone()); }};
      };
      chevron::trainer train(small_model::setup(plan, comm, build));
      train.step({data.input}, {data.target});
    });
    CHECK(backwards == m);
    CHECK(outputs.peak >= 1);
    CHECK(most_at_backward == 0);
    CHECK(outputs.live == 0);
  }
}
