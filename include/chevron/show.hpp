#pragma once

/// \file
/// Every way to show a schedule or what was measured of it: text, SVG, HTML, CSV, JSON, Chrome trace, a model for
/// SPIN. No LibTorch.

#include <chevron/show/analysis_text.hpp>
#include <chevron/show/chrome_trace.hpp>
#include <chevron/show/csv/csv.hpp>
#include <chevron/show/html.hpp>
#include <chevron/show/json.hpp>
#include <chevron/show/program_text.hpp>
#include <chevron/show/svg.hpp>
#include <chevron/show/text.hpp>
