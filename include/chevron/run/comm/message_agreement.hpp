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
/// What both ranks of a message keep of its first time.

namespace chevron::detail {

/// The messages of one rank, by tag. Channels between processes and devices know nothing of shapes: a receiver can post a message
/// only once it was told them. They are told with the message's first time, both ranks keep them, and a sender whose later
/// tensors differ stops before anything is sent.
///
/// So the first receive of a message comes later than the program says, and its rank may first have to send to this one: a sender
/// that waited for it would close a circle. The first of each message therefore goes out from a copy, and nothing waits for it
/// before the next step.
/// \tparam Terms what is kept of a message: its `shapes`, and what a transport adds to them
/// \tparam Sent  a message under way
template <class Terms, class Sent>
class message_agreement {
 public:
  message_agreement(failure_monitor& watch, int rank) : watch_(watch), rank_(rank) {}

  /// Forgets the messages of earlier programs: all ranks open together, once `finish_first_sends` has returned.
  void open() {
    terms_.clear();
    ++turn_;
  }
  /// How often `open` was called.
  unsigned turn() const { return turn_; }
  std::uint32_t tag(action what) const { return tag_in_turn(tag_of(what), turn_); }

  /// Null where the message has not been there yet.
  Terms* known(std::uint32_t tag) {
    auto const found = terms_.find(tag);
    return found == terms_.end() ? nullptr : &found->second;
  }
  /// The same as the sender of these tensors.
  /// \throws preflight_error where they are not what both ranks agreed on; all ranks are told
  Terms* known_for(std::uint32_t tag, std::vector<at::Tensor> const& values, awaited const& mine) {
    Terms* const found = known(tag);
    if (found != nullptr && !fits(values, found->shapes)) {
      refuse_shapes([this](failure const& told) { return watch_.report(told); }, mine, rank_, found->shapes, shapes_of(values));
    }
    return found;
  }
  Terms& agree(std::uint32_t tag, Terms terms) { return terms_.emplace(tag, std::move(terms)).first->second; }

  /// Has a first message go out from a copy.
  static void copy(std::vector<at::Tensor>& values) {
    for (at::Tensor& value : values) {
      if (value.defined()) value = value.clone();
    }
  }
  void first_sent(Sent sent) { first_sends_.push_back(std::move(sent)); }
  /// \param wait wait(sent) for each of them
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
