#pragma once

/// \file
/// Replaces a Gloo header that LibTorch's wheel lacks: the wheel ships and exports c10d's `ProcessGroupGloo`, whose header
/// includes five headers of Gloo that the wheel lacks. From these headers `ProcessGroupGloo.hpp` needs only types behind
/// pointers. If the include path has the real headers, they are used instead.
///
/// Never construct these types, derive from them or read their members: the real types have a different layout.

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
