#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <chevron/run/comm/group_collective.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/stream_handoff.hpp>

/// \file
/// A collective over a group of threads: the member that arrives last computes the results of all members.

namespace chevron::detail {

/// One collective: stores a part from each member of the group, then computes the results.
class thread_collective {
 public:
  explicit thread_collective(std::size_t members = 0) : parts_(members), given_(members) {}

  struct part {
    group_collective what;
    at::Tensor values;
    std::vector<std::int64_t> cut;
  };

  /// Adds a member's part, and records an event on the current stream, for which `carry_out` waits.
  void bring(std::size_t member, part of) {
    given_[member].record(std::span(&of.values, 1));
    parts_[member] = std::move(of);
    ++count_;
  }
  bool brought(std::size_t member) const { return parts_[member].values.defined(); }
  bool is_complete() const { return count_ == parts_.size(); }
  /// Whether at least one member has added its part.
  bool is_under_way() const { return count_ > 0; }

  /// Computes the collective's results, in place. Called once, after all members have added their parts.
  /// \param context of the calling rank, for errors
  /// \returns an event at the end of the work on the devices' streams
  /// \throws preflight_error if members have added different collectives, cuts, shapes or dtypes
  stream_handoff carry_out(rank_group among, int bucket, error_context const& context) {
    at::NoGradGuard const off;
    part const& first = parts_[0];
    for (std::size_t r = 1; r < parts_.size(); ++r) {
      part const& other = parts_[r];
      if (other.what == first.what && other.cut == first.cut && other.values.sizes() == first.values.sizes() &&
          other.values.dtype() == first.values.dtype()) {
        continue;
      }
      throw preflight_error(unlike_collectives(among, bucket, 0, first.what, static_cast<int>(r), other.what), context);
    }
    // Sums and copies run on the devices of the parts, whichever rank calls `carry_out`: these devices wait.
    given_[0].wait_for(first.values.device());
    for (std::size_t r = 1; r < parts_.size(); ++r) given_[r].wait_for(parts_[r].values.device());
    std::vector<at::Tensor> values;
    for (part const& each : parts_) values.push_back(each.values.detach().view({-1}));
    if (first.what == group_collective::all_reduce) add_up(values);
    if (first.what == group_collective::reduce_scatter) scatter(values, first.cut);
    if (first.what == group_collective::share_gather) gather(values, first.cut);
    stream_handoff done;
    done.record(values);
    return done;
  }

 private:
  static void add_up(std::vector<at::Tensor> const& values) {
    for (std::size_t r = 1; r < values.size(); ++r) values[0].add_(values[r].to(values[0].device()));
    for (std::size_t r = 1; r < values.size(); ++r) values[r].copy_(values[0]);
  }
  /// Sums each share in the memory of member 0, in the order of members, then copies the sum to the share's member.
  static void scatter(std::vector<at::Tensor> const& values, std::vector<std::int64_t> const& cut) {
    for (std::size_t s = 0; s < values.size(); ++s) {
      auto const share_in = [&](std::size_t r) { return values[r].narrow(0, cut[s], cut[s + 1] - cut[s]); };
      at::Tensor const total = share_in(0);
      for (std::size_t r = 1; r < values.size(); ++r) total.add_(share_in(r).to(total.device()));
      if (s > 0) share_in(s).copy_(total);
    }
  }
  /// Copies shares as bytes, so that no bit changes.
  static void gather(std::vector<at::Tensor> const& values, std::vector<std::int64_t> const& cut) {
    auto const width = static_cast<std::int64_t>(values[0].itemsize());
    for (std::size_t s = 0; s < values.size(); ++s) {
      auto const share_in = [&](std::size_t r) {
        return bytes_of(values[r]).narrow(0, cut[s] * width, (cut[s + 1] - cut[s]) * width);
      };
      for (std::size_t r = 0; r < values.size(); ++r) {
        if (r != s) share_in(r).copy_(share_in(s));
      }
    }
  }

  std::vector<part> parts_;
  std::vector<stream_handoff> given_;
  std::size_t count_ = 0;
};

}  // namespace chevron::detail
