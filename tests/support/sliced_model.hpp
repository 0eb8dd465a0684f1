#pragma once

// Shared by tests of slices: stages that carry keys and values, or the state of a recurrent layer, from slice to slice, and the
// same model in a plain loop over microbatches and slices.

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <torch/nn/modules/rnn.h>

#include <chevron/describe/table.hpp>

#include "support/small_model.hpp"

namespace sliced_model {

using chevron::tensors;
using small_model::builder, small_model::complaints;

inline constexpr std::int64_t width = 6;

/// Causal attention over all tokens so far, whose keys and values are its carry.
struct attention_impl : torch::nn::Module {
  attention_impl() {
    norm = register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    in = register_module("in", torch::nn::Linear(width, 3 * width));
    out = register_module("out", torch::nn::Linear(width, width));
  }
  std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(at::Tensor x, at::Tensor keys, at::Tensor values) {
    return attend(x, keys, values, {});
  }
  /// \param documents by token, or none; tokens attend within their document \param before of the tokens that are carried
  std::tuple<at::Tensor, at::Tensor, at::Tensor> attend(at::Tensor x, at::Tensor keys, at::Tensor values, at::Tensor same) {
    tensors const parts = in(norm(x)).chunk(3, -1);
    // Sums of the carry's gradient over slices are made in the carry's dtype.
    at::Tensor own_keys = parts[1].to(carried), own_values = parts[2].to(carried);
    if (keys.defined()) {
      own_keys = at::cat({keys, own_keys}, 1);
      own_values = at::cat({values, own_values}, 1);
    }
    std::int64_t const tokens = x.size(1), all = own_keys.size(1);
    at::Tensor seen = at::ones({tokens, all}, at::kBool).tril(all - tokens).unsqueeze(0);
    if (same.defined()) seen = seen.logical_and(same);
    at::Tensor const scores = parts[0].matmul(own_keys.transpose(1, 2).to(parts[0].dtype())) / std::sqrt(double(width));
    at::Tensor const shares = scores.masked_fill(seen.logical_not(), -1e9).softmax(-1);
    at::Tensor const mixed = shares.matmul(own_values.to(shares.dtype()));
    return {x + out(mixed.to(parts[0].dtype())).tanh(), own_keys, own_values};
  }
  torch::nn::LayerNorm norm{nullptr};
  torch::nn::Linear in{nullptr}, out{nullptr};
  at::ScalarType carried = at::kFloat;
};

inline std::shared_ptr<attention_impl> make_attention(int number) {
  at::manual_seed(500 + number);
  return std::make_shared<attention_impl>();
}
inline chevron::stage build_attention(int number) { return chevron::stage(make_attention(number)).carries({"keys", "values"}); }

/// A recurrent layer over time; its carry is its state.
struct recurrent_impl : torch::nn::Module {
  recurrent_impl() { layer = register_module("layer", torch::nn::LSTM(torch::nn::LSTMOptions(width, width).batch_first(true))); }
  std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(at::Tensor x, at::Tensor hidden, at::Tensor cell) {
    torch::optional<std::tuple<at::Tensor, at::Tensor>> state;
    if (hidden.defined()) state = std::make_tuple(hidden, cell);
    auto const [y, next] = layer(x, state);
    return {x + y, std::get<0>(next), std::get<1>(next)};
  }
  torch::nn::LSTM layer{nullptr};
};
inline chevron::stage build_recurrent(int number) {
  at::manual_seed(600 + number);
  return chevron::stage(std::make_shared<recurrent_impl>()).carries({"hidden", "cell"});
}

inline chevron::plan plan_of(char const* name, chevron::shape size) {
  auto plan = chevron::catalogue::make_plan(name, size);
  auto const found = chevron::check(plan);
  if (found) throw std::runtime_error(chevron::describe(found).str());
  return plan;
}

/// Two stages on one rank, three microbatches of two slices whose actions alternate as far as the laws allow, and two fused
/// pairs.
inline chevron::plan alternating(bool split) {
  using chevron::letters::B, chevron::letters::F, chevron::letters::I, chevron::letters::W;
  auto const gradient = [&](int stage, int unit) { return split ? I(stage, unit) : B(stage, unit); };
  std::vector<chevron::action> list;
  for (int const unit : {0, 2, 1, 3, 4, 5}) list.push_back(F(0, unit));
  for (int const unit : {0, 2, 1, 3}) list.push_back(F(1, unit));
  for (int const unit : {4, 5}) {
    list.push_back(F(1, unit));
    list.back().fused = 1;
    list.push_back(gradient(1, unit == 4 ? 1 : 3));
  }
  for (int const unit : {0, 5, 2, 4}) list.push_back(gradient(1, unit));
  for (int const unit : {5, 1, 4, 0, 3, 2}) list.push_back(gradient(0, unit));
  for (int stage = 0; split && stage < 2; ++stage) {
    for (int const unit : {2, 0, 5, 1, 4, 3}) list.push_back(W(stage, unit));
  }
  int const begin[] = {0, static_cast<int>(list.size())};
  chevron::plan plan = chevron::plan_of_actions(list.data(), begin, 1);
  plan.size.micro_batches = 3;
  plan.size.slices = 2;
  auto const found = chevron::check(plan);
  if (found) throw std::runtime_error(chevron::describe(found).str());
  return plan;
}

struct sequences {
  at::Tensor input, target;
};
inline sequences make_sequences(std::int64_t samples, std::int64_t tokens, int seed) {
  auto const generator = at::make_generator<at::CPUGeneratorImpl>(static_cast<std::uint64_t>(seed));
  return {at::randn({samples, tokens, width}, generator), at::randn({samples, tokens, width}, generator)};
}

/// Ends of slices of equal length, the longer ones first.
inline std::vector<std::int64_t> equal_ends(std::int64_t tokens, int slices) {
  std::vector<std::int64_t> ends;
  for (int s = 0; s < slices; ++s)
    ends.push_back((ends.empty() ? 0 : ends.back()) + tokens / slices + (s < tokens % slices ? 1 : 0));
  return ends;
}

inline std::vector<std::int64_t> no_ends(std::int64_t, int) { return {}; }

/// Settings that differ from run to run.
struct plain_run {
  long step = 0;
  std::function<std::vector<std::int64_t>(std::int64_t tokens, int micro_batch)> ends = no_ends;
  std::function<double(at::Tensor const& target)> counts = {};  // of a slice; empty: its share of samples
  std::function<std::vector<chevron::side_input>(int micro_batch, std::int64_t begin, std::int64_t end)> side_inputs = {};
  std::function<at::Tensor(at::Tensor, at::Tensor)> loss = small_model::mean_square;
  double total = 0;                                              // count of all units of the step; 0: of these
  std::vector<std::pair<std::string, double>> loss_totals = {};  // the same of losses of stages with a weight of their own
  int first = 0;                                                 // number of the first unit
  bool adds = false;                                             // to the loss and gradients of the run before
};

/// The un-pipelined model: for each microbatch its slices forward in order, then backward in reverse, by plain autograd with one
/// graph a slice. Carries are cut off between slices, and their gradients handed back by hand.
struct reference {
  std::vector<chevron::stage> stages;
  std::vector<tensors> gradients;  // by stage, by parameter
  double loss = 0, grad_norm = 0;
  /// By replica and unit, summed over the runs of a step: `loss` is summed in this order, as `step_report::loss` is.
  std::vector<std::vector<double>> weighted_losses;
  std::vector<std::vector<double>> stage_losses;  // means of the losses that stages declare, by stage and declaration

  explicit reference(int count, builder const& build) {
    for (int s = 0; s < count; ++s) stages.push_back(build(s));
  }

  /// The means of a name's losses, added up by stage as reports do.
  double mean_of(std::string const& name) const {
    std::optional<double> sum;
    for (std::size_t s = 0; s < stages.size(); ++s) {
      for (std::size_t k = 0; k < stage_losses[s].size(); ++k) {
        if (stages[s].losses()[k].name == name) sum = sum ? *sum + stage_losses[s][k] : stage_losses[s][k];
      }
    }
    return sum.value();
  }

  /// The tensors of a unit that its backward needs.
  struct unit {
    at::Tensor loss;
    std::vector<tensors> came, left;  // carries, by stage
    double counts = 0;
    std::vector<tensors> given;                     // losses of stages, by stage and declaration
    std::vector<std::vector<double>> given_counts;  // counts of the unit in these losses
  };

  unit forward(sequences const& part, std::int64_t begin, std::int64_t end, std::vector<tensors> const* before,
               chevron::rng_key key, std::vector<chevron::side_input> const& side_inputs,
               std::function<at::Tensor(at::Tensor, at::Tensor)> const& loss_of) {
    unit out;
    tensors values{part.input.narrow(1, begin, end - begin)}, next;
    tensors const targets{part.target.narrow(1, begin, end - begin)};
    for (std::size_t s = 0; s < stages.size(); ++s) {
      auto const declared = stages[s].carries();
      chevron::collected_losses given;
      tensors carried(declared.size());
      for (std::size_t k = 0; before != nullptr && k < declared.size(); ++k) {
        at::Tensor const& t = (*before)[s][k];
        if (t.defined()) carried[k] = t.detach().requires_grad_(t.is_floating_point() && !declared[k].detached);
      }
      out.came.push_back(carried);
      key.stage = static_cast<int>(s);
      stages[s].forward(values, next, {.side_inputs = side_inputs, .draws = key, .targets = &targets, .carried = &carried});
      out.given.emplace_back();
      for (auto const& one : stages[s].losses()) {
        auto const same = [&](auto const& each) { return each.name == one.name; };
        bool const gave = std::any_of(given.all().begin(), given.all().end(), same);
        out.given.back().push_back(gave ? given.sum(one.name) : at::Tensor());
      }
      out.left.push_back(carried);
      values = next;
    }
    out.loss = loss_of(values[0], part.target.narrow(1, begin, end - begin));
    out.counts = double(part.input.size(0)) * (double(end - begin) / double(part.input.size(1)));
    return out;
  }

  void backward(unit const& of, double weight, std::vector<std::vector<double>> const& loss_totals,
                std::vector<tensors>& from_behind) {
    tensors roots, seeds;
    if (weight > 0) {
      roots.push_back(of.loss);
      seeds.push_back(at::full({}, weight));
    }
    for (std::size_t s = 0; s < stages.size(); ++s) {
      for (std::size_t k = 0; k < of.given[s].size(); ++k) {
        double const share = of.given_counts[s][k] / loss_totals[s][k];
        if (!(share > 0)) continue;
        roots.push_back(of.given[s][k].reshape({}));
        seeds.push_back(at::full({}, share * stages[s].losses()[k].factor, at::kDouble).to(roots.back().scalar_type()));
      }
      for (std::size_t k = 0; k < of.left[s].size(); ++k) {
        if (!from_behind[s].empty() && from_behind[s][k].defined() && of.left[s][k].requires_grad()) {
          roots.push_back(of.left[s][k]);
          seeds.push_back(from_behind[s][k]);
        }
      }
      for (auto& q : stages[s].parameters()) q.value.mutable_grad().reset();
    }
    if (!roots.empty()) torch::autograd::backward(roots, seeds);
    for (std::size_t s = 0; s < stages.size(); ++s) {
      from_behind[s].clear();
      for (at::Tensor const& t : of.came[s]) from_behind[s].push_back(t.defined() && t.requires_grad() ? t.grad() : at::Tensor());
    }
  }

  /// \param replicas the microbatches of each
  void run(chevron::plan const& p, std::vector<std::vector<sequences>> const& replicas, plain_run const& how = {}) {
    int const k = p.size.slices;
    if (!how.adds) weighted_losses.clear();
    weighted_losses.resize(replicas.size());
    std::vector<std::vector<std::vector<tensors>>> each(replicas.size());  // by replica, unit, stage, parameter
    double all = 0;
    std::vector<std::vector<double>> loss_totals, means;
    for (auto& one : stages) loss_totals.emplace_back(one.losses().size());
    means = loss_totals;
    std::vector<std::vector<unit>> units(replicas.size());
    for (std::size_t r = 0; r < replicas.size(); ++r) {
      double of_replica = 0;
      auto of_losses = means;
      for (int m = 0; m < p.size.micro_batches; ++m) {
        sequences const& part = replicas[r][static_cast<std::size_t>(m)];
        auto cuts = how.ends(part.input.size(1), m);
        if (cuts.empty()) cuts = equal_ends(part.input.size(1), k);
        std::int64_t begin = 0;
        if (!how.counts) of_replica += double(part.input.size(0));  // whole samples: fractions of slices would be rounded
        for (int s = 0; s < k; ++s) {
          std::int64_t const end = cuts[static_cast<std::size_t>(s)];
          int const u = m * k + s;
          auto const extra = how.side_inputs ? how.side_inputs(m, begin, end) : std::vector<chevron::side_input>{};
          units[r].push_back(forward(part, begin, end, s == 0 ? nullptr : &units[r].back().left,
                                     {.step = how.step, .replica = static_cast<int>(r), .micro_batch = how.first + u}, extra,
                                     how.loss));
          if (how.counts) {
            units[r].back().counts = how.counts(part.target.narrow(1, begin, end - begin));
            of_replica += units[r].back().counts;
          }
          chevron::batch const slice{
              {part.input.narrow(1, begin, end - begin)}, {part.target.narrow(1, begin, end - begin)}, extra};
          for (std::size_t n = 0; n < stages.size(); ++n) {
            units[r].back().given_counts.emplace_back();
            for (auto const& one : stages[n].losses()) {
              double const counts = one.weight ? one.weight(slice) : units[r].back().counts;
              of_losses[n][units[r].back().given_counts.back().size()] += counts;
              units[r].back().given_counts.back().push_back(counts);
            }
          }
          begin = end;
        }
      }
      all += of_replica;
      for (std::size_t n = 0; n < stages.size(); ++n) {
        for (std::size_t j = 0; j < of_losses[n].size(); ++j) loss_totals[n][j] += of_losses[n][j];
      }
    }
    if (how.total > 0) all = how.total;
    for (std::size_t n = 0; n < stages.size(); ++n) {
      for (std::size_t j = 0; j < loss_totals[n].size(); ++j) {
        auto const& declared = stages[n].losses()[j];
        if (!declared.weight) loss_totals[n][j] = all;
        for (auto const& [name, total] : how.loss_totals) {
          if (declared.weight && declared.name == name) loss_totals[n][j] = total;
        }
      }
    }
    for (std::size_t r = 0; r < replicas.size(); ++r) {
      each[r].resize(units[r].size());
      for (int m = 0; m < p.size.micro_batches; ++m) {
        std::vector<tensors> from_behind(stages.size());
        for (int s = k - 1; s >= 0; --s) {
          std::size_t const u = static_cast<std::size_t>(m * k + s);
          backward(units[r][u], units[r][u].counts / all, loss_totals, from_behind);
          for (auto& one : stages) {
            each[r][u].emplace_back();
            for (auto& q : one.parameters())
              each[r][u].back().push_back(q.value.grad().defined() ? q.value.grad().clone() : at::zeros_like(q.value));
          }
        }
      }
      weighted_losses[r].resize(std::max(weighted_losses[r].size(), units[r].size()));
      for (std::size_t u = 0; u < units[r].size(); ++u) {
        unit const& one = units[r][u];
        if (one.counts > 0) weighted_losses[r][u] += one.loss.item<double>() * (one.counts / all);
      }
      for (std::size_t n = 0; n < stages.size(); ++n) {
        for (std::size_t j = 0; j < means[n].size(); ++j) {
          double of_replica = 0;
          for (unit const& one : units[r]) {
            double const counts = one.given_counts[n][j];
            if (counts > 0) of_replica += one.given[n][j].item<double>() * (counts / loss_totals[n][j]);
          }
          means[n][j] += of_replica;
        }
      }
    }
    loss = 0;
    for (auto const& of_replica : weighted_losses) {
      for (double const one : of_replica) loss += one;
    }
    for (std::size_t n = 0; how.adds && n < stages.size(); ++n) {
      for (std::size_t j = 0; j < means[n].size(); ++j) means[n][j] += stage_losses[n][j];
    }
    stage_losses = means;
    std::vector<tensors> const before = std::exchange(gradients, {});
    double squares = 0;
    for (std::size_t s = 0; s < stages.size(); ++s) {
      gradients.emplace_back();
      for (std::size_t q = 0; q < stages[s].parameters().size(); ++q) {
        at::Tensor sum;
        for (auto const& of_replica : each) {
          at::Tensor own = how.adds ? before[s][q] : at::zeros_like(of_replica[0][s][q]);
          for (int const u : small_model::order_of(p, static_cast<int>(s))) own += of_replica[static_cast<std::size_t>(u)][s][q];
          sum = sum.defined() ? sum + own : own;
        }
        gradients.back().push_back(sum);
        squares += chevron::sum_of_squares(sum);
        stages[s].parameters()[q].value.mutable_grad() = sum;
      }
    }
    grad_norm = std::sqrt(squares);
  }

  tensors parameters() { return small_model::parameters_of(stages); }
};

/// The microbatches of a batch.
inline std::vector<sequences> parts_of(sequences const& whole, int micro_batches) {
  std::vector<sequences> out;
  for (int m = 0; m < micro_batches; ++m) {
    auto const range = chevron::samples_of(whole.input.size(0), micro_batches, m);
    out.push_back({whole.input.narrow(0, range.first, range.count), whole.target.narrow(0, range.first, range.count)});
  }
  return out;
}

/// Gradients of this rank's stages against the reference's.
inline void compare_gradients(chevron::trainer& train, reference const& whole, std::string const& where, complaints& wrong) {
  int checked = 0;
  for (std::size_t s = 0; s < train.stages().size(); ++s) {
    auto const& mine = train.stages()[s].parameters();
    for (std::size_t q = 0; q < mine.size(); ++q, ++checked)
      wrong.require(at::equal(mine[q].value.grad(), whole.gradients[s][q]),
                    where + "gradient of stage " + std::to_string(s) + " " + mine[q].name);
  }
  wrong.require(checked > 0, where + "no gradient was compared");
}

inline std::string words_of(chevron::plan const& plan) {
  chevron::text size;
  append(size, plan.size);
  return std::string(plan.name) + ", " + size.str() + ": ";
}

}  // namespace sliced_model
