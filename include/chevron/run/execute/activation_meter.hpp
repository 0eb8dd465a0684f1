#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty_strided.h>
#include <c10/core/Storage.h>

#include <chevron/plan/action.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/run/core/measured_bytes.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/stage/stage_execution.hpp>
#include <chevron/run/stage/storage_set.hpp>

/// \file
/// Measures the bytes that a stage stores for a microbatch from F to B or W.

namespace chevron::detail {

/// Measures microbatches' bytes in one run of a training program, on any device. A storage among the stage's inputs and its
/// operators' results in F (`storage_recorder`) counts for the microbatch if it still exists when F ends and is gone when B or
/// W ends; each storage counts once, even if several tensors share it. Parameters, buffers, targets and the loss outlive the
/// microbatch, and so do not count. If sequences are in slices, a carry counts for the slice that created it alone.
///
/// A storage with another owner would not be freed. So a stage gets its inputs in new storages over the inputs' memory, and
/// outputs that the stage's graph has also saved are copied for the next stage.
///
/// The numbers have the same meaning with recomputation and without: `activation` is what F stores without recomputation,
/// `input` what F stores with recomputation, `kept` the part that W needs.
class activation_meter {
 public:
  explicit activation_meter(plan_view const& plan)
      : units_(static_cast<std::size_t>(plan.size.units())),
        slices_(static_cast<std::size_t>(plan.size.slices)),
        chunks_(static_cast<std::size_t>(plan.stages) * units_),
        by_slice_(static_cast<std::size_t>(plan.stages)) {}

  /// Runs F, B, I, W or R of one microbatch by `run`, and measures.
  /// \param given inputs of F, or gradients of outputs for B and I
  /// \param outputs the list to which F writes outputs
  template <class Run>
  void measure(action what, stage_call& task, stage_execution const& work, tensors& given, tensors& outputs, Run const& run) {
    chunk& here = chunks_[what.stage * units_ + what.micro_batch];
    if (what.kind == kind::forward) {
      here = {};
      std::vector<alias> aliases;
      here.given = isolate_storage(given, what.stage == 0, here.left, aliases);
      if (task.carried != nullptr) {
        for (at::Tensor const& t : *task.carried) here.came.add(t);
      }
      {
        storage_recorder const seen(here.left);
        run();
      }
      here.left.remove(here.came);
      if (task.carried != nullptr) here.given += bytes_passed_on(*task.carried, here.came);
      // Repeats version changes on the original tensors, so that split_batch::was_changed detects a change in place.
      for (alias const& one : aliases) {
        if (one.version.current_version() != 0) one.of.unsafeGetTensorImpl()->bump_version();
      }
      copy_saved_outputs(outputs, here.left);
      here.left.drop_gone();
      here.all = here.left;
      return;
    }
    // Carries that a recomputed stage stored for later slices are gone before the stage builds its graph again.
    if (task.owner->recomputes() && !here.again) here.all.drop_gone();
    storage_set built;
    task.built = &built;
    run();
    built.remove(here.came);
    here.again = here.again || built.bytes() > 0;
    here.all.merge(built);
    if (what.kind == kind::recompute) return;
    if (what.kind == kind::backward_input) {
      here.split = true;
      here.kept = here.all;
      here.kept.drop_gone();
      here.gradients = {};
      work.each_kept_gradient([&](at::Tensor const& gradient) {
        here.kept.remove(gradient);
        here.gradients.add(gradient);
      });
    }
    if (!ends_cell(what.kind)) return;
    here.kept.merge(built);  // W builds the graph if I computes nothing
    note(by_slice_[what.stage], what.micro_batch % slices_, here, *task.owner);
    here = {};
  }

  /// The bytes by stage; unknown for stages of other ranks.
  std::vector<measured_bytes> found() const {
    std::vector<measured_bytes> out;
    for (std::vector<measured_slice> const& slices : by_slice_) {
      measured_bytes& of = out.emplace_back();
      of.stage = static_cast<int>(out.size()) - 1;
      if (slices.empty()) continue;
      of.activation = of.kept = of.input = 0;
      for (measured_slice const& one : slices) {
        of.activation += one.activation;
        of.input += one.input;
        bool const known = one.kept != measured_bytes::unknown && of.kept != measured_bytes::unknown;
        of.kept = known ? of.kept + one.kept : measured_bytes::unknown;
      }
      if (slices_ > 1) of.slices = slices;
    }
    return out;
  }

 private:
  struct alias {
    at::Tensor of;
    c10::VariableVersion version;
  };
  struct chunk {
    std::int64_t given = 0;  // bytes of inputs, and of carries for the next slice
    storage_set came;        // carries of earlier slices, which count for these
    storage_set left;        // storages that exist after F
    storage_set all;         // storages that exist after F, and storages of graphs that were built later
    storage_set kept;        // the part of `all` that still exists after I
    storage_set gradients;   // gradients that I stores for W; the sending stage may own their storages, too
    bool split = false;      // I ran instead of B
    bool again = false;      // of a recomputed stage: its forward ran again
  };

  void note(std::vector<measured_slice>& of_stage, std::size_t slice, chunk const& of, stage const& owner) const {
    of_stage.resize(slices_);
    measured_slice& most = of_stage[slice];
    std::int64_t const input = owner.recomputes() ? of.left.bytes_gone() : of.given;
    most.input = std::max(most.input, input);
    most.activation = std::max({most.activation, of.all.bytes_gone(), input});  // F's input exists while F runs
    if (of.split) most.kept = std::max(most.kept, of.kept.bytes_gone() + of.gradients.bytes());
  }

  /// Replaces tensors by aliases over the same memory, in new storages, which no tensor outside of `given` uses.
  /// \param of_batch the tensors are views of a batch, whose storage is larger: only the views' bytes count
  /// \returns the bytes of the tensors
  static std::int64_t isolate_storage(tensors& given, bool of_batch, storage_set& into, std::vector<alias>& aliases) {
    struct own_storage {
      c10::Storage storage;
      std::int64_t bytes = 0;
    };
    std::unordered_map<c10::StorageImpl*, own_storage> own;
    for (at::Tensor& t : given) {
      if (!t.defined() || !t.has_storage()) continue;
      c10::Storage const original = t.storage();
      own_storage& mine = own[original.unsafeGetStorageImpl()];
      if (!mine.storage) {
        auto const let_go = [](void* held) { delete static_cast<c10::Storage*>(held); };
        mine.storage = c10::Storage(c10::Storage::use_byte_size_t(), original.nbytes(),
                                    {original.mutable_data(), new c10::Storage(original), let_go, original.device()});
      }
      auto const all = static_cast<std::int64_t>(original.nbytes());
      mine.bytes = of_batch ? std::min(all, mine.bytes + static_cast<std::int64_t>(t.nbytes())) : all;
      c10::VariableVersion const changes(0);
      auto own_tensor = t.unsafeGetTensorImpl()->shallow_copy_and_detach(changes, true);
      own_tensor->set_storage_keep_dtype(mine.storage);
      aliases.push_back({t, changes});
      t = at::Tensor(std::move(own_tensor));
      into.add(t, mine.bytes);
    }
    std::int64_t sum = 0;
    for (auto const& [place, mine] : own) sum += mine.bytes;
    return sum;
  }

  /// The bytes of the carries that F created for the next slice. \param passed carries after F \param came carries before
  static std::int64_t bytes_passed_on(tensors const& passed, storage_set const& came) {
    storage_set own;
    for (at::Tensor const& t : passed) own.add(t);
    own.remove(came);
    return own.bytes();
  }

  /// Removes from `left` the outputs that only the next stage will own; copies outputs that the graph owns, too.
  static void copy_saved_outputs(tensors& outputs, storage_set& left) {
    std::unordered_map<c10::StorageImpl*, std::size_t> here;
    for (at::Tensor const& t : outputs) {
      if (t.defined() && t.has_storage()) ++here[t.storage().unsafeGetStorageImpl()];
    }
    for (at::Tensor& t : outputs) {
      if (!t.defined() || !t.has_storage()) continue;
      if (t.storage().use_count() == here.at(t.storage().unsafeGetStorageImpl())) {
        left.remove(t);
      } else if (t.is_non_overlapping_and_dense() && !t.is_conj() && !t.is_neg()) {
        --here[t.storage().unsafeGetStorageImpl()];
        t = at::empty_strided(t.sizes(), t.strides(), t.options()).copy_(t);
      }
    }
  }

  std::size_t units_, slices_;  // of all microbatches, of one
  std::vector<chunk> chunks_;
  std::vector<std::vector<measured_slice>> by_slice_;  // by stage; empty: a stage of another rank
};

}  // namespace chevron::detail
