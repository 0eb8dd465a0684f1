#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/MT19937RNGEngine.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/python_variable.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/random_scope.hpp>
#include <chevron/run/stage/stage.hpp>

#include "object.hpp"

/// \file
/// A stage whose module is written in Python.

namespace chevron_pipelining {

/// The name of the side input that holds a microbatch's number: Python code finds the microbatch's keyword arguments by it.
inline constexpr char const* micro_batch_number = "microbatch";

/// A microbatch's number as a tensor without elements: its size is known without a wait for the device.
inline at::Tensor numbered(std::size_t number) { return at::empty({static_cast<std::int64_t>(number), 0}); }
inline std::int64_t number_of(at::Tensor const& numbered) { return numbered.size(0); }

/// Seeds the process's CPU generator with the seed of the current place's stream (random_scope.hpp), and restores the generator
/// at the end. Draws are those of Chevron's streams; and torch.utils.checkpoint, which saves and restores the process's
/// generator, repeats a forward's draws. Copies the generator's members, without the tensor of `get_state`.
class seeded_process {
 public:
  seeded_process() {
    auto const* const place = dynamic_cast<chevron::detail::one_stream const*>(chevron::detail::current_stream);
    if (place == nullptr) return;
    std::lock_guard const hold(all_.mutex_);
    before_ = generator_state{all_.engine(), all_.next_float_normal_sample(), all_.next_double_normal_sample()};
    all_.set_current_seed(place->seed);
  }
  ~seeded_process() {
    if (!before_) return;
    std::lock_guard const hold(all_.mutex_);
    all_.set_engine(before_->engine);
    all_.set_next_float_normal_sample(before_->next_float);
    all_.set_next_double_normal_sample(before_->next_double);
  }
  seeded_process(seeded_process const&) = delete;
  seeded_process& operator=(seeded_process const&) = delete;

 private:
  struct generator_state {
    at::mt19937 engine;
    std::optional<float> next_float;  // the second one of two normal numbers, which are drawn together
    std::optional<double> next_double;
  };

  at::CPUGeneratorImpl& all_ = *at::check_generator<at::CPUGeneratorImpl>(at::detail::getDefaultCPUGenerator());
  std::optional<generator_state> before_;
};

/// Calls Python with tensors; the last is `numbered`, and goes first, as an integer. Undefined tensors are None.
/// \returns the tensor that Python returns, or the tensors and Nones of its list
inline chevron::tensors call(object const& callee, std::span<at::Tensor const> given) {
  seeded_process const draws;
  return in_python([&] {
    std::vector<py::object> arguments{py::int_(number_of(given.back()))};
    std::vector<PyObject*> pointers{arguments[0].ptr()};
    for (at::Tensor const& each : given.first(given.size() - 1))
      pointers.push_back(arguments.emplace_back(py::reinterpret_steal<py::object>(THPVariable_Wrap(each))).ptr());
    auto const results =
        py::reinterpret_steal<py::object>(PyObject_Vectorcall(callee.get(), pointers.data(), pointers.size(), nullptr));
    if (!results) throw py::error_already_set();
    chevron::tensors out;
    if (THPVariable_Check(results.ptr())) return out.push_back(THPVariable_Unpack(results.ptr())), out;
    for (py::handle const each : results) {
      out.push_back(each.is_none() ? at::Tensor() : THPVariable_Unpack(each.ptr()));
    }
    return out;
  });
}

/// The members of a Python module that a stage needs (concept `module_pointer`). The mode of the module is the user's, in
/// training and in evaluation, as in PyTorch's runtime: `train` changes nothing.
class python_module {
 public:
  struct entry {
    std::string name;
    at::Tensor tensor;
    std::string const& key() const { return name; }
    at::Tensor const& value() const { return tensor; }
  };
  explicit python_module(object module) : module_(std::move(module)) {}

  std::vector<entry> named_parameters(bool) const { return list("named_parameters"); }
  std::vector<entry> named_buffers(bool) const { return list("named_buffers"); }
  std::vector<std::shared_ptr<python_module>> modules() const { return {}; }
  bool is_training() const {
    return in_python([&] { return of(module_).attr("training").cast<bool>(); });
  }
  void train(bool) {}

 private:
  std::vector<entry> list(char const* method) const {
    return in_python([&] {
      std::vector<entry> out;
      for (py::handle const each : of(module_).attr(method)()) {
        auto [name, tensor] = each.cast<std::pair<std::string, at::Tensor>>();
        out.push_back({std::move(name), std::move(tensor)});
      }
      return out;
    });
  }

  object module_;
};

/// A stage of Python: its module, the function that computes a microbatch, and the user's declarations.
struct python_stage {
  object module, forward;
  bool recompute = false;
  std::vector<std::pair<std::string, std::string>> ties;  ///< a parameter's name, and its group over all stages

  /// Makes Chevron's stage.
  chevron::stage make() const {
    chevron::stage made(std::make_shared<python_module>(module),
                        [forward = forward](std::span<at::Tensor const> given) { return call(forward, given); });
    made.side_inputs({micro_batch_number}).recompute(recompute);
    for (auto const& [name, group] : ties) made.tie(name, group);
    return made;
  }
};

}  // namespace chevron_pipelining
