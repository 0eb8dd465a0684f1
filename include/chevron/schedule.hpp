#pragma once

/// \file
/// Describes schedules, proves them, lowers them to programs and shows them on a terminal, with all published schedules. Does
/// not need LibTorch. <chevron/language.hpp> has less and compiles faster, <chevron/show.hpp> adds pictures and files,
/// <chevron/search.hpp> finds schedules for given costs.

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/language.hpp>
#include <chevron/tools/show/text.hpp>
