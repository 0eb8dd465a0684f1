#pragma once

/// \file
/// Replaces a Gloo header that LibTorch's wheel lacks; see context.h.

#if __has_include_next(<gloo/algorithm.h>)
#include_next <gloo/algorithm.h>
#endif
