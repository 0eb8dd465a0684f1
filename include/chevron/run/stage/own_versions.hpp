#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/stage.hpp>

/// \file
/// Detects tensors that are changed in place between a microbatch's F and its backward: buffers, parameters, and inputs that
/// are stored for a second forward.

namespace chevron::detail {

/// The number of times a tensor was changed in place.
inline std::uint32_t version_of(at::Tensor const& t) {
  return t.defined() && !t.is_inference() ? static_cast<std::uint32_t>(t._version()) : 0;
}

inline std::vector<std::uint32_t> versions_of(std::span<side_input const> side_inputs) {
  std::vector<std::uint32_t> out;
  for (side_input const& e : side_inputs) out.push_back(version_of(e.value));
  return out;
}

/// Stores inputs for a second forward.
class kept_inputs {
 public:
  /// Stores `values`. \param values replaced by detached tensors
  void keep(tensors& values) {
    versions_.clear();
    for (at::Tensor& value : values) {
      if (value.defined()) value = value.detach();
      versions_.push_back(version_of(value));
    }
    inputs_ = values;
  }
  /// Checks that no input was changed in place since `keep`.
  /// \param change the error's sentence up to the tensor: `the stage changes its`
  /// \param what the kind of tensor, for the error
  /// \throws usage_error if an input was changed
  void check(char const* change, char const* what = "input") const {
    for (std::size_t i = 0; i < inputs_.size(); ++i) {
      if (version_of(inputs_[i]) == versions_[i]) continue;
      throw usage_error(std::string(change) + " " + what + " " + std::to_string(i) +
                        " in place, from which recompute() computes the stage again. Remedy: change a clone, or no recompute()");
    }
  }
  tensors take() { return std::exchange(inputs_, {}); }

 private:
  tensors inputs_;
  std::vector<std::uint32_t> versions_;  // versions at `keep`
};

/// The version counters of a stage's buffers and parameters at the end of one microbatch's F.
///
/// A plain loop runs each backward before the next forward. In a pipeline, forwards of other microbatches run in between: a
/// forward that changes a buffer in place breaks the backwards of earlier microbatches whose graphs have saved the buffer.
class own_versions {
 public:
  /// Records the version counters.
  void note(stage const& owner) {
    versions_.clear();
    each(owner, [&](parameter const& p) { versions_.push_back(detail::version_of(p.value)); });
  }

  /// Explains an error of autograd about a saved tensor that was changed.
  /// \param error autograd's message
  /// \returns a sentence with the changed buffer or parameter and the remedy; empty if no changed tensor fits the message
  std::string why(stage const& owner, std::string const& error) const {
    std::string found;
    std::size_t i = 0;
    each(owner, [&](parameter const& p) {
      std::uint32_t const now = detail::version_of(p.value);
      if (now == versions_[i++]) return;
      std::ostringstream sizes;
      sizes << ' ' << p.value.sizes() << ']';
      bool const meant = error.find(sizes.str()) != std::string::npos &&
                         error.find("is at version " + std::to_string(now) + ";") != std::string::npos;
      if (meant) found = p.name;
    });
    if (found.empty()) return found;
    return "`" + found +
           "` was changed in place since the forward of this microbatch, whose backward needs it as it was: forwards of other "
           "microbatches come between. Remedy: compute with a clone of it, or change it between two steps";
  }

 private:
  template <class See>
  static void each(stage const& owner, See const& see) {
    for (auto const* list : {&owner.buffers(), &owner.parameters()}) {
      for (parameter const& p : *list) see(p);
    }
  }

  std::vector<std::uint32_t> versions_;
};

}  // namespace chevron::detail
