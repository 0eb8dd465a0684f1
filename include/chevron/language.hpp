#pragma once

/// \file
/// Describes schedules, proves them and lowers them to programs: <chevron/schedule.hpp> without the catalogue and without text
/// for a terminal, so a file compiles faster. A file that needs one published schedule includes its header in addition, such as
/// <chevron/catalogue/zb_v.hpp>. Does not need LibTorch.

#include <chevron/describe/block.hpp>
#include <chevron/describe/expand.hpp>
#include <chevron/describe/list.hpp>
#include <chevron/describe/own_action.hpp>
#include <chevron/describe/recomputed.hpp>
#include <chevron/describe/table.hpp>
#include <chevron/lower/check_program.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/lower/lowered.hpp>
#include <chevron/prove/bounds/bound.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/prove/critical_path.hpp>
#include <chevron/prove/gate.hpp>
#include <chevron/prove/idle.hpp>
#include <chevron/prove/in_flight.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/prove/steps.hpp>
#include <chevron/prove/timeline.hpp>
