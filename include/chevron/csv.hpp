#pragma once

/// \file
/// Schedules as CSV in PyTorch's notation: writes, reads and checks files; `from_csv` embeds a schedule in a program. No
/// LibTorch.

#include <chevron/show/csv/csv.hpp>
#include <chevron/show/csv/csv_check.hpp>
#include <chevron/show/csv/csv_source.hpp>
