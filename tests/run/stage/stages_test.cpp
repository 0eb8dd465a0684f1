#include "support/small_model.hpp"

#include <array>
#include <atomic>

#include <torch/nn/modules/rnn.h>

#include <chevron/run/stage/skip.hpp>

#include <doctest/doctest.h>

using namespace small_model;

namespace {

using layers = std::vector<torch::nn::Linear>;

/// Leaves the layers as they are, for another run.
auto const standing = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0));

layers make_layers(int count, int seed) {
  at::manual_seed(seed);
  layers made;
  for (int i = 0; i < count; ++i) made.emplace_back(width, width);
  return made;
}

/// A callable with the parameters of one layer.
template <class Callable>
chevron::stage with_layer(torch::nn::Linear layer, Callable call) {
  return {layer, std::move(call)};
}

/// Runs one step by plain autograd: `forward(first sample, count)` gives a microbatch's loss.
template <class Forward>
std::vector<tensors> plain_gradients(layers& all, chevron::plan const& plan, std::int64_t samples, Forward forward) {
  std::vector<std::vector<tensors>> each;
  for (int m = 0; m < plan.size.micro_batches; ++m) {
    auto const part = chevron::samples_of(samples, plan.size.micro_batches, m);
    for (auto& l : all) l->zero_grad();
    auto const loss = forward(part.first, part.count);
    torch::autograd::backward({loss}, {at::full({}, static_cast<double>(part.count) / static_cast<double>(samples))});
    each.emplace_back();
    for (auto& l : all) each.back().push_back({l->weight.grad().clone(), l->bias.grad().clone()});
  }
  std::vector<tensors> sums;
  for (std::size_t s = 0; s < all.size(); ++s) {
    sums.push_back({at::zeros_like(all[s]->weight), at::zeros_like(all[s]->bias)});
    for (int const m : order_of(plan, static_cast<int>(s))) {
      for (std::size_t q = 0; q < 2; ++q) sums.back()[q] += each[static_cast<std::size_t>(m)][s][q];
    }
  }
  for (auto& l : all) l->zero_grad();
  return sums;
}

/// One step of a trainer, against these gradients.
void compare_gradients(chevron::plan const& plan, builder const& build, chevron::batch const& data, layers const& all,
                       std::vector<tensors> const& expected) {
  complaints wrong;
  std::atomic<std::size_t> compared = 0;
  chevron::run_threads({.pipeline_ranks = plan.size.ranks, .rendezvous = true}, [&](transport& comm) {
    chevron::trainer train(small_model::setup(plan, comm, build, {}, standing));
    train.step(data);
    for (std::size_t s = 0; s < all.size(); ++s) {
      if (plan.view().rank_of_stage(static_cast<int>(s)) != comm.topology().pipeline_rank()) continue;
      std::string const where = std::string(plan.name) + ", stage " + std::to_string(s);
      wrong.require(at::equal(all[s]->weight.grad(), expected[s][0]), where + " weight");
      wrong.require(at::equal(all[s]->bias.grad(), expected[s][1]), where + " bias");
      wrong.require(expected[s][0].abs().sum().item<float>() > 0, where + ": nothing to compare");
      ++compared;
    }
  });
  for (auto const& w : wrong.all) FAIL_CHECK(w);
  CHECK(compared == all.size());
}

}  // namespace

TEST_CASE("skip connections past other stages, crossing and nested, for every schedule") {
  at::set_num_threads(1);
  auto const data = make_batch(7, 1);
  for (char const* name : schedules) {
    auto const plan = plan_of(name, 4, 3);
    int const stages = plan.stages;
    auto all = make_layers(stages, 5);
    // From stage 0 to the third and the last; from stage 1 to the last: a long, a short and a crossing one.
    std::vector<chevron::skip> const connections{{0, 2}, {0, stages - 1}, {1, stages - 1}};
    auto const first = [](torch::nn::Linear& l, at::Tensor x) {
      auto const h = l(x);
      return std::make_tuple(h.tanh(), h.sin(), h * 2);
    };
    auto const second = [](torch::nn::Linear& l, at::Tensor x) {
      auto const h = l(x);
      return std::make_tuple(h.tanh(), h.cos());
    };
    auto const third = [](torch::nn::Linear& l, at::Tensor x, at::Tensor from_0) { return l(x).tanh() + from_0; };
    auto const middle = [](torch::nn::Linear& l, at::Tensor x) { return l(x).tanh(); };
    auto const last = [](torch::nn::Linear& l, at::Tensor x, at::Tensor from_0, at::Tensor from_1) {
      return l(x) * from_0 + from_1;
    };
    auto const expected = plain_gradients(all, plan, 7, [&](std::int64_t at, std::int64_t count) {
      auto const [a, a2, aw] = first(all[0], data.input.narrow(0, at, count));
      auto const [b, bw] = second(all[1], a);
      at::Tensor x = third(all[2], b, a2);
      for (std::size_t s = 3; s + 1 < all.size(); ++s) x = middle(all[s], x);
      return mean_square(last(all.back(), x, aw, bw), data.target.narrow(0, at, count));
    });
    for (bool const recompute : {false, true}) {
      auto const build = chevron::with_skips(
          [&](int s) {
            auto l = all[static_cast<std::size_t>(s)];
            chevron::stage made = [&]() -> chevron::stage {
              if (s == 0) return with_layer(l, [=](at::Tensor x) mutable { return first(l, x); });
              if (s == 1) return with_layer(l, [=](at::Tensor x) mutable { return second(l, x); });
              if (s == 2) return with_layer(l, [=](at::Tensor x, at::Tensor y) mutable { return third(l, x, y); });
              if (s == stages - 1)
                return with_layer(l, [=](at::Tensor x, at::Tensor y, at::Tensor z) mutable { return last(l, x, y, z); });
              return with_layer(l, [=](at::Tensor x) mutable { return middle(l, x); });
            }();
            return made.recompute(recompute);
          },
          connections);
      compare_gradients(plan, build, {{data.input}, {data.target}}, all, expected);
    }
  }
}

TEST_CASE("integers and undefined tensors travel along skip connections, and in evaluation") {
  auto const plan = plan_of("ZB-H1", 3, 2);
  auto all = make_layers(3, 6);
  auto const data = make_batch(4, 2);
  auto const ids = at::arange(4).view({4, 1});
  auto const model = [&](int s) {
    auto l = all[static_cast<std::size_t>(s)];
    if (s == 0) {
      return with_layer(
          l, [l](at::Tensor x, at::Tensor id) mutable { return std::make_tuple(l(x), id, std::optional<at::Tensor>()); });
    }
    if (s == 1) return with_layer(l, [l](at::Tensor x) mutable { return l(x).tanh(); });
    return with_layer(l, [l](at::Tensor x, at::Tensor id, at::Tensor nothing) mutable {
      if (nothing.defined()) throw std::runtime_error("it came from nowhere");
      return l(x) * id;
    });
  };
  auto const build = chevron::with_skips(model, {{0, 2}, {0, 2}});
  auto const expected = plain_gradients(all, plan, 4, [&](std::int64_t at, std::int64_t count) {
    at::Tensor const x = all[1](all[0](data.input.narrow(0, at, count))).tanh();
    return mean_square(all[2](x) * ids.narrow(0, at, count), data.target.narrow(0, at, count));
  });
  compare_gradients(plan, build, {{data.input, ids}, {data.target}}, all, expected);

  at::Tensor const whole = all[2](all[1](all[0](data.input)).tanh()) * ids;
  chevron::run_threads({.pipeline_ranks = 3}, [&](transport& comm) {
    chevron::trainer train(small_model::setup(plan, comm, build, {}, standing));
    chevron::evaluator evaluate(chevron::lower(chevron::prove(chevron::forward_part(plan))), train);
    auto const out = evaluate.outputs({data.input, ids});
    if (comm.topology().pipeline_rank() == 2 && !at::allclose(out.at(0), whole)) throw std::runtime_error("other outputs");
  });
}

TEST_CASE("skip connections that cannot be say why") {
  auto const run = [](std::vector<chevron::skip> connections, int given) {
    auto const data = make_batch(4, 2);
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      auto const build = chevron::with_skips(
          [&](int) -> chevron::stage {
            torch::nn::Linear l(width, width);
            return with_layer(
                l, [l, given](at::Tensor x) mutable { return std::vector<at::Tensor>(static_cast<std::size_t>(given), l(x)); });
          },
          connections);
      chevron::trainer train(small_model::setup(plan_of("1F1B", 2, 2), comm, build, {}, standing));
      train.step({data.input}, {data.target});
    });
  };
  CHECK_THROWS_WITH_AS(run({{1, 1}}, 1),
                       "a skip connection from stage 1 to stage 1. Remedy: a connection from a stage to a later one",
                       chevron::usage_error);
  CHECK_THROWS_WITH_AS(
      run({{0, 1}, {0, 1}}, 1),
      doctest::Contains("rank 0, step 0, 0F0: stage 0 threw: the stage returned 1 tensors, but 2 skip connections begin here"),
      chevron::usage_error);
  CHECK_THROWS_WITH_AS(
      run({{0, 2}}, 2),
      doctest::Contains("rank 1, step 0, 1F0: stage 1 threw: a skip connection leads past the last stage"),
      chevron::usage_error);
}

TEST_CASE("masks and positions come to any stage from the batch, by name") {
  auto const data = make_batch(7, 3);
  at::manual_seed(4);
  at::Tensor const mask = at::randn({7, width}) > 0, positions = at::randn({width});
  for (char const* name : schedules) {
    auto const plan = plan_of(name, 2, 3);
    auto all = make_layers(plan.stages, 7);
    auto const step = [](torch::nn::Linear& l, at::Tensor x, at::Tensor m, at::Tensor p) {
      return (l(x) + p).masked_fill(m, 0.5).tanh();
    };
    auto const expected = plain_gradients(all, plan, 7, [&](std::int64_t at, std::int64_t count) {
      at::Tensor x = data.input.narrow(0, at, count);
      for (auto& l : all) x = step(l, x, mask.narrow(0, at, count), positions);
      return mean_square(x, data.target.narrow(0, at, count));
    });
    chevron::batch const whole{{data.input}, {data.target}, {{"positions", positions, true}, {"mask", mask}}};
    for (bool const recompute : {false, true}) {
      auto const build = [&](int s) {
        auto l = all[static_cast<std::size_t>(s)];
        chevron::stage made = with_layer(l, [=](at::Tensor x, at::Tensor m, at::Tensor p) mutable { return step(l, x, m, p); });
        return made.side_inputs({"mask", "positions"}).recompute(recompute);
      };
      compare_gradients(plan, build, whole, all, expected);
    }
  }
  // Evaluation takes side inputs, too; a missing one is an error.
  auto all = make_layers(2, 7);
  auto const build = [&](int s) {
    auto l = all[static_cast<std::size_t>(s)];
    return with_layer(l, [l](at::Tensor x, at::Tensor m) mutable { return l(x) * m; }).side_inputs({"mask"});
  };
  at::Tensor const expected = all[1](all[0](data.input) * mask) * mask;
  auto const run = [&](std::vector<chevron::side_input> side_inputs) {
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train(small_model::setup(plan_of("1F1B", 2, 2), comm, build, {}, standing));
      chevron::evaluator evaluate(chevron::lower(chevron::prove(chevron::forward_part(plan_of("1F1B", 2, 3)))), train);
      auto const out = evaluate.outputs(chevron::batch{{data.input}, {}, side_inputs});
      if (!out.empty() && !at::allclose(out[0], expected)) throw std::runtime_error("other outputs");
    });
  };
  run({{"mask", mask}});
  CHECK_THROWS_WITH_AS(
      run({{"masks", mask}}),
      doctest::Contains("no stage and no loss takes the side input `masks` of the batch; those that are taken are `mask`"),
      chevron::usage_error);
  CHECK_THROWS_WITH_AS(run({{"mask", mask.narrow(0, 0, 6)}}),
                       doctest::Contains("side input `mask` has 6 samples (dimension 0) but input 0 has 7"), chevron::usage_error);
}

TEST_CASE("several tensors, undefined ones, integers, and a stage without parameters in the middle, for every schedule") {
  auto const data = make_batch(6, 5);
  auto const ids = at::arange(6).view({6, 1});
  for (char const* name : schedules) {
    auto const plan = plan_of(name, 4, 3);
    int const stages = plan.stages;
    auto all = make_layers(stages, 8);
    auto const first = [](torch::nn::Linear& l, at::Tensor x, at::Tensor id) {
      return std::make_tuple(l(x), id, std::optional<at::Tensor>(), x.sin(), std::vector<at::Tensor>{l(x).cos(), id > 2});
    };
    auto const nothing_to_train = [](at::Tensor h, at::Tensor id, at::Tensor none, at::Tensor s, at::Tensor c, at::Tensor m) {
      return std::make_tuple(h.masked_fill(m, 0.25) + s, id + 1, none, at::Tensor(), c, at::Tensor(m));
    };
    auto const middle = [](torch::nn::Linear& l, at::Tensor h, at::Tensor id, at::Tensor none, at::Tensor none_2, at::Tensor c,
                           at::Tensor m) {
      if (none.defined() || none_2.defined()) throw std::runtime_error("undefined tensors must stay so");
      return std::make_tuple(l(h) * id, id, none, none_2, c, m);
    };
    auto const run_stage = [=](torch::nn::Linear& l, int s, tensors const& in) -> tensors {
      tensors out;
      if (s == 0) {
        chevron::detail::flatten(out, first(l, in[0], in[1]));
      } else if (s == 1) {
        chevron::detail::flatten(out, nothing_to_train(in[0], in[1], in[2], in[3], in[4], in[5]));
      } else if (s + 1 < stages) {
        chevron::detail::flatten(out, middle(l, in[0], in[1], in[2], in[3], in[4], in[5]));
      } else {
        out = {l(in[0]) + in[4]};
      }
      return out;
    };
    layers trained_ones;
    for (int s = 0; s < stages; ++s) trained_ones.push_back(all[static_cast<std::size_t>(s == 1 ? 0 : s)]);  // stage 1 has none
    auto const expected = plain_gradients(trained_ones, plan, 6, [&](std::int64_t at, std::int64_t count) {
      tensors values{data.input.narrow(0, at, count), ids.narrow(0, at, count)};
      for (int s = 0; s < stages; ++s) values = run_stage(all[static_cast<std::size_t>(s)], s, values);
      return mean_square(values[0], data.target.narrow(0, at, count));
    });
    for (bool const recompute : {false, true}) {
      complaints wrong;
      std::atomic<int> compared = 0;
      chevron::run_threads({.pipeline_ranks = 4, .rendezvous = true}, [&](transport& comm) {
        auto const build = [&](int s) -> chevron::stage {
          auto l = all[static_cast<std::size_t>(s)];
          auto const call = [=](std::span<at::Tensor const> in) mutable {
            return run_stage(l, s, tensors(in.begin(), in.end()));
          };
          chevron::stage made = s == 1 ? chevron::stage(call) : with_layer(l, call);
          return made.recompute(recompute);
        };
        chevron::trainer train(small_model::setup(plan, comm, build, {}, standing));
        train.step({data.input, ids}, {data.target});
        for (int s = 0; s < stages; ++s) {
          if (s == 1 || plan.view().rank_of_stage(s) != comm.topology().pipeline_rank()) continue;
          auto const& l = all[static_cast<std::size_t>(s)];
          wrong.require(at::equal(l->weight.grad(), expected[static_cast<std::size_t>(s)][0]), "stage " + std::to_string(s));
          wrong.require(at::equal(l->bias.grad(), expected[static_cast<std::size_t>(s)][1]), "stage " + std::to_string(s));
          ++compared;
        }
      });
      for (auto const& w : wrong.all) FAIL_CHECK(name << ": " << w);
      CHECK(compared == stages - 1);
    }
  }
}

TEST_CASE("the first stage may change its input in place, while other microbatches of the batch are under way") {
  for (char const* name : schedules) {
    auto const plan = plan_of(name, 2, 3);
    auto all = make_layers(plan.stages, 9);
    auto const data = make_batch(7, 6);
    at::Tensor const own = data.input.clone();
    auto const expected = plain_gradients(all, plan, 7, [&](std::int64_t at, std::int64_t count) {
      at::Tensor x = own.narrow(0, at, count).mul_(3);
      for (auto& l : all) x = l(x).tanh();
      return mean_square(x, data.target.narrow(0, at, count));
    });
    auto const build = [&](int s) {
      auto l = all[static_cast<std::size_t>(s)];
      return with_layer(l, [l, s](at::Tensor x) mutable { return l(s == 0 ? x.mul_(3) : x).tanh(); });
    };
    compare_gradients(plan, build, {{data.input.clone()}, {data.target}}, all, expected);
  }
  // A step that may have to be done over needs the batch as it was.
  CHECK_THROWS_WITH_AS(
      chevron::run_threads({.pipeline_ranks = 2},
                           [&](transport& comm) {
                             auto const build = [&](int s) {
                               torch::nn::Linear l(width, width);
                               return with_layer(l, [l, s](at::Tensor x) mutable { return l(s == 0 ? x.mul_(3) : x); });
                             };
                             chevron::trainer train(small_model::setup(plan_of("1F1B", 2, 3), comm, build,
                                                                       {.post_validation = true, .stable_steps = 0}, standing));
                             for (int step = 0; step < 2; ++step) {
                               auto const data = make_batch(7, step);
                               train.step({data.input}, {data.target});
                             }
                           }),
      doctest::Contains("rank 0, step 1: a stage changes microbatch 0 in place, and so the step cannot be done over"),
      chevron::usage_error);
}

namespace {

/// Counts its forwards in a buffer, and gives the count to the next stage.
struct counting : torch::nn::Module {
  torch::nn::Linear layer{nullptr};
  at::Tensor count;
  explicit counting(torch::nn::Linear const& l) {
    layer = register_module("layer", l);
    count = register_buffer("count", at::zeros({1}));
  }
  std::tuple<at::Tensor, at::Tensor> forward(at::Tensor x) {
    count.add_(1);
    return {layer(x), count};
  }
};

}  // namespace

TEST_CASE("a buffer that a stage gives away arrives as it was then, whatever later forwards do to it") {
  for (char const* name : schedules) {
    auto const plan = plan_of(name, 2, 3);
    if (plan.stages < 2) continue;
    auto all = make_layers(plan.stages, 9);
    auto const data = make_batch(6, 6);
    auto const expected = plain_gradients(all, plan, 6, [&](std::int64_t at, std::int64_t count) {
      at::Tensor x = data.input.narrow(0, at, count);
      for (auto& l : all) x = l(x);
      return mean_square(x * static_cast<double>(at / 2 + 1), data.target.narrow(0, at, count));
    });
    auto const build = [&](int s) -> chevron::stage {
      auto l = all[static_cast<std::size_t>(s)];
      if (s == 0) return std::make_shared<counting>(l);
      if (s == plan.stages - 1) return with_layer(l, [l](at::Tensor x, at::Tensor c) mutable { return l(x) * c; });
      return with_layer(l, [l](at::Tensor x, at::Tensor c) mutable { return std::make_tuple(l(x), c); });
    };
    compare_gradients(plan, build, {{data.input}, {data.target}}, all, expected);
  }
}

TEST_CASE("a parameter that a callable uses without listing it is an error, a tensor of its own making is not") {
  auto const data = make_batch(6, 6);
  for (bool const recompute : {false, true}) {
    auto const run = [&](bool forgotten) {
      chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
        auto const build = [&](int) {
          torch::nn::Linear l(width, width), other(width, 5);
          return with_layer(l,
                            [=](at::Tensor x) mutable {
                              at::Tensor const h = l(x);
                              if (forgotten) return h + other(x).sum();
                              return h + at::ones({1}, at::TensorOptions().requires_grad(true));
                            })
              .recompute(recompute);
        };
        chevron::trainer train(small_model::setup(plan_of("ZB-H1", 2, 3), comm, build, {}, standing));
        for (int step = 0; step < 3; ++step) train.step({data.input}, {data.target});
      });
    };
    run(false);
    CHECK_THROWS_WITH_AS(run(true), doctest::Contains("threw: the stage uses a parameter of sizes ["), chevron::usage_error);
  }
}

TEST_CASE(
    "a buffer that a forward changes while its graph needs it is named, with the remedy; a clone of it trains as in one piece") {
  struct normalized : torch::nn::Module {
    at::Tensor w, u;
    bool cloned;
    explicit normalized(bool clones) : cloned(clones) {
      w = register_parameter("w", at::randn({width, width}));
      u = register_buffer("u", at::randn({width}));
    }
    at::Tensor forward(at::Tensor x) {
      at::Tensor v;
      {
        at::NoGradGuard const off;
        v = w.t().mv(u);
        u.copy_(w.mv(v) / w.mv(v).norm());
      }
      at::Tensor const by = cloned ? u.clone() : u;
      return x.matmul(w / by.dot(w.mv(v))).tanh();
    }
  };
  at::set_num_threads(1);
  auto const build = [](bool cloned) {
    return [cloned](int s) {
      at::manual_seed(700 + s);
      return chevron::stage(std::make_shared<normalized>(cloned));
    };
  };
  for (char const* name : {"1F1B", "ZB-H1"}) {
    auto const plan = plan_of(name, 2, 4);
    auto const data = make_batch(8, 2);
    complaints wrong;
    reference whole(plan.stages, build(true));
    whole.run(plan, {data});
    chevron::run_threads({.pipeline_ranks = 2},
                         [&](transport& comm) { compare_one_step(comm, plan, data, whole, wrong, build(true)); });
    for (auto const& w : wrong.all) FAIL_CHECK(w);
    std::string words;
    try {
      chevron::run_threads({.pipeline_ranks = 2},
                           [&](transport& comm) { compare_one_step(comm, plan, data, whole, wrong, build(false)); });
    } catch (chevron::stage_error const& e) {
      words = e.what();
    }
    CHECK_MESSAGE(words.find("`u` was changed in place since the forward of this microbatch") != std::string::npos, words);
    CHECK_MESSAGE(words.find("Remedy: compute with a clone of it") != std::string::npos, words);
  }
}

TEST_CASE("what is no buffer's change is told in autograd's words alone") {
  auto const plan = plan_of("1F1B", 2, 2);
  auto const build = [](int s) {
    return with_layer(make_layers(1, s)[0], [](at::Tensor x) {
      at::Tensor const y = x.exp();
      return y + y.add_(1);  // exp has saved its result
    });
  };
  auto const data = make_batch(4, 2);
  std::string words;
  try {
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer train(small_model::setup(plan, comm, build));
      train.step({data.input}, {data.target});
    });
  } catch (std::exception const& e) {
    words = e.what();
  }
  CHECK_MESSAGE(words.find("modified by an inplace operation") != std::string::npos, words);
  CHECK_MESSAGE(words.find("was changed in place since the forward") == std::string::npos, words);
}

TEST_CASE("a forward or a loss that takes another number of tensors is refused with the tensors that were passed") {
  at::set_num_threads(1);
  auto const plan = plan_of("1F1B", 2, 2);
  auto const data = make_batch(4, 1);
  auto const said = [&](builder const& build, chevron::loss_function const& loss, chevron::batch const& given) {
    try {
      chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
        chevron::trainer train({.program = chevron::lower(chevron::prove(plan)),
                                .transport = comm,
                                .stages = build,
                                .loss = loss,
                                .optimizer = sgd});
        train.step(given);
      });
    } catch (chevron::error const& e) {  // of nn::Sequential LibTorch's own, in a stage_error
      CHECK(e.code() == 2);
      return std::string(e.what());
    }
    return std::string("nothing was thrown");
  };
  auto const has = [](std::string const& words, char const* part) {
    CHECK_MESSAGE(words.find(part) != std::string::npos, words);
  };
  chevron::batch const whole{{data.input}, {data.target}};
  // Carries that are not declared, beside the position.
  std::string const four = said(
      [](int s) {
        if (s == 0) return build_stage(0);
        torch::nn::Linear layer(width, width);
        return chevron::stage(layer, [layer](at::Tensor x, at::Tensor, at::Tensor, at::Tensor) mutable { return layer(x); })
            .side_inputs({chevron::slice_start});
      },
      mean_square, whole);
  has(four, "stage 1 threw: the stage's callable takes 4 tensors, and 2 were passed: 1 input, the side input `slice_start`.");
  has(four,
      "Remedy: a forward that takes the inputs and then the tensors that are declared, in this order: stage.side_inputs, "
      "targets, carries");
  // A module with an optional mask, targets and carries.
  struct lenient_impl : torch::nn::Module {
    lenient_impl() { layer = register_module("layer", torch::nn::Linear(width, width)); }
    at::Tensor forward(at::Tensor x, at::Tensor = {}) { return layer(x); }
    torch::nn::Linear layer{nullptr};
  };
  has(said(
          [](int) {
            return chevron::stage(std::make_shared<lenient_impl>()).targets().carries({"keys", "values"});
          },
          mean_square, whole),
      "the module's forward takes 1 or 2 tensors, and 4 were passed: 1 input, 1 target, the carries `keys`, `values`.");
  // The outputs of another pipeline, which its last rank alone has.
  has(said([](int) -> chevron::stage { return torch::nn::Linear(width, width); }, mean_square, {{}, {data.target}}),
      "stage 0 threw: the module's forward takes 1 tensor, and 0 were passed: no inputs; the rank of stage 0 was given no inputs "
      "(an evaluator's outputs are on the rank of its own last stage). Remedy: the step's inputs on the rank of stage 0; or a "
      "forward that takes");
  has(said(build_stage, mean_square, {{}, {data.target}}), "the rank of stage 0 was given no inputs (an evaluator's outputs");
  has(said(build_stage, mean_square, {{data.input}, {data.target, data.target}}),
      "the loss function takes 2 tensors, and 3 were passed: 1 output of the last stage, 2 targets. Remedy: a loss that takes");
  has(said(build_stage, mean_square, {{data.input}, {}}),
      "the loss function takes 2 tensors, and 1 was passed: 1 output of the last stage, no targets. Remedy: the batch's targets");
}
