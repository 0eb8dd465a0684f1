#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>

#include <nlohmann/json.hpp>

#include <chevron/run/error.hpp>
#include <chevron/run/optimizer_state.hpp>
#include <chevron/run/safetensors.hpp>
#include <chevron/run/stage.hpp>
#include <chevron/run/trainer.hpp>
#include <chevron/version.hpp>

/// \file
/// Checkpoints: what training needs to go on, to the last bit. Not part of <chevron/run.hpp>, since it needs nlohmann-json.
///
///     DIR/step-00000200/model-3.safetensors       parameters and buffers of stage 3, by the names of its module
///                       optimizer-3.safetensors   what the optimizer keeps for them: "exp_avg/layer_1.weight"
///                       manifest.json             written last: without it the folder is no checkpoint
///
/// Another layout (P, V, R, schedule) can load it where parameters' names say which is which: where each name stands in one stage
/// only, as in a model whose modules are registered under names of their own. Where names repeat from stage to stage
/// ("0.weight" in each), the number of stages must be the same.
///
/// There is no random state to keep: what a stage draws depends on the trainer's seed, step, stage and microbatch only.

namespace chevron {

/// What a checkpoint says besides its tensors.
struct checkpoint_note {
  long next_step = 0;                        ///< the step to go on with
  std::map<std::string, std::string> words;  ///< the caller's own: position in the data, settings, …
};

namespace detail {

inline std::string checkpoint_name(long step) {
  char name[32];
  std::snprintf(name, sizeof name, "step-%08ld", step);
  return name;
}

/// Step N of exactly the name that a checkpoint has, with something before it; -1: another name.
inline long step_of(std::string const& name, std::string const& before = "") {
  long step = -1;
  std::size_t const digits = before.size() + 5;
  if (name.size() <= digits || std::from_chars(name.data() + digits, name.data() + name.size(), step).ec != std::errc{}) return -1;
  return name == before + checkpoint_name(step) ? step : -1;
}

inline std::filesystem::path stage_file(std::filesystem::path const& folder, char const* sort, int stage) {
  return folder / (std::string(sort) + "-" + std::to_string(stage) + ".safetensors");
}

/// What of a stage goes into its model file: each tensor once, buffers too.
inline std::vector<parameter> kept_of(stage const& s) {
  std::vector<parameter> all;
  for (auto const* list : {&s.parameters(), &s.buffers()}) {
    for (parameter const& p : *list) {
      if (p.value.defined()) all.push_back(p);
    }
  }
  return all;
}

inline std::string plain_shape(at::IntArrayRef shape) {
  std::string out = "[";
  for (std::size_t i = 0; i < shape.size(); ++i) out += (i > 0 ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

/// A collective: every rank hears of the first failure, and throws it.
inline void agree(transport& line, std::string const& failure) {
  auto const all = line.gather_text(failure);
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    if (!all[rank].empty()) throw checkpoint_error(all[rank], {static_cast<int>(rank), -1, -1, ""});
  }
}

/// Does something on this rank that may throw, and tells all ranks how it went.
template <class Work>
void together(transport& line, Work&& work) {
  std::string failure;
  try {
    work();
  } catch (std::exception const& e) {
    failure = e.what();
  }
  agree(line, failure);
}

/// Saves what the optimizer keeps for one stage's parameters.
inline named_tensors optimizer_tensors(torch::optim::Optimizer& optimizer, stage const& s) {
  named_tensors out;
  std::set<void const*> seen;
  for (parameter const& p : s.parameters()) {
    auto const found = optimizer.state().find(p.value.unsafeGetTensorImpl());
    if (found == optimizer.state().end() || !seen.insert(p.value.unsafeGetTensorImpl()).second) continue;
    visit_state(
        *found->second,
        [&](char const* name, at::Tensor const& t) {
          if (t.defined()) out.emplace_back(std::string(name) + "/" + p.name, t);
        },
        [&](char const* name, auto const& number) {
          out.emplace_back(std::string(name) + "/" + p.name, at::full({}, static_cast<std::int64_t>(number), at::kLong));
        });
  }
  return out;
}

/// Takes the state of one parameter out of a file; null if the file has none.
inline std::unique_ptr<torch::optim::OptimizerParamState> optimizer_state(safetensors_file& from, std::string const& kind,
                                                                          parameter const& p) {
  auto state = empty_state(kind);
  bool any = false;
  visit_state(
      *state,
      [&](char const* name, at::Tensor& t) {
        std::string const key = std::string(name) + "/" + p.name;
        if (!from.holds(key)) return;
        t = from.read(key).to(p.value.device());
        any = true;
      },
      [&](char const* name, auto& number) {
        std::string const key = std::string(name) + "/" + p.name;
        if (!from.holds(key)) return;
        number = static_cast<std::remove_reference_t<decltype(number)>>(from.read(key).template item<std::int64_t>());
        any = true;
      });
  return any ? std::move(state) : nullptr;
}

/// What the folder lists outlives a loss of power.
inline void bring_to_disk(std::filesystem::path const& folder) {
  int const opened = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY);
  bool const kept = opened >= 0 && ::fsync(opened) == 0;
  int const fault = errno;
  if (opened >= 0) ::close(opened);
  if (!kept) refuse_file(folder, std::string("cannot be brought to the disk: ") + std::strerror(fault));
}

inline double first_rate(torch::optim::Optimizer* optimizer) {
  if (optimizer == nullptr || optimizer->param_groups().empty()) return 0;
  return optimizer->param_groups()[0].options().get_lr();
}

inline nlohmann::json read_manifest(std::filesystem::path const& folder) {
  std::filesystem::path const file = folder / "manifest.json";
  std::ifstream in(file);
  auto manifest = nlohmann::json::parse(in, nullptr, false);
  bool const whole = manifest.is_object() && manifest.value("format", 0) == 1 && manifest.contains("stages") &&
                     manifest["stages"].is_number_unsigned() && manifest.contains("next_step") && manifest["next_step"].is_number_integer() &&
                     manifest.contains("tensors") && manifest["tensors"].is_number_unsigned();
  if (!whole) refuse_file(file, "is no manifest of a checkpoint that this version of Chevron reads");
  return manifest;
}

}  // namespace detail

/// The last whole checkpoint in a folder; nothing where there is none.
inline std::optional<std::filesystem::path> last_checkpoint(std::filesystem::path const& folder) {
  std::optional<std::filesystem::path> last;
  long last_step = -1;
  std::error_code gone;
  for (auto const& entry : std::filesystem::directory_iterator(folder, gone)) {
    long const step = detail::step_of(entry.path().filename().string());
    if (step > last_step && std::filesystem::exists(entry.path() / "manifest.json")) {
      last_step = step;
      last = entry.path();
    }
  }
  return last;
}

/// Saves a trainer between two steps, into `folder`/step-N with N = the next step. Collective; the folder must be the same, and shared,
/// for all ranks. Until the manifest has its name, older checkpoints are the last ones.
/// \returns the checkpoint's folder
/// \throws checkpoint_error, on every rank, when one of them cannot write
inline std::filesystem::path save_checkpoint(trainer& train, std::filesystem::path const& folder,
                                             std::map<std::string, std::string> const& words = {}) {
  train.settle();
  transport& line = train.line();
  std::filesystem::path const target = folder / detail::checkpoint_name(train.next_step());
  std::uint64_t mine = 0;
  detail::together(line, [&] {
    std::error_code failed;
    std::filesystem::create_directories(target, failed);
    if (failed) detail::refuse_file(target, "cannot be made: " + failed.message());
    for (std::size_t s = 0; s < train.stages().size(); ++s) {
      stage const& one = train.stages()[s];
      if (!one || line.where().replica() != 0) continue;
      named_tensors kept;
      for (parameter const& p : detail::kept_of(one)) kept.emplace_back(p.name, p.value);
      mine += kept.size();
      write_safetensors(detail::stage_file(target, "model", static_cast<int>(s)), kept);
      if (train.optimizer() != nullptr) {
        write_safetensors(detail::stage_file(target, "optimizer", static_cast<int>(s)), detail::optimizer_tensors(*train.optimizer(), one));
      }
    }
  });

  // What only some ranks know.
  std::string const kind = train.optimizer() != nullptr ? kind_of(*train.optimizer()) : "";
  auto const known = line.gather_text(nlohmann::json{{"tensors", mine}, {"optimizer", kind}, {"rate", detail::first_rate(train.optimizer())}}.dump());
  detail::together(line, [&] {
    if (line.where().global_rank != 0) return;
    plan_view const& plan = train.program().plan;
    nlohmann::json manifest = {{"format", 1},
                               {"chevron", version},
                               {"next_step", train.next_step()},
                               {"stages", plan.stages},
                               {"layout", {{"schedule", plan.name}, {"ranks", plan.size.ranks}, {"replicas", line.where().replicas}}},
                               {"tensors", 0u},
                               {"optimizer", ""},
                               {"learning_rate", 0},
                               {"loss_scale", {{"factor", train.scaling().get().factor}, {"steps", train.scaling().get().steps}}},
                               {"words", words}};
    for (std::string const& text : known) {
      auto const one = nlohmann::json::parse(text);
      manifest["tensors"] = manifest["tensors"].get<std::uint64_t>() + one["tensors"].get<std::uint64_t>();
      if (!one["optimizer"].get<std::string>().empty() && manifest["optimizer"].get<std::string>().empty()) {
        manifest["optimizer"] = one["optimizer"];
        manifest["learning_rate"] = one["rate"];
      }
    }
    detail::write_whole(target / "manifest.json", [&](std::ofstream& out) { out << manifest.dump(2) << '\n'; });
  });
  return target;
}

namespace detail {

/// Whether a checkpoint has a file of this name, or had one half written.
inline bool is_checkpoint_file(std::string name) {
  constexpr std::string_view partial = ".partial", ending = ".safetensors";
  if (name.ends_with(partial)) name.resize(name.size() - partial.size());
  if (name == "manifest.json") return true;
  for (std::string_view const sort : {"model-", "optimizer-"}) {
    if (!name.starts_with(sort) || !name.ends_with(ending) || name.size() <= sort.size() + ending.size()) continue;
    auto const number = std::string_view(name).substr(sort.size(), name.size() - sort.size() - ending.size());
    if (number.find_first_not_of("0123456789") == number.npos) return true;
  }
  return false;
}

/// Whether this is a folder, and no link to one, with nothing in it but a checkpoint's files.
inline bool holds_only_a_checkpoint(std::filesystem::path const& folder) {
  std::error_code gone;
  if (!std::filesystem::is_directory(std::filesystem::symlink_status(folder, gone))) return false;
  for (auto const& entry : std::filesystem::directory_iterator(folder, gone)) {
    if (!is_checkpoint_file(entry.path().filename().string()) || !std::filesystem::is_regular_file(entry.symlink_status(gone))) return false;
  }
  return !gone;
}

inline constexpr char const* removed_prefix = "removed-";

/// Deletes what is called a removed checkpoint. What cannot be deleted now (a reader on a network disk) is tried again next time.
inline void delete_removed(std::filesystem::path const& folder) {
  std::error_code ignored;
  std::vector<std::filesystem::path> removed;
  for (auto const& entry : std::filesystem::directory_iterator(folder, ignored)) {
    if (step_of(entry.path().filename().string(), removed_prefix) >= 0 && holds_only_a_checkpoint(entry.path())) removed.push_back(entry.path());
  }
  for (auto const& one : removed) {
    std::vector<std::filesystem::path> files;
    for (auto const& entry : std::filesystem::directory_iterator(one, ignored)) files.push_back(entry.path());
    for (auto const& file : files) std::filesystem::remove(file, ignored);
    std::filesystem::remove(one, ignored);  // only if it is empty
  }
}

}  // namespace detail

/// Removes old checkpoints from a folder, on a single rank: of the whole ones up to step `newest`, which must be there, the last `keep`
/// stay. Whatever else is in the folder stays too: later checkpoints, half-written ones, links, and checkpoints into which somebody has
/// put a file. A checkpoint is renamed to `removed-step-N` first, then deleted. Killed in between, it is no longer taken for one, and the
/// next call deletes what is left.
/// \param keep 1 or more
/// \throws checkpoint_error where one cannot be renamed
inline void remove_old_checkpoints(std::filesystem::path const& folder, long newest, int keep) {
  std::vector<long> whole;
  std::error_code gone;
  for (auto const& entry : std::filesystem::directory_iterator(folder, gone)) {
    long const step = detail::step_of(entry.path().filename().string());
    if (step < 0 || step > newest || !std::filesystem::exists(entry.path() / "manifest.json")) continue;
    if (step == newest || detail::holds_only_a_checkpoint(entry.path())) whole.push_back(step);
  }
  std::sort(whole.begin(), whole.end());
  // Nothing goes before the newest has come to stay.
  if (whole.empty() || whole.back() != newest) return;
  whole.resize(whole.size() - std::min(whole.size(), static_cast<std::size_t>(std::max(keep, 1))));
  if (!whole.empty()) {
    detail::bring_to_disk(folder / detail::checkpoint_name(newest));
    detail::bring_to_disk(folder);
  }
  detail::delete_removed(folder);
  for (long const step : whole) {
    std::filesystem::path const from = folder / detail::checkpoint_name(step);
    std::error_code failed;
    std::filesystem::rename(from, folder / (detail::removed_prefix + detail::checkpoint_name(step)), failed);
    if (failed && failed != std::errc::directory_not_empty && failed != std::errc::file_exists)
      detail::refuse_file(from, "is an old checkpoint and cannot be removed: " + failed.message() + ". Remedy: a folder that may be written to");
  }
  detail::delete_removed(folder);
}

/// The same after `save_checkpoint`, between the same two steps. Collective.
inline void remove_old_checkpoints(trainer& train, std::filesystem::path const& folder, int keep) {
  detail::together(train.line(), [&] {
    if (train.line().where().global_rank == 0) remove_old_checkpoints(folder, train.next_step(), keep);
  });
}

/// Loads a checkpoint into a trainer that was built alike but for layout and schedule, before its next step. Everything is found and
/// compared before anything is changed. Collective.
/// \param from a folder that holds checkpoints, for the last whole one, or one checkpoint's own
/// \throws checkpoint_error, on every rank, when there is none, when a file is damaged, or when names, shapes, dtypes or the kind of
/// optimizer are not those of this model
inline checkpoint_note load_checkpoint(trainer& train, std::filesystem::path const& from) {
  train.settle();
  transport& line = train.line();
  std::filesystem::path folder;
  nlohmann::json manifest;
  detail::together(line, [&] {
    folder = std::filesystem::exists(from / "manifest.json") ? from : last_checkpoint(from).value_or("");
    if (folder.empty()) {
      detail::refuse_file(from, "holds no whole checkpoint, no folder step-N with a manifest.json. Remedy: the folder that was saved to, or begin anew");
    }
    manifest = detail::read_manifest(folder);
  });
  auto const chosen = line.gather_text(folder.filename().string());
  for (std::string const& other : chosen) {
    if (other != chosen[0]) throw checkpoint_error("ranks see different last checkpoints, " + chosen[0] + " and " + other + ": " + from.string() + " must be one shared folder");
  }

  struct found_tensor {
    parameter to;
    std::size_t file;
  };
  std::vector<safetensors_file> models;
  std::vector<std::vector<found_tensor>> found(train.stages().size());
  std::string const kind = manifest.value("optimizer", "");
  double mine = 0;
  detail::together(line, [&] {
    std::size_t const saved_stages = manifest["stages"].get<std::size_t>();
    std::map<std::string, std::vector<std::size_t>> where;
    for (std::size_t s = 0; s < saved_stages; ++s) {
      models.emplace_back(detail::stage_file(folder, "model", static_cast<int>(s)));
      for (std::string const& name : models.back().names()) where[name].push_back(s);
    }
    for (std::size_t s = 0; s < train.stages().size(); ++s) {
      if (!train.stages()[s]) continue;
      for (parameter const& p : detail::kept_of(train.stages()[s])) {
        auto const& places = where[p.name];
        std::string const wanted = "stage " + std::to_string(s) + " needs " + p.name;
        if (places.empty()) throw checkpoint_error(folder.string() + ": " + wanted + ", which the checkpoint does not hold. Remedy: the model that was saved");
        bool const same_stage = saved_stages == train.stages().size() && std::count(places.begin(), places.end(), s) == 1;
        if (!same_stage && places.size() > 1) {
          throw checkpoint_error(folder.string() + ": " + wanted + ", which " + std::to_string(places.size()) + " of the checkpoint's " +
                                 std::to_string(saved_stages) + " stages hold: names that repeat can only be loaded by as many stages, not " +
                                 std::to_string(train.stages().size()) + ". Remedy: register modules under names of their own");
        }
        std::size_t const file = same_stage ? s : places[0];
        if (at::IntArrayRef(models[file].shape(p.name)) != p.value.sizes()) {
          throw checkpoint_error(models[file].path().string() + ": " + p.name + " has the shape " + detail::plain_shape(models[file].shape(p.name)) +
                                 ", the model's is " + detail::plain_shape(p.value.sizes()));
        }
        found[s].push_back({p, file});
        mine += line.where().replica() == 0 ? 1 : 0;
      }
    }
    if (train.optimizer() != nullptr && kind_of(*train.optimizer()) != kind) {
      throw checkpoint_error(folder.string() + ": was trained with " + (kind.empty() ? "no optimizer" : kind) + ", this job steps " +
                             kind_of(*train.optimizer()) + ". Remedy: the same optimizer");
    }
  });
  std::vector<double> counts(static_cast<std::size_t>(line.where().world()));
  line.gather(std::span<double const>(&mine, 1), counts);
  double taken = 0;
  for (double const n : counts) taken += n;
  if (auto const held = manifest["tensors"].get<std::uint64_t>(); taken != static_cast<double>(held)) {
    throw checkpoint_error(folder.string() + ": holds " + std::to_string(held) + " tensors, this model has " +
                           std::to_string(static_cast<std::uint64_t>(taken)) + ". Remedy: the model that was saved");
  }

  detail::together(line, [&] {
    at::NoGradGuard const off;
    for (std::size_t s = 0; s < found.size(); ++s) {
      std::map<std::size_t, safetensors_file> states;
      for (found_tensor const& one : found[s]) {
        at::Tensor const value = models[one.file].read(one.to.name);
        if (value.scalar_type() != one.to.value.scalar_type()) {
          throw checkpoint_error(models[one.file].path().string() + ": " + one.to.name + " is " + c10::toString(value.scalar_type()) +
                                 ", the model's is " + c10::toString(one.to.value.scalar_type()));
        }
        at::Tensor to = one.to.value;
        to.copy_(value);
        if (train.optimizer() == nullptr || !one.to.value.requires_grad()) continue;
        auto file = states.find(one.file);
        if (file == states.end()) {
          file = states.emplace(one.file, safetensors_file(detail::stage_file(folder, "optimizer", static_cast<int>(one.file)))).first;
        }
        auto state = detail::optimizer_state(file->second, kind, one.to);
        auto& all = train.optimizer()->state();
        if (state != nullptr) {
          all[to.unsafeGetTensorImpl()] = std::move(state);
        } else {
          all.erase(to.unsafeGetTensorImpl());
        }
      }
    }
    if (train.optimizer() != nullptr) {
      for (auto& group : train.optimizer()->param_groups()) group.options().set_lr(manifest.value("learning_rate", group.options().get_lr()));
    }
  });
  if (auto const scale = manifest.find("loss_scale"); scale != manifest.end()) {
    train.scaling().set({scale->value("factor", 1.0), scale->value("steps", 0)});
  }
  train.next_step(manifest["next_step"].get<long>());
  checkpoint_note note{train.next_step(), {}};
  if (manifest.contains("words")) note.words = manifest["words"].get<std::map<std::string, std::string>>();
  return note;
}

}  // namespace chevron
