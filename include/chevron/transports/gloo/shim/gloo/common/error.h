#pragma once

/// \file
/// Replaces a Gloo header that LibTorch's wheel lacks; see ../context.h.

#if __has_include_next(<gloo/common/error.h>)
#include_next <gloo/common/error.h>
#endif
