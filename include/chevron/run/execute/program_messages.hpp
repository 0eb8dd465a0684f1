#pragma once

#include <memory>
#include <span>
#include <utility>

#include <ATen/core/Tensor.h>

#include <chevron/lower/messages.hpp>
#include <chevron/lower/program.hpp>
#include <chevron/plan/step_graph.hpp>
#include <chevron/run/comm/message_checksum.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/fault_point.hpp>
#include <chevron/run/core/tensors.hpp>

/// \file
/// Sends and receives the tensors of a program's messages, with checksums where settings ask for them.

namespace chevron::detail {

/// The messages of one rank's program, over its transport.
class program_messages {
 public:
  explicit program_messages(transport& comm) : comm_(&comm) {}
  virtual ~program_messages() = default;
  program_messages(program_messages const&) = delete;
  program_messages& operator=(program_messages const&) = delete;

  /// Passes a SEND's tensors to the transport, and clears `values`.
  virtual void send(instruction const& i, long step, tensors& values) {
    detail::message_fault_point(comm_->topology().global_rank, step, i.op, values);
    comm_->post_send(i.peer, i.op, i.source, values);
    values.clear();
  }
  /// Waits for the message that a computation needs, and moves its tensors to `out`.
  virtual void receive(instruction const& computation, long step, tensors& out) {
    static_cast<void>(step);
    std::span<at::Tensor> const arrived = comm_->receive(computation.source);
    out.clear();
    for (at::Tensor& t : arrived) out.push_back(std::move(t));
  }

 protected:
  transport& comm() const { return *comm_; }

 private:
  transport* comm_;
};

/// Appends a checksum to each message that is sent, and checks each received message (message_checksum.hpp).
class checked_messages final : public program_messages {
 public:
  checked_messages(transport& comm, plan_view const& plan) : program_messages(comm), plan_(plan) {}

  void send(instruction const& i, long step, tensors& values) override {
    detail::add_checksum(values);
    program_messages::send(i, step, values);
  }
  /// Receives a message, and reports a wrong checksum to all ranks.
  /// \throws corrupt_message_error if the tensors differ from the sent tensors
  void receive(instruction const& computation, long step, tensors& out) override {
    program_messages::receive(computation, step, out);
    topology const& where = comm().topology();
    int const sender = where.global_of(plan_.rank_of[step_graph(plan_).from(computation.op)]);
    try {
      detail::take_checksum(
          out, {where.global_rank, sender, step, to_text(detail::receive_for(computation.op), plan_.size.slices).str()});
    } catch (corrupt_message_error const& e) {
      comm().fail(e);
      throw;
    }
  }

 private:
  plan_view plan_;
};

}  // namespace chevron::detail
