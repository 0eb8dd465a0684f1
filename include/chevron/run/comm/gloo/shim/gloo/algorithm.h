#pragma once

/// \file
/// Stands in for a Gloo header that LibTorch's wheel leaves out; see context.h beside it.

#if __has_include_next(<gloo/algorithm.h>)
#include_next <gloo/algorithm.h>
#endif
