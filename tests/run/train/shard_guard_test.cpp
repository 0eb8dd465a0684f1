// timeout: 300
#include <cstdint>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/randn.h>
#include <ATen/ops/zeros.h>
#include <torch/nn/functional/dropout.h>
#include <torch/optim/sgd.h>

#include <chevron/run/stage/skip.hpp>

#include "support/own_optimizer.hpp"
#include "support/small_model.hpp"

#include <doctest/doctest.h>

namespace {

using chevron::after_gather;
using chevron::shard_group;
using chevron::tensors;
using chevron::transport;

constexpr std::int64_t wide = 6, inner = 8, tokens = 4;

/// The fault of a job.
enum class fault {
  none,
  cut_forgotten,
  wrong_dimension,         // of a cut whose whole size is declared
  whole_declared_cut,      // the bias after the sum
  partial_not_declared,    // of a norm over a part of the sequence
  whole_declared_partial,  // of a norm over the whole sequence
  no_copy,                 // before the layers that are cut, in the last stage
  no_copy_hidden,          // the same, and all whole parameters of earlier stages are declared partial
  bias_in_sum,
  no_sum,             // after the row-parallel layer, in the first stage
  gathered_as_whole,  // the gradient of a gathered tensor is not summed
  needless_copy,      // of a tensor with which all shards compute the same
  gathered_as_parts,  // at the end of the last stage, where all shards compute the same
  own_dropout,        // each shard draws its own for a whole tensor
  loss_of_own_part    // each shard's loss is of its own piece
};

struct setting {
  std::string schedule = "1F1B";
  int ranks = 2, shards = 2, steps = 3, chunks = 0;
  int blocks = 1;  // of a stage
  bool sequence_parallel = false;
  fault wrong = fault::none;
  double dropout = 0;
  chevron::optimizer_factory make = chevron::optimizer<torch::optim::SGD>(0.1);
  chevron::trainer_options options = {};
  std::vector<std::pair<at::Tensor, at::Tensor>> batches = {};  // of the first steps; then drawn ones
};

struct feed_forward : torch::nn::Module {
  feed_forward(shard_group g, setting const& of, int number, bool here)
      : group(g), how(of), wrong(here ? of.wrong : fault::none) {
    auto const generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(300 + number));
    auto const drawn = [&](std::vector<std::int64_t> sizes) { return at::randn(sizes, generator, at::kDouble) * 0.4; };
    auto const own = [&](at::Tensor const& whole, std::int64_t along) {
      auto const [begin, size] = group.piece(whole.size(along));
      return whole.narrow(along, begin, size).clone();
    };
    norm = register_parameter("norm", 1 + drawn({wide}));
    columns = register_parameter("columns", own(drawn({inner, wide}), 0));
    rows = register_parameter("rows", own(drawn({wide, inner}), 1));
    bias = register_parameter("bias", drawn({wide}));
  }
  at::Tensor forward(at::Tensor x) {
    if (wrong == fault::needless_copy) x = group.copy(x);
    at::Tensor h = at::layer_norm(x, {wide}) * norm;
    if (how.dropout > 0) {
      std::optional<chevron::sharded_random> own;
      if (wrong == fault::own_dropout) own.emplace(group.shard());
      h = torch::dropout(h, how.dropout, is_training());
    }
    if (how.sequence_parallel) {
      h = group.all_gather(h, 1, wrong == fault::gathered_as_whole ? after_gather::whole : after_gather::partial, tokens);
    } else if (wrong != fault::no_copy && wrong != fault::no_copy_hidden) {
      h = group.copy(h);
    }
    bool const inside = wrong == fault::bias_in_sum;
    h = at::linear(at::gelu(at::linear(h, columns)), rows, inside ? bias : at::Tensor());
    if (wrong != fault::no_sum) h = how.sequence_parallel ? group.reduce_scatter(h, 1) : group.all_reduce(h);
    return x + (inside ? h : h + bias);
  }

  shard_group group;
  setting how;
  fault wrong;
  at::Tensor norm, columns, rows, bias;
};

/// Blocks in a row; the first stage cuts a sequence, and the last one gathers it.
struct several : torch::nn::Module {
  several(shard_group g, setting const& of, int stage, int stages)
      : group(g), how(of), first(stage == 0), last(stage + 1 == stages) {
    for (int b = 0; b < how.blocks; ++b) {
      bool const at_end = how.wrong == fault::no_copy || how.wrong == fault::no_copy_hidden || how.wrong == fault::needless_copy,
                 here = at_end ? last && b + 1 == how.blocks : first && b == 0;
      blocks.push_back(
          register_module("b" + std::to_string(b), std::make_shared<feed_forward>(g, how, stage * how.blocks + b, here)));
    }
  }
  at::Tensor forward(at::Tensor x) {
    if (how.sequence_parallel && first) x = group.scatter(x, 1);
    for (auto const& block : blocks) x = block->forward(x);
    return how.sequence_parallel && last && how.wrong != fault::loss_of_own_part
               ? group.all_gather(x, 1, how.wrong == fault::gathered_as_parts ? after_gather::partial : after_gather::whole,
                                  tokens)
               : x;
  }

  shard_group group;
  setting how;
  bool first, last;
  std::vector<std::shared_ptr<feed_forward>> blocks;
};

chevron::stage declared(transport& comm, setting const& how, int stage, int stages) {
  auto const made = std::make_shared<several>(shard_group(comm), how, stage, stages);
  chevron::stage out(made);
  for (int b = 0; b < how.blocks; ++b) {
    std::string const block = "b" + std::to_string(b) + ".";
    bool const here = stage == 0 && b == 0, is_last = stage + 1 == stages && b + 1 == how.blocks;
    auto const wrong = [&](fault what) { return here && how.wrong == what; };
    if (wrong(fault::wrong_dimension)) {
      out.cut(block + "columns", 1, {.whole = wide});
    } else if (!wrong(fault::cut_forgotten)) {
      out.cut(block + "columns", 0, {.whole = inner});
    }
    out.cut(block + "rows", 1);
    if (wrong(fault::whole_declared_cut)) out.cut(block + "bias", 0);
    bool const hidden = how.wrong == fault::no_copy_hidden;
    if (how.sequence_parallel ? !wrong(fault::partial_not_declared) : wrong(fault::whole_declared_partial) || hidden)
      out.partial({block + "norm"});
    if (how.sequence_parallel || (hidden && !is_last)) out.partial({block + "bias"});
  }
  return out;
}

struct outcome {
  std::vector<double> losses, norms;
  std::string refused;  // words of the error; empty: trained
  int code = 0;
  long step = -1;  // that was refused
};

outcome train(setting const& how) {
  chevron::shape size{.ranks = how.ranks, .micro_batches = 2};
  if (how.chunks > 0) size.chunks = how.chunks;
  auto const program = chevron::lower(chevron::prove(chevron::catalogue::make_plan(how.schedule, size)));
  outcome out;
  try {
    chevron::run_threads({.pipeline_ranks = how.ranks, .shards = how.shards}, [&](transport& comm) {
      chevron::trainer trainer(
          {.program = program,
           .transport = comm,
           .stages = [&](int s) { return declared(comm, how, s, program.view().plan.stages); },
           .loss = [](at::Tensor y, at::Tensor target) { return at::mse_loss(y, target.narrow(1, 0, y.size(1))); },
           .optimizer = how.make,
           .options = how.options});
      for (int k = 0; k < how.steps; ++k) {
        auto const generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(900 + k));
        at::Tensor x = at::randn({4, tokens, wide}, generator, at::kDouble),
                   y = at::randn({4, tokens, wide}, generator, at::kDouble);
        if (static_cast<std::size_t>(k) < how.batches.size()) std::tie(x, y) = how.batches[static_cast<std::size_t>(k)];
        if (comm.topology().global_rank == 0) out.step = k;
        auto const report = trainer.step(x, y);
        if (comm.topology().global_rank != 0) continue;
        out.losses.push_back(report.loss);
        out.norms.push_back(report.grad_norm);
      }
    });
  } catch (chevron::error const& e) {
    out.refused = e.what();
    out.code = static_cast<int>(e.code());
  }
  return out;
}

/// Training is that of one shard, but for the order of sums.
void check_equals_one_shard(setting how) {
  CAPTURE(how.schedule);
  outcome const got = train(how);
  how.shards = 1;
  outcome const expected = train(how);
  CHECK(got.refused == "");
  REQUIRE(got.losses.size() == expected.losses.size());
  for (std::size_t k = 0; k < got.losses.size(); ++k) {
    CHECK(got.losses[k] == doctest::Approx(expected.losses[k]).epsilon(1e-9));
    CHECK(got.norms[k] == doctest::Approx(expected.norms[k]).epsilon(1e-9));
  }
}

void check_refused(setting const& how, std::vector<std::string> const& words, long at_most_step = 0) {
  outcome const got = train(how);
  CAPTURE(got.refused);
  CHECK(got.step <= at_most_step);
  for (std::string const& word : words) {
    CAPTURE(word);
    CHECK(got.refused.find(word) != std::string::npos);
  }
}

}  // namespace

TEST_CASE("planted faults of stages that are cut: each is refused with the word that mends it, before a parameter changes") {
  struct row {
    fault wrong;
    bool sequence_parallel;
    std::vector<std::string> words;
  };
  std::vector<row> const rows = {
      {fault::cut_forgotten,
       false,
       {"shards 0 and 1 hold different values of stage 0's b0.columns, which is not declared cut",
        "Remedy: if each holds a piece, stage.cut(\"b0.columns\", dimension)"}},
      {fault::wrong_dimension,
       false,
       {"stage 0 b0.columns is declared cut along 1 of 6 elements, but its pieces have 6 + 6 = 12",
        "the dimension along which it is cut"}},
      {fault::whole_declared_cut,
       false,
       {"all 2 shards have equal values and equal gradients of stage 0's b0.bias, which is declared cut",
        "leave b0.bias out of stage.cut"}},
      {fault::partial_not_declared,
       true,
       {"have unequal gradients of stage 0's b0.norm, but each holds the whole parameter", "stage.partial({\"b0.norm\"})"}},
      {fault::whole_declared_partial,
       false,
       {"all 2 shards computed the same gradient of stage 0's b0.norm, which is declared partial",
        "leave it out of stage.partial"}},
      {fault::no_copy,
       false,
       {"of stage 1 got equal values of input 0, a whole tensor, and gave unequal gradients of this input back to stage 0",
        "Remedy: in stage 1, shard_group::copy"}},
      {fault::no_copy_hidden, false, {"of stage 1 got equal values of input 0", "Remedy: in stage 1, shard_group::copy"}},
      {fault::bias_in_sum,
       false,
       {"stage 0's b0.bias is whole on all 2 shards, with equal gradients, and is added over them, inside of "
        "shard_group::all_reduce",
        "contains 2 times the parameter", "Remedy: add a bias after the sum"}},
      {fault::no_sum, false, {"pass different tensors to shard_group::copy in stage 1", "Remedy: shard_group::all_reduce"}},
      {fault::gathered_as_whole,
       true,
       {"have unequal gradients of the result of shard_group::all_gather in stage 0", "Remedy: after_gather::partial"}},
      {fault::needless_copy,
       false,
       {"all 2 shards computed the same gradient of the result of shard_group::copy in stage 1", "would be 2 times too large",
        "no copy"}},
      {fault::gathered_as_parts,
       true,
       {"all 2 shards computed the same gradient of the result of shard_group::all_gather with after_gather::partial in stage 1",
        "Remedy: where all shards compute the same, after_gather::whole"}},
      {fault::own_dropout, false, {"pass different tensors to shard_group::copy in stage 0", "equal random numbers"}},
      {fault::loss_of_own_part, true, {"shards 0 and 1 computed the losses", "which counts once"}},
  };
  for (char const* schedule : {"1F1B", "ZB-H1", "GPipe"}) {
    CAPTURE(schedule);
    for (row const& one : rows) {
      CAPTURE(static_cast<int>(one.wrong));
      setting how{.schedule = schedule, .sequence_parallel = one.sequence_parallel, .wrong = one.wrong};
      how.dropout = one.wrong == fault::own_dropout ? 0.3 : 0;
      check_refused(how, one.words);
    }
    check_equals_one_shard({.schedule = schedule});
    check_equals_one_shard({.schedule = schedule, .sequence_parallel = true});
    check_equals_one_shard({.schedule = schedule, .dropout = 0.3});
  }
}

TEST_CASE("a forgotten cut of pieces that differ in size, and three shards that are right") {
  check_refused({.shards = 3, .wrong = fault::cut_forgotten},
                {"shards 0 and 1 hold different tensors (Double [2, 6] and Double [3, 6]) of stage 0's b0.columns",
                 "stage.cut(\"b0.columns\", dimension)"});
  check_equals_one_shard({.shards = 3});
  check_equals_one_shard({.shards = 4, .sequence_parallel = true});
}

TEST_CASE("a missing copy between chunks of one rank, within one stage, and in the first stage") {
  // Four stages on two ranks, and two on one: messages, and boundaries without a message.
  for (int const ranks : {1, 2}) {
    setting how{.schedule = ranks == 1 ? "Interleaved1F1B" : "ZB-V", .ranks = ranks, .chunks = ranks == 1 ? 2 : 0};
    std::string const last = std::to_string(2 * ranks - 1);
    for (fault const wrong : {fault::no_copy, fault::no_copy_hidden}) {
      how.wrong = wrong;
      check_refused(how, {"of stage " + last + " got equal values of input 0", "shard_group::copy"});
    }
    how.wrong = fault::none;
    check_equals_one_shard(how);
  }
  // Two blocks in one stage: the first block's sum gets the gradient.
  setting how{.schedule = "1F1B", .ranks = 1, .blocks = 2, .wrong = fault::no_copy_hidden};
  check_refused(how, {"have unequal gradients of the result of shard_group::all_reduce in stage 0", "Remedy: shard_group::copy"});
  // One block: the parameters before it.
  how.blocks = 1;
  how.wrong = fault::no_copy;
  check_refused(how, {"have unequal gradients of stage 0's b0.norm", "Remedy: shard_group::copy of the whole tensor",
                      "only where a shard sees a part of the input, stage.partial({\"b0.norm\"})"});
}

TEST_CASE("batches whose pieces are equal by chance are no fault, and hide none longer than until the next batch") {
  auto const generator = at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{8});
  at::Tensor const drawn = at::randn({4, tokens, wide}, generator, at::kDouble),
                   repeated = drawn.narrow(1, 0, 1).expand({4, tokens, wide}).contiguous(), ones = at::ones_like(drawn),
                   zeros = at::zeros_like(drawn);
  for (auto const& [x, y] : {std::pair{ones, zeros}, {repeated, repeated.flip({2})}, {zeros, drawn}, {zeros, zeros}}) {
    for (bool const sequence_parallel : {true, false}) {
      setting how{.steps = 4, .sequence_parallel = sequence_parallel, .batches = {{x, y}, {x, y}, {x, y}}};
      check_equals_one_shard(how);
      how.schedule = "ZB-H1";
      check_equals_one_shard(how);
    }
    // A true fault, then: with the first batch that shows it.
    setting wrong{.steps = 4, .wrong = fault::whole_declared_partial, .batches = {{x, y}}};
    check_refused(wrong, {"all 2 shards computed the same gradient of stage 0's b0.norm"}, 1);
    wrong.wrong = fault::no_copy_hidden;
    check_refused(wrong, {"Remedy: in stage 1, shard_group::copy"}, 1);
    wrong.wrong = fault::whole_declared_cut;
    check_refused(wrong, {"stage 0's b0.bias, which is declared cut"}, 1);
  }
  // Batches that repeat in each step that always compares: the comparison goes on until a batch that proves something.
  for (std::size_t const repeats : {2u, 3u}) {
    setting wrong{.steps = 5, .batches = {repeats, {repeated, repeated.flip({2})}}};
    auto const first_drawn = static_cast<long>(repeats);
    wrong.wrong = fault::whole_declared_partial;
    check_refused(wrong, {"all 2 shards computed the same gradient of stage 0's b0.norm"}, first_drawn);
    wrong.wrong = fault::no_copy_hidden;
    check_refused(wrong, {"Remedy: in stage 1, shard_group::copy"}, first_drawn);
    wrong.wrong = fault::whole_declared_cut;
    check_refused(wrong, {"stage 0's b0.bias, which is declared cut"}, first_drawn);
  }
}

TEST_CASE("gradients that are not finite prove nothing: a first step that overflows is skipped") {
  auto const generator = at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{8});
  at::Tensor const x = at::randn({4, tokens, wide}, generator, at::kDouble);
  at::Tensor const bad = at::full_like(x, std::numeric_limits<double>::infinity());
  for (bool const sequence_parallel : {true, false}) {
    setting how{.steps = 4, .sequence_parallel = sequence_parallel, .batches = {{x, bad}, {x, bad}}};
    how.options.when_not_finite = chevron::not_finite::skip;
    outcome const got = train(how);
    CHECK(got.refused == "");
    CHECK(got.losses.size() == 4);
    how.wrong = sequence_parallel ? fault::partial_not_declared : fault::whole_declared_partial;
    check_refused(how, {sequence_parallel ? "unequal gradients" : "computed the same gradient"}, 2);
  }
}

TEST_CASE("the gradient of a carry that is whole on all shards has to be whole, too") {
  auto const run = [](bool copies, int shards, bool hidden) {
    outcome out;
    auto const program =
        chevron::lower(chevron::prove(chevron::catalogue::make_plan("Seq1F1B", {.ranks = 2, .micro_batches = 2, .slices = 2})));
    try {
      chevron::run_threads({.pipeline_ranks = 2, .shards = shards}, [&](transport& comm) {
        shard_group const group(comm);
        chevron::trainer trainer(
            {.program = program,
             .transport = comm,
             .stages =
                 [&](int s) {
                   setting const how;
                   auto const layer = std::make_shared<feed_forward>(group, how, s, false);
                   // The sum of the tokens so far, which the layers that are cut take, too.
                   auto const forward = [layer, group, copies](at::Tensor x, at::Tensor past) {
                     at::Tensor const from = past.defined() ? past : at::zeros_like(x.narrow(1, 0, 1)), parts = x * layer->bias;
                     at::Tensor const h = group.copy(x + parts.cumsum(1)) + (copies ? group.copy(from) : from);
                     at::Tensor const sum = group.all_reduce(at::linear(at::gelu(at::linear(h, layer->columns)), layer->rows));
                     return tensors{x * layer->norm + sum, from + parts.sum(1, true)};
                   };
                   chevron::stage stage(layer, forward);
                   stage.cut("columns", 0).cut("rows", 1).carries({"state"});
                   if (hidden) stage.partial({"bias"});
                   return stage;
                 },
             .loss = [](at::Tensor y, at::Tensor target) { return at::mse_loss(y, target); },
             .optimizer = chevron::optimizer<torch::optim::SGD>(0.1)});
        for (int k = 0; k < 2; ++k) {
          auto const generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(60 + k));
          at::Tensor const x = at::randn({4, tokens, wide}, generator, at::kDouble),
                           y = at::randn({4, tokens, wide}, generator, at::kDouble);
          auto const report = trainer.step(x, y);
          if (comm.topology().global_rank == 0) out.losses.push_back(report.loss), out.norms.push_back(report.grad_norm);
        }
      });
    } catch (chevron::error const& e) {
      out.refused = e.what();
    }
    return out;
  };
  outcome const right = run(true, 2, false), alone = run(true, 1, false), wrong = run(false, 2, true);
  CHECK(right.refused == "");
  REQUIRE(right.norms.size() == 2);
  CHECK(right.norms[1] == doctest::Approx(alone.norms[1]).epsilon(1e-9));
  CAPTURE(wrong.refused);
  CHECK(wrong.refused.find("got equal values of carry 0, a whole tensor, and gave unequal gradients of this carry back") !=
        std::string::npos);
}

TEST_CASE("a skip connection's gradient is compared at the stage that takes it") {
  auto const run = [](bool copies) {
    std::string refused;
    auto const program = chevron::lower(chevron::prove(chevron::catalogue::make_plan("1F1B", {.ranks = 3, .micro_batches = 2})));
    try {
      chevron::run_threads({.pipeline_ranks = 3, .shards = 2}, [&](transport& comm) {
        shard_group const group(comm);
        auto const build = [&](int s) {
          setting const how;
          auto const layer = std::make_shared<feed_forward>(group, how, s, false);
          auto const last = [layer, group, copies](at::Tensor x, at::Tensor skipped) {
            at::Tensor const h = group.copy(x) + (copies ? group.copy(skipped) : skipped);
            return x * layer->norm + layer->bias +
                   group.all_reduce(at::linear(at::gelu(at::linear(h, layer->columns)), layer->rows));
          };
          chevron::stage stage = s == 0   ? chevron::stage(layer,
                                                           [layer](at::Tensor x) {
                                                           return tensors{layer->forward(x), x * layer->norm};
                                                         })
                                 : s == 1 ? chevron::stage(layer)
                                          : chevron::stage(layer, last);
          return stage.cut("columns", 0)
              .cut("rows", 1)
              .partial(s == 0 ? std::vector<std::string>{"norm"} : std::vector<std::string>{});
        };
        chevron::trainer trainer({.program = program,
                                  .transport = comm,
                                  .stages = chevron::with_skips(build, {{0, 2}}),
                                  .loss = [](at::Tensor y, at::Tensor target) { return at::mse_loss(y, target); },
                                  .optimizer = chevron::optimizer<torch::optim::SGD>(0.1)});
        auto const generator = at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{61});
        at::Tensor const x = at::randn({4, tokens, wide}, generator, at::kDouble);
        trainer.step(x, x.flip({1}));
      });
    } catch (chevron::error const& e) {
      refused = e.what();
    }
    return refused;
  };
  std::string const wrong = run(false);
  CAPTURE(wrong);
  CHECK(wrong.find("of stage 2 got equal values of input 1, a whole tensor") != std::string::npos);
}

TEST_CASE("code that may need whole tensors is refused where it would get pieces, unless it says that it is element-wise") {
  setting how;
  how.make = chevron::optimizer<own_optimizer>(0.1);
  check_refused(how, {"an optimizer of a class of its own may need whole tensors, and of stage ",
                      "this rank has a piece, cut along dimension 0", "chevron::element_wise"});
  how.make = chevron::element_wise(how.make);
  check_equals_one_shard(how);

  setting hook;
  hook.options.before_optimizer_step = [](chevron::final_gradients const& now) {
    for (chevron::named_parameter const& p : now.parameters) p.value.grad().mul_(0.5);
  };
  check_refused(hook, {"before_optimizer_step would be given a piece of stage ", "'s b0.columns, which is cut along dimension 0",
                       "trainer_options::element_wise_hook"});
  hook.options.element_wise_hook = true;
  check_equals_one_shard(hook);
  // The hook learns which parameters are pieces, and how they are cut.
  hook.steps = 1;
  std::mutex mutex;
  std::string seen;
  hook.options.before_optimizer_step = [&](chevron::final_gradients const& now) {
    std::lock_guard const hold(mutex);
    if (!seen.empty()) return;
    for (chevron::named_parameter const& p : now.parameters)
      seen += p.name + (p.is_piece ? " cut along " + std::to_string(p.cut_along) : "") + "; ";
  };
  train(hook);
  CHECK(seen == "b0.norm; b0.columns cut along 0; b0.rows cut along 1; b0.bias; ");
  // With one shard nothing is a piece.
  setting alone{.shards = 1, .make = chevron::optimizer<own_optimizer>(0.1)};
  alone.options.before_optimizer_step = [](chevron::final_gradients const&) {};
  CHECK(train(alone).refused == "");
}
