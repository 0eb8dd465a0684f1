#pragma once

/// \file
/// Describes schedules, proves them, lowers them to programs and shows them on a terminal. Does not need LibTorch.
/// <chevron/show.hpp> adds pictures and files, <chevron/search.hpp> finds schedules for given costs.

#include <chevron/catalogue/catalogue.hpp>
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
#include <chevron/tools/show/text.hpp>
