#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/ScalarType.h>

#include <nlohmann/json.hpp>

#include <chevron/checkpoint/checkpoint_ranks.hpp>
#include <chevron/checkpoint/file_tensor.hpp>
#include <chevron/checkpoint/safetensors.hpp>
#include <chevron/checkpoint/shard_cuts.hpp>
#include <chevron/checkpoint/weight_names.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/train/trainer.hpp>

/// \file
/// The tensors that a model's ranks read from or write to a folder of weights, and the communication between these ranks.

namespace chevron::detail {

/// A tensor of this rank, and its name in the folder.
struct named_weight {
  std::size_t stage = 0, place = 0;  // place: index in the order of registration
  parameter here;
  std::string there;
  shard_cuts const* cuts = nullptr;  // of this rank's stages; null: no tensor is sharded

  std::optional<tensor_part> part() const { return cuts == nullptr ? std::nullopt : cuts->part(here.value); }
  std::vector<std::int64_t> shape() const { return cuts == nullptr ? here.value.sizes().vec() : cuts->shape(here.value); }
  std::string words() const {
    if (cuts != nullptr) return cuts->words(here.value);
    return c10::toString(here.value.scalar_type()) + (" " + plain_shape(here.value.sizes()));
  }
  file_tensor to_file() const {
    return cuts == nullptr ? file_tensor(there, here.value) : cuts->to_file(there, here.value, here.value);
  }
};

inline void add_weights(std::vector<named_weight>& to, std::size_t stage, std::vector<parameter> const& all,
                        weight_names const& names, shard_cuts const* cuts = nullptr) {
  for (std::size_t i = 0; i < all.size(); ++i) {
    std::string const there = names(stage, all[i].name);
    if (all[i].value.defined() && !there.empty()) to.push_back({stage, i, all[i], there, cuts});
  }
}

/// The tensors of a module.
template <module_pointer Module>
std::vector<named_weight> weights_of(Module& module, weight_names const& names) {
  std::vector<parameter> all;
  for (auto const& item : module->named_parameters(true)) all.push_back({item.key(), item.value()});
  for (auto const& item : module->named_buffers(true)) all.push_back({item.key(), item.value()});
  std::vector<named_weight> out;
  add_weights(out, 0, all, names);
  return out;
}

/// The tensors of a rank's stages. \param cuts must live as long as the result
inline std::vector<named_weight> weights_of(std::vector<stage> const& stages, weight_names const& names, shard_cuts const& cuts) {
  std::vector<named_weight> out;
  for (std::size_t s = 0; s < stages.size(); ++s) {
    if (stages[s]) add_weights(out, s, kept_of(stages[s]), names, &cuts);
  }
  return out;
}

/// The communication of ranks that read or write weights together: all ranks of a trainer, or one thread alone for a module
/// without a trainer.
class weight_ranks {
 public:
  weight_ranks() = default;
  explicit weight_ranks(transport& comm) : comm_(&comm) {}

  std::vector<std::string> gather(std::string const& text) const {
    return comm_ == nullptr ? std::vector<std::string>{text} : comm_->all_gather_text(text);
  }
  /// Runs `work`; if `work` throws on any rank, every rank throws.
  template <class Work>
  void together(Work&& work) const {
    comm_ == nullptr ? work() : detail::together(*comm_, work);
  }
  /// As `detail::check_one_folder`.
  void check_one_folder(std::filesystem::path const& folder, std::vector<unnamed_file> const& written) const {
    if (comm_ != nullptr) detail::check_one_folder(*comm_, folder, written);
  }
  std::size_t me() const { return comm_ == nullptr ? 0 : static_cast<std::size_t>(comm_->topology().global_rank); }
  /// Whether files get this rank's tensors, or its pieces of tensors: true on the first replica, and on the replicas that share
  /// a stage's experts with the first.
  bool holds() const { return comm_ == nullptr || comm_->topology().replica() < comm_->topology().expert_replicas; }
  /// Whether this rank writes files: true on one of the ranks that have a stage, shard 0 of replica 0.
  bool writes() const { return comm_ == nullptr || (comm_->topology().replica() == 0 && comm_->topology().shard() == 0); }

 private:
  transport* comm_ = nullptr;
};

/// One name of a parameter: its stage, its index in the order of registration, and its name in the folder. Sorts in that order.
using weight_place = std::tuple<std::size_t, std::size_t, std::string>;

/// All names of each parameter, on all ranks. A tied parameter has several names; a common key (`tied …` or `tensor …`) tells
/// which names belong together.
class weight_groups {
 public:
  weight_groups(weight_ranks const& ranks, std::vector<named_weight> const& mine) {
    std::map<void const*, named_weight const*> first;
    std::map<void const*, std::string> tie;
    for (named_weight const& one : mine) {
      void const* const key = one.here.value.unsafeGetTensorImpl();
      first.emplace(key, &one);
      if (!one.here.tied_as.empty()) tie[key] = "tied " + one.here.tied_as;
    }
    auto told = nlohmann::json::array();
    for (named_weight const& one : mine) {
      void const* const key = one.here.value.unsafeGetTensorImpl();
      std::string const word =
          tie.count(key) != 0 ? tie[key] : "tensor " + std::to_string(first[key]->stage) + " " + first[key]->here.name;
      word_of_[{one.stage, one.place}] = word;
      told.push_back({word, one.stage, one.place, one.there});
    }
    for (std::string const& text : ranks.gather(told.dump())) {
      for (auto const& one : nlohmann::json::parse(text))
        places_[one[0].get<std::string>()].insert(
            {one[1].get<std::size_t>(), one[2].get<std::size_t>(), one[3].get<std::string>()});
    }
  }

  /// All places (stage, index, name) of the parameter that is this tensor, in ascending order.
  std::set<weight_place> const& of(named_weight const& one) const { return places_.at(word_of_.at({one.stage, one.place})); }

 private:
  std::map<std::pair<std::size_t, std::size_t>, std::string> word_of_;
  std::map<std::string, std::set<weight_place>> places_;
};

}  // namespace chevron::detail
