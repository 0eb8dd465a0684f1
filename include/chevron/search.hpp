#pragma once

/// \file
/// Finds schedules for given costs and memory limits: the zero-bubble paper's orders, and a search for any placement, at run
/// time or while compiling; stages are given, or the search divides layers among stages. Does not need LibTorch.

#include <chevron/tools/search/best.hpp>
#include <chevron/tools/search/find.hpp>
#include <chevron/tools/search/gathered.hpp>
#include <chevron/tools/search/held_sets.hpp>
#include <chevron/tools/search/improve.hpp>
#include <chevron/tools/search/jitter.hpp>
#include <chevron/tools/search/layer_bytes.hpp>
#include <chevron/tools/search/layers.hpp>
#include <chevron/tools/search/lengths/input_order.hpp>
#include <chevron/tools/search/lengths/replan.hpp>
#include <chevron/tools/search/plan_cut.hpp>
#include <chevron/tools/search/problem/effort.hpp>
#include <chevron/tools/search/recomputation.hpp>
#include <chevron/tools/search/robust.hpp>
#include <chevron/tools/search/zero_bubble.hpp>
