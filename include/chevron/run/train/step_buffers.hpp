#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/buffers.hpp>
#include <chevron/run/stage/own_versions.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/train/trainer_options.hpp>

/// \file
/// Restores the buffers of stages after forwards that do not count: those of a skipped step, and those that began on parameters
/// of a step that was undone.

namespace chevron::detail {

/// Copies of a rank's buffers at the beginning of a step and, with post-validation, of the step before, whose verdict comes
/// during the step. Copies are made only with options that may skip or undo a step.
class step_buffers {
 public:
  step_buffers() = default;
  /// \param stages by number; stages of other ranks are empty
  step_buffers(std::span<stage const> stages, trainer_options const& options)
      : copies_(options.when_not_finite == not_finite::skip || options.scaling.has_value()),
        of_step_(stages),
        of_last_(stages) {
    for (stage const& s : stages) {
      for (parameter const& b : s.buffers()) {
        if (b.value.defined()) buffers_.push_back(b.value);
      }
    }
  }

  /// Copies the buffers before the first forward of a step, or before any forward on parameters of a pending step.
  /// \param pending whether the last step waits for its verdict
  void begin(bool pending) {
    if (!copies_ && !pending) return;
    if (pending) std::swap(of_step_, of_last_);
    of_step_.take();
    begun_ = versions();
  }
  /// Notes that the forwards of a step, and its broadcast of buffers, are over.
  void end() {
    if (copies_) ended_ = versions();
  }

  /// Restores the buffers after a step that ended and was skipped, except for those that the caller wrote after it.
  void skip() {
    if (copies_) of_step_.put_back(written(versions()));
  }
  /// Restores the buffers for forwards of the next step that run again, on the parameters of an earlier step.
  /// \param skipped true: the step before is skipped, and leaves no trace in the buffers either, except for those that the
  /// caller wrote after it
  void begin_again(bool skipped) {
    if (!skipped || !copies_) return of_step_.put_back();
    of_step_.put_back();
    of_last_.put_back(written(begun_));
    of_step_.take();
  }

 private:
  /// The buffers that were written between the end of the last step and the time of `versions`.
  std::vector<bool> written(std::vector<std::uint32_t> const& versions) const {
    std::vector<bool> out;
    for (std::size_t i = 0; i < ended_.size(); ++i) out.push_back(ended_[i] != versions[i]);
    return out;
  }
  std::vector<std::uint32_t> versions() const {
    std::vector<std::uint32_t> out;
    for (at::Tensor const& one : buffers_) out.push_back(version_of(one));
    return out;
  }

  bool copies_ = false;
  buffer_snapshot of_step_, of_last_;
  tensors buffers_;
  std::vector<std::uint32_t> begun_, ended_;  // versions when this step began, when the step before ended
};

}  // namespace chevron::detail
