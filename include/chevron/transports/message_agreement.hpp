#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/jobs/failure_monitor.hpp>
#include <chevron/plan/action.hpp>
#include <chevron/run/comm/message_signature.hpp>
#include <chevron/run/core/failure.hpp>

/// \file
/// Stores the shapes, dtypes and path of each message, which sender and receiver agree on at the message's first transfer.

namespace chevron::detail {

/// The terms (shapes and more) of one rank's messages, by tag. Channels between processes and devices carry no shapes, so the
/// sender also sends the shapes at a message's first transfer, and both ranks store them. The receive of a first transfer is
/// posted later than in the program, maybe after the receiver has had to send to the sender. So that sender and receiver do not
/// wait for each other, a first transfer is sent from a copy, and the sender waits for its end only in the next step.
/// \tparam Terms the terms of a message: its `shapes`, and members that a transport adds
/// \tparam Sent  a send under way
template <class Terms, class Sent>
class message_agreement {
 public:
  message_agreement(failure_monitor& watch, int rank) : watch_(watch), rank_(rank) {}

  /// Removes the terms of earlier programs' messages. All ranks call `open` together, after `finish_first_sends`.
  void open() {
    terms_.clear();
    ++turn_;
  }
  /// The number of calls of `open`.
  unsigned turn() const { return turn_; }
  std::uint32_t tag(action what) const { return tag_in_turn(tag_of(what), turn_); }

  /// The terms of a message; null before its first transfer.
  Terms* known(std::uint32_t tag) {
    auto const found = terms_.find(tag);
    return found == terms_.end() ? nullptr : &found->second;
  }
  /// Returns the terms of a message to its sender; null before the first transfer.
  /// \throws preflight_error if the tensors have other shapes or dtypes than agreed; the error is published to all ranks
  Terms* known_for(std::uint32_t tag, std::vector<at::Tensor> const& values, awaited const& mine) {
    Terms* const found = known(tag);
    if (found != nullptr && !fits(values, found->shapes)) {
      refuse_shapes([this](failure const& told) { return watch_.report(told); }, mine, rank_, found->shapes, shapes_of(values));
    }
    return found;
  }
  /// Records the terms of a message's first transfer.
  Terms& agree(std::uint32_t tag, Terms terms) { return terms_.emplace(tag, std::move(terms)).first->second; }

  /// Replaces tensors by copies, for sending a first transfer.
  static void copy(std::vector<at::Tensor>& values) {
    for (at::Tensor& value : values) {
      if (value.defined()) value = value.clone();
    }
  }
  /// Stores the send of a first transfer until `finish_first_sends`.
  void first_sent(Sent sent) { first_sends_.push_back(std::move(sent)); }
  /// Waits for the sends of all first transfers. \param wait called as wait(sent) for each send
  template <class Wait>
  void finish_first_sends(Wait const& wait) {
    for (Sent& sent : first_sends_) wait(sent);
    first_sends_.clear();
  }

 private:
  failure_monitor& watch_;
  int rank_;
  std::unordered_map<std::uint32_t, Terms> terms_;
  std::vector<Sent> first_sends_;
  unsigned turn_ = 0;
};

}  // namespace chevron::detail
