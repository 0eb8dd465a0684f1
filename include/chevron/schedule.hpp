#pragma once

/// \file
/// Everything about schedules: describe, prove, lower, show. No LibTorch.

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/describe/expand.hpp>
#include <chevron/lower/check_program.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/prove/gate.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/prove/timeline.hpp>
#include <chevron/show/chrome_trace.hpp>
#include <chevron/show/csv.hpp>
#include <chevron/show/html.hpp>
#include <chevron/show/json.hpp>
#include <chevron/show/program_text.hpp>
#include <chevron/show/svg.hpp>
#include <chevron/show/text.hpp>
