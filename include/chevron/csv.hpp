#pragma once

/// \file
/// Writes, reads and checks schedules as CSV in PyTorch's notation; `from_csv` embeds a schedule in a program. Does not need
/// LibTorch.

#include <chevron/csv/csv.hpp>
#include <chevron/csv/csv_check.hpp>
#include <chevron/csv/csv_source.hpp>
