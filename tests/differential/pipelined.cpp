#include "pipelined.hpp"

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <torch/nn/modules/container/sequential.h>
#include <torch/nn/modules/linear.h>
#include <torch/optim/sgd.h>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/checkpoint/checkpoint.hpp>
#include <chevron/csv/csv.hpp>
#include <chevron/csv/csv_read.hpp>
#include <chevron/describe/recomputed.hpp>
#include <chevron/jobs/failure_monitor.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/plan/forward_part.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/run.hpp>
#include <chevron/run/comm/shard_group.hpp>
#include <chevron/run/comm/threads/run_threads.hpp>
#include <chevron/transports/gloo/gloo_transport.hpp>
#include <chevron/transports/streams/stream_transport.hpp>
#include "../support/host_streams.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "data.hpp"
#include "limits.hpp"
#include "model.hpp"

namespace differential {

namespace {

using std::chrono::milliseconds;

/// Data of all ranks, computed once.
struct job {
  program const& p;
  chevron::plan plan;
  chevron::proved_program steps, evaluation;

  explicit job(program const& of)
      : p(of),
        plan(plan_of(of)),
        steps(chevron::lower(chevron::prove(plan))),
        evaluation(chevron::lower(chevron::prove(chevron::forward_part(plan)))) {}

 private:
  /// X behind each F, as a file says it.
  static chevron::plan with_own_actions(chevron::plan const& of) {
    std::string const cells = chevron::show::csv(of.view());
    std::string out;
    for (std::size_t i = 0, j = 0; i < cells.size(); i = j) {
      j = std::min(cells.find_first_of(",\n", i), cells.size());
      std::string cell = cells.substr(i, j - i);
      out += cell;
      if (auto const f = cell.find('F'); f != std::string::npos && cell.find(';') == std::string::npos) {
        cell[f] = 'X';
        out += "," + cell;
      }
      if (j < cells.size()) out += cells[j++];
    }
    return chevron::read_csv(out).plan;
  }

  static chevron::plan plan_of(program const& of) {
    chevron::plan made = chevron::catalogue::make_plan(
        of.schedule(), {.ranks = of.ranks(), .micro_batches = of.micro_batches(), .slices = of.slices()});
    if (chevron::check(made)) throw meaningless("no such plan");
    if (of.has("own")) made = with_own_actions(made);
    if (!of.has("ahead")) return made;
    chevron::buffer<bool> again(made.stages);
    for (int s = 0; s < made.stages; ++s) again.data[s] = recomputes(of.stages[static_cast<std::size_t>(s)]);
    return chevron::with_recomputation(made, again.data);
  }
};

std::vector<chevron::parameter> parameters_of(piece const& module) {
  std::vector<chevron::parameter> all;
  for (auto const& item : module->named_parameters(true)) all.push_back({item.key(), item.value()});
  return all;
}

/// The callable of a stage given with its module, where there is that constructor.
template <class Callable>
chevron::stage with_module(piece const& module, Callable call) {
  if constexpr (std::is_constructible_v<chevron::stage, piece, Callable>) {
    return chevron::stage(module, call);
  } else {
    return chevron::stage(call, parameters_of(module));
  }
}

std::vector<chevron::stage_carry> carries_of(piece const& one) {
  std::vector<chevron::stage_carry> out;
  for (std::size_t k = 0; k < one->carries().size(); ++k) {
    std::string const name = "carry " + std::to_string(k);
    out.push_back(one->carries()[k] ? chevron::detached_carry(name) : chevron::stage_carry(name));
  }
  return out;
}

/// Declares the cuts of blocks `tp`, with the faults that are planted.
void declare_cuts(program const& p, int number, std::vector<piece> const& pieces, chevron::stage& made) {
  for (cut_parameter const& c : cut_of(p, number, pieces)) {
    std::string name;
    for (chevron::parameter const& q : made.parameters()) {
      if (q.value.is_same(c.value)) name = q.name;
    }
    if (name.empty()) throw meaningless("a stage hides the name of a parameter");
    if (c.name == "bias") {
      if (c.flags.contains("nowhole")) made.cut(name, 0);
      continue;
    }
    bool const columns = c.name == "columns";
    if (columns && c.flags.contains("nocut")) continue;
    int const dimension = columns && c.flags.contains("wrongdim") ? 1 : c.dimension;
    made.cut(name, dimension, {.blocks = c.blocks});
    if (columns && c.flags.contains("wrongtwice")) made.partial({name});
  }
}

chevron::stage given_as(program const& p, int number, std::vector<piece> const& pieces) {
  stage_text const& text = p.stages[static_cast<std::size_t>(number)];
  std::string const form = text.form.name;
  bool const again = text.form.has("rc");
  chevron::stage made;
  if (form == "parts") {
    std::vector<chevron::stage> parts;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      parts.emplace_back(pieces[i]);
      parts.back().carries(carries_of(pieces[i]));
      if (text.blocks[i].has("rc")) parts.back().recompute();
    }
    made = chevron::in_sequence(std::move(parts));
  } else if (form == "seq") {
    torch::nn::Sequential whole;
    for (auto const& one : pieces[0]->blocks()) whole->push_back(one_tensorImpl(one));
    if (text.form.has("eval")) whole->eval();
    // push_back has made copies of holders only: the blocks and their modes are these.
    made = whole;
  } else if (form == "call") {
    made = chevron::stage(
        [inner = pieces[0]](std::span<at::Tensor const> values) {
          return inner->run({values.begin(), values.end()});
        },
        parameters_of(pieces[0]));
  } else if (form == "both") {
    made = with_module(pieces[0], [inner = pieces[0]](std::span<at::Tensor const> values) {
      return inner->run({values.begin(), values.end()});
    });
  } else {
    made = pieces[0];
  }
  if (again) made.recompute();
  if (form != "parts") made.carries(carries_of(pieces[0]));
  for (block const& b : text.blocks) {
    if (!gives_loss(b)) continue;
    auto const counts = [](chevron::batch const& part) {
      return rows_of(part.targets[0]).select(1, 2).gt(0).sum().item<double>();
    };
    b.has("own") ? made.losses({{.name = "own", .factor = 0.5, .weight = counts}})
                 : made.losses({{.name = "aux", .factor = 0.3}});
  }
  if (p.has("tp")) declare_cuts(p, number, pieces, made);
  if (p.slices() > 1 && !p.by_sequences()) made.independent_slices();
  for (at::Tensor const& t : summed_of(p, number, pieces)) {
    for (chevron::parameter const& q : made.buffers()) {
      if (!q.value.is_same(t)) continue;
      made.summed({q.name});
      break;
    }
  }
  if (p.expert_replicas() > 1) {
    for (at::Tensor const& e : of_experts(p, number, pieces)) {
      for (auto const* list : {&made.parameters(), &made.buffers()}) {
        for (chevron::parameter const& q : *list) {
          if (!q.value.is_same(e)) continue;
          made.experts(std::string(q.name));
          break;
        }
      }
    }
  }
  for (auto const& [word, value] : tied_of(p, number, pieces)) {
    for (chevron::parameter const& q : made.parameters()) {
      if (!q.value.is_same(value)) continue;
      made.tie(std::string(q.name), word);
      break;
    }
  }
  return made;
}

/// \param tied the names of the rank's tied parameters, by stage, once stages are built
chevron::optimizer_factory factory_of(program const& p, std::map<int, std::set<std::string>> const& tied) {
  return [&](std::vector<chevron::named_parameter> const& all) {
    tensors apart, others;
    for (chevron::named_parameter const& q : all) {
      (stands_apart(p, q.stage, tied.at(q.stage).contains(q.name)) ? apart : others).push_back(q.value);
    }
    return optimizer_of(p, apart, others);
  };
}

/// A call that ranks refuse; the loop goes on.
void slip(chevron::trainer& train) {
  try {
    train.step(std::vector<chevron::batch>(static_cast<std::size_t>(train.program().plan.size.micro_batches) + 1));
  } catch (chevron::usage_error const&) {
    return;
  }
  throw std::runtime_error("a step of a microbatch too many was not refused");
}

chevron::trainer_options options_of(program const& p) {
  chevron::trainer_options out;
  out.clip_grad_norm = p.real("clip");
  out.seed = p.seed();
  if (p.has("lr")) out.learning_rate = [](long step) { return 0.02 / static_cast<double>(step + 1); };
  if (p.has("bucket")) out.bucket_bytes = static_cast<std::size_t>(p.number("bucket"));
  if (p.get("cast") == "bf16") out.autocast = at::kBFloat16;
  if (p.has("weigh")) {
    out.loss_weight = [](chevron::batch const& b) { return rows_of(b.targets[0]).select(1, 0).gt(0).sum().item<double>(); };
  }
  if (p.has("pv")) {
    out.post_validation = true;
    out.stable_steps = static_cast<int>(p.number("pv"));
  }
  out.overlap_pairs = p.has("overlap");
  out.master_parameters = p.has("masters");
  if (p.has("shard")) out.shard = p.get("shard") == "gradients" ? chevron::sharding::gradients : chevron::sharding::optimizer;
  out.overlap_gather = p.gathers_late();
  return out;
}

std::string generator_state() {
  at::Generator g = at::detail::getDefaultCPUGenerator();
  std::lock_guard const hold(g.mutex());
  at::Tensor const s = g.get_state();
  return {static_cast<char const*>(s.const_data_ptr()), s.nbytes()};
}

/// The part of these samples that a rank is given: all, or with `less` the tensors that its stages and the loss use.
chevron::batch batch_of(job const& j, chevron::transport& comm, samples const& of) {
  program const& p = j.p;
  auto const plan = j.plan.view();
  int const rank = comm.topology().pipeline_rank();
  bool const less = p.has("less") && !gives_losses(p);
  bool const first = !less || rank == plan.rank_of_stage(0), last = !less || rank == plan.rank_of_stage(plan.stages - 1);
  chevron::batch out;
  if (first) out.inputs = {of.input};
  if (last) out.targets = {p.has("label") ? of.target.select(1, 0).select(1, 0) : of.target};
  if (last && p.has("odd")) out.targets.push_back(at::zeros({of.count() + 1}));
  if (last && p.has("side")) out.side_inputs = {{"factor", factor_of(p, of.target)}};
  return out;
}

/// A loop's habits.
void touch_gradients(program const& p, chevron::trainer& train) {
  if (!p.has("zg") || train.optimizer() == nullptr) return;
  if (p.get("zg") != "detach") return train.optimizer()->zero_grad(p.get("zg") == "none");
  for (auto& group : train.optimizer()->param_groups()) {
    for (at::Tensor& q : group.params()) {
      if (q.grad().defined()) q.mutable_grad().detach_();
    }
  }
}

/// The states and masters of whole parameters; of a sharded optimizer on replica 0, from the shares of all.
states whole_states(chevron::trainer& train, std::map<int, std::vector<piece>> const& mine) {
  states out = states_of(train.optimizer());
  for (auto const& [s, pieces] : mine) {
    for (piece const& one : pieces) {
      for (at::Tensor const& q : one->parameters()) {
        kept_state& kept = out[q.unsafeGetTensorImpl()];
        auto const& optimizer = chevron::detail::trainer_access::optimizer(train);
        if (optimizer.sharded()) {
          auto const whole = optimizer.whole(q);
          kept = {whole.state, whole.master};
        } else if (optimizer.has_master(q)) {
          kept = out[train.master_of(q).unsafeGetTensorImpl()];
          kept.master = train.master_of(q);
        }
      }
    }
  }
  return out;
}

/// A trainer that takes turns with the program's, under another schedule and with other shapes between its stages.
chevron::trainer_setup another_model(chevron::transport& comm, program const& p) {
  auto const plan = chevron::catalogue::make_plan("1F1B", {.ranks = p.ranks(), .micro_batches = 2});
  return {.program = chevron::lower(chevron::prove(plan)),
          .transport = comm,
          .stages = [](int) -> chevron::stage {
            at::manual_seed(1);
            return torch::nn::Sequential(torch::nn::Linear(3, 3));
          },
          .loss = [](at::Tensor out, at::Tensor target) { return at::mse_loss(out, target); },
          .optimizer = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.05)),
          .options = {.post_validation = p.has("pv"), .stable_steps = 0}};
}

/// The caller's change between two steps: changes parameters in place, or steps the optimizer.
void act(program const& p, chevron::trainer& train) {
  if (p.get("act") == "again" && train.optimizer() != nullptr) train.optimizer()->step();
  if (p.get("act") != "scale" && p.get("act") != "rush") return;
  if (p.get("act") == "scale") train.synchronize();
  at::NoGradGuard const off;
  for (chevron::stage& s : train.stages()) {
    for (chevron::parameter const& q : s.parameters()) {
      if (q.value.requires_grad()) at::Tensor(q.value).mul_(0.5);
    }
  }
}

/// Steps of a job, between files.
struct part_of_run {
  int first = 0, end = 0;
  std::string load = {}, save = {};  ///< folders of checkpoints; empty: none
};

/// One rank, from its trainer to its last step.
void train_on(chevron::transport& comm, job const& j, part_of_run const& steps, outcome& out) {
  program const& p = j.p;
  std::map<int, std::vector<piece>> mine;
  std::map<int, std::set<std::string>> tied;
  chevron::shard_group const group(comm, chevron::rank_group::experts);
  expert_ranks const experts{
      .member = group.shard(),
      .members = group.shards(),
      .counts = [&](std::vector<std::int64_t> const& own) { return group.all_counts(own); },
      .rows = [&](at::Tensor const& rows, std::vector<std::int64_t> const& counts) { return group.all_to_all(rows, counts); }};
  chevron::shard_group const cut(comm);
  shard_ranks const shards{.member = cut.shard(),
                           .members = cut.shards(),
                           .copy = [&](at::Tensor const& x) { return cut.copy(x); },
                           .sum = [&](at::Tensor const& x) { return cut.all_reduce(x); }};
  auto const build = [&](int s) {
    mine[s] = build_stage(p, s, {.experts = p.expert_replicas() > 1 ? &experts : nullptr, .shards = p.has("tp") ? &shards : nullptr});
    chevron::stage made = given_as(p, s, mine[s]);
    tied[s];
    for (chevron::parameter const& q : made.parameters()) {
      if (!q.tied_as.empty()) tied[s].insert(q.name);
    }
    return made;
  };
  // After the outputs: the target, with `odd` one more, with `side` the factor.
  std::size_t const behind = 1 + (p.has("odd") ? 1u : 0u) + (p.has("side") ? 1u : 0u);
  auto const mean_loss = [&p, behind](std::span<at::Tensor const> all) {
    std::span<at::Tensor const> const rest = all.last(behind);
    return loss_of(p, tensors(all.begin(), rest.begin()), rest.front(), p.has("side") ? rest.back() : at::Tensor());
  };
  int const replica = comm.topology().replica();
  bool const reports = replica == 0 && comm.topology().pipeline_rank() == 0;  // on each shard
  chevron::trainer_options options = options_of(p);
  options.on_report = [&](chevron::step_report const& r) {
    if (!reports) return;
    out.put(key_of(static_cast<int>(r.step), "0 loss"), r.loss);
    if (p.expert_replicas() == 1) out.put(key_of(static_cast<int>(r.step), "1 norm"), r.grad_norm);
    for (chevron::stage_loss_value const& one : r.losses)
      out.put(key_of(static_cast<int>(r.step), "0 loss", -1, -1, one.name), one.value);
  };
  int pass_now = 0;
  bool tells_own = true;
  if (p.has("own")) {
    options.own_actions = [&](chevron::own_work const& what) {
      at::Tensor const drawn = at::rand({2});
      int const unit = pass_now * p.units() + what.micro_batch;
      if (tells_own && comm.topology().shard() == 0)
        out.put(key_of(static_cast<int>(what.step), "8 own", what.stage_number, replica, std::to_string(unit)), drawn);
    };
  }
  chevron::trainer train({.program = j.steps,
                          .transport = comm,
                          .stages = build,
                          .loss = p.has("side") ? chevron::loss_function(mean_loss).side_inputs({"factor"}) : mean_loss,
                          .optimizer = factory_of(p, tied),
                          .options = options});
  std::optional<chevron::evaluator> evaluate;
  if (p.has("eval")) evaluate.emplace(j.evaluation, train);
  std::optional<chevron::trainer> other;
  if (p.has("turn")) other.emplace(another_model(comm, p));
  if (!steps.load.empty()) chevron::load_checkpoint(train, steps.load);
  std::string const generator = generator_state();
  bool const slips =
      p.get("slip") == "all" || (p.get("slip") == "one" && comm.topology().global_rank + 1 == comm.topology().world());
  for (int step = steps.first; step < steps.end; ++step) {
    if (slips) slip(train);
    double const all = total_of(p, step, false);
    chevron::step_total said = p.passes() == 1 && !p.has("all") && p.get("act") != "drop" ? 0 : all;
    if (said.model > 0) said.losses = {{"own", total_of_own(p, step)}};
    touch_gradients(p, train);
    for (int pass = p.get("act") == "drop" ? -1 : 0; pass < p.passes(); ++pass) {
      pass_now = std::max(pass, 0);
      tells_own = pass >= 0;
      feed const given = feed_of(p, step, pass < 0 ? dropped_pass : pass, replica);
      bool const last = pass + 1 == p.passes();
      if (given.own_parts) {
        std::vector<chevron::batch> parts;
        for (samples const& one : given.parts) parts.push_back(batch_of(j, comm, one));
        if (parts[0].inputs.empty() && parts[0].targets.empty()) parts.clear();
        last ? void(train.step(parts, said)) : train.accumulate(parts, said);
      } else {
        chevron::batch const whole = batch_of(j, comm, given.whole);
        last ? void(train.step(whole, said)) : train.accumulate(whole, said);
      }
      if (pass < 0) train.drop_accumulated();
    }
    if (other) other->step(at::ones({4, 3}), at::zeros({4, 3}));
    bool const last = step + 1 == p.steps();
    if (last) train.synchronize();
    if (!p.ends_late() || last) {
      states const kept = whole_states(train, mine);
      for (auto const& [s, pieces] : mine) put_stage(out, p, step, s, replica, pieces, kept);
      if (reports) out.put(key_of(step, "7 generator"), std::string(generator_state() == generator ? "as it was" : "changed"));
    }
    if (!last) act(p, train);
    if (p.get("eval") == "each" || (p.has("eval") && last)) {
      feed const given = feed_of(p, step, -1, replica);
      double const loss = evaluate->loss(batch_of(j, comm, given.whole));
      if (reports) out.put("after evaluation, " + key_of(step, "0 loss"), loss);
      outcome after;
      for (auto const& [s, pieces] : mine) put_stage(after, p, step, s, replica, pieces, {});
      for (auto const& [key, v] : after.values()) {
        bool const kept = key.find("4 buffer") != std::string::npos || key.find("6 modes") != std::string::npos;
        if (kept) out.put_as("after evaluation, " + key, v);
      }
    }
  }
  if (!steps.save.empty()) chevron::save_checkpoint(train, steps.save);
}

std::string words_of(std::exception_ptr const& thrown) {
  try {
    std::rethrow_exception(thrown);
  } catch (chevron::peer_lost_error const& e) {
    return std::string("(lost) ") + e.what();
  } catch (c10::Error const& e) {
    return e.what_without_backtrace();
  } catch (std::exception const& e) {
    return e.what();
  } catch (...) {
    return "what is no exception";
  }
}

/// Runs ranks in threads, each with a topology, a store and a monitor as a process has them. Returns the first failure's message.
std::string on_ranks(job const& j, outcome& out,
                     std::function<void(chevron::topology const&, c10::intrusive_ptr<c10d::Store>,
                                        std::shared_ptr<chevron::failure_monitor>, outcome&)> const& rank) {
  auto const store = c10::make_intrusive<c10d::HashStore>();
  int const world = j.p.world();
  std::vector<std::exception_ptr> thrown(static_cast<std::size_t>(world));
  std::vector<outcome> each(static_cast<std::size_t>(world));
  std::vector<std::thread> threads;
  for (int r = 0; r < world; ++r) {
    threads.emplace_back([&, r] {
      at::set_num_threads(1);
      auto const watch = std::make_shared<chevron::failure_monitor>(store, r, world);
      try {
        rank({.pipeline_ranks = j.p.ranks(),
              .replicas = j.p.replicas(),
              .global_rank = r,
              .shards = j.p.shards(),
              .expert_replicas = j.p.expert_replicas()},
             store, watch,
             each[static_cast<std::size_t>(r)]);
      } catch (std::exception const& e) {
        thrown[static_cast<std::size_t>(r)] = std::current_exception();
        watch->report({.rank = r, .step = 0, .action = "differential", .reason = e.what()});
      }
    });
  }
  for (auto& t : threads) t.join();
  for (auto const& one : each) out.add(one);
  std::string lost;
  for (auto const& t : thrown) {
    if (!t) continue;
    std::string const words = words_of(t);
    if (!words.starts_with("(lost)")) return words;
    if (lost.empty()) lost = words;
  }
  return lost;
}

constexpr milliseconds patience{20000};

}  // namespace

namespace {

void run_part(program const& p, part_of_run const& steps, pipelined_run& out) {
  job const j(p);
  std::string const line = p.get("line", "threads");
  if (line == "threads" || line == "rendezvous" || line == "delays") {
    std::mutex mutex;
    try {
      chevron::run_threads({.pipeline_ranks = p.ranks(),
                            .replicas = p.replicas(),
                            .shards = p.shards(),
                            .expert_replicas = p.expert_replicas(),
                            .rendezvous = line != "threads",
                            .longest_delay = std::chrono::microseconds(line == "delays" ? 300 : 0),
                            .seed = p.seed(),
                            .deadline = patience},
                           [&](chevron::transport& rank) {
                             outcome mine;
                             train_on(rank, j, steps, mine);
                             std::lock_guard const hold(mutex);
                             out.what.add(mine);
                           });
    } catch (...) {
      out.thrown = words_of(std::current_exception());
    }
    return;
  }
  if (line == "gloo" || line == "far") {
    out.thrown = on_ranks(j, out.what, [&](auto const& where, auto store, auto watch, outcome& mine) {
      chevron::gloo_transport link(where, store, watch, {.join = patience, .shared_memory = line == "gloo"});
      link.deadline(patience);
      train_on(link, j, steps, mine);
      link.close();
    });
    return;
  }
  if (line == "streams") {
    out.thrown = on_ranks(j, out.what, [&](auto const& where, auto store, auto watch, outcome& mine) {
      chevron::stream_transport<chevron::host_streams> link(where, store, watch, patience);
      link.deadline(patience);
      train_on(link, j, steps, mine);
      link.close();
    });
    return;
  }
  throw meaningless("line=" + line);
}

}  // namespace

pipelined_run run_pipelined(program const& p) {
  pipelined_run out;
  if (p.saved_after() == p.steps()) {
    run_part(p, {0, p.steps()}, out);
    return out;
  }
  std::string const folder =
      (std::filesystem::temp_directory_path() / ("chevron-differential." + std::to_string(::getpid()))).string();
  std::filesystem::remove_all(folder);
  run_part(p, {0, p.saved_after(), "", folder}, out);
  program again = p;
  if (p.has("rate2")) again.options["slower"] = "1";  // the file's rates go on
  if (p.has("tp2")) again.options["tp"] = p.get("tp2");
  if (out.thrown.empty()) run_part(again, {p.saved_after(), p.steps(), folder, ""}, out);
  std::filesystem::remove_all(folder);
  return out;
}

pipelined_run run_forked(program const& p, std::string const& folder) {
  int const world = p.world();
  std::fflush(nullptr);
  pid_t const parent = ::fork();
  if (parent == 0) {
    int rank = -1;
    try {
      chevron::job const here = chevron::launch({.nproc = world, .join = patience});
      rank = here.rank;
      at::set_num_threads(1);
      job const j(p);
      outcome mine;
      {
        chevron::gloo_transport link(here.topology(p.ranks(), p.replicas(), p.shards(), p.expert_replicas()), here);
        link.deadline(patience);
        train_on(link, j, {0, p.steps()}, mine);
        link.close();
      }
      mine.write(folder + "/" + std::to_string(rank));
    } catch (...) {
      std::ofstream(folder + "/thrown." + std::to_string(rank)) << words_of(std::current_exception());
      std::fflush(nullptr);
      ::_exit(9);
    }
    std::fflush(nullptr);
    ::_exit(0);
  }
  int status = 0;
  ::waitpid(parent, &status, 0);
  pipelined_run out;
  for (int r = -1; r < world; ++r) {
    std::string const name = folder + "/" + std::to_string(r);
    if (std::filesystem::exists(name)) out.what.add(outcome::read(name));
    std::ifstream thrown(folder + "/thrown." + std::to_string(r));
    if (!thrown) continue;
    std::string const words((std::istreambuf_iterator<char>(thrown)), {});
    if (out.thrown.empty() || out.thrown.starts_with("(lost)")) out.thrown = words;
  }
  if (out.thrown.empty() && status != 0)
    out.thrown =
        WIFEXITED(status) ? "ranks ended with exit code " + std::to_string(WEXITSTATUS(status)) : "the launcher was killed";
  return out;
}

}  // namespace differential
