#pragma once

#include <cstddef>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <c10/core/Device.h>

#include <chevron/lower/program.hpp>
#include <chevron/run/comm/stage_failure.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/stage/loss.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/train/trainer_setup.hpp>

/// \file
/// Builds a rank's stages, and refuses stages that cannot be trained as they are.

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

/// Compares the parameters of two stages. \throws usage_error for a parameter that both stages share and do not tie
inline void check_apart(std::vector<stage> const& stages, std::size_t a, std::size_t b) {
  for (parameter const& p : stages[a].parameters()) {
    for (parameter const& q : stages[b].parameters()) {
      if (p.value.is_same(q.value) && p.value.requires_grad() && (p.tied_as.empty() || p.tied_as != q.tied_as)) {
        throw usage_error("stages " + std::to_string(a) + " (" + p.name + ") and " + std::to_string(b) + " (" + q.name +
                          ") share a parameter. Remedy: tie it on both stages, as on any other layout: stage.tie(\"" + p.name +
                          "\", \"a name for the tie\")");
      }
    }
  }
}

/// Builds a rank's stages, one at a time in a process. \returns the stages by number; stages of other ranks are empty
/// \param device device on which all parameters must be
/// \param broadcast_buffers true: buffers will be copied between replicas, so sparse and quantized buffers are refused
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
                            " is sparse or quantized, and cannot be broadcast from replica 0. Remedy: a dense buffer, "
                            "or trainer_options::broadcast_buffers = false",
                        here);
    }
  }
  for (std::size_t a = 0; a < stages.size(); ++a) {
    for (std::size_t b = a + 1; b < stages.size(); ++b) check_apart(stages, a, b);
  }
  return stages;
}

/// Refuses parameters that modules registered after the trainer was made: no gradient of theirs is set to zero or summed.
/// \throws usage_error naming the first parameter that was added, removed or replaced
inline void check_registered(std::vector<stage> const& stages) {
  for (std::size_t s = 0; s < stages.size(); ++s) {
    std::string const name = stages[s] ? stages[s].changed_parameter() : "";
    if (name.empty()) continue;
    throw usage_error("stage " + std::to_string(s) + "'s " + name +
                      " was registered, removed or replaced since the trainer was made, and a trainer keeps the parameters and "
                      "buffers of its start. Remedy: write values in place (copy_); or a new trainer, from a checkpoint if the "
                      "optimizer is to go on");
  }
}

/// Returns the names of the side inputs that a rank's stages read, on the last stage's rank also those that the loss reads, and
/// `targets_taken` for each stage that reads targets.
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
