#pragma once

#include <cstddef>
#include <cstdint>
#include <sstream>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/model/stage.hpp>

/// \file
/// What a stage changed of its own while a microbatch was under way.

namespace chevron {

namespace detail {

/// How often a tensor was changed in place.
inline std::uint32_t version_of(at::Tensor const& t) {
  return t.defined() && !t.is_inference() ? static_cast<std::uint32_t>(t._version()) : 0;
}

}  // namespace detail

/// How often a stage's buffers and parameters had been changed in place when the F of one microbatch was over.
///
/// A plain loop has each backward before the next forward. In a pipeline forwards of other microbatches come between, and a
/// forward that changes a buffer which its own graph has saved breaks the backwards of the microbatches before it.
class own_versions {
 public:
  void note(stage const& owner) {
    versions_.clear();
    each(owner, [&](parameter const& p) { versions_.push_back(detail::version_of(p.value)); });
  }

  /// \param error autograd's words where a tensor was saved and has changed since
  /// \returns which buffer or parameter that was, and the remedy; empty where it was none
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

}  // namespace chevron
