#pragma once

#include <cstdint>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/plan/action.hpp>
#include <chevron/run/comm/message_signature.hpp>
#include <chevron/run/failure/failure.hpp>
#include <chevron/run/failure/failure_monitor.hpp>

/// \file
/// The shapes, dtypes and paths that both ranks of a message keep from its first transfer on.

namespace chevron::detail {

/// The messages of one rank, by tag. Channels between processes and devices carry no shapes, so the sender sends them with a
/// message's first transfer, and both ranks keep them. That transfer's receive is posted later than in the program, when the
/// receiver may have to send to the sender before: so that the two do not wait for each other, a first transfer is sent from a
/// copy, and is waited for in the next step only.
/// \tparam Terms the record of a message: its `shapes`, and members that a transport adds
/// \tparam Sent  a message under way
template <class Terms, class Sent>
class message_agreement {
 public:
  message_agreement(failure_monitor& watch, int rank) : watch_(watch), rank_(rank) {}

  /// Forgets the messages of earlier programs. All ranks call it together, once `finish_first_sends` has returned.
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
  /// The terms of a message, for its sender; null before the first transfer.
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

  /// Replaces tensors by copies, from which a first message is sent.
  static void copy(std::vector<at::Tensor>& values) {
    for (at::Tensor& value : values) {
      if (value.defined()) value = value.clone();
    }
  }
  /// Keeps a first message alive until `finish_first_sends`.
  void first_sent(Sent sent) { first_sends_.push_back(std::move(sent)); }
  /// Ends all first sends. \param wait called as wait(sent) for each
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
