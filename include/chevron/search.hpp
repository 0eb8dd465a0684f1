#pragma once

/// \file
/// Schedules made for given costs and memory: the zero-bubble paper's orders, and a search on any placement. No LibTorch.

#include <chevron/search/find.hpp>
#include <chevron/search/jitter.hpp>
#include <chevron/search/robust.hpp>
#include <chevron/search/zero_bubble.hpp>
