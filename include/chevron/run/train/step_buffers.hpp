#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/run/stage/buffers.hpp>
#include <chevron/run/stage/own_versions.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/stage/summed_buffers.hpp>
#include <chevron/run/train/collective_numbers.hpp>
#include <chevron/run/train/record.hpp>
#include <chevron/run/train/step_part.hpp>
#include <chevron/run/train/step_parts.hpp>
#include <chevron/run/train/trainer_options.hpp>

/// \file
/// The buffers of stages in a step: sums and copies over the replicas, and values of before forwards that do not count, which are
/// those of a skipped step, and those that began on parameters of a step that was undone.

namespace chevron::detail {

/// Makes the buffers of a rank's stages equal over the replicas after each step: sums of changes (summed_buffers.hpp), else
/// copies of replica 0's values (`trainer_options::broadcast_buffers`). Has copies of the buffers at the beginning of a step and,
/// with post-validation, of the step before, whose verdict comes during the step; copies are made only with options that may
/// skip or undo a step.
class step_buffers final : public step_part {
 public:
  /// Appends this part to `parts`, unless no stage of this rank has a buffer. \param stages by number; stages of other ranks are
  /// empty \param device of this rank's stages \param collectives from which collectives over the replicas claim their numbers
  static void make(step_parts& parts, std::vector<stage> const& stages, topology const& where, at::Device device,
                   collective_numbers& collectives, trainer_options const& options) {
    bool const any = std::any_of(stages.begin(), stages.end(), [](stage const& s) { return !s.buffers().empty(); });
    if (any) parts.make<step_buffers>(stages, where, device, collectives, options);
  }

  /// Use `make`.
  step_buffers(record&, std::vector<stage> const& stages, topology const& where, at::Device device,
               collective_numbers& collectives, trainer_options const& options)
      : copies_(options.when_not_finite == not_finite::skip || options.scaling.has_value()),
        of_step_(stages),
        of_last_(stages) {
    if (options.broadcast_buffers) of_all_ = replica_buffers(stages, where, device, collectives.claim());
    summed_ = summed_buffers(stages, where, device, collectives.claim());
    for (stage const& s : stages) {
      for (parameter const& b : s.buffers()) {
        if (b.value.defined()) buffers_.push_back(b.value);
      }
    }
  }

  void connect(transport& comm) override {
    summed_.begin();
    start(comm);
    finish(comm);
  }
  /// Copies the buffers before the first forward of a step that may be skipped, or of one on parameters of a pending step.
  void begin(bool pending) override {
    summed_.begin();
    if (!copies_ && !pending) return;
    if (pending) std::swap(of_step_, of_last_);
    of_step_.take();
    begun_ = versions();
  }
  /// Restores the buffers for forwards that run again, on the parameters of an earlier step. If the step before is skipped, its
  /// forwards leave no trace either, except for buffers that the caller wrote after that step.
  void begin_again(bool skipped) override {
    of_step_.put_back();
    if (skipped && copies_) {
      of_last_.put_back(written(begun_));
      of_step_.take();
    }
    summed_.begin();
  }
  void start(transport& comm) override {
    of_all_.start(comm);
    summed_.start(comm);
  }
  void finish(transport& comm) override {
    of_all_.finish(comm);
    summed_.finish(comm);
    if (copies_) ended_ = versions();
  }
  /// Restores the buffers after a step that ended and was skipped, except for those that the caller wrote after it.
  void skip() override {
    if (copies_) of_step_.put_back(written(versions()));
  }
  void drop() override { summed_.drop(); }

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

  bool copies_;  // a step may be skipped
  replica_buffers of_all_;
  summed_buffers summed_;
  buffer_snapshot of_step_, of_last_;
  tensors buffers_;
  std::vector<std::uint32_t> begun_, ended_;  // versions when this step began, when the step before ended
};

}  // namespace chevron::detail
