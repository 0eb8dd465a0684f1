#pragma once

#include <cstddef>
#include <exception>
#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <system_error>
#include <vector>

#include <c10/util/Exception.h>
#include <torch/optim/optimizer.h>

#include <nlohmann/json.hpp>

#include <chevron/checkpoint/checkpoint_folder.hpp>
#include <chevron/checkpoint/checkpoint_session.hpp>
#include <chevron/checkpoint/frozen_base.hpp>
#include <chevron/checkpoint/safetensors.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/text_parts.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/train/optimizer_state.hpp>
#include <chevron/run/train/trainer.hpp>

/// \file
/// Checks that all ranks agree before a checkpoint is saved or loaded.

namespace chevron::detail {

inline checkpoint_session& session_of(trainer& train) {
  if (trainer_access::checkpoints(train) == nullptr) trainer_access::checkpoints(train) = std::make_shared<checkpoint_session>();
  return *trainer_access::checkpoints(train);
}

/// Creates the folder, and claims it for this job. Called on global rank 0.
/// \returns the job's name
/// \throws checkpoint_error if the folder cannot be created, and as `claim_folder`
inline std::string claim(trainer& train, std::filesystem::path const& folder) {
  std::error_code failed;
  std::filesystem::create_directories(folder, failed);
  if (failed) refuse_file(folder, "cannot be made: " + failed.message() + ". Remedy: a folder that may be written to");
  return claim_folder(session_of(train), folder, train.next_step());
}

inline constexpr char const *of_a_piece = "piece ", *of_experts = "piece of experts ";

/// Returns fingerprints of a rank's buffers, by names for errors; empty with one replica and one shard.
inline std::map<std::string, std::string> buffers_of(trainer& train) {
  std::map<std::string, std::string> out;
  if (topology const& grid = train.comm().topology(); grid.replicas == 1 && grid.shards == 1) return out;
  for (std::size_t s = 0; s < train.stages().size(); ++s) {
    for (parameter const& b : train.stages()[s].buffers()) {
      if (!b.value.defined()) continue;
      std::string& mark = out["stage " + std::to_string(s) + "'s " + b.name];
      char const* const piece = b.cut_over == rank_group::experts ? of_experts : of_a_piece;
      mark = (b.held == over_shards::cut ? piece : "") + std::to_string(fingerprint(b.value));
    }
  }
  return out;
}

/// Throws on every rank the failure of the first rank that has a failure. Collective. \param failure this rank's failure;
/// empty: none
inline void agree(transport& comm, std::string const& failure) {
  auto const all = comm.all_gather_text(failure);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].empty()) throw checkpoint_error(all[rank], {static_cast<int>(rank), -1, -1, ""});
  }
}

/// Runs `work` on this rank; if `work` throws on any rank, every rank throws the failure of the first such rank. Collective.
template <class Work>
void together(transport& comm, Work&& work) {
  std::string failure;
  try {
    work();
  } catch (std::exception const& e) {
    failure = e.what();
  }
  agree(comm, failure);
}

/// Checks that all ranks see the same checkpoint in a folder. Collective.
/// \param mine name of the checkpoint that this rank sees
/// \throws checkpoint_error, on every rank, if ranks see different checkpoints
inline void compare_seen(transport& comm, std::filesystem::path const& folder, std::string const& mine) {
  auto const seen = comm.all_gather_text(mine);
  for (std::string const& other : seen) {
    if (other != seen[0])
      throw checkpoint_error("ranks see different last checkpoints, " + seen[0] + " and " + other + ": " + folder.string() +
                             " must be one shared folder");
  }
}

/// Returns the checkpoint at a path, equal on all ranks: the folder itself, or the last whole checkpoint in the folder; empty
/// if there is none. Collective. \throws checkpoint_error, on every rank, if ranks see different checkpoints
inline std::filesystem::path shared_checkpoint(transport& comm, std::filesystem::path const& from) {
  std::filesystem::path found;
  together(comm, [&] { found = checkpoint_in(from); });
  compare_seen(comm, from, found.empty() ? "none" : name_of(found));
  return found;
}

/// Checks that rank 0 finds the new files of all ranks, before an older file is removed: ranks may have been given different
/// folders, or disks of their own. Collective.
/// \param folder this rank's \param written this rank's new files, still without their names: no older file is taken for one
/// \throws checkpoint_error, on every rank, naming the first file that is not found and its rank
inline void check_one_folder(transport& comm, std::filesystem::path const& folder, std::vector<unnamed_file> const& written) {
  std::error_code none;
  nlohmann::json mine = {{"folder", std::filesystem::absolute(folder, none).string()}, {"files", nlohmann::json::object()}};
  for (unnamed_file const& one : written) mine["files"][one.partial().filename().string()] = one.file().filename().string();
  auto const known = comm.all_gather_text(mine.dump());
  together(comm, [&] {
    if (comm.topology().global_rank != 0) return;
    for (std::size_t rank = 0; rank < known.size(); ++rank) {
      nlohmann::json const told = nlohmann::json::parse(known[rank]);
      auto const name_of_file = told.at("files").get<std::map<std::string, std::string>>();
      std::vector<std::string> names;
      for (auto const& [partial, name] : name_of_file) names.push_back(partial);
      std::string const missing = first_missing(folder, names);
      if (missing.empty()) continue;
      refuse_file(folder, "has no file " + name_of_file.at(missing) + ", which rank " + std::to_string(rank) +
                              " has written into " + told.at("folder").get<std::string>() +
                              ": nothing was saved. Remedy: one folder that all ranks share, under the same path");
    }
  });
}

/// Checks that buffers are equal on all replicas and shards, and experts' buffers on the replicas that hold the same experts,
/// since a checkpoint stores each stage once.
/// \param known JSON texts of all ranks, by global rank, with the result of `buffers_of` as "buffers"
/// \throws checkpoint_error naming a buffer that differs
inline void compare_buffers(topology const& where, std::vector<std::string> const& known) {
  std::vector<nlohmann::json> buffers;
  for (std::string const& text : known) buffers.push_back(nlohmann::json::parse(text)["buffers"]);
  auto const on = [&](int replica, int rank, int shard) -> nlohmann::json const& {
    return buffers[static_cast<std::size_t>(where.rank_at(replica, where.pipeline_rank_of(rank), shard))];
  };
  auto const refuse = [](std::string const& name, std::string const& copy, int number, int first, std::string const& remedy) {
    throw checkpoint_error(name + " differs between " + copy + " " + std::to_string(number) + " and " + copy + " " +
                           std::to_string(first) + ", and a checkpoint stores one of them. Remedy: " + remedy +
                           ", or equal values before saving");
  };
  for (int rank = 0; rank < where.world(); ++rank) {
    int const replica = where.replica_of(rank), shard = where.shard_of(rank);
    for (bool const experts : {false, true}) {
      int const first = experts ? replica % where.expert_replicas : 0;  // the first replica with this rank's copy
      for (auto const& [name, value] : on(first, rank, shard).items()) {
        auto const words = value.get<std::string>();
        if (words.starts_with(of_experts) != experts) continue;
        if (on(replica, rank, shard).value(name, nlohmann::json()) != value)
          refuse(name, "replica", replica, first, "trainer_options::broadcast_buffers");
        if (!words.starts_with(of_a_piece) && on(0, rank, 0).value(name, nlohmann::json()) != value)
          refuse(name, "shard", shard, 0, "stage.cut where each shard holds a piece");
      }
    }
  }
}

/// Passes the sentences of all ranks to `options.on_difference` on rank 0, each once. Collective.
inline void tell(transport& comm, std::set<std::string> const& mine, load_options const& options) {
  std::string text;
  for (std::string const& one : mine) text += one + "\n";
  std::set<std::string> all;
  for (std::string const& of_rank : comm.all_gather_text(text)) {
    for (std::string const& one : parts_of(of_rank, '\n')) all.insert(one);
  }
  if (comm.topology().global_rank != 0) return;
  for (std::string const& one : all) {
    if (options.on_difference) {
      options.on_difference(one);
    } else {
      TORCH_WARN("load_checkpoint: " + one);
    }
  }
}

inline void compare_words(std::filesystem::path const& folder, std::map<std::string, std::string> const& saved,
                          std::map<std::string, std::string> const& expected) {
  for (auto const& [word, value] : expected) {
    auto const there = saved.find(word);
    if (there != saved.end() && there->second == value) continue;
    throw checkpoint_error(folder.string() + ": was saved by a run " +
                           (there != saved.end() ? "with " + word + " " + there->second : "whose manifest has no " + word) +
                           ", this one has " + value + ": a resumed run must be the saved run. Remedy: the same " + word +
                           ", or begin anew in another folder");
  }
}

/// Checks that no accumulated gradients wait for their step, since no checkpoint stores gradients.
/// \throws usage_error otherwise \param what `saved` or `loaded`, for the error
inline void be_between_steps(trainer const& train, char const* what) {
  if (!train.accumulating()) return;
  throw usage_error(std::string("a checkpoint cannot be ") + what +
                        " between accumulate() and its step(): the accumulated gradients are in no file. "
                        "Remedy: after step()",
                    {-1, -1, train.next_step(), ""});
}

/// Prepares a save: waits for the verdict on the last step, checks that parameters are finite, and compares copies of parameters
/// (unless `check_copies` is 0), since one copy is saved. \param call a literal, the name of the function that saves, for errors
inline void begin_save(trainer& train, char const* call) {
  be_between_steps(train, "saved");
  train.check_before_save(call);
}

/// Returns the kind of an optimizer; empty for null.
/// \throws checkpoint_error for an optimizer of an unknown class, whose state cannot be saved
inline std::string kind_to_save(torch::optim::Optimizer* optimizer) {
  if (optimizer == nullptr) return "";
  std::string kind = kind_of(*optimizer);
  if (kind.empty()) {
    throw checkpoint_error(
        "the state of an optimizer of this class is unknown, and can neither be saved nor loaded. Remedy: SGD, Adam, AdamW, "
        "RMSprop or Adagrad of torch::optim, or write_safetensors() for the parameters alone");
  }
  return kind;
}

}  // namespace chevron::detail
