// A stage that computes another result for slices than for their sequence is refused in the first step; stages that do not are
// trained as if no slice had been compared.
// timeout: 400
#include "support/rank_ends.hpp"
#include "support/shard_model.hpp"
#include "support/sliced_model.hpp"

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/conv.h>
#include <torch/nn/modules/instancenorm.h>

#include <doctest/doctest.h>

using namespace sliced_model;
using chevron::batch;
using chevron::transport;
using rank_ends::check_all_say, rank_ends::check_all_well, rank_ends::over;
using small_model::mean_square, small_model::sgd;

namespace {

namespace nn = torch::nn;

at::Tensor turned(at::Tensor const& x) { return x.transpose(1, 2); }

/// A linear layer, then `mix`, in the second of two stages; the first stage mixes no tokens.
template <class Mix>
builder mixing(Mix mix) {
  return [mix](int number) {
    at::manual_seed(number + 40);
    nn::Linear layer(width, width);
    return chevron::stage(layer, [layer, mix, number](at::Tensor x) mutable { return number == 1 ? mix(layer(x)) : layer(x); });
  };
}
template <class Made>
builder module_of(Made made) {
  return [made](int number) -> chevron::stage {
    at::manual_seed(number + 50);
    if (number == 0) return nn::Linear(width, width);
    return made();
  };
}

/// The mistakes, with the token beside the cut at which slices differ.
struct mistake {
  char const* name;
  builder build;
  char const* at;
};
constexpr char const* before_cut = "at token 3, the last of slice 0, its outputs differ by ";
constexpr char const* after_cut = "at token 4, the first of slice 1, its outputs differ by ";

std::vector<mistake> mistakes() {
  return {
      {"group norm over time", mixing([](at::Tensor h) { return turned(at::group_norm(turned(h), 2)); }), before_cut},
      {"instance norm", module_of([] {
         nn::InstanceNorm1d norm{nn::InstanceNorm1dOptions(width)};
         return chevron::stage(norm, [norm](at::Tensor x) mutable { return turned(norm(turned(x))); });
       }),
       before_cut},
      {"mean over time", mixing([](at::Tensor h) { return h - h.mean(1, true); }), before_cut},
      {"convolution to both sides", module_of([] {
         nn::Conv1d layer(nn::Conv1dOptions(width, width, 3).padding(1));
         return chevron::stage(layer, [layer](at::Tensor x) mutable { return turned(layer(turned(x))).contiguous(); });
       }),
       before_cut},
      {"attention without a mask", module_of([] {
         nn::MultiheadAttention layer(nn::MultiheadAttentionOptions(width, 2));
         return chevron::stage(layer, [layer](at::Tensor x) mutable {
           at::Tensor const q = x.transpose(0, 1);
           return std::get<0>(layer(q, q, q)).transpose(0, 1).contiguous();
         });
       }),
       before_cut},
      {"causal attention without carries", module_of([] {
         auto const layer = make_attention(1);
         return chevron::stage(layer, [layer](at::Tensor x) { return std::get<0>(layer->forward(x, {}, {})); });
       }),
       after_cut},
      {"a recurrent layer without carries", module_of([] {
         nn::LSTM layer(nn::LSTMOptions(width, width).batch_first(true));
         return chevron::stage(layer, [layer](at::Tensor x) mutable { return std::get<0>(layer(x)); });
       }),
       after_cut},
      {"positions that begin anew", mixing([](at::Tensor h) { return h + at::arange(h.size(1), at::kFloat).unsqueeze(1).cos(); }),
       after_cut},
      {"the sum of earlier slices, without this one's", module_of([] {
         nn::Linear layer(width, width);
         return chevron::stage(layer,
                               [layer](at::Tensor x, at::Tensor sum) mutable {
                                 at::Tensor y = layer(x).cumsum(1);
                                 if (sum.defined()) y = y + sum.unsqueeze(1);
                                 return std::make_tuple(y.tanh(), layer(x).mean(1));  // the slice's mean, not the sum so far
                               })
             .carries({"sum"});
       }),
       after_cut},
  };
}

/// A first step of two stages, in two slices of four tokens.
rank_ends::ends first_step(builder const& build, chevron::trainer_options const& options = {}, int slices = 2,
                           over line = over::threads) {
  return rank_ends::run(line, 2, 1, [&](transport& comm) {
    auto const plan = plan_of("Seq1F1B", {.ranks = 2, .micro_batches = 2, .slices = slices});
    auto const data = make_sequences(6, 8, 1);
    chevron::trainer train(small_model::setup(plan, comm, build, options));
    auto const before = small_model::parameters_of(train.stages());
    tensors copies;
    for (at::Tensor const& p : before) copies.push_back(p.detach().clone());
    try {
      train.step(data.input, data.target);
    } catch (chevron::usage_error const&) {
      for (std::size_t i = 0; i < copies.size(); ++i) {
        if (!at::equal(copies[i], before[i])) throw std::logic_error("a parameter was changed");
      }
      throw;
    }
  });
}

/// The parameters of all ranks after three steps, and the losses.
tensors trained(chevron::plan const& plan, builder const& build, chevron::trainer_options const& options = {},
                std::int64_t tokens = 9) {
  std::vector<tensors> by_rank(static_cast<std::size_t>(plan.size.ranks));
  chevron::run_threads({.pipeline_ranks = plan.size.ranks}, [&](transport& comm) {
    chevron::trainer train(small_model::setup(plan, comm, build, options));
    tensors& out = by_rank[static_cast<std::size_t>(comm.topology().pipeline_rank())];
    for (int step = 0; step < 3; ++step) {
      auto const data = make_sequences(2 * plan.size.micro_batches, tokens + step % 2, step);
      train.step(data.input, data.target);
      out.push_back(at::full({}, train.synchronize().loss, at::kDouble));
    }
    train.synchronize();
    for (at::Tensor const& p : small_model::parameters_of(train.stages())) out.push_back(p.detach().clone());
    for (auto const& s : train.stages()) {
      for (auto const& b : s.buffers()) out.push_back(b.value.detach().clone());
    }
  });
  tensors all;
  for (tensors const& each : by_rank) all.insert(all.end(), each.begin(), each.end());
  return all;
}

}  // namespace

TEST_CASE("slices that are not the sequence: refused on all ranks in the first step, with stage and token") {
  at::set_num_threads(1);
  for (mistake const& one : mistakes()) {
    CAPTURE(std::string(one.name));
    auto const e = first_step(one.build);
    check_all_say(
        e, "step 0, comparison of slices: stage 1 computes another result for a sequence in slices than for the sequence", 2);
    check_all_say(e, one.at, 2);
    check_all_say(e, "stage.independent_slices()", 2);
    check_all_well(first_step(one.build, {}, 1));
    check_all_well(first_step([&](int s) { return one.build(s).independent_slices(); }));
  }
  // Slices have as many tokens as features: between stages two dimensions may count tokens.
  for (mistake const& one : {mistakes()[0], mistakes()[5]}) {
    auto const run = [](builder const& build) {
      return rank_ends::run(over::threads, 2, 1, [&](transport& comm) {
        auto const plan = plan_of("Seq1F1B", {.ranks = 2, .micro_batches = 2, .slices = 2});
        auto const data = make_sequences(4, 12, 1);
        chevron::trainer train(small_model::setup(plan, comm, build));
        train.step(data.input, data.target);
      });
    };
    check_all_say(run(one.build), "stage 1 computes another result", 2);
    check_all_well(run(build_attention));
  }
  // As many samples in a microbatch as tokens in a slice.
  for (bool const wrong : {false, true}) {
    auto const e = rank_ends::run(over::threads, 2, 1, [&](transport& comm) {
      auto const plan = plan_of("Seq1F1B", {.ranks = 2, .micro_batches = 2, .slices = 2});
      auto const data = make_sequences(8, 8, 1);
      chevron::trainer train(small_model::setup(plan, comm, wrong ? mistakes()[6].build : build_recurrent));
      train.step(data.input, data.target);
    });
    if (wrong) check_all_say(e, "stage 1 computes another result", 2);
    if (!wrong) check_all_well(e);
  }
  check_all_say(first_step(mistakes()[1].build, {}, 2, over::gloo), "stage 1 computes another result", 2);
}

TEST_CASE("a stage that changes the batch's inputs in place is compared by copies of them") {
  at::set_num_threads(1);
  auto const build = [](bool mixes) {
    return [mixes](int number) {
      at::manual_seed(number + 60);
      nn::Linear layer(width, width);
      return chevron::stage(layer, [=](at::Tensor x) mutable {
        at::Tensor const h = layer(number == 0 ? x.add_(1) : x);
        return mixes && number == 0 ? h - h.mean(1, true) : h;
      });
    };
  };
  auto const e = first_step(build(true));
  check_all_say(e, "stage 0 computes another result for a sequence in slices than for the sequence", 2);
  check_all_say(e, before_cut, 2);
  check_all_well(first_step(build(false)));
}

TEST_CASE("an evaluator's first call is refused, too") {
  at::set_num_threads(1);
  for (bool const with_loss : {true, false}) {
    auto const e = rank_ends::run(over::threads, 2, 1, [&](transport& comm) {
      auto const plan = plan_of("Seq1F1B", {.ranks = 2, .micro_batches = 2, .slices = 2});
      auto const data = make_sequences(4, 8, 1);
      chevron::evaluator evaluate({.program = chevron::lower(chevron::prove(plan)),
                                   .transport = comm,
                                   .stages = mistakes()[5].build,
                                   .loss = mean_square});
      with_loss ? static_cast<void>(evaluate.loss(data.input, data.target)) : static_cast<void>(evaluate.outputs(data.input));
    });
    check_all_say(e, after_cut, 2);
  }
}

TEST_CASE("length-first sequences, whose samples are cut as tokens, are refused where a state goes from sample to sample") {
  at::set_num_threads(1);
  auto const run = [](bool carries) {
    return rank_ends::run(over::threads, 2, 1, [&](transport& comm) {
      auto const plan = plan_of("Seq1F1B", {.ranks = 2, .micro_batches = 2, .slices = 2});
      std::vector<batch> parts;
      for (int m = 0; m < 2; ++m) {
        auto const data = make_sequences(8, 4, m);  // eight tokens of four samples
        parts.push_back({{data.input}, {data.target}});
      }
      auto const build = [&](int number) {
        at::manual_seed(number);
        nn::LSTM layer(nn::LSTMOptions(width, width));
        if (!carries) return chevron::stage(layer, [layer](at::Tensor x) mutable { return std::get<0>(layer(x)); });
        return chevron::stage(layer,
                              [layer](at::Tensor x, at::Tensor hidden, at::Tensor cell) mutable {
                                torch::optional<std::tuple<at::Tensor, at::Tensor>> state;
                                if (hidden.defined()) state = std::make_tuple(hidden, cell);
                                auto const [y, next] = layer(x, state);
                                return std::make_tuple(y, std::get<0>(next), std::get<1>(next));
                              })
            .carries({"hidden", "cell"});
      };
      chevron::trainer train(small_model::setup(plan, comm, build));
      train.step(parts);
    });
  };
  check_all_say(run(true), "samples in dimension 0 of the batch and tokens in dimension 1", 2);
  check_all_well(run(false));  // slices are then samples, which no token of another sample changes
}

TEST_CASE("stages whose slices are the sequence train to the same bits as without the comparison") {
  at::set_num_threads(1);
  auto const dropping = [](int number) {
    at::manual_seed(number);
    nn::Sequential dropped(nn::Linear(width, width), nn::Dropout(0.3));
    return chevron::in_sequence({build_attention(number), dropped, build_recurrent(number)});
  };
  auto const recomputed = [&](int number) { return dropping(number).recompute(); };
  // Tokens first between stages, with a state over them.
  auto const length_first = [](int number) {
    at::manual_seed(number);
    auto const module = std::make_shared<recurrent_impl>();
    return chevron::stage(module,
                          [module, number](at::Tensor x, at::Tensor hidden, at::Tensor cell) {
                            auto [y, h, c] = module->forward(number == 1 ? x.transpose(0, 1) : x, hidden, cell);
                            return std::make_tuple(number == 0 ? y.transpose(0, 1).contiguous() : y, h, c);
                          })
        .carries({"hidden", "cell"});
  };
  // A running sum in a buffer, and numbers drawn in every mode, which are not compared.
  struct counting_impl : nn::Module {
    counting_impl() {
      layer = register_module("layer", nn::Linear(width, width));
      count = register_buffer("count", at::zeros({}));
    }
    at::Tensor forward(at::Tensor x) {
      count.add_(1);
      return layer(x) + at::randn_like(x);
    }
    nn::Linear layer{nullptr};
    at::Tensor count;
  };
  auto const counting = [](int number) {
    at::manual_seed(number);
    return chevron::stage(std::make_shared<counting_impl>());
  };
  struct right {
    char const* name;
    builder build;
    chevron::trainer_options options = {};
  };
  auto const cuts = [](batch const&, std::int64_t length, int) { return std::vector<std::int64_t>{1, length - 2}; };
  for (right const& one : {right{"attention", build_attention}, right{"recurrence", build_recurrent}, right{"dropout", dropping},
                           right{"recomputed", recomputed}, right{"length first", length_first},
                           right{"counting and drawing", counting}, right{"uneven cuts", dropping, {.slice_cuts = cuts}},
                           right{"by cost", dropping, {.slice_cuts = chevron::slices_by_cost(0.7)}},
                           right{"autocast", build_attention, {.autocast = at::kBFloat16}},
                           right{"post-validation", dropping, {.post_validation = true, .stable_steps = 0}}}) {
    CAPTURE(std::string(one.name));
    for (char const* const name : {"Seq1F1B", "SeqZB-H1"}) {
      auto const plan = plan_of(name, {.ranks = 2, .micro_batches = 2, .slices = 3});
      auto const compared = trained(plan, one.build, one.options);
      auto const plain = trained(
          plan, [&](int s) { return one.build(s).independent_slices(); }, one.options);
      REQUIRE(compared.size() == plain.size());
      int different = 0;
      for (std::size_t i = 0; i < plain.size(); ++i) different += at::equal(compared[i], plain[i]) ? 0 : 1;
      CHECK(different == 0);
    }
  }
}

TEST_CASE("the comparison leaves modes and the process's generator as they are, and runs once") {
  at::set_num_threads(1);
  chevron::run_threads({.pipeline_ranks = 1}, [&](transport& comm) {
    int forwards = 0;
    nn::Linear layer(width, width);
    auto const build = [&](int) {
      return chevron::stage(layer, [&, layer](at::Tensor x) mutable {
        ++forwards;
        return layer(x);
      });
    };
    auto const plan = plan_of("Seq1F1B", {.ranks = 1, .micro_batches = 2, .slices = 3});
    chevron::trainer train(small_model::setup(plan, comm, build));
    auto const data = make_sequences(2, 9, 1);
    at::manual_seed(5);
    at::Tensor const expected = at::rand({2});
    at::manual_seed(5);
    train.step(data.input, data.target);
    CHECK(forwards == 6 + 3);
    CHECK(layer->is_training());
    CHECK(at::equal(at::rand({2}), expected));
    train.step(data.input, data.target);
    CHECK(forwards == 12 + 3);
  });
}

TEST_CASE("ranks without a batch, and stages whose outputs have no tokens, are compared as far as they can be") {
  at::set_num_threads(1);
  auto const run = [](builder const& build) {
    return rank_ends::run(over::threads, 3, 1, [&](transport& comm) {
      auto const plan = plan_of("SeqZB-H1", {.ranks = 3, .micro_batches = 2, .slices = 2});
      auto const data = make_sequences(4, 9, 1);
      chevron::trainer train(small_model::setup(plan, comm, build));
      comm.topology().global_rank == 1 ? train.step() : train.step(data.input, data.target);
    });
  };
  check_all_well(run(build_attention));
  check_all_say(run([](int s) { return s == 1 ? mistakes()[5].build(1) : build_attention(s); }), "stage 1 computes another", 2);
}

TEST_CASE("a stage that takes another tensor without tokens in each slice is compared at the last token of slice 0") {
  at::set_num_threads(1);
  auto const build = [](bool looks_ahead) {
    return [looks_ahead](int number) {
      at::manual_seed(number + 70);
      nn::Linear layer(width, width);
      if (number == 0)
        return chevron::stage(layer, [layer](at::Tensor x) mutable {
          return std::make_tuple(layer(x), x.mean().expand({3}));  // of the slice, as wide as no slice is long
        });
      return chevron::stage(layer, [=](at::Tensor x, at::Tensor mean) mutable {
        at::Tensor const h = layer(x) * mean.sum();
        return looks_ahead ? h - h.mean(1, true) : h;
      });
    };
  };
  auto const e = first_step(build(true));
  check_all_say(e, "stage 1 computes another result for a sequence in slices than for the sequence", 2);
  check_all_say(e, before_cut, 2);
  check_all_well(first_step(build(false)));
}

TEST_CASE("shards run the same collectives when slices are compared") {
  at::set_num_threads(1);
  for (bool const mixes : {false, true}) {
    std::vector<std::string> said(4);
    chevron::run_threads({.pipeline_ranks = 2, .shards = 2, .deadline = std::chrono::seconds(60)}, [&](transport& comm) {
      chevron::shard_group const group(comm);
      auto const build = [&](int number) {
        auto const generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(number + 1));
        auto const piece = group.piece(4 * width);
        auto const drawn = [&](std::int64_t rows, std::int64_t columns) { return at::randn({rows, columns}, generator) * 0.3; };
        at::Tensor columns = drawn(4 * width, width).narrow(0, piece.begin, piece.size).clone().requires_grad_();
        at::Tensor rows = drawn(width, 4 * width).narrow(1, piece.begin, piece.size).clone().requires_grad_();
        auto const forward = [=](at::Tensor x) {
          at::Tensor const y = x + group.all_reduce(at::linear(at::gelu(at::linear(group.copy(x), columns)), rows));
          return mixes && number == 1 ? y - y.mean(1, true) : y;
        };
        return chevron::stage(forward, {{"columns", columns}, {"rows", rows}}).cut("columns", 0).cut("rows", 1);
      };
      auto const plan = plan_of("Seq1F1B", {.ranks = 2, .micro_batches = 2, .slices = 2});
      auto const data = make_sequences(4, 8, 1);
      try {
        chevron::trainer train(small_model::setup(plan, comm, build));
        train.step(data.input, data.target);
      } catch (chevron::usage_error const& e) {
        said[static_cast<std::size_t>(comm.topology().global_rank)] = e.what();
      }
      comm.all_gather_text("over");
    });
    for (std::string const& each : said) {
      if (mixes) CHECK_MESSAGE(each.find("stage 1 computes another result") != std::string::npos, each);
      if (!mixes) CHECK(each == "");
    }
  }
}

TEST_CASE("one label a sequence is refused where slices are weighted by their tokens") {
  at::set_num_threads(1);
  auto const plan = plan_of("Seq1F1B", {.ranks = 2, .micro_batches = 2, .slices = 2});
  auto const data = make_sequences(4, 8, 1);
  at::Tensor const label = at::arange(4), last = at::zeros({4, 8});
  last.select(1, 7).fill_(1);
  auto const loss_of = [](at::Tensor y, at::Tensor of) { return at::cross_entropy_loss(y.select(1, -1), of); };
  auto const build = [](int s) { return build_recurrent(s); };
  double whole = 0;
  {
    at::NoGradGuard const off;
    auto first = build(0), second = build(1);
    tensors values{data.input}, next;
    first.forward(values, next);
    second.forward(next, values);
    whole = loss_of(values[0], label).item<double>();
  }
  auto const run = [&](bool weighed, bool evaluates, double& loss) {
    return rank_ends::run(over::threads, 2, 1, [&](transport& comm) {
      chevron::trainer_options options;
      if (weighed) options.loss_weight = [](batch const& b) { return b.targets[1].sum().item<double>(); };
      chevron::loss_function const function =
          weighed ? chevron::loss_function([=](at::Tensor y, at::Tensor of, at::Tensor) { return loss_of(y, of); })
                  : chevron::loss_function(loss_of);
      chevron::trainer train({.program = chevron::lower(chevron::prove(plan)),
                              .transport = comm,
                              .stages = build,
                              .loss = function,
                              .optimizer = sgd,
                              .options = options});
      batch given{{data.input}, {label}};
      if (weighed) given.targets.push_back(last);
      chevron::evaluator evaluate(train);
      double const found = evaluates ? evaluate.loss(given) : train.step(given).loss;
      if (comm.topology().global_rank == 0) loss = found;
    });
  };
  for (bool const evaluates : {false, true}) {
    double loss = 0;
    check_all_say(run(false, evaluates, loss), "each of its 2 slices is given the label of the whole sequence", 2);
    check_all_well(run(true, evaluates, loss));
    CHECK(loss == doctest::Approx(whole).epsilon(1e-6));
  }
}

TEST_CASE("boundaries that differ by rank are told as such") {
  at::set_num_threads(1);
  for (int const wrong : {-1, 0, 1}) {
    for (bool const evaluates : {false, true}) {
      auto const e = rank_ends::run(over::threads, 2, 2, [&](transport& comm) {
        int const more = comm.topology().global_rank == wrong ? 1 : 0;
        chevron::trainer_options options;
        options.slice_cuts = [more](batch const&, std::int64_t length, int) {
          return std::vector<std::int64_t>{length / 2 + more};
        };
        auto const plan = plan_of("Seq1F1B", {.ranks = 2, .micro_batches = 2, .slices = 2});
        auto const data = make_sequences(4, 8, comm.topology().replica());
        chevron::trainer train(small_model::setup(plan, comm, build_attention, options));
        if (evaluates) {
          chevron::evaluator(train).loss(data.input, data.target);
        } else {
          train.step(data.input, data.target);
        }
      });
      if (wrong < 0) check_all_well(e);
      if (wrong >= 0) check_all_say(e, "trainer_options::slice_cuts cuts the sequences of ranks 0 and 1 at different tokens");
    }
  }
}
