#pragma once

/// \file
/// Schedules made for given costs and memory: the zero-bubble paper's orders, and a search on any placement, at run time or while
/// compiling, with given stages or with layers that the search divides among stages. No LibTorch.

#include <chevron/search/best.hpp>
#include <chevron/search/find.hpp>
#include <chevron/search/improve.hpp>
#include <chevron/search/jitter.hpp>
#include <chevron/search/layers.hpp>
#include <chevron/search/lengths/input_order.hpp>
#include <chevron/search/lengths/replan.hpp>
#include <chevron/search/problem/effort.hpp>
#include <chevron/search/recomputation.hpp>
#include <chevron/search/robust.hpp>
#include <chevron/search/zero_bubble.hpp>
