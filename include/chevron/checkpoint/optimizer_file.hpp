#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/full.h>
#include <torch/optim/optimizer.h>

#include <chevron/base/format.hpp>
#include <chevron/checkpoint/file_tensor.hpp>
#include <chevron/checkpoint/safetensors.hpp>
#include <chevron/checkpoint/shard_cuts.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/train/optimizer_state.hpp>
#include <chevron/run/train/rank_optimizer.hpp>

/// \file
/// Converts the optimizer state of a stage's parameters, and their masters, to tensors of a file and back.

namespace chevron::detail {

/// Calls `see(whole parameter, number of its group)` for all parameters of a rank's optimizer.
template <class See>
void each_in_groups(rank_optimizer const& optimizer, See const& see) {
  for (std::size_t g = 0; optimizer.get() != nullptr && g < optimizer.get()->param_groups().size(); ++g) {
    for (at::Tensor const& p : optimizer.group(g)) see(p, g);
  }
}

/// The group of each parameter, by number.
inline std::map<void const*, std::size_t> groups_of(rank_optimizer const& optimizer) {
  std::map<void const*, std::size_t> out;
  each_in_groups(optimizer, [&](at::Tensor const& p, std::size_t g) { out[p.unsafeGetTensorImpl()] = g; });
  return out;
}

/// Learning rates by parameter.
inline std::map<void const*, double> rates_of(rank_optimizer const& optimizer) {
  std::vector<double> const rates = optimizer.rates();
  std::map<void const*, double> out;
  each_in_groups(optimizer, [&](at::Tensor const& p, std::size_t g) { out[p.unsafeGetTensorImpl()] = rates[g]; });
  return out;
}

/// Returns the states and masters of all parameters, on replica 0, after copying the caller's changes of parameters into
/// masters. Collective over the replicas if the optimizer is sharded: replica 0 then needs memory for all whole states and
/// masters while the result lives.
inline std::map<void const*, rank_optimizer::kept> states_of(rank_optimizer& optimizer) {
  optimizer.take_changes();
  std::map<void const*, rank_optimizer::kept> out;
  each_in_groups(optimizer, [&](at::Tensor const& p, std::size_t) { out[p.unsafeGetTensorImpl()] = optimizer.whole(p); });
  return out;
}

/// Learning rates of groups, computed from the saved rates of parameters; a group without a saved rate keeps its own.
/// \throws checkpoint_error for a group whose parameters were saved with different rates
inline std::vector<double> rates_by_group(rank_optimizer const& optimizer, std::map<void const*, double> const& saved,
                                          std::filesystem::path const& folder) {
  std::vector<double> rates = optimizer.rates();
  for (std::size_t g = 0; g < rates.size(); ++g) {
    std::optional<double> rate;
    for (at::Tensor const& p : optimizer.group(g)) {
      auto const found = saved.find(p.unsafeGetTensorImpl());
      if (found == saved.end()) continue;
      if (rate && *rate != found->second) {
        throw checkpoint_error(
            folder.string() + ": parameters that are in one group of this optimizer were trained with learning rates " +
            number_text(*rate) + " and " + number_text(found->second) + ". Remedy: the groups that were saved");
      }
      rate = found->second;
    }
    rates[g] = rate.value_or(rates[g]);
  }
  return rates;
}

/// Returns the tensors of a stage's optimizer file: states, masters and learning rates of the stage's parameters. A state of
/// the parameter's shape is cut over shards like the parameter.
/// \throws checkpoint_error if a parameter that is cut has a state of another shape, since the state's pieces cannot be joined
inline std::vector<file_tensor> optimizer_tensors(std::map<void const*, double> const& rates,
                                                  std::map<void const*, rank_optimizer::kept> const& states, stage const& s,
                                                  shard_cuts const& cuts) {
  std::vector<file_tensor> out;
  std::set<void const*> seen;
  for (parameter const& p : s.parameters()) {
    void* const key = p.value.unsafeGetTensorImpl();
    auto const rate = rates.find(key);
    if (rate == rates.end() || !seen.insert(key).second) continue;
    out.emplace_back("lr/" + p.name, at::full({}, rate->second, at::kDouble));
    auto const found = states.find(key);
    if (found == states.end()) continue;
    if (found->second.master.defined()) out.push_back(cuts.to_file("master/" + p.name, found->second.master, p.value));
    if (found->second.state == nullptr) continue;
    visit_state(
        *found->second.state,
        [&](char const* name, at::Tensor const& t) {
          if (!t.defined()) return;
          if (cuts.of(p.value) != nullptr && t.sizes() != p.value.sizes()) {
            throw checkpoint_error("the optimizer keeps a " + std::string(name) + " of " + plain_shape(t.sizes()) + " for " +
                                   p.name + ", whose piece on a shard is " + plain_shape(p.value.sizes()) +
                                   ": a file stores whole states, and only states of the piece's shape can be joined. Remedy: "
                                   "states of the parameter's shape");
          }
          out.push_back(cuts.to_file(std::string(name) + "/" + p.name, t, p.value));
        },
        [&](char const* name, auto const& number) {
          out.emplace_back(std::string(name) + "/" + p.name, at::full({}, static_cast<std::int64_t>(number), at::kLong));
        });
  }
  return out;
}

/// Checks that a file's states of a parameter have the shape of the whole parameter, and the parameter's dtype, or float32 if
/// the file has a master.
/// \throws checkpoint_error if not, and for a saved master of a parameter that has no master in this job: the master's low bits
/// would be lost
inline void check_optimizer_state(safetensors_file const& from, std::string const& kind, std::string const& saved_name,
                                  at::Tensor const& p, rank_optimizer const& optimizer, shard_cuts const& cuts) {
  bool const has_master = from.holds("master/" + saved_name);
  if (has_master && !optimizer.has_master(p)) {
    refuse_file(from.path(), "holds a float32 master of " + saved_name +
                                 ", which has no master in this job and would lose the master's low bits. Remedy: "
                                 "trainer_options::master_parameters, or load_weights and a new optimizer");
  }
  auto const require = [&](std::string const& key, at::IntArrayRef shape, at::ScalarType dtype) {
    if (!from.holds(key) || (at::IntArrayRef(from.shape(key)) == shape && from.dtype(key) == dtype)) return;
    refuse_file(from.path(), key + " is " + c10::toString(from.dtype(key)) + " " + plain_shape(from.shape(key)) +
                                 ", this model needs " + c10::toString(dtype) + " " + plain_shape(shape));
  };
  visit_state(
      *empty_state(kind),
      [&](char const* name, at::Tensor&) {
        require(std::string(name) + "/" + saved_name, cuts.shape(p), has_master ? at::kFloat : p.scalar_type());
      },
      [&](char const* name, auto&) { require(std::string(name) + "/" + saved_name, {}, at::kLong); });
  require("lr/" + saved_name, {}, at::kDouble);
  require("master/" + saved_name, cuts.shape(p), at::kFloat);
}

/// A tensor of an optimizer's state that an option of the parameter's group needs, and a file lacks.
struct missing_state {
  std::string option, value, tensor;  ///< `amsgrad`, `true`, `max_exp_avg_sq`; empty: nothing is missing
};

/// Finds what the options of a parameter's group need and a file lacks. A parameter without any state begins anew with any
/// options, except that SGD's momentum is its only state.
inline missing_state missing_state_of(safetensors_file const& from, std::string const& saved_name,
                                      torch::optim::OptimizerOptions const& options) {
  namespace optim = torch::optim;
  auto const lacks = [&](char const* tensor) { return !from.holds(std::string(tensor) + "/" + saved_name); };
  auto const adam = [&](auto const& o) -> missing_state {
    if (o.amsgrad() && !lacks("exp_avg") && lacks("max_exp_avg_sq")) return {"amsgrad", "true", "max_exp_avg_sq"};
    return {};
  };
  if (auto const* o = dynamic_cast<optim::AdamWOptions const*>(&options)) return adam(*o);
  if (auto const* o = dynamic_cast<optim::AdamOptions const*>(&options)) return adam(*o);
  if (auto const* o = dynamic_cast<optim::RMSpropOptions const*>(&options)) {
    if (lacks("square_avg")) return {};
    if (o->momentum() > 0 && lacks("momentum_buffer")) return {"momentum", number_text(o->momentum()), "momentum_buffer"};
    if (o->centered() && lacks("grad_avg")) return {"centered", "true", "grad_avg"};
  }
  if (auto const* o = dynamic_cast<optim::SGDOptions const*>(&options)) {
    if (o->momentum() != 0 && lacks("momentum_buffer")) return {"momentum", number_text(o->momentum()), "momentum_buffer"};
  }
  return {};
}

/// Reads the state of a parameter, or of this shard's piece, from a file; null if the file has none.
/// \param dtype of the tensor that the optimizer steps
inline std::unique_ptr<torch::optim::OptimizerParamState> optimizer_state(safetensors_file const& from, std::string const& kind,
                                                                          std::string const& saved_name, at::Tensor const& p,
                                                                          at::ScalarType dtype, shard_cuts const& cuts) {
  auto state = empty_state(kind);
  bool any = false;
  visit_state(
      *state,
      [&](char const* name, at::Tensor& t) {
        std::string const key = std::string(name) + "/" + saved_name;
        if (!from.holds(key)) return;
        // The optimizer allocates its state in this layout, on which rounding in kernels depends.
        t = at::empty_like(p.detach(), p.options().dtype(dtype).requires_grad(false)).copy_(from.read(key, cuts.part(p)));
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

/// Reads state and master of a parameter, or of this shard's piece, from a file; a tensor that the file lacks stays undefined.
inline rank_optimizer::kept kept_in(safetensors_file const& from, std::string const& kind, std::string const& saved_name,
                                    at::Tensor const& p, rank_optimizer const& optimizer, shard_cuts const& cuts) {
  rank_optimizer::kept out;
  out.state = optimizer_state(from, kind, saved_name, p, optimizer.dtype_of(p), cuts);
  if (std::string const name = "master/" + saved_name; from.holds(name)) out.master = from.read(name, cuts.part(p));
  return out;
}

}  // namespace chevron::detail
