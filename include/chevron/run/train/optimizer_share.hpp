#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/max.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <torch/optim/optimizer.h>

#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/fault_point.hpp>
#include <chevron/run/core/host_copy.hpp>
#include <chevron/run/train/collective_numbers.hpp>
#include <chevron/run/train/master_parameters.hpp>
#include <chevron/run/train/optimizer_factory.hpp>
#include <chevron/run/train/optimizer_state.hpp>
#include <chevron/run/train/rank_gradients.hpp>

/// \file
/// The share of the parameters that one replica of a sharded optimizer steps (ZeRO, Rajbhandari et al., arXiv 1910.02054,
/// section 5.1).

namespace chevron::detail {

/// Knows the elements of each parameter that this replica steps, and gathers the stepped elements of all replicas.
///
/// The optimizer is constructed with whole parameters, so that a factory sees names and shapes. The share then replaces each
/// parameter in the optimizer's groups by the piece that this replica steps: the parameter itself, a view of a part of its
/// memory, or nothing. A master is replaced by a copy of its piece. So all replicas' states and masters together need the bytes
/// of one unsharded optimizer. Element-wise optimizers compute the same bits for a piece as for the whole; for any other
/// optimizer parameters are not cut.
class optimizer_share {
 public:
  /// Replaces the parameters of all groups by their pieces.
  /// \param of the optimizer, whose groups contain whole parameters, or their masters
  /// \param gradients gradients of this rank, which `cut` has divided \param masters whole masters, replaced by those of the
  /// share
  /// \param where this rank's place \param collectives from which each parameter's gather claims its number
  optimizer_share(torch::optim::Optimizer& of, rank_gradients const& gradients, master_parameters& masters, topology const& where,
                  collective_numbers& collectives)
      : optimizer_(&of), gradients_(&gradients), where_(where) {
    std::vector<mastered_part> kept;
    for (std::size_t s = 0; s < gradients.stages(); ++s) {
      for (std::size_t i = 0; gradients[s] != nullptr && i < gradients[s]->trained().size(); ++i) {
        at::Tensor const& p = gradients[s]->trained()[i].value;
        if (find(held_, p) == nullptr) held_.push_back(held_in(s, i, p, masters, kept));
      }
    }
    first_bucket_ = collectives.claim(static_cast<int>(held_.size()));
    for (std::size_t g = 0; g < of.param_groups().size(); ++g) {
      std::vector<at::Tensor> mine;
      for (at::Tensor const& p : of.param_groups()[g].params()) {
        held* const one = find(held_, masters.parameter_of(p));
        if (one != nullptr) one->group = g;
        // A tensor of no stage, which the factory has added, is stepped by all replicas.
        if (at::Tensor const& piece = one != nullptr ? one->piece : p; piece.defined()) mine.push_back(piece);
      }
      of.param_groups()[g].params() = std::move(mine);
    }
    // Adagrad's constructor has already created states, of whole parameters.
    for (held const& one : held_) {
      auto const found = of.state().find(masters.stepped(one.whole).unsafeGetTensorImpl());
      if (found == of.state().end()) continue;
      auto const whole = std::move(found->second);
      of.state().erase(found);
      take_state(one.whole, whole.get());
    }
    masters.hold(kept);
  }

  /// Sets the `.grad` of each piece for the optimizer's step, rounded to the dtype of the piece.
  void set_gradients() {
    at::NoGradGuard const off;
    for (held& one : held_) {
      if (!one.piece.defined()) continue;
      gradient_buckets const& of = *(*gradients_)[one.stage];
      at::Tensor const gradient = one.is_whole() ? of.whole(one.index) : of.share_of(one.index);
      one.piece.mutable_grad() = gradient.to(one.piece.scalar_type());
    }
  }

  /// Starts the gathers that copy each replica's stepped elements to all replicas. Collective over the replicas.
  /// \param step number of the step, for tests that make a rank fail in a given step
  void start_gather(transport& comm, long step) {
    at::NoGradGuard const off;
    detail::fault_point(where_.global_rank, step, "stepped");
    for (std::size_t k = 0; k < held_.size(); ++k) {
      if (k == held_.size() / 2) detail::fault_point(where_.global_rank, step, "gathering");
      held& one = held_[k];
      bool const own_gradient = !one.is_whole() || (*gradients_)[one.stage]->is_freed(one.index);
      if (one.piece.defined() && own_gradient) one.piece.mutable_grad().reset();
      // A parameter whose memory has gaps is gathered through a contiguous copy.
      bool const dense = one.whole.is_non_overlapping_and_dense();
      if (!dense) one.staged = one.whole.detach().contiguous();
      // `variable_data` has a version of its own: elements that the gather writes must not look like changes by the caller.
      at::Tensor const values = (dense ? one.whole : one.staged).variable_data();
      comm.start_share_gather(first_bucket_ + static_cast<int>(k), memory_of(values), one.cut);
      one.gathering = true;
      one.version = one.whole._version();
    }
  }
  /// Waits for the gathers of `stage`, or if empty of all stages; then this replica has the whole parameters.
  void finish_gather(transport& comm, std::optional<int> stage = {}) {
    at::NoGradGuard const off;
    for (std::size_t k = 0; k < held_.size(); ++k) {
      held& one = held_[k];
      if ((stage && static_cast<int>(one.stage) != *stage) || !std::exchange(one.gathering, false)) continue;
      comm.wait_bucket(first_bucket_ + static_cast<int>(k));
      if (one.staged.defined()) one.whole.variable_data().copy_(std::exchange(one.staged, {}));
    }
  }

  /// Whether a gather is under way.
  bool gathers() const {
    return std::any_of(held_.begin(), held_.end(), [](held const& one) { return one.gathering; });
  }

  /// \returns the first parameter that was written in place while its gather is under way, which overwrites the other replicas'
  /// elements; undefined if none was. A write through `data()` is not noticed.
  at::Tensor changed() const {
    for (held const& one : held_) {
      if (one.gathering && one.whole._version() != one.version) return one.whole;
    }
    return {};
  }

  /// The parameter of a piece; undefined for any other tensor.
  at::Tensor parameter_of(at::Tensor const& piece) const {
    auto const found = std::find_if(held_.begin(), held_.end(), [&](held const& one) { return one.piece.is_same(piece); });
    return found == held_.end() ? at::Tensor() : found->whole;
  }
  /// The piece of a parameter; undefined if this replica steps no element of it.
  at::Tensor piece_of(at::Tensor const& p) const {
    held const* const found = find(held_, p);
    return found == nullptr ? at::Tensor() : found->piece;
  }
  /// The options that a parameter is stepped with, on this or another replica; null for a parameter that is in no group.
  torch::optim::OptimizerOptions const* options_of(at::Tensor const& p) const {
    held const* const found = find(held_, p);
    if (found == nullptr || !found->group) return nullptr;
    return &std::as_const(*optimizer_).param_groups()[*found->group].options();
  }

  /// The whole parameters of a group, those in other replicas' shares included.
  std::vector<at::Tensor> group(std::size_t number) const {
    std::vector<at::Tensor> out;
    for (held const& one : held_) {
      if (one.group == number) out.push_back(one.whole);
    }
    return out;
  }

  /// Sets a parameter's state in the optimizer to this replica's part of a whole state.
  /// \param p a parameter of this rank's stages \param whole the state of the whole parameter; null: the parameter has no state
  void take_state(at::Tensor const& p, torch::optim::OptimizerParamState const* whole) {
    held const& one = *find(held_, p);
    if (!one.piece.defined()) return;
    if (whole == nullptr) {
      optimizer_->state().erase(one.piece.unsafeGetTensorImpl());
      return;
    }
    auto mine = whole->clone();
    visit_state(
        *mine,
        [&](char const*, at::Tensor& t) {
          if (t.defined() && !one.is_whole()) t = one.part_of(t);
        },
        [](char const*, auto&) {});
    optimizer_->state()[one.piece.unsafeGetTensorImpl()] = std::move(mine);
  }
  /// Returns this replica's part of `whole`, a tensor of the parameter's shape; undefined if this replica steps no element.
  at::Tensor part_of(at::Tensor const& p, at::Tensor const& whole) const {
    held const& one = *find(held_, p);
    return one.piece.defined() ? one.part_of(whole) : at::Tensor();
  }
  /// Gathers a tensor of a parameter's shape, and returns it on replica 0; undefined on all other replicas. Collective over the
  /// replicas; no gather may be under way. \param piece this replica's part; undefined if it steps no element
  at::Tensor whole_of(transport& comm, at::Tensor const& p, at::Tensor const& piece) const {
    at::NoGradGuard const off;
    held const& one = *find(held_, p);
    at::Tensor const whole = gathered(comm, one, piece);
    return where_.replica() == 0 ? whole : at::Tensor();
  }

  /// Gathers the whole state of a parameter, and returns it on replica 0; null on all other replicas, and for a parameter that
  /// has no state yet. Collective over the replicas; no gather may be under way.
  std::unique_ptr<torch::optim::OptimizerParamState> whole_state(transport& comm, at::Tensor const& p) const {
    at::NoGradGuard const off;
    held const* const found = find(held_, p);
    if (found == nullptr) return nullptr;
    held const& one = *found;
    std::string const kind = kind_of(*optimizer_);
    auto const mine = one.piece.defined() ? optimizer_->state().find(one.piece.unsafeGetTensorImpl()) : optimizer_->state().end();
    bool const held_here = mine != optimizer_->state().end();
    auto out = held_here ? mine->second->clone() : empty_state(kind);
    // First the replicas exchange the state's numbers, and a flag for each tensor that is defined.
    std::vector<double> told{held_here ? 1.0 : 0.0};
    visit_state(
        *out, [&](char const*, at::Tensor const& t) { told.push_back(t.defined() ? 1 : 0); },
        [&](char const*, auto const& number) { told.push_back(static_cast<double>(number)); });
    std::vector<double> const known = largest_of_replicas(comm, told);
    if (known[0] == 0) return nullptr;
    std::size_t next = 1;
    visit_state(
        *out,
        [&](char const*, at::Tensor& t) {
          if (known[next++] != 0) t = gathered(comm, one, t);
        },
        [&](char const*, auto& number) { number = static_cast<std::remove_reference_t<decltype(number)>>(known[next++]); });
    return where_.replica() == 0 ? std::move(out) : nullptr;
  }

 private:
  struct held {
    at::Tensor whole, piece;  // piece: part of parameter or master that this replica steps, if any
    at::Tensor staged;        // during a gather: contiguous copy of a parameter whose memory has gaps
    std::size_t stage, index;
    std::vector<std::int64_t> cut;  // replica r steps elements [cut[r], cut[r + 1])
    std::size_t replica;
    at::ScalarType dtype;                   // of pieces, also on other replicas
    std::optional<std::size_t> group = {};  // of the optimizer
    bool gathering = false;
    std::int64_t version = 0;  // of `whole`, when the gather started

    std::int64_t begin() const { return cut[replica]; }
    std::int64_t size() const { return cut[replica + 1] - cut[replica]; }
    bool is_whole() const { return size() == cut.back(); }
    /// Returns this replica's part of a tensor of the parameter's shape: a copy, unless the part is the whole.
    at::Tensor part_of(at::Tensor const& t) const {
      if (is_whole()) return t;
      bool const alike = t.strides() == whole.strides();  // cuts count elements in the order of the parameter's memory
      return memory_of(alike ? t : at::zeros_like(whole, t.options()).copy_(t)).narrow(0, begin(), size()).clone();
    }
  };

  /// Returns a view of a tensor's elements in the order of its memory.
  static at::Tensor memory_of(at::Tensor const& t) { return t.detach().as_strided({t.numel()}, {1}); }

  /// Makes the entry of a parameter. \param kept receives this replica's part of a parameter that has a master
  held held_in(std::size_t stage, std::size_t index, at::Tensor const& p, master_parameters const& masters,
               std::vector<mastered_part>& kept) const {
    auto const replica = static_cast<std::size_t>(where_.replica());
    held out{p, {}, {}, stage, index, (*gradients_)[stage]->cut_of(index), replica, masters.dtype_of(p)};
    if (out.size() == 0) return out;
    at::Tensor const of = out.is_whole() ? p : memory_of(p).narrow(0, out.begin(), out.size());
    bool const has_master = masters.has(p);
    out.piece = has_master ? out.part_of(masters.stepped(p).detach()) : of;
    out.piece.requires_grad_();
    if (has_master) kept.push_back({p, of, out.piece});
    return out;
  }
  /// Finds the entry of a parameter; null for a tensor that is no parameter of this rank's stages.
  template <class List>
  static auto find(List& in, at::Tensor const& p) -> decltype(in.data()) {
    auto const found = std::find_if(in.begin(), in.end(), [&](held const& one) { return one.whole.is_same(p); });
    return found == in.end() ? nullptr : &*found;
  }

  /// Gathers the pieces of all replicas, and returns the whole tensor in the shape and layout of the parameter. Collective over
  /// the replicas.
  /// \param mine this replica's piece; undefined: the replica has none
  at::Tensor gathered(transport& comm, held const& one, at::Tensor const& mine) const {
    at::Tensor const whole = at::zeros_like(one.whole, one.whole.options().dtype(one.dtype).requires_grad(false));
    if (mine.defined()) (one.is_whole() ? whole : memory_of(whole).narrow(0, one.begin(), one.size())).copy_(mine);
    comm.start_share_gather(first_bucket_, memory_of(whole), one.cut);
    comm.wait_bucket(first_bucket_);
    return whole;
  }

  /// Returns the maximum of each number over the replicas.
  std::vector<double> largest_of_replicas(transport& comm, std::vector<double> const& mine) const {
    auto const count = static_cast<std::int64_t>(mine.size());
    at::Tensor const all = at::zeros({where_.replicas, count}, at::kDouble);
    std::copy(mine.begin(), mine.end(), all.mutable_data_ptr<double>() + where_.replica() * count);
    at::Tensor const there = all.to(held_.front().whole.device());
    std::vector<std::int64_t> cut;
    for (int r = 0; r <= where_.replicas; ++r) cut.push_back(r * count);
    comm.start_share_gather(first_bucket_, there.flatten(), cut);
    comm.wait_bucket(first_bucket_);
    at::Tensor const largest = std::get<0>(host_copy(there).max(0));
    return {largest.const_data_ptr<double>(), largest.const_data_ptr<double>() + count};
  }

  torch::optim::Optimizer* optimizer_;
  rank_gradients const* gradients_;
  topology where_;
  int first_bucket_ = 0;
  std::vector<held> held_;  // each parameter once, by stage and registration
};

}  // namespace chevron::detail
