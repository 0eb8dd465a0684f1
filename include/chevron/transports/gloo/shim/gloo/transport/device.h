#pragma once

/// \file
/// Replaces a Gloo header that LibTorch's wheel lacks; see ../context.h.

#if __has_include_next(<gloo/transport/device.h>)
#include_next <gloo/transport/device.h>
#else

namespace gloo::transport {
class Device;
}  // namespace gloo::transport

#endif
