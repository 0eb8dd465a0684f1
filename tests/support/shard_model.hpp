#pragma once

// A stage whose parameters are cut over shards, as Megatron-LM cuts a feed-forward block, and training with it.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include <ATen/ops/gelu.h>
#include <ATen/ops/layer_norm.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/mse_loss.h>

#include <chevron/run/comm/shard_group.hpp>

#include "support/small_model.hpp"

#include <doctest/doctest.h>

namespace shard_model {

using chevron::shard_group;
using chevron::tensors;
using chevron::transport;

constexpr std::int64_t wide = 12, inner = 24, tokens = 8;

/// The mistake that a test makes.
enum class fault {
  none,
  partial_not_declared,    // of a norm over a part of the sequence
  whole_declared_partial,  // of a norm over the whole sequence
  gathered_as_whole,       // the gradient of a gathered tensor is not summed
  no_copy,                 // the gradient of the cut region's input is not summed
  same_dropout,            // all shards drop alike within the cut region
  own_dropout_outside,     // each shard draws its own outside of it
  loss_of_own_part         // each shard's loss is of its own piece
};

struct setting {
  std::string schedule = "1F1B";
  int ranks = 2, replicas = 1, shards = 2, micro_batches = 4, steps = 3;
  bool sequence_parallel = false;
  double dropout = 0;          // of whole tensors
  double sharded_dropout = 0;  // within the cut region
  fault wrong = fault::none;
  bool tied = false;
  bool recompute = false;
  chevron::optimizer_factory make = chevron::optimizer<torch::optim::SGD>(0.5);
  chevron::trainer_options options = {};
  at::ScalarType dtype = at::kDouble;
};

struct block : torch::nn::Module {
  shard_group group;
  setting how;
  at::Tensor norm_weight, norm_bias, columns, column_bias, rows, row_bias;
  bool first, last;

  block(shard_group g, setting const& what, int number, bool is_last) : group(g), how(what), first(number == 0), last(is_last) {
    auto const generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(700 + number));
    auto const drawn = [&](std::vector<std::int64_t> sizes) {
      return (at::randn(sizes, generator, at::kDouble) * 0.3).to(how.dtype);
    };
    auto const piece = group.piece(inner);
    auto const own = [&](at::Tensor const& whole, std::int64_t dim) {
      return whole.narrow(dim, piece.begin, piece.size).clone();
    };
    norm_weight = register_parameter("norm_weight", 1 + drawn({wide}));
    norm_bias = register_parameter("norm_bias", drawn({wide}));
    columns = register_parameter("column_weight", own(drawn({inner, wide}), 0));
    column_bias = register_parameter("column_bias", own(drawn({inner}), 0));
    rows = register_parameter("row_weight", own(drawn({wide, inner}), 1));
    row_bias = register_parameter("row_bias", drawn({wide}));
  }

  at::Tensor forward(at::Tensor x) {
    using chevron::after_gather;
    if (how.sequence_parallel && first) x = group.scatter(x, 1);
    at::Tensor h = at::layer_norm(x, {wide}, norm_weight, norm_bias);
    if (how.sequence_parallel) {
      h = group.all_gather(h, 1, how.wrong == fault::gathered_as_whole ? after_gather::whole : after_gather::partial, tokens);
    } else {
      if (how.dropout > 0) {
        std::optional<chevron::sharded_random> own;
        if (how.wrong == fault::own_dropout_outside) own.emplace(group.shard());
        h = torch::dropout(h, how.dropout, is_training());
      }
      if (how.wrong != fault::no_copy) h = group.copy(h);
    }
    h = at::gelu(at::linear(h, columns, column_bias));
    if (how.sharded_dropout > 0) {
      std::optional<chevron::sharded_random> own;
      if (how.wrong != fault::same_dropout) own.emplace(group.shard());
      h = torch::dropout(h, how.sharded_dropout, is_training());
    }
    h = at::linear(h, rows);
    h = how.sequence_parallel ? group.reduce_scatter(h, 1) : group.all_reduce(h);
    x = x + h + row_bias;
    return how.sequence_parallel && last && how.wrong != fault::loss_of_own_part
               ? group.all_gather(x, 1, after_gather::whole, tokens)
               : x;
  }
};

inline chevron::stage build(transport& comm, setting const& what, int number, bool is_last) {
  auto const made = std::make_shared<block>(shard_group(comm), what, number, is_last);
  chevron::stage out(made);
  out.cut("column_weight", 0).cut("column_bias", 0).cut("row_weight", 1).recompute(what.recompute);
  bool const partial =
      what.sequence_parallel ? what.wrong != fault::partial_not_declared : what.wrong == fault::whole_declared_partial;
  if (partial) out.partial({"norm_weight", "norm_bias"});
  if (what.sequence_parallel) out.partial({"row_bias"});
  if (what.tied && (number == 0 || is_last)) out.tie("column_weight", "table");
  return out;
}

struct named_value {
  std::string name;  // `stage 1 norm_weight`
  at::Tensor value;
  chevron::over_shards held;
  std::int64_t along;
};
struct outcome {
  std::vector<chevron::step_report> reports;
  std::vector<named_value> values;
};

inline chevron::trainer make_trainer(transport& comm, setting const& what, std::vector<chevron::step_report>& reports) {
  auto options = what.options;
  options.on_report = [&reports](chevron::step_report const& report) { reports.push_back(report); };
  auto const program = chevron::lower(
      chevron::prove(chevron::catalogue::make_plan(what.schedule, {.ranks = what.ranks, .micro_batches = what.micro_batches})));
  int const last = program.view().plan.stages - 1;
  return chevron::trainer(
      {.program = program,
       .transport = comm,
       .stages = [&comm, what, last](int s) { return build(comm, what, s, s == last); },
       .loss = [](at::Tensor y, at::Tensor target) { return at::mse_loss(y, target.narrow(1, 0, y.size(1))); },
       .optimizer = what.make,
       .options = options});
}

inline void train_steps(chevron::trainer& train, setting const& what, int steps) {
  for (int k = 0; k < steps; ++k) {
    auto const generator = at::make_generator<at::CPUGeneratorImpl>(
        static_cast<std::uint64_t>(100 * train.next_step() + train.comm().topology().replica()));
    std::int64_t const samples = 2 * what.micro_batches;
    at::Tensor const input = at::randn({samples, tokens, wide}, generator, at::kDouble).to(what.dtype);
    at::Tensor const target = at::randn({samples, tokens, wide}, generator, at::kDouble).to(what.dtype);
    train.step(input, target);
  }
}

inline std::vector<named_value> values_of(chevron::trainer& train) {
  std::vector<named_value> out;
  for (std::size_t s = 0; s < train.stages().size(); ++s) {
    for (auto const& p : train.stages()[s].parameters())
      out.push_back({"stage " + std::to_string(s) + " " + p.name, p.value.detach().clone(), p.held, p.cut_along});
  }
  return out;
}

inline outcome train_on(transport& comm, setting const& what) {
  outcome out;
  chevron::trainer train = make_trainer(comm, what, out.reports);
  train_steps(train, what, what.steps);
  train.synchronize();
  out.values = values_of(train);
  return out;
}

inline std::vector<outcome> on_threads(setting const& what) {
  std::vector<outcome> all(static_cast<std::size_t>(what.ranks * what.replicas * what.shards));
  chevron::run_threads({.pipeline_ranks = what.ranks, .replicas = what.replicas, .shards = what.shards}, [&](transport& comm) {
    all[static_cast<std::size_t>(comm.topology().global_rank)] = train_on(comm, what);
  });
  return all;
}

/// The whole parameters of replica 0, pieces put together. Copies have to be equal on all shards and replicas, bit for bit.
inline std::vector<named_value> whole_values(std::vector<outcome> const& all, setting const& what) {
  std::vector<named_value> out;
  for (int p = 0; p < what.ranks; ++p) {
    chevron::topology const grid{what.ranks, what.replicas, 0, what.shards};
    auto const at_place = [&](int replica, int shard) -> outcome const& {
      return all[static_cast<std::size_t>(grid.rank_at(replica, p, shard))];
    };
    for (std::size_t i = 0; i < at_place(0, 0).values.size(); ++i) {
      named_value one = at_place(0, 0).values[i];
      CAPTURE(one.name);
      tensors pieces;
      for (int shard = 0; shard < what.shards; ++shard) {
        pieces.push_back(at_place(0, shard).values[i].value);
        for (int replica = 1; replica < what.replicas; ++replica)
          CHECK(at_place(replica, shard).values[i].value.equal(pieces.back()));
        if (one.held != chevron::over_shards::cut) CHECK(pieces.back().equal(one.value));
      }
      if (one.held == chevron::over_shards::cut) one.value = at::cat(pieces, one.along);
      out.push_back(std::move(one));
    }
  }
  return out;
}

}  // namespace shard_model
