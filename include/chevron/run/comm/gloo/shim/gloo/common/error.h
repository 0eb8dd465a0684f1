#pragma once

/// \file
/// Stands in for a Gloo header that LibTorch's wheel leaves out; see ../context.h.

#if __has_include_next(<gloo/common/error.h>)
#include_next <gloo/common/error.h>
#endif
