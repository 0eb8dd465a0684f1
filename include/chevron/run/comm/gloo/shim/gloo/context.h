#pragma once

/// \file
/// Stands in for a Gloo header that LibTorch's wheel leaves out: the wheel ships and exports c10d's `ProcessGroupGloo`, whose
/// header includes five headers of Gloo that the wheel lacks. Of those `ProcessGroupGloo.hpp` needs only names behind pointers.
/// Real headers, where the include path has any, come before this folder.
///
/// Never construct these types, derive from them or read their members: their layout is not the real one.

#if __has_include_next(<gloo/context.h>)
#include_next <gloo/context.h>
#else

#include <chrono>

namespace gloo {

class Context {
 public:
  void setTimeout(std::chrono::milliseconds timeout);
};

namespace transport {
class Device;

class UnboundBuffer {
 public:
  virtual ~UnboundBuffer() = 0;
};
}  // namespace transport

}  // namespace gloo

#endif
