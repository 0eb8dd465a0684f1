#pragma once

/// \file
/// Shows a schedule or a measured run as text, SVG, HTML, CSV, JSON or a Chrome trace. Does not need LibTorch.

#include <chevron/show/analysis_text.hpp>
#include <chevron/show/chrome_trace.hpp>
#include <chevron/show/csv/csv.hpp>
#include <chevron/show/html.hpp>
#include <chevron/show/json.hpp>
#include <chevron/show/program_text.hpp>
#include <chevron/show/svg.hpp>
#include <chevron/show/text.hpp>
