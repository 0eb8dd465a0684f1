#pragma once

/// \file
/// Shows a schedule or a measured run as text, SVG, HTML, CSV, JSON or a Chrome trace. Does not need LibTorch.

#include <chevron/csv/csv.hpp>
#include <chevron/tools/show/analysis_text.hpp>
#include <chevron/tools/show/chrome_trace.hpp>
#include <chevron/tools/show/html.hpp>
#include <chevron/tools/show/json.hpp>
#include <chevron/tools/show/program_text.hpp>
#include <chevron/tools/show/svg.hpp>
#include <chevron/tools/show/text.hpp>
