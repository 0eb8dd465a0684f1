#pragma once

#include <string>

#include <chevron/tools/replan/replan_report.hpp>

#include "options.hpp"

/// \file
/// What `--schedule auto` says while it trains.

namespace chevron::train {

/// What a look at the costs came to: what was measured, what is predicted, what runs now and on what that relies.
std::string words_for(replan_report const& news);

/// Where layers shared out to the stages otherwise would gain more: how, and the flag for it; else empty.
/// \param news with the costs that were planned for
std::string words_for_layers(options const& o, replan_report const& news);

}  // namespace chevron::train
