#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <chevron/checkpoint/checkpoint_folder.hpp>
#include <chevron/checkpoint/checkpoint_loader.hpp>
#include <chevron/checkpoint/checkpoint_manifest.hpp>
#include <chevron/checkpoint/checkpoint_ranks.hpp>
#include <chevron/checkpoint/checkpoint_session.hpp>
#include <chevron/checkpoint/frozen_base.hpp>
#include <chevron/checkpoint/optimizer_file.hpp>
#include <chevron/checkpoint/safetensors.hpp>
#include <chevron/checkpoint/shard_cuts.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/fault_point.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/train/loss_scale.hpp>
#include <chevron/run/train/trainer.hpp>
#include <chevron/version.hpp>

/// \file
/// Checkpoints: files from which a run resumes with the same bits. Not part of <chevron/run.hpp>, as they need nlohmann-json.
///
///     DIR/step-00000200/model-3.safetensors       parameters and buffers of stage 3, by the names of its module
///                       optimizer-3.safetensors   the optimizer's state of them: "exp_avg/layer_1.weight", and masters of
///                                                 half-precision parameters: "master/layer_1.weight"
///                       manifest.json             written last: without it the folder is no checkpoint
///     DIR/.chevron-lock                             held by the job that saves there
///
/// Another layout (P, V, R, schedule) can load a checkpoint in which each parameter's name stands in one stage only, as in a
/// model whose modules are registered under names of their own. Where names repeat from stage to stage ("0.weight" in each), the
/// number of stages must be the same.
///
/// The manifest names each file's fingerprint, and ends with its own: a damaged, exchanged or changed file is reported, and
/// nothing is loaded. A folder belongs to one job, whose name is in the manifest; jobs that resume from it keep the name. The
/// manifest lists tied parameters, too, so that layouts that name them once, or in several stages, can load them.
///
/// With `save_options::trained_only` frozen parameters are in no file: the manifest has a fingerprint of each. Buffers are those
/// of replica 0, to which all replicas' are equal between two steps. Of a tensor that is cut over shards the files hold the
/// whole, so that any number of shards can load it; the manifest has the blocks of such tensors ('cuts', since a fused weight
/// may be declared with other blocks). Without a saved master a master begins with its parameter's values; a saved one whose
/// parameter has none here is refused. Random numbers have no state to be saved: they depend on the trainer's seed, step, stage
/// and microbatch only.

namespace chevron {

/// The contents of a checkpoint besides its tensors.
struct checkpoint_note {
  long next_step = 0;                           ///< the step with which training goes on
  std::map<std::string, std::string> metadata;  ///< the caller's own entries: position in the data, settings, …
};

namespace detail {

/// The files of this rank's stages. Collective over the shards. \param base gets the fingerprints of frozen parameters that are
/// left out of the files
inline std::vector<file_to_write> files_of(trainer& train, std::filesystem::path const& target, shard_cuts const& cuts,
                                           std::map<void const*, double> const& rates,
                                           std::map<void const*, rank_optimizer::kept> const& states, bool trained_only,
                                           std::map<saved_name, std::string>& base) {
  std::vector<file_to_write> out;
  for (std::size_t s = 0; s < train.stages().size(); ++s) {
    stage const& one = train.stages()[s];
    for (parameter const& p : one.parameters()) {
      if (trained_only && !p.value.requires_grad()) base[{s, p.name}] = base_mark(cuts.whole(p.value, p.value));
    }
  }
  for (auto const& [one, mark] : base) keep_mark(session_of(train), one, mark);
  for (std::size_t s = 0; s < train.stages().size(); ++s) {
    stage const& one = train.stages()[s];
    if (!one) continue;
    auto& kept = out.emplace_back(file_to_write{stage_file(target, "model", s), {}}).tensors;
    for (parameter const& p : kept_of(one, trained_only)) kept.push_back(cuts.to_file(p.name, p.value, p.value));
    out.push_back({stage_file(target, "optimizer", s), optimizer_tensors(rates, states, one, cuts)});
  }
  return out;
}

/// The cuts of tensors of which shards have pieces, for the manifest.
inline nlohmann::json cuts_to_json(shard_cuts const& cuts, std::vector<stage> const& stages) {
  auto out = nlohmann::json::array();
  for (std::size_t s = 0; s < stages.size(); ++s) {
    for (parameter const& p : kept_of(stages[s])) {
      tensor_cut const* const cut = cuts.of(p.value);
      if (cut != nullptr && cut->over == rank_group::shards && p.cut_over == rank_group::shards)
        out.push_back({s, p.name, static_cast<std::uint64_t>(cut->along), cut->blocks()});
    }
  }
  return out;
}

}  // namespace detail

/// Checks before training whether all ranks can write checkpoints into a folder, and locks the folder for this job until the
/// trainer is destroyed. After `load_checkpoint`, where training goes on from a checkpoint. Collective.
/// \param folder created if missing; the same, and shared, for all ranks
/// \throws checkpoint_error, on every rank, when one of them cannot write there, or the folder belongs to another job
inline void check_checkpoint_folder(trainer& train, std::filesystem::path const& folder) {
  detail::together(train.comm(), [&] {
    if (train.comm().topology().global_rank == 0) detail::claim(train, folder);
  });
  detail::together(train.comm(), [&] {
    detail::unnamed_file const never_named(folder / "manifest.json", [](auto const& write) { write("?", 1); });
  });
}

/// Saves a trainer between two steps, into `folder`/step-N with N = the next step. Collective. The checkpoint is valid from the
/// moment at which its manifest gets its name; an older checkpoint of the same step stays until all new files are written. With
/// `post_validation` the function first waits for the verdict on the last step.
/// \param folder the same, and shared, for all ranks
/// \param metadata the caller's entries for the manifest: settings that training depends on and the trainer does not know
/// \returns the checkpoint's folder
/// \throws numerical_error, on every rank, if a trained parameter is not finite: nothing is written, so the last checkpoint stays
/// \throws checkpoint_error, on every rank, when one of them cannot write, or the folder holds checkpoints of another job or a
/// later step: no partial file stays, and training may go on
inline std::filesystem::path save_checkpoint(trainer& train, std::filesystem::path const& folder,
                                             std::map<std::string, std::string> const& metadata = {},
                                             save_options const& options = {}) {
  char const* const call = "save_checkpoint";
  collective_scope const doing(train.comm(), call);
  detail::begin_save(train, call);
  step_report const last = train.synchronize();
  transport& comm = train.comm();
  std::filesystem::path const target = folder / detail::checkpoint_name(train.next_step());
  detail::rank_optimizer& optimizer = detail::trainer_access::optimizer(train);
  std::vector<detail::unnamed_file> written;
  std::vector<detail::file_to_write> files;
  std::map<detail::saved_name, std::string> base;
  std::optional<detail::shard_cuts> cuts;
  topology const& where = comm.topology();
  bool const holds = where.replica() < where.expert_replicas, writes = where.replica() == 0 && where.shard() == 0;
  nlohmann::json mine = {{"optimizer", ""}, {"files", nlohmann::json::object()}};
  std::string job;
  detail::together(comm, [&] {
    cuts.emplace(comm, train.stages());
    mine["optimizer"] = detail::kind_to_save(train.optimizer());
    if (comm.topology().global_rank != 0) return;
    job = detail::claim(train, folder);
    detail::remove_link_to_checkpoint(target);
  });
  auto const rates = detail::rates_of(optimizer);
  auto const states = detail::states_of(optimizer);
  detail::together(comm, [&] {
    if (holds) files = detail::files_of(train, target, *cuts, rates, states, options.trained_only, base);
    if (!writes) base.clear();
  });
  detail::together(comm, [&] {
    if (holds) written = detail::write_files(&*cuts, std::move(files), writes);
    for (auto const& file : written) mine["files"][file.file().filename().string()] = file.fingerprint();
    mine["same"] = detail::to_json(detail::same_parameters(train.stages()));
    mine["base"] = detail::base_to_json(base);
    mine["cuts"] = writes ? detail::cuts_to_json(*cuts, train.stages()) : nlohmann::json::array();
    mine["buffers"] = detail::buffers_of(train);
  });

  // All files are written. An older checkpoint of this step is removed, its manifest first, and the new files get their names.
  auto const known = comm.all_gather_text(mine.dump());
  detail::compare_buffers(comm.topology(), known);
  detail::check_one_folder(comm, target, written);
  plan_view const& plan = train.program().plan;
  detail::together(comm, [&] {
    if (comm.topology().global_rank == 0) detail::remove_files(target);
  });
  detail::together(comm, [&] {
    detail::fault_point(comm.topology().global_rank, train.next_step(), "saving");
    for (auto& file : written) file.give_name();
  });
  // Files are on the disk before the manifest that names them, also after a loss of power.
  detail::together(comm, [&] {
    detail::fault_point(comm.topology().global_rank, train.next_step(), "publishing");
    if (comm.topology().global_rank != 0) return;
    detail::bring_to_disk(target);
    nlohmann::json manifest = {
        {"format", detail::manifest_format},
        {"job", job},
        {"chevron", version},
        {"next_step", static_cast<std::uint64_t>(train.next_step())},
        {"stages", static_cast<std::uint64_t>(plan.stages)},
        {"layout", {{"schedule", plan.name}, {"ranks", plan.size.ranks}, {"replicas", comm.topology().replicas}}},
        {"optimizer", ""},
        {"words", metadata},
        {"files", nlohmann::json::object()},
        {"base", nlohmann::json::array()}};
    if (loss_scale const& scale = train.scaling(); scale.on())
      manifest["loss_scale"] = {{"factor", scale.get().factor}, {"steps", scale.get().steps}};
    if (last.step >= 0 && last.step == train.next_step() - 1) manifest["learning_rate"] = last.learning_rate;
    std::map<std::string, std::set<detail::saved_name>> same;
    for (std::string const& text : known) {
      auto const one = nlohmann::json::parse(text);
      manifest["files"].update(one["files"]);
      for (auto const& each : one["base"]) manifest["base"].push_back(each);
      for (auto const& each : one["cuts"]) manifest["cuts"].push_back(each);
      detail::add_from_json(same, one["same"]);
      if (manifest["optimizer"].get<std::string>().empty()) manifest["optimizer"] = one["optimizer"];
    }
    manifest["same"] = detail::to_json(same);
    std::string const text = detail::with_fingerprint(manifest);
    if (text.size() > detail::most_of_a_manifest)
      detail::refuse_file(target / "manifest.json", "would have " + std::to_string(text.size()) +
                                                        " bytes, and no manifest has more than " +
                                                        std::to_string(detail::most_of_a_manifest) +
                                                        ". Remedy: fewer or shorter entries of save_checkpoint's metadata");
    detail::unnamed_file(target / "manifest.json", [&](auto const& write) { write(text.data(), text.size()); }).give_name();
    detail::bring_to_disk(target);
    detail::bring_to_disk(folder);
  });
  return target;
}

/// Removes old checkpoints after `save_checkpoint`, between the same two steps. Collective.
/// \param keep number of checkpoints that stay, the last ones; 1 or more
/// \throws checkpoint_error, on every rank, where one cannot be renamed
inline void remove_old_checkpoints(trainer& train, std::filesystem::path const& folder, int keep) {
  collective_scope const doing(train.comm(), "remove_old_checkpoints");
  detail::together(train.comm(), [&] {
    if (train.comm().topology().global_rank == 0) remove_old_checkpoints(folder, train.next_step(), keep);
  });
}

/// Loads a checkpoint into a trainer of the same model, whose layout and schedule may differ, before its next step. All names,
/// shapes and files are checked before anything is changed; files are read once for that. Collective.
/// \param from a folder of checkpoints, whose last whole one is loaded, or the folder of one checkpoint
/// \param expected entries that the saved metadata must contain with the same values
/// \returns the step with which training goes on (as `trainer::next_step`), and the saved metadata
/// \throws checkpoint_error, on every rank, without a whole checkpoint; when ranks see different ones; when a file is damaged or
/// of another checkpoint; or when names, shapes, dtypes, trained parameters, the kind of optimizer or metadata differ from this
/// job's
inline checkpoint_note load_checkpoint(trainer& train, std::filesystem::path const& from,
                                       std::map<std::string, std::string> const& expected = {},
                                       load_options const& options = {}) {
  collective_scope const doing(train.comm(), "load_checkpoint");
  detail::be_between_steps(train, "loaded");
  train.synchronize();
  transport& comm = train.comm();
  auto const folder = detail::shared_checkpoint(comm, from);
  detail::manifest about;
  detail::together(comm, [&] {
    if (folder.empty()) {
      detail::refuse_file(from,
                          "holds no whole checkpoint, no folder step-N with a manifest.json. Remedy: the folder that was saved "
                          "to, or begin anew");
    }
    about = detail::read_manifest(folder);
    detail::compare_words(folder, about.metadata, expected);
  });
  detail::compare_seen(comm, from, detail::name_of(folder) + " " + about.fingerprint);
  detail::checkpoint_loader loader(train, folder, about);
  loader.find(options);
  loader.copy();
  detail::tell(comm, loader.notes(), options);
  if (about.scale) train.scaling().set(*about.scale);
  train.next_step(about.next_step);
  detail::checkpoint_session& session = detail::session_of(train);
  session.job = about.job;
  session.loaded = about.fingerprint;
  session.base.clear();
  return {about.next_step, about.metadata};
}

/// Loads the last whole checkpoint, if there is one, by `load_checkpoint`. For jobs that launchers restart after each failure:
/// the first failure may come before the first checkpoint. Collective.
/// \param folder a folder of checkpoints; may be missing
/// \returns the loaded step and metadata; nullopt without a whole checkpoint, and then the trainer is unchanged
/// \throws checkpoint_error, on every rank, as `load_checkpoint`
inline std::optional<checkpoint_note> resume(trainer& train, std::filesystem::path const& folder,
                                             std::map<std::string, std::string> const& expected = {},
                                             load_options const& options = {}) {
  collective_scope const doing(train.comm(), "resume");
  if (detail::shared_checkpoint(train.comm(), folder).empty()) return std::nullopt;
  return load_checkpoint(train, folder, expected, options);
}

}  // namespace chevron
