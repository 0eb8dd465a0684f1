#pragma once

// Declarations that the replacements of libtorch_cuda share.

#include <cstdint>
#include <cstring>

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <torch/library.h>

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

/// Gives every operator that has a kernel of the CPU one for CUDA devices (operators.cpp).
void register_operators(torch::Library& aten);

}  // namespace gpu_double
