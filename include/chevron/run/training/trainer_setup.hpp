#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Device.h>

#include <chevron/lower/program.hpp>
#include <chevron/run/comm/stage_failure.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/model/loss.hpp>
#include <chevron/run/model/stage.hpp>
#include <chevron/run/optimizer/optimizer_factory.hpp>
#include <chevron/run/optimizer/trainer_options.hpp>

/// \file
/// The arguments of trainers and evaluators, and the stages of a rank that are built of them; stages that cannot be trained as
/// they are, are refused.

namespace chevron {

/// Makes a stage, given its number. A trainer calls it for the stages of its own rank, one at a time in a process: a builder that
/// seeds the generator with the stage's number gives the model the same weights on any number of ranks.
using stage_builder = std::function<stage(int stage_number)>;

/// The arguments of a trainer. Members without a default have to be given.
struct trainer_setup {
  proved_program program;         ///< of `lowered<…>` or `lower(prove(plan))`
  chevron::transport& transport;  ///< must outlive the trainer
  stage_builder stages;           ///< called for each stage of this rank
  loss_function loss;             ///< the mean loss of a microbatch, of the last stage's outputs and then targets
  optimizer_factory optimizer;    ///< of this rank's parameters: `chevron::optimizer<torch::optim::AdamW>(3e-4)`
  trainer_options options = {};   ///< see trainer_options.hpp
};

/// The arguments of an evaluator without a trainer, for a model that is not trained here, such as a teacher or a reference.
/// Members without a default have to be given.
struct evaluator_setup {
  proved_program program;         ///< a program that only runs forward, or a training program, of which the forwards run
  chevron::transport& transport;  ///< must outlive the evaluator
  stage_builder stages;           ///< called for each stage of this rank; parameters may need gradients, and get none
  loss_function loss = {};        ///< as of a trainer; empty: the evaluator gives outputs alone
  trainer_options options = {};   ///< read are `device`, `autocast`, `loss_weight`, `slice_cuts`, `check_data`, `check_messages`
};

}  // namespace chevron

namespace chevron::detail {

/// Builds one stage. Reports exceptions of the builder to all ranks.
inline stage built(stage_builder const& build, int number, transport& comm) {
  std::string const who = "building stage " + std::to_string(number) + " threw: ";
  error_context const where{.rank = comm.topology().global_rank};
  try {
    return build(number);
  } catch (usage_error const&) {
    rethrow_placed(&comm, who, where);
  } catch (error const& e) {
    throw_stage_error(&comm, who + e.what(), where);
  } catch (...) {
    rethrow_placed(&comm, who, where);
  }
}

/// \throws usage_error for a parameter that two stages share and do not tie
inline void check_apart(std::vector<stage> const& stages, std::size_t a, std::size_t b) {
  for (parameter const& p : stages[a].parameters()) {
    for (parameter const& q : stages[b].parameters()) {
      if (p.value.is_same(q.value) && p.value.requires_grad() && (p.tied_as.empty() || p.tied_as != q.tied_as)) {
        throw usage_error("stages " + std::to_string(a) + " (" + p.name + ") and " + std::to_string(b) + " (" + q.name +
                          ") share a parameter: say so on both, as on any other layout, by stage.tie(\"" + p.name +
                          "\", \"a group of their own\")");
      }
    }
  }
}

/// Builds a rank's stages, one at a time in a process. \returns the stages by number; stages of other ranks are empty
/// \param device that all parameters must be on
/// \param broadcast_buffers refuses buffers that a gather cannot carry: sparse and quantized ones
/// \throws usage_error for an empty stage, a parameter on another device, such a buffer, and a parameter that two stages share
/// and do not tie; stage_error for an exception of `build`
inline std::vector<stage> build_stages(program_view const& p, stage_builder const& build, transport& comm, at::Device device,
                                       bool broadcast_buffers) {
  static std::mutex one_at_a_time;
  error_context const here{.rank = comm.topology().global_rank};
  std::vector<stage> stages(static_cast<std::size_t>(p.plan.stages));
  for (int s = 0; s < p.plan.stages; ++s) {
    if (p.plan.rank_of_stage(s) != comm.topology().pipeline_rank()) continue;
    std::lock_guard const hold(one_at_a_time);
    stage& made = stages[static_cast<std::size_t>(s)];
    made = built(build, s, comm);
    if (!made) throw usage_error("stage " + std::to_string(s) + " was built empty", here);
    for (parameter const& q : made.parameters()) {
      if (q.value.device() == device) continue;
      throw usage_error("stage " + std::to_string(s) + "'s " + q.name + " is on " + q.value.device().str() +
                            ", but the trainer's options say this rank computes on " + device.str() +
                            ": build the stage there (module->to(device)), or change trainer_options::device",
                        here);
    }
    for (parameter const& b : made.buffers()) {
      if (comm.topology().replicas == 1 || !broadcast_buffers || !b.value.defined()) continue;
      if (b.value.layout() == at::kStrided && !b.value.is_quantized()) continue;
      throw usage_error("stage " + std::to_string(s) + "'s buffer " + b.name +
                            " is sparse or quantized, and cannot be brought from replica 0 to the others. Remedy: a dense one, "
                            "or trainer_options::broadcast_buffers = false",
                        here);
    }
  }
  for (std::size_t a = 0; a < stages.size(); ++a) {
    for (std::size_t b = a + 1; b < stages.size(); ++b) check_apart(stages, a, b);
  }
  return stages;
}

/// Compares the addresses of trained parameters over the ranks. Collective. To be called before any rank writes to a parameter or
/// its `.grad`, which would be a race between two threads.
/// \param stages by number; stages of other ranks are empty
/// \throws usage_error, on every rank alike, where threads share a parameter that is trained
inline void check_separate_tensors(std::vector<stage> const& stages, transport& comm) {
  struct owner {
    std::size_t rank;
    std::string stage, name;
    std::string text() const { return "stage " + stage + "'s " + name + " on rank " + std::to_string(rank); }
  };
  std::string mine;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    if (!stages[s]) continue;
    for (parameter const& p : stages[s].parameters()) {
      if (!p.value.requires_grad()) continue;
      mine += std::to_string(::getpid()) + "/" + std::to_string(reinterpret_cast<std::uintptr_t>(p.value.unsafeGetTensorImpl())) +
              "\t" + std::to_string(s) + "\t" + p.name + "\n";
    }
  }
  std::vector<std::string> const all = comm.all_gather_text(mine);
  std::map<std::string, owner> seen;  // the first owner by process and address
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    std::istringstream in(all[rank]);
    std::string address;
    for (owner now{rank, {}, {}};
         std::getline(in, address, '\t') && std::getline(in, now.stage, '\t') && std::getline(in, now.name);) {
      owner const& before = seen.try_emplace(address, now).first->second;
      if (before.rank == rank) continue;
      throw usage_error(
          now.text() + " and " + before.text() +
          " are one tensor: ranks that are threads would both write to it. Remedy: build it anew on each rank" +
          (now.stage == before.stage ? "" : ", and tie the two: stage.tie(\"" + now.name + "\", \"a group of their own\")"));
    }
  }
}

/// The names of the side inputs that a rank's stages read, and on the last stage's rank the loss; `targets_taken` for a stage
/// that reads targets.
inline std::vector<std::string> side_inputs_taken(std::vector<stage> const& stages, loss_function const& loss) {
  std::vector<std::string> out;
  for (stage const& one : stages) {
    if (!one) continue;
    for (std::string& name : one.side_input_names()) out.push_back(std::move(name));
    if (one.takes_targets()) out.push_back(targets_taken);
  }
  if (stages.back()) out.insert(out.end(), loss.side_input_names().begin(), loss.side_input_names().end());
  return out;
}

}  // namespace chevron::detail
