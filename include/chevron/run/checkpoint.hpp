#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>

#include <nlohmann/json.hpp>

#include <chevron/run/error.hpp>
#include <chevron/run/loss_scale.hpp>
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
/// The manifest names each file's fingerprint: a file that was damaged, exchanged or written by another job is told, and nothing is
/// loaded. Tied parameters are listed too, so that they can be loaded by layouts that name them once, or oftener.
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

/// Learning rates by parameter: those of its group.
inline std::map<void const*, double> rates_of(torch::optim::Optimizer& optimizer) {
  std::map<void const*, double> rates;
  for (auto& group : optimizer.param_groups()) {
    for (at::Tensor const& p : group.params()) rates[p.unsafeGetTensorImpl()] = group.options().get_lr();
  }
  return rates;
}

/// What the optimizer keeps for one stage's parameters, and their learning rates.
inline named_tensors optimizer_tensors(torch::optim::Optimizer& optimizer, stage const& s) {
  named_tensors out;
  std::set<void const*> seen;
  auto const rates = rates_of(optimizer);
  for (parameter const& p : s.parameters()) {
    void* const key = p.value.unsafeGetTensorImpl();
    auto const rate = rates.find(key);
    if (rate == rates.end() || !seen.insert(key).second) continue;
    out.emplace_back("lr/" + p.name, at::full({}, rate->second, at::kDouble));
    auto const found = optimizer.state().find(key);
    if (found == optimizer.state().end()) continue;
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

/// Is what the file has of a parameter's state of its shape and dtype?
inline void check_optimizer_state(safetensors_file const& from, std::string const& kind, std::string const& saved_name, at::Tensor const& p) {
  auto const require = [&](std::string const& key, at::IntArrayRef shape, at::ScalarType dtype) {
    if (!from.holds(key) || (at::IntArrayRef(from.shape(key)) == shape && from.dtype(key) == dtype)) return;
    refuse_file(from.path(), key + " is " + c10::toString(from.dtype(key)) + " " + plain_shape(from.shape(key)) + ", this model needs " +
                                 c10::toString(dtype) + " " + plain_shape(shape));
  };
  visit_state(
      *empty_state(kind), [&](char const* name, at::Tensor&) { require(std::string(name) + "/" + saved_name, p.sizes(), p.scalar_type()); },
      [&](char const* name, auto&) { require(std::string(name) + "/" + saved_name, {}, at::kLong); });
  require("lr/" + saved_name, {}, at::kDouble);
}

/// Takes the state of one parameter out of a file; null if the file has none.
inline std::unique_ptr<torch::optim::OptimizerParamState> optimizer_state(safetensors_file const& from, std::string const& kind,
                                                                          std::string const& saved_name, at::Tensor const& p) {
  auto state = empty_state(kind);
  bool any = false;
  visit_state(
      *state,
      [&](char const* name, at::Tensor& t) {
        std::string const key = std::string(name) + "/" + saved_name;
        if (!from.holds(key)) return;
        t = from.read(key).to(p.device());
        any = true;
      },
      [&](char const* name, auto& number) {
        std::string const key = std::string(name) + "/" + saved_name;
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

/// A tensor of a checkpoint: whose file, and its name there.
struct saved_name {
  std::size_t stage = 0;
  std::string name;
  friend auto operator<=>(saved_name const&, saved_name const&) = default;
};

/// This rank's parameters that are one with others, by a word: that of the tie, or one made up for a tensor that has several names.
inline std::map<std::string, std::set<saved_name>> same_parameters(std::vector<stage> const& stages) {
  std::map<void const*, std::set<saved_name>> names;
  std::map<void const*, std::string> words;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    for (parameter const& p : stages[s].parameters()) {
      void const* const key = p.value.unsafeGetTensorImpl();
      names[key].insert({s, p.name});
      if (!p.tied_as.empty()) words[key] = "tied " + p.tied_as;
    }
  }
  std::map<std::string, std::set<saved_name>> out;
  for (auto const& [key, all] : names) {
    std::string const word = words.count(key) != 0 ? words[key] : "tensor " + std::to_string(all.begin()->stage) + " " + all.begin()->name;
    if (all.size() > 1 || words.count(key) != 0) out[word].insert(all.begin(), all.end());
  }
  return out;
}

inline nlohmann::json to_json(std::map<std::string, std::set<saved_name>> const& same) {
  auto out = nlohmann::json::object();
  for (auto const& [word, all] : same) {
    for (saved_name const& one : all) out[word].push_back({one.stage, one.name});
  }
  return out;
}

inline void add_from_json(std::map<std::string, std::set<saved_name>>& same, nlohmann::json const& from) {
  for (auto const& [word, all] : from.items()) {
    for (auto const& one : all) same[word].insert({one.at(0).get<std::size_t>(), one.at(1).get<std::string>()});
  }
}

/// What a manifest says.
struct manifest {
  long next_step = 0;
  std::size_t stages = 0;
  std::string optimizer;                                // its kind
  std::optional<loss_scale::state> scale;               // where losses were scaled
  std::map<std::string, std::string> files;             // fingerprints
  std::map<std::string, std::set<saved_name>> same;     // parameters that are one
  std::map<std::string, std::string> words;
};

inline manifest read_manifest(std::filesystem::path const& folder) {
  std::filesystem::path const file = folder / "manifest.json";
  std::ifstream in(file);
  manifest out;
  try {
    auto const json = nlohmann::json::parse(in);
    auto const require = [](bool holds, char const* what) {
      if (!holds) throw checkpoint_error(what);
    };
    require(json.at("format") == 2, "its format is not 2");
    require(json.at("next_step").is_number_unsigned(), "next_step is no number of a step");
    require(json.at("stages").is_number_unsigned(), "stages is no number of stages");
    out.next_step = json["next_step"].get<long>();
    out.stages = json["stages"].get<std::size_t>();
    out.optimizer = json.at("optimizer").get<std::string>();
    out.files = json.at("files").get<std::map<std::string, std::string>>();
    out.words = json.at("words").get<std::map<std::string, std::string>>();
    add_from_json(out.same, json.at("same"));
    if (auto const scale = json.find("loss_scale"); scale != json.end()) {
      out.scale = {scale->at("factor").get<double>(), scale->at("steps").get<int>()};
      require(std::isfinite(out.scale->factor) && out.scale->factor > 0, "the factor of the loss is no number above 0");
    }
  } catch (std::exception const& e) {
    refuse_file(file, std::string("is no manifest of a checkpoint that this version of Chevron reads: ") + e.what());
  }
  return out;
}

/// Where a checkpoint holds what a model needs: by name, and where a name stands in several stages by the stage's number. Only headers
/// are read until a file is asked for.
class checkpoint_index {
 public:
  checkpoint_index(std::filesystem::path folder, manifest const& about, std::size_t stages_here)
      : folder_(std::move(folder)), about_(&about), same_stages_(about.stages == stages_here), stages_here_(stages_here) {
    for (std::size_t s = 0; s < about.stages; ++s) {
      models_.emplace_back(stage_file(folder_, "model", static_cast<int>(s)));
      for (std::string const& name : models_.back().names()) where_[name].push_back(s);
    }
    for (auto const& [word, all] : about.same) {
      for (saved_name const& one : all) word_of_[one] = word;
    }
  }

  /// The model file of a stage of the checkpoint, found to be whole.
  safetensors_file const& model(std::size_t s) {
    be_whole(models_[s].path());
    return models_[s];
  }
  safetensors_file const& optimizer(std::size_t s) {
    auto found = optimizers_.find(s);
    if (found == optimizers_.end()) {
      auto const file = stage_file(folder_, "optimizer", static_cast<int>(s));
      found = optimizers_.emplace(s, safetensors_file(file)).first;
      be_whole(file);
    }
    return found->second;
  }

  /// \param also names of the same parameter in other stages of this model
  saved_name find(std::size_t s, std::string const& name, std::set<saved_name> const& also) const {
    if (auto const there = held(s, name)) return *there;
    for (saved_name const& other : also) {
      if (auto const there = held(other.stage, other.name)) return *there;
    }
    throw checkpoint_error(folder_.string() + ": stage " + std::to_string(s) + " needs " + name +
                           ", which the checkpoint does not hold. Remedy: the model that was saved");
  }

  /// Whether two tensors of the checkpoint are one parameter.
  bool are_one(saved_name const& a, saved_name const& b) const {
    if (a == b) return true;
    auto const of_a = word_of_.find(a), of_b = word_of_.find(b);
    return of_a != word_of_.end() && of_b != word_of_.end() && of_a->second == of_b->second;
  }

  /// \throws checkpoint_error where the checkpoint holds what nobody took
  void check_taken(std::set<saved_name> const& taken) const {
    std::set<std::string> words;
    for (saved_name const& one : taken) {
      if (auto const word = word_of_.find(one); word != word_of_.end()) words.insert(word->second);
    }
    std::size_t held = 0;
    std::optional<saved_name> left;
    for (auto const& [name, places] : where_) {
      held += places.size();
      for (std::size_t const s : places) {
        saved_name const one{s, name};
        auto const word = word_of_.find(one);
        if (taken.count(one) == 0 && (word == word_of_.end() || words.count(word->second) == 0) && !left) left = one;
      }
    }
    if (!left) return;
    throw checkpoint_error(folder_.string() + ": holds " + std::to_string(held) + " tensors, this model has " + std::to_string(taken.size()) +
                           ": none is " + left->name + " of stage " + std::to_string(left->stage) + ". Remedy: the model that was saved");
  }

 private:
  std::optional<saved_name> held(std::size_t s, std::string const& name) const {
    auto const found = where_.find(name);
    if (found == where_.end()) return {};
    auto const& places = found->second;
    if (same_stages_ && std::count(places.begin(), places.end(), s) == 1) return saved_name{s, name};
    for (std::size_t const other : places) {
      if (are_one({places[0], name}, {other, name})) continue;
      throw checkpoint_error(folder_.string() + ": stage " + std::to_string(s) + " needs " + name + ", which " + std::to_string(places.size()) +
                             " of the checkpoint's " + std::to_string(about_->stages) +
                             " stages hold: names that repeat can only be loaded by as many stages, not " + std::to_string(stages_here_) +
                             ". Remedy: register modules under names of their own");
    }
    return saved_name{places[0], name};
  }

  void be_whole(std::filesystem::path const& file) {
    if (!whole_.insert(file).second) return;
    auto const wanted = about_->files.find(file.filename().string());
    if (wanted != about_->files.end() && fingerprint_of(file) == wanted->second) return;
    refuse_file(file, "is not the file that the manifest names: it was damaged, or another job has saved into the same folder. Remedy: another "
                      "checkpoint, and a folder for each job");
  }

  std::filesystem::path folder_;
  manifest const* about_;
  bool same_stages_;
  std::size_t stages_here_;
  std::vector<safetensors_file> models_;
  std::map<std::size_t, safetensors_file> optimizers_;
  std::map<std::string, std::vector<std::size_t>> where_;  // by name: stages that hold it
  std::map<saved_name, std::string> word_of_;
  std::set<std::filesystem::path> whole_;
};

/// Whether a checkpoint has a file of this name, or had one half written.
inline bool is_checkpoint_file(std::string name) {
  constexpr std::string_view partial = ".partial", ending = ".safetensors";
  if (name.ends_with(partial)) {
    name.resize(name.size() - partial.size());
    std::size_t const unique = name.rfind('.') + 1;
    if (name.size() - unique != 16 || name.find_first_not_of("0123456789abcdef", unique) != name.npos) return false;
    name.resize(unique - 1);
  }
  if (name == "manifest.json") return true;
  for (std::string_view const sort : {"model-", "optimizer-"}) {
    if (!name.starts_with(sort) || !name.ends_with(ending) || name.size() <= sort.size() + ending.size()) continue;
    auto const number = std::string_view(name).substr(sort.size(), name.size() - sort.size() - ending.size());
    if (number.find_first_not_of("0123456789") == number.npos) return true;
  }
  return false;
}

/// Takes a checkpoint's manifest away, and then its files; not those of somebody else, nor what is not named yet.
inline void remove_files(std::filesystem::path const& folder) {
  std::filesystem::remove(folder / "manifest.json");
  std::vector<std::filesystem::path> old;
  for (auto const& entry : std::filesystem::directory_iterator(folder)) {
    std::string const name = entry.path().filename().string();
    if (name.ends_with(".safetensors") && is_checkpoint_file(name)) old.push_back(entry.path());
  }
  for (auto const& one : old) std::filesystem::remove(one);
}

/// Gradients that wait for their step are in no checkpoint.
inline void be_between_steps(trainer const& train, char const* what) {
  if (!train.accumulating()) return;
  throw usage_error(std::string("a checkpoint cannot be ") + what + " between accumulate() and its step(): the accumulated gradients are in no file. "
                    "Remedy: after step()",
                    {-1, -1, train.next_step(), ""});
}

/// \throws checkpoint_error for an optimizer that keeps nobody knows what
inline std::string kind_to_save(torch::optim::Optimizer* optimizer) {
  if (optimizer == nullptr) return "";
  std::string kind = kind_of(*optimizer);
  if (kind.empty()) {
    throw checkpoint_error("what this optimizer keeps is not known here, so it can neither be saved nor loaded. Remedy: SGD, Adam, AdamW, "
                           "RMSprop or Adagrad of torch::optim, or write_safetensors() for the parameters alone");
  }
  return kind;
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

/// Finds out, before time is spent on training, whether checkpoints can be written into a folder. Collective.
/// \throws checkpoint_error, on every rank, when one of them cannot write there
inline void check_checkpoint_folder(trainer& train, std::filesystem::path const& folder) {
  detail::together(train.line(), [&] {
    std::error_code failed;
    std::filesystem::create_directories(folder, failed);
    if (failed) detail::refuse_file(folder, "cannot be made: " + failed.message() + ". Remedy: a folder that may be written to");
    detail::unnamed_file const never_named(folder / "manifest.json", [](auto const& write) { write("?", 1); });
  });
}

/// Saves a trainer between two steps, into `folder`/step-N with N = the next step. Collective; the folder must be the same, and shared,
/// for all ranks. Until the manifest has its name, older checkpoints are the last ones; a checkpoint of the same step stays until all
/// files of the new one are written.
/// \returns the checkpoint's folder
/// \throws checkpoint_error, on every rank, when one of them cannot write: nothing half-written stays, and training may go on
inline std::filesystem::path save_checkpoint(trainer& train, std::filesystem::path const& folder,
                                             std::map<std::string, std::string> const& words = {}) {
  detail::be_between_steps(train, "saved");
  train.settle();
  transport& line = train.line();
  std::filesystem::path const target = folder / detail::checkpoint_name(train.next_step());
  std::vector<detail::unnamed_file> written;
  nlohmann::json mine = {{"optimizer", ""}, {"files", nlohmann::json::object()}};
  detail::together(line, [&] {
    mine["optimizer"] = detail::kind_to_save(train.optimizer());
    std::error_code failed;
    std::filesystem::create_directories(target, failed);
    if (failed) detail::refuse_file(target, "cannot be made: " + failed.message() + ". Remedy: a folder that may be written to");
    for (std::size_t s = 0; s < train.stages().size(); ++s) {
      stage const& one = train.stages()[s];
      if (!one || line.where().replica() != 0) continue;
      named_tensors kept, state;
      for (parameter const& p : detail::kept_of(one)) kept.emplace_back(p.name, p.value);
      if (train.optimizer() != nullptr) state = detail::optimizer_tensors(*train.optimizer(), one);
      written.push_back(detail::unnamed_safetensors(detail::stage_file(target, "model", static_cast<int>(s)), kept));
      written.push_back(detail::unnamed_safetensors(detail::stage_file(target, "optimizer", static_cast<int>(s)), state));
    }
    for (auto const& file : written) mine["files"][file.file().filename().string()] = file.fingerprint();
    mine["same"] = detail::to_json(detail::same_parameters(train.stages()));
  });

  // All is written. What a checkpoint of this step had goes, its manifest first, and the new files get their names.
  auto const known = line.gather_text(mine.dump());
  plan_view const& plan = train.program().plan;
  detail::together(line, [&] {
    if (line.where().global_rank == 0) detail::remove_files(target);
  });
  detail::together(line, [&] {
    for (auto& file : written) file.give_name();
  });
  detail::together(line, [&] {
    if (line.where().global_rank != 0) return;
    nlohmann::json manifest = {{"format", 2},
                               {"chevron", version},
                               {"next_step", static_cast<std::uint64_t>(train.next_step())},
                               {"stages", static_cast<std::uint64_t>(plan.stages)},
                               {"layout", {{"schedule", plan.name}, {"ranks", plan.size.ranks}, {"replicas", line.where().replicas}}},
                               {"optimizer", ""},
                               {"words", words},
                               {"files", nlohmann::json::object()}};
    if (loss_scale const& scale = train.scaling(); scale.on())
      manifest["loss_scale"] = {{"factor", scale.get().factor}, {"steps", scale.get().steps}};
    std::map<std::string, std::set<detail::saved_name>> same;
    for (std::string const& text : known) {
      auto const one = nlohmann::json::parse(text);
      manifest["files"].update(one["files"]);
      detail::add_from_json(same, one["same"]);
      if (manifest["optimizer"].get<std::string>().empty()) manifest["optimizer"] = one["optimizer"];
    }
    manifest["same"] = detail::to_json(same);
    std::string const text = manifest.dump(2) + "\n";
    detail::unnamed_file(target / "manifest.json", [&](auto const& write) { write(text.data(), text.size()); }).give_name();
  });
  return target;
}

namespace detail {

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
/// compared, and the files that are needed are read once and found whole, before anything is changed. Collective.
/// \param from a folder that holds checkpoints, for the last whole one, or one checkpoint's own
/// \throws checkpoint_error, on every rank, when there is none, when a file is damaged or not of this checkpoint, or when names, shapes,
/// dtypes or the kind of optimizer are not those of this model
inline checkpoint_note load_checkpoint(trainer& train, std::filesystem::path const& from) {
  detail::be_between_steps(train, "loaded");
  train.settle();
  transport& line = train.line();
  std::filesystem::path folder;
  detail::manifest about;
  detail::together(line, [&] {
    folder = std::filesystem::exists(from / "manifest.json") ? from : last_checkpoint(from).value_or("");
    if (folder.empty()) {
      detail::refuse_file(from, "holds no whole checkpoint, no folder step-N with a manifest.json. Remedy: the folder that was saved to, or begin anew");
    }
    about = detail::read_manifest(folder);
  });
  auto const chosen = line.gather_text(folder.filename().string());
  for (std::string const& other : chosen) {
    if (other != chosen[0]) throw checkpoint_error("ranks see different last checkpoints, " + chosen[0] + " and " + other + ": " + from.string() + " must be one shared folder");
  }
  std::map<std::string, std::set<detail::saved_name>> same;
  for (std::string const& text : line.gather_text(detail::to_json(detail::same_parameters(train.stages())).dump()))
    detail::add_from_json(same, nlohmann::json::parse(text));

  struct found_tensor {
    parameter to;
    detail::saved_name from;
  };
  std::optional<detail::checkpoint_index> index;
  std::vector<found_tensor> found;
  std::vector<double> rates;  // by group of the optimizer
  auto taken = nlohmann::json::array();
  detail::together(line, [&] {
    std::string const kind = detail::kind_to_save(train.optimizer());
    if (train.optimizer() != nullptr && kind != about.optimizer) {
      throw checkpoint_error(folder.string() + ": was trained with " + (about.optimizer.empty() ? "no optimizer" : about.optimizer) +
                             ", this job steps " + kind + ". Remedy: the same optimizer");
    }
    index.emplace(folder, about, train.stages().size());
    for (auto const& [word, all] : same) {
      detail::saved_name const first = index->find(all.begin()->stage, all.begin()->name, all);
      for (detail::saved_name const& one : all) {
        detail::saved_name const other = index->find(one.stage, one.name, all);
        if (index->are_one(first, other)) continue;
        throw checkpoint_error(folder.string() + ": stage " + std::to_string(all.begin()->stage) + "'s " + all.begin()->name + " and stage " +
                               std::to_string(one.stage) + "'s " + one.name +
                               " are one parameter here, and were two when this was saved. Remedy: the model that was saved");
      }
    }
    std::map<void const*, double> rate_of;
    for (std::size_t s = 0; s < train.stages().size(); ++s) {
      if (!train.stages()[s]) continue;
      for (parameter const& p : detail::kept_of(train.stages()[s])) {
        std::set<detail::saved_name> also;
        for (auto const& [word, all] : same) {
          if (all.count({s, p.name}) != 0) also = all;
        }
        detail::saved_name const there = index->find(s, p.name, also);
        safetensors_file const& file = index->model(there.stage);
        if (at::IntArrayRef(file.shape(there.name)) != p.value.sizes() || file.dtype(there.name) != p.value.scalar_type()) {
          throw checkpoint_error(file.path().string() + ": " + there.name + " is " + c10::toString(file.dtype(there.name)) + " " +
                                 detail::plain_shape(file.shape(there.name)) + ", the model's is " + c10::toString(p.value.scalar_type()) + " " +
                                 detail::plain_shape(p.value.sizes()) + ". Remedy: the model that was saved");
        }
        if (train.optimizer() != nullptr && p.value.requires_grad()) {
          safetensors_file const& states = index->optimizer(there.stage);
          detail::check_optimizer_state(states, kind, there.name, p.value);
          if (states.holds("lr/" + there.name)) rate_of[p.value.unsafeGetTensorImpl()] = states.read("lr/" + there.name).item<double>();
        }
        found.push_back({p, there});
        if (line.where().replica() == 0) taken.push_back({there.stage, there.name});
      }
    }
    if (train.optimizer() == nullptr) return;
    for (auto& group : train.optimizer()->param_groups()) {
      std::optional<double> rate;
      for (at::Tensor const& p : group.params()) {
        auto const saved = rate_of.find(p.unsafeGetTensorImpl());
        if (saved == rate_of.end()) continue;
        if (rate && *rate != saved->second) {
          throw checkpoint_error(folder.string() + ": parameters that are in one group of this optimizer were trained with learning rates " +
                                 detail::plain(*rate) + " and " + detail::plain(saved->second) + ". Remedy: the groups that were saved");
        }
        rate = saved->second;
      }
      rates.push_back(rate.value_or(group.options().get_lr()));
    }
  });
  std::set<detail::saved_name> all_taken;
  for (std::string const& text : line.gather_text(taken.dump())) {
    for (auto const& one : nlohmann::json::parse(text)) all_taken.insert({one[0].get<std::size_t>(), one[1].get<std::string>()});
  }
  index->check_taken(all_taken);

  detail::together(line, [&] {
    at::NoGradGuard const off;
    for (found_tensor const& one : found) {
      at::Tensor to = one.to.value;
      to.copy_(index->model(one.from.stage).read(one.from.name));
      if (train.optimizer() == nullptr || !to.requires_grad()) continue;
      auto state = detail::optimizer_state(index->optimizer(one.from.stage), about.optimizer, one.from.name, to);
      auto& all = train.optimizer()->state();
      if (state != nullptr) {
        all[to.unsafeGetTensorImpl()] = std::move(state);
      } else if (about.optimizer != "Adagrad") {  // which makes its states when it is made
        all.erase(to.unsafeGetTensorImpl());
      }
    }
    for (std::size_t g = 0; g < rates.size(); ++g) train.optimizer()->param_groups()[g].options().set_lr(rates[g]);
  });
  if (about.scale) train.scaling().set(*about.scale);
  train.next_step(about.next_step);
  return {about.next_step, about.words};
}

}  // namespace chevron
