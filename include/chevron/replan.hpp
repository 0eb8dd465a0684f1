#pragma once

/// \file
/// Schedules that change while training: `auto_schedule` measures costs and searches again, `length_schedule` plans each step
/// for the lengths of its batch. Beside <chevron/run.hpp>; needs LibTorch.

#include <chevron/tools/replan/auto_schedule.hpp>
#include <chevron/tools/replan/length_schedule.hpp>
