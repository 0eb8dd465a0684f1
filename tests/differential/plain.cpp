#include "plain.hpp"

#include <ATen/ATen.h>
#include <ATen/Parallel.h>
#include <ATen/autocast_mode.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/optim/optimizer.h>

#include <chevron/run/core/libtorch.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/backward_scope.hpp>
#include <chevron/run/stage/random_scope.hpp>
#include <chevron/run/stage/stage_loss.hpp>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <thread>

#include "data.hpp"
#include "model.hpp"
#include "plans.hpp"

namespace differential {

namespace {

/// The global norm is made of one number for each parameter, in double. Its memory goes in blocks: of 1,024 elements, or where
/// these would be more than 256 of the least multiple of 64 that makes them 256 at most. A block has eight running sums, added in
/// pairs; blocks are added in their order.
double squares_of(at::Tensor const& g) {
  at::Tensor const row = g.is_non_overlapping_and_dense() ? g.as_strided({g.numel()}, {1}) : g.reshape({-1});
  std::int64_t block = 1024;
  for (; block * 256 < row.numel(); block += 64) {
  }
  double sum = 0;
  for (at::Tensor const& part : row.split(block)) {
    if (part.is_complex()) {
      sum += at::sum(at::square(at::view_as_real(part).to(at::kDouble))).item<double>();
      continue;
    }
    at::Tensor const wide = part.to(at::kDouble);
    double const* const x = wide.const_data_ptr<double>();
    double sums[8] = {};
    // A last group of fewer than eight goes to the first sums.
    for (std::int64_t i = 0; i < wide.numel(); ++i) sums[i % 8] += x[i] * x[i];
    sum += ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
  }
  return sum;
}

/// Carries of a slice, or their gradients: by stage, piece and carry.
using carry_state = std::vector<std::vector<tensors>>;

struct trained_parameter {
  int stage = 0;
  std::size_t part = 0;
  std::string tie;
  bool of_experts = false;
  at::Tensor value;
  at::Tensor master;  // float32, of a half-precision parameter of a program with masters
  at::Tensor sum;     // of this step's gradients; in single precision where the parameter is in half
};

/// The first node of a stage's graph: takes the gradients of the inputs, with their strides.
struct arrivals final : torch::autograd::Node {
  tensors came;
  torch::autograd::variable_list apply(torch::autograd::variable_list&& gradients) override {
    came = std::move(gradients);
    return {};
  }
};
/// Where the graph of a stage ends: an output that has a gradient.
struct ending {
  torch::autograd::Edge from;  // invalid: it needs none
  at::Tensor value;
};
bool differentiable(at::Tensor const& t) { return t.is_floating_point() || t.is_complex(); }

/// The sums of a stage's losses, by name: values, and their gradients.
struct given_losses {
  tensors values;
  std::vector<double> seeds;
};

/// Where replicas that share experts swap rows: each puts its own down, and takes them all once all have come.
class swap_board {
 public:
  struct item {
    at::Tensor rows = {};
    std::vector<std::int64_t> counts = {};
  };

  explicit swap_board(int members) : mine_(static_cast<std::size_t>(members)) {}

  std::vector<item> swap(int member, item given) {
    std::unique_lock hold(mutex_);
    mine_[static_cast<std::size_t>(member)] = std::move(given);
    if (++come_ == mine_.size()) {
      all_ = mine_;
      come_ = 0;
      ++round_;
      changed_.notify_all();
    } else {
      long const round = round_;
      changed_.wait(hold, [&] { return round_ != round || broken_; });
      if (round_ == round) throw meaningless("another replica failed");
    }
    return all_;
  }
  void give_up() {
    std::lock_guard const hold(mutex_);
    broken_ = true;
    changed_.notify_all();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<item> mine_, all_;
  std::size_t come_ = 0;
  long round_ = 0;
  bool broken_ = false;
};

/// The rows that came to a member, by sender.
at::Tensor rows_swapped(swap_board& board, int member, at::Tensor const& rows, std::vector<std::int64_t> const& counts) {
  auto const all = board.swap(member, {.rows = rows.detach().contiguous()});
  std::size_t const members = all.size();
  tensors came;
  for (std::size_t from = 0; from < members; ++from) {
    std::int64_t begin = 0;
    for (std::size_t to = 0; to < static_cast<std::size_t>(member); ++to) begin += counts[from * members + to];
    came.push_back(all[from].rows.narrow(0, begin, counts[from * members + static_cast<std::size_t>(member)]));
  }
  return at::cat(came);
}

/// The same, with its gradient.
struct swapped : torch::autograd::Function<swapped> {
  struct place final : torch::CustomClassHolder {
    place(swap_board& b, int m) : board(&b), member(m) {}
    swap_board* board;
    int member;
  };
  static at::Tensor forward(torch::autograd::AutogradContext* context, at::Tensor const& rows, swap_board* board, int member,
                            std::vector<std::int64_t> const& counts) {
    std::size_t members = 0;
    while (members * members < counts.size()) ++members;
    std::vector<std::int64_t> back(counts.size());
    for (std::size_t i = 0; i < counts.size(); ++i) back[i % members * members + i / members] = counts[i];
    context->saved_data["back"] = back;
    context->saved_data["place"] = at::IValue::make_capsule(c10::make_intrusive<place>(*board, member));
    return rows_swapped(*board, member, rows, counts);
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context, torch::autograd::variable_list g) {
    auto const at = c10::static_intrusive_pointer_cast<place>(context->saved_data["place"].toCapsule());
    return {rows_swapped(*at->board, at->member, g[0], context->saved_data["back"].toIntVector()), {}, {}, {}};
  }
};

/// One replica's model.
struct replica_model {
  expert_ranks experts;
  std::vector<std::vector<piece>> stages;
  std::vector<std::vector<chevron::parameter>> listed;  // by stage, for the draws of hooks on them
  std::vector<trained_parameter> trained;
  std::unique_ptr<torch::optim::Optimizer> optimizer;
};

class loop {
 public:
  loop(program const& p, graph how)
      : p_(p), how_(how), facts_(facts_of(p.schedule(), p.ranks(), p.micro_batches(), p.slices())) {
    if (facts_.stages != static_cast<int>(p.stages.size())) throw meaningless("the plan has another number of stages");
    int const group = p.expert_replicas();
    for (int g = 0; g < p.replicas() / group; ++g) boards_.push_back(std::make_unique<swap_board>(group));
    for (int r = 0; r < p.replicas(); ++r) build(r);
  }

  outcome run() {
    outcome out;
    // With post-validation the state between two steps may still be rolled back: only reports and the final state are compared.
    bool const later = p_.ends_late();
    for (int step = 0; step < p_.steps(); ++step) {
      train(step, out);
      share_buffers();
      bool const last = step + 1 == p_.steps();
      if (!later || last) look(step, out);
      if (!last) act();
      if (p_.get("eval") == "each" || (p_.has("eval") && last)) {
        evaluate(step, out);
        for (int r = 0; r < p_.replicas(); ++r) {
          for (std::size_t s = 0; s < p_.stages.size(); ++s) put_after_evaluation(out, step, r, s);
        }
      }
    }
    return out;
  }

 private:
  void build(int replica) {
    replica_model& made = *replicas_.emplace_back(std::make_unique<replica_model>());
    int const group = p_.expert_replicas();
    swap_board* const board = boards_[static_cast<std::size_t>(replica / group)].get();
    made.experts = {.member = replica % group,
                    .members = group,
                    .counts =
                        [board, member = replica % group](std::vector<std::int64_t> const& own) {
                          std::vector<std::int64_t> all;
                          for (auto const& one : board->swap(member, {.counts = own})) {
                            all.insert(all.end(), one.counts.begin(), one.counts.end());
                          }
                          return all;
                        },
                    .rows = [board, member = replica % group](at::Tensor const& rows, std::vector<std::int64_t> const& counts) {
                      return swapped::apply(rows, board, member, counts);
                    }};
    std::map<std::string, at::Tensor> first_of;
    tensors apart, others;
    for (int s = 0; s < facts_.stages; ++s) {
      made.stages.push_back(build_stage(p_, s, {.experts = group > 1 ? &made.experts : nullptr}));
      tensors const of_some = of_experts(p_, s, made.stages.back());
      auto const ties = tied_of(p_, s, made.stages.back());
      for (auto const& [word, value] : ties) {
        if (first_of.contains(word)) {
          at::NoGradGuard const off;
          at::Tensor(value).copy_(first_of.at(word));
        } else {
          first_of[word] = value;
        }
      }
      made.listed.emplace_back();
      for (std::size_t part = 0; part < made.stages.back().size(); ++part) {
        piece const& each = made.stages.back()[part];
        for (auto const& item : each->named_parameters(true)) made.listed.back().push_back({item.key(), item.value()});
        for (at::Tensor const& q : each->parameters()) {
          if (!q.requires_grad()) continue;
          bool const expert = std::any_of(of_some.begin(), of_some.end(), [&](at::Tensor const& e) { return e.is_same(q); });
          trained_parameter t{s, part, "", expert && group > 1, q, {}, {}};
          if (p_.has("masters") && q.scalar_type() == at::kBFloat16) t.master = q.detach().to(at::kFloat).requires_grad_();
          for (auto const& [word, value] : ties) {
            if (value.is_same(q)) t.tie = word;
          }
          made.trained.push_back(t);
          (stands_apart(p_, s, !t.tie.empty()) ? apart : others).push_back(t.master.defined() ? t.master : q);
        }
      }
    }
    if (made.trained.empty()) throw meaningless("nothing to train");
    made.optimizer = optimizer_of(p_, apart, others);
  }

  struct place {
    int step, replica, micro_batch;
  };

  /// Runs stages [first, last) on a microbatch. Forwards and backwards draw from Chevron's streams of random numbers, the only
  /// part of Chevron in the plain loop.
  /// \param carried of the slice before; replaced by this slice's
  void forward(replica_model& m, int first, int last, tensors& values, std::optional<place> at, carry_state& carried,
               chevron::node_places* nodes = nullptr) {
    for (int s = first; s < last; ++s) {
      if (at) {
        nodes->add_leaves(
            {.seed = p_.seed(), .step = at->step, .replica = at->replica, .stage = s, .micro_batch = at->micro_batch},
            m.listed[static_cast<std::size_t>(s)]);
      }
      for (std::size_t part = 0; part < m.stages[static_cast<std::size_t>(s)].size(); ++part) {
        std::optional<chevron::random_scope> scope;
        if (at) {
          scope.emplace(chevron::rng_key{.seed = p_.seed(),
                                         .step = at->step,
                                         .replica = at->replica,
                                         .stage = s,
                                         .micro_batch = at->micro_batch,
                                         .part = static_cast<int>(part)},
                        std::span<at::Tensor const>(), nodes);
        }
        tensors& own = carried[static_cast<std::size_t>(s)][part];
        values.insert(values.end(), own.begin(), own.end());
        values = m.stages[static_cast<std::size_t>(s)][part]->run(std::move(values));
        std::copy(values.end() - static_cast<std::ptrdiff_t>(own.size()), values.end(), own.begin());
        values.resize(values.size() - own.size());
      }
    }
  }

  /// Autocast as a user would switch it on, without keeping casts of weights from one use to the next.
  struct casting {
    bool on;
    explicit casting(program const& p) : on(p.get("cast") == "bf16") {
      if (!on) return;
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::set_autocast_dtype(at::kCPU, at::kBFloat16);
      at::autocast::set_autocast_cache_enabled(false);
    }
    ~casting() {
      if (!on) return;
      at::autocast::set_autocast_enabled(at::kCPU, false);
      at::autocast::set_autocast_cache_enabled(true);
    }
    casting(casting const&) = delete;
    casting& operator=(casting const&) = delete;
  };

  /// A carry for each that the pieces have, undefined.
  static carry_state no_carries(replica_model const& m) {
    carry_state out;
    for (auto const& of_stage : m.stages) {
      out.emplace_back();
      for (piece const& each : of_stage) out.back().emplace_back(each->carries().size());
    }
    return out;
  }

  /// A microbatch, or slice, between its forward and its backward.
  struct under_way {
    double weight = 0, own = 0;  // shares in the loss, and in the losses `own` of stages
    chevron::node_places nodes;
    std::vector<given_losses> aside;                         // by stage
    std::vector<std::vector<ending>> given;                  // of a cut graph, by stage
    std::vector<chevron::detail::node_ptr<arrivals>> taken;  // the same
    carry_state came, left;                                  // carries, with their graphs
    at::Tensor loss;
    tensors outputs;  // of the last stage
  };

  /// The carries of the slice before, cut off from its graph. Gradients go where something is trained that they can reach.
  static carry_state cut_off(replica_model const& m, carry_state const& before) {
    carry_state out = no_carries(m);
    trained_parameter const& lowest = m.trained.front();
    for (std::size_t s = 0; s < out.size(); ++s) {
      for (std::size_t part = 0; part < out[s].size(); ++part) {
        int const stage = static_cast<int>(s);
        bool const reaches = stage > lowest.stage || (stage == lowest.stage && part >= lowest.part);
        for (std::size_t k = 0; k < out[s][part].size(); ++k) {
          at::Tensor const& t = before[s][part][k];
          if (!t.defined()) continue;
          bool const flows = reaches && differentiable(t) && !m.stages[s][part]->carries()[k];
          out[s][part][k] = t.detach().requires_grad_(flows);
        }
      }
    }
    return out;
  }

  /// The forward of a microbatch or slice. It is a view of its batch: matrix products round by where in memory their operands
  /// begin.
  /// \param before carries of the slice before
  void go(replica_model& m, samples const& part, place at, carry_state const& before, under_way& here) {
    here.aside.resize(static_cast<std::size_t>(facts_.stages));
    here.came = cut_off(m, before);
    here.left = here.came;
    auto const run_stage = [&](int s, tensors& values) {
      chevron::collected_losses collected;
      forward(m, s, s + 1, values, at, here.left, &here.nodes);
      note(s, at.replica, collected, here.weight, here.own, here.aside[static_cast<std::size_t>(s)]);
    };
    casting const cast(p_);
    tensors values{part.input};
    int const lowest = m.trained.front().stage;
    here.given.resize(static_cast<std::size_t>(facts_.stages));
    for (int s = 0; s < facts_.stages; ++s) {
      if (how_ == graph::whole) {
        run_stage(s, values);
        continue;
      }
      auto const entry = here.taken.emplace_back(chevron::detail::make_node<arrivals>());
      for (at::Tensor& v : values) {
        if (!v.defined()) continue;
        v = v.detach();
        if (s > lowest && differentiable(v)) torch::autograd::create_gradient_edge(v, entry);
      }
      entry->came.resize(entry->num_inputs());
      run_stage(s, values);
      // Noted now: the next stage may change these in place.
      for (at::Tensor const& v : values) {
        if (v.defined() && differentiable(v))
          here.given[static_cast<std::size_t>(s)].push_back(
              {v.requires_grad() ? torch::autograd::impl::gradient_edge(v) : torch::autograd::Edge(), v.detach()});
      }
    }
    here.loss = loss_of(p_, values, part.target, factor_of(p_, part.target));
    here.outputs = values;
  }

  /// Its backward: gradients in `.grad`. One that counts nothing begins at its carries alone.
  /// \param behind the gradients of its carries from the next slice; afterwards those of the carries that it took
  /// \returns the loss
  double come_back(replica_model& m, under_way& here, carry_state& behind) {
    for (trained_parameter const& t : m.trained) t.value.mutable_grad().reset();
    // Carries of these stages to which a gradient came.
    auto const add_carries = [&](std::size_t first, std::size_t last, tensors& roots, tensors& gradients) {
      for (std::size_t s = first; s < last; ++s) {
        for (std::size_t part = 0; part < behind[s].size(); ++part) {
          for (std::size_t k = 0; k < behind[s][part].size(); ++k) {
            if (!behind[s][part][k].defined() || !here.left[s][part][k].requires_grad()) continue;
            roots.push_back(here.left[s][part][k]);
            gradients.push_back(behind[s][part][k]);
          }
        }
      }
    };
    // The last stage's loss and its own ones, each times its weight.
    auto const begin = [&](given_losses const& also, std::size_t first) {
      at::Tensor sum = here.weight != 0 ? here.loss * here.weight : at::Tensor();
      for (std::size_t i = 0; i < also.values.size(); ++i) {
        at::Tensor const term = also.values[i] * also.seeds[i];
        sum = sum.defined() ? sum + term : term;
      }
      tensors roots, gradients;
      if (sum.defined()) {
        roots.push_back(sum);
        gradients.push_back(at::ones_like(sum));
      }
      // The other replicas of a group of experts wait for the exchanges of this backward.
      if (here.weight == 0 && p_.expert_replicas() > 1) {
        for (at::Tensor const& t : here.outputs) {
          if (!t.defined() || !t.requires_grad()) continue;
          roots.push_back(t);
          gradients.push_back(at::zeros_like(t));
        }
      }
      add_carries(first, here.left.size(), roots, gradients);
      if (!roots.empty()) torch::autograd::backward(roots, gradients);
    };
    chevron::backward_scope const draws(here.nodes);
    if (how_ == graph::whole) {
      given_losses all;
      for (given_losses const& of_stage : here.aside) {
        all.values.insert(all.values.end(), of_stage.values.begin(), of_stage.values.end());
        all.seeds.insert(all.seeds.end(), of_stage.seeds.begin(), of_stage.seeds.end());
      }
      begin(all, 0);
    } else {
      begin(here.aside.back(), here.left.size() - 1);
      int const lowest = m.trained.front().stage;
      for (int s = facts_.stages; --s > lowest;) {
        torch::autograd::edge_list roots;
        tensors gradients, carries;
        std::size_t next = 0;
        for (ending const& of : here.given[static_cast<std::size_t>(s - 1)]) {
          at::Tensor const& g = here.taken[static_cast<std::size_t>(s)]->came[next++];
          if (!of.from.is_valid()) continue;
          roots.push_back(of.from);
          gradients.push_back(g.defined() ? g : at::zeros_like(of.value));
        }
        given_losses const& also = here.aside[static_cast<std::size_t>(s - 1)];
        for (std::size_t i = 0; i < also.values.size(); ++i) {
          roots.push_back(torch::autograd::impl::gradient_edge(also.values[i]));
          gradients.push_back(at::full({}, also.seeds[i], also.values[i].options().requires_grad(false)));
        }
        add_carries(static_cast<std::size_t>(s) - 1, static_cast<std::size_t>(s), carries, gradients);
        for (at::Tensor const& t : carries) roots.push_back(torch::autograd::impl::gradient_edge(t));
        if (!roots.empty()) torch::autograd::Engine::get_default_engine().execute(roots, gradients, false, false, true);
      }
    }
    for (std::size_t s = 0; s < behind.size(); ++s) {
      for (std::size_t part = 0; part < behind[s].size(); ++part) {
        for (std::size_t k = 0; k < behind[s][part].size(); ++k) {
          at::Tensor const& came = here.came[s][part][k];
          behind[s][part][k] = came.defined() && came.requires_grad() ? came.grad() : at::Tensor();
        }
      }
    }
    return here.loss.item<double>();
  }

  /// Adds up the losses of a stage's forward: for the report, by stage and replica, and for the backward.
  void note(int s, int replica, chevron::collected_losses const& collected, double weight, double own, given_losses& into) {
    std::map<std::string, at::Tensor> sums;
    std::lock_guard const hold(told_mutex_);
    for (auto const& [name, value] : collected.all()) {
      at::Tensor& sum = sums[name];
      sum = sum.defined() ? sum + value.detach() : value.detach();
      double const share = name == "own" ? own : weight;
      if (share == 0) continue;
      into.values.push_back(value);
      into.seeds.push_back(share * (name == "own" ? 0.5 : 0.3));
    }
    for (auto const& [name, sum] : sums) {
      double const share = name == "own" ? own : weight;
      auto& of_replica = told_[name][s];
      of_replica.resize(static_cast<std::size_t>(p_.replicas()));
      if (share != 0) of_replica[static_cast<std::size_t>(replica)] += sum.item<double>() * share;
    }
  }

  /// X runs once for each stage and unit, and draws where Chevron says it does.
  void tell_own_actions(int step, outcome& out) {
    if (!p_.has("own")) return;
    for (int r = 0; r < p_.replicas(); ++r) {
      for (int s = 0; s < facts_.stages; ++s) {
        for (int pass = 0; pass < p_.passes(); ++pass) {
          for (int u = 0; u < p_.units(); ++u) {
            chevron::random_scope const draws({.seed = p_.seed(),
                                               .step = step,
                                               .replica = r,
                                               .stage = s,
                                               .micro_batch = pass * p_.units() + u,
                                               .use = chevron::random_use::own_action,
                                               .node = 'X'},
                                              std::span<at::Tensor const>());
            out.put(key_of(step, "8 own", s, r, std::to_string(pass * p_.units() + u)), at::rand({2}));
          }
        }
      }
    }
  }

  void train(int step, outcome& out) {
    keep_tallies();
    told_.clear();
    double const all = total_of(p_, step, false);
    if (!(all > 0)) throw meaningless("a step counts nothing");
    own_total_ = total_of_own(p_, step);
    double step_loss = 0;
    std::vector<std::vector<double>> losses(replicas_.size(), std::vector<double>(static_cast<std::size_t>(p_.units())));
    tell_own_actions(step, out);
    on_replicas([&](int r) {
      replica_model& m = *replicas_[static_cast<std::size_t>(r)];
      // A pass that is dropped leaves its changes of buffers.
      if (p_.get("act") == "drop") {
        for (trained_parameter& t : m.trained) t.sum = at::zeros_like(t.value, t.value.options().requires_grad(false));
        std::vector<double> dropped(static_cast<std::size_t>(p_.units()));
        learn_pass(m, r, step, 0, dropped_pass, all, dropped);
      }
    });
    told_.clear();
    on_replicas([&](int r) {
      replica_model& m = *replicas_[static_cast<std::size_t>(r)];
      for (trained_parameter& t : m.trained) {
        bool const half = t.value.scalar_type() == at::kBFloat16;
        t.sum = at::zeros_like(t.value, t.value.options().dtype(half ? at::kFloat : t.value.scalar_type()));
        t.sum.requires_grad_(false);
      }
      for (int pass = 0; pass < p_.passes(); ++pass)
        learn_pass(m, r, step, pass, pass, all, losses[static_cast<std::size_t>(r)]);
    });
    for (auto const& of_replica : losses) {
      for (double const each : of_replica) step_loss += each;
    }
    auto& first = replicas_[0]->trained;
    // Over replicas in their order, of experts over those that have the same; then tied parameters in the order of stages.
    for (std::size_t i = 0; i < first.size(); ++i) {
      std::size_t const apart = first[i].of_experts ? static_cast<std::size_t>(p_.expert_replicas()) : 1;
      for (std::size_t r = apart; r < replicas_.size(); ++r) replicas_[r % apart]->trained[i].sum += replicas_[r]->trained[i].sum;
    }
    std::map<std::string, at::Tensor> tied;
    double squares = 0;
    for (trained_parameter& t : first) {
      if (t.tie.empty()) continue;
      if (tied.contains(t.tie)) {
        tied[t.tie] += t.sum;
      } else {
        tied[t.tie] = t.sum.clone();
      }
    }
    std::map<std::string, bool> counted;
    for (trained_parameter& t : first) {
      if (!t.tie.empty()) t.sum = tied.at(t.tie).clone();
      if (t.tie.empty() || !std::exchange(counted[t.tie], true)) squares += squares_of(t.sum);
    }
    double const norm = std::sqrt(squares);
    if (!std::isfinite(norm) || !std::isfinite(step_loss)) throw meaningless("not finite");
    out.put(key_of(step, "0 loss"), step_loss);
    if (p_.expert_replicas() == 1) out.put(key_of(step, "1 norm"), norm);  // over experts in an order of Chevron's own
    for (auto const& [name, by_stage] : told_) {
      double sum = 0;
      for (auto const& [s, by_replica] : by_stage) {
        double of_stage = 0;
        for (double const one : by_replica) of_stage += one;
        sum += of_stage;
      }
      out.put(key_of(step, "0 loss", -1, -1, name), sum);
    }
    double const most = p_.real("clip");
    for (std::size_t r = 0; r < replicas_.size(); ++r) {
      replica_model& m = *replicas_[r];
      for (std::size_t i = 0; i < first.size(); ++i) {
        std::size_t const of = first[i].of_experts ? r % static_cast<std::size_t>(p_.expert_replicas()) : 0;
        at::Tensor g = replicas_[of]->trained[i].sum.clone();
        if (most > 0 && norm > most) g.mul_(most / (norm + 1e-6));
        trained_parameter const& t = m.trained[i];
        t.value.mutable_grad() = t.master.defined() ? at::Tensor() : g.to(t.value.scalar_type());
        if (t.master.defined()) t.master.mutable_grad() = g;
      }
      if (p_.has("lr")) {
        for (auto& group : m.optimizer->param_groups()) group.options().set_lr(0.02 / (step + 1));
      }
      m.optimizer->step();
      at::NoGradGuard const off;
      for (trained_parameter const& t : m.trained) {
        if (t.master.defined()) at::Tensor(t.value).copy_(t.master);
      }
    }
  }

  /// \param fed the samples' number among the step's passes; another one than the pass's, of samples that are dropped
  void learn_pass(replica_model& m, int replica, int step, int pass, int fed, double all, std::vector<double>& losses) {
    feed const given = feed_of(p_, step, fed, replica);
    int const count = p_.units(), slices = p_.slices();
    // By unit and parameter; added up in the order in which the schedule has each stage's backwards.
    std::vector<std::vector<at::Tensor>> each(static_cast<std::size_t>(count));
    // Of each microbatch the slices forward in order, then backward in reverse.
    for (int first = 0; first < count; first += slices) {
      std::deque<under_way> here;
      for (int u = first; u < first + slices; ++u) {
        samples const& part = given.units[static_cast<std::size_t>(u)];
        carry_state const before = here.empty() ? no_carries(m) : here.back().left;
        under_way& now = here.emplace_back();
        now.weight = counts_of(p_, part) / all;
        now.own = own_total_ > 0 ? counts_of_own(part) / own_total_ : 0;
        go(m, part, {step, replica, pass * count + u}, before, now);
      }
      carry_state behind = no_carries(m);
      for (int u = first + slices; u-- > first;) {
        under_way& now = here[static_cast<std::size_t>(u - first)];
        double const loss = come_back(m, now, behind);
        if (now.weight != 0) losses[static_cast<std::size_t>(u)] += loss * now.weight;
        for (trained_parameter const& t : m.trained) each[static_cast<std::size_t>(u)].push_back(t.value.grad());
      }
    }
    for (std::size_t i = 0; i < m.trained.size(); ++i) {
      trained_parameter& t = m.trained[i];
      for (int const b : facts_.additions[static_cast<std::size_t>(t.stage)]) {
        at::Tensor const& g = each[static_cast<std::size_t>(b)][i];
        if (g.defined()) t.sum += g.to(t.sum.scalar_type());
      }
    }
  }

  /// The caller's change between two steps.
  void act() {
    if (p_.get("act") != "scale" && p_.get("act") != "rush") return;
    at::NoGradGuard const off;
    for (auto& m : replicas_) {
      for (trained_parameter const& t : m->trained) {
        at::Tensor(t.value).mul_(0.5);
        if (t.master.defined()) at::Tensor(t.master).copy_(t.value);
      }
    }
  }

  /// Stores the buffers of blocks `tally` before a step.
  void keep_tallies() {
    tallies_.clear();
    for (std::size_t s = 0; s < p_.stages.size(); ++s) {
      for (at::Tensor const& t : summed_of(p_, static_cast<int>(s), replicas_[0]->stages[s])) tallies_.push_back(t.clone());
    }
  }
  /// To each replica's the others' changes are added.
  void share_tallies() {
    std::vector<tensors> of(replicas_.size());
    for (std::size_t r = 0; r < replicas_.size(); ++r) {
      for (std::size_t s = 0; s < p_.stages.size(); ++s) {
        tensors const those = summed_of(p_, static_cast<int>(s), replicas_[r]->stages[s]);
        of[r].insert(of[r].end(), those.begin(), those.end());
      }
    }
    for (std::size_t i = 0; i < tallies_.size(); ++i) {
      at::Tensor sum = tallies_[i].clone();
      for (tensors const& each : of) sum += each[i] - tallies_[i];
      for (tensors& each : of) each[i].copy_(sum);
    }
  }

  /// Between two steps all replicas have the buffers of the first one.
  void share_buffers() {
    at::NoGradGuard const off;
    share_tallies();
    for (std::size_t r = 1; r < replicas_.size(); ++r) {
      std::size_t const same = r % static_cast<std::size_t>(p_.expert_replicas());  // the first replica with these experts
      for (std::size_t s = 0; s < replicas_[r]->stages.size(); ++s) {
        tensors const of_some = of_experts(p_, static_cast<int>(s), replicas_[r]->stages[s]);
        for (std::size_t i = 0; i < replicas_[r]->stages[s].size(); ++i) {
          auto from = replicas_[0]->stages[s][i]->buffers(), to = replicas_[r]->stages[s][i]->buffers();
          auto const own = replicas_[same]->stages[s][i]->buffers();
          for (std::size_t b = 0; b < to.size(); ++b) {
            bool const expert = std::any_of(of_some.begin(), of_some.end(), [&](auto const& e) { return e.is_same(to[b]); });
            if (to[b].defined()) to[b].copy_(expert ? own[b] : from[b]);
          }
        }
      }
    }
  }

  void look(int step, outcome& out) {
    for (int r = 0; r < p_.replicas(); ++r) {
      replica_model& m = *replicas_[static_cast<std::size_t>(r)];
      for (int s = 0; s < facts_.stages; ++s) put_stage(out, p_, step, s, r, m.stages[static_cast<std::size_t>(s)], kept_of(m));
    }
    out.put(key_of(step, "7 generator"), std::string("as it was"));
  }

  /// The optimizer's states, and masters, by parameter.
  static states kept_of(replica_model const& m) {
    states out = states_of(m.optimizer.get());
    for (trained_parameter const& t : m.trained) {
      if (!t.master.defined()) continue;
      kept_state& kept = out[t.value.unsafeGetTensorImpl()];
      kept = out[t.master.unsafeGetTensorImpl()];
      kept.master = t.master;
    }
    return out;
  }

  void put_after_evaluation(outcome& out, int step, int r, std::size_t s) {
    outcome all;
    put_stage(all, p_, step, static_cast<int>(s), r, replicas_[static_cast<std::size_t>(r)]->stages[s], {});
    for (auto const& [key, v] : all.values()) {
      bool const kept = key.find("4 buffer") != std::string::npos || key.find("6 modes") != std::string::npos;
      if (kept) out.put_as("after evaluation, " + key, v);
    }
  }

  void evaluate(int step, outcome& out) {
    double const all = total_of(p_, step, true);
    if (!(all > 0)) throw meaningless("an evaluation counts nothing");
    std::vector<double> of_replica(replicas_.size());
    on_replicas([&](int r) {
      replica_model& m = *replicas_[static_cast<std::size_t>(r)];
      std::vector<std::pair<torch::nn::Module*, bool>> modes;
      for (auto const& s : m.stages) {
        for (piece const& each : s) {
          for (auto const& module : each->modules(true)) modes.emplace_back(module.get(), module->is_training());
          each->eval();
        }
      }
      double mine = 0;
      {
        at::NoGradGuard const off;
        casting const cast(p_);
        int unit = 0;
        carry_state carried;
        for (samples const& part : feed_of(p_, step, -1, r).units) {
          if (unit++ % p_.slices() == 0) carried = no_carries(m);
          tensors values{part.input};
          forward(m, 0, facts_.stages, values, std::nullopt, carried);
          double const weight = counts_of(p_, part) / all;
          if (weight != 0) mine += loss_of(p_, values, part.target, factor_of(p_, part.target)).item<double>() * weight;
        }
      }
      of_replica[static_cast<std::size_t>(r)] = mine;
      // train() goes down to children, which come after their parents here.
      for (auto const& [module, trains] : modes) module->train(trains);
    });
    double sum = 0;
    for (double const mine : of_replica) sum += mine;
    out.put("after evaluation, " + key_of(step, "0 loss"), sum);
  }

  /// One replica after the other; those that share experts at once, since each waits for the others' rows.
  void on_replicas(std::function<void(int)> const& work) {
    if (p_.expert_replicas() == 1) {
      for (int r = 0; r < p_.replicas(); ++r) work(r);
      return;
    }
    std::exception_ptr first;
    std::mutex mutex;
    std::vector<std::thread> threads;
    for (int r = 0; r < p_.replicas(); ++r) {
      threads.emplace_back([&, r] {
        at::set_num_threads(1);
        try {
          work(r);
        } catch (...) {
          std::lock_guard const hold(mutex);
          if (!first) first = std::current_exception();
          for (auto const& board : boards_) board->give_up();
        }
      });
    }
    for (std::thread& t : threads) t.join();
    if (first) std::rethrow_exception(first);
  }

  program const& p_;
  graph how_;
  plan_facts facts_;
  std::map<std::string, std::map<int, std::vector<double>>> told_;  // of a step: losses by name, stage and replica
  double own_total_ = 0;
  tensors tallies_;  // of all blocks `tally`, before the step
  std::mutex told_mutex_;
  std::vector<std::unique_ptr<swap_board>> boards_;         // of each group of replicas that share experts
  std::vector<std::unique_ptr<replica_model>> replicas_;
};

}  // namespace

outcome run_plain(program const& p, graph how) {
  if (!p.by_sequences()) return loop(p, how).run();
  program whole = p;
  whole.options.erase("slices");
  return loop(whole, how).run();
}

}  // namespace differential
