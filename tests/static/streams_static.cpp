#include "accelerator/check_streams.hpp"

#include "support/plan_claims.hpp"

using namespace chevron;
using namespace chevron::tests;

// The laws of streams while compiling: nothing hangs, nothing is used before it is ready. The whole grid is walked at run time
// (tests/unit/accelerator/check_streams_test.cpp).
static_assert(!check_streams(lowered<catalogue::one_f_one_b, shape{4, 5}>));
static_assert(!check_streams(lowered<catalogue::zb_v, shape{2, 4}>));
static_assert(!check_streams(lowered<catalogue::dual_pipe_v, shape{2, 4}>));
