#pragma once

// A link that changes a message on its way.

#include <cstdint>
#include <span>

#include "support/slow_links.hpp"

namespace faulty_link {

/// Turns a bit over of one message that rank `to` receives in a step. Carries checksums along, as `slow_links` does.
class transport : public slow_links::transport {
 public:
  transport(chevron::transport& inner, int to, long step) : slow_links::transport(inner, {}), to_(to), step_(step) {}

  std::span<at::Tensor> receive(std::uint16_t slot) override {
    std::span<at::Tensor> const came = slow_links::transport::receive(slot);
    if (topology().global_rank != to_ || step() != step_ || struck_) return came;
    struck_ = true;
    at::Tensor& value = came.front();
    value = value.clone();
    static_cast<unsigned char*>(value.mutable_data_ptr())[value.nbytes() - 2] ^= 0x40;  // of the mantissa: the value stays finite
    return came;
  }

 private:
  int to_;
  long step_;
  bool struck_ = false;
};

}  // namespace faulty_link
