#pragma once

// Declarations that the replacements of libtorch_cuda share.

#include <cstdint>
#include <cstring>
#include <optional>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>

namespace gpu_double {

/// The CPU's generator under a device's name.
struct generator final : c10::GeneratorImpl {
  explicit generator(c10::DeviceIndex index)
      : GeneratorImpl({at::kCUDA, index}, c10::DispatchKeySet(c10::DispatchKey::CUDA)),
        inside(at::make_generator<at::CPUGeneratorImpl>()) {}
  void set_current_seed(std::uint64_t seed) override { inside.set_current_seed(seed); }
  void set_offset(std::uint64_t) override {}
  std::uint64_t get_offset() const override { return 0; }
  std::uint64_t current_seed() const override { return inside.current_seed(); }
  std::uint64_t seed() override { return inside.seed(); }
  void set_state(c10::TensorImpl const& state) override {
    at::Tensor of_inside = inside.get_state();
    std::memcpy(of_inside.mutable_data_ptr(), state.data(), of_inside.nbytes());
    inside.set_state(of_inside);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inside.get_state().getIntrusivePtr(); }
  generator* clone_impl() const override { return new generator(device().index()); }
  static c10::DeviceType device_type() { return at::kCUDA; }

  at::Generator inside;
};

/// The generator of the CPU from which an operator on a device draws.
/// \param given the operator's argument; undefined: the caller gave none, and the device's own is asked for
/// \returns empty: the operator is called without a generator
std::optional<at::Generator> host_generator(at::Generator const& given, c10::DeviceIndex device);

/// Gives every operator that has a kernel of the CPU one for CUDA devices (operators.cpp). To be called once in a process.
void register_operators();

}  // namespace gpu_double
