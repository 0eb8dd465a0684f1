#pragma once

/// \file
/// Replaces a Gloo header that LibTorch's wheel lacks; see ../context.h.

#if __has_include_next(<gloo/rendezvous/store.h>)
#include_next <gloo/rendezvous/store.h>
#else

#include <chrono>
#include <string>
#include <vector>

namespace gloo::rendezvous {

/// Declares the functions that c10d's `GlooStore` overrides.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(std::string const& key, std::vector<char> const& value) = 0;
  virtual std::vector<char> get(std::string const& key) = 0;
  virtual void wait(std::vector<std::string> const& keys) = 0;
  virtual void wait(std::vector<std::string> const& keys, std::chrono::milliseconds const& timeout) = 0;
};

}  // namespace gloo::rendezvous

#endif
