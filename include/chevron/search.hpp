#pragma once

/// \file
/// Finds schedules for given costs and memory limits: the zero-bubble paper's orders, and a search for any placement, at run
/// time or while compiling; stages are given, or the search divides layers among stages. Does not need LibTorch.

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
