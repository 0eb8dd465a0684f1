#pragma once

/// \file
/// Stands in for a Gloo header that LibTorch's wheel leaves out: the wheel ships and exports c10d's `ProcessGroupGloo`, whose
/// header includes five of Gloo's, but none of those. What that header needs of them is little: names behind pointers. The
/// real headers win wherever this folder is searched, if there are any.
///
/// Never construct, derive from or look inside these types: they say nothing about the real layout.

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
