#pragma once

/// \file
/// Schedules as CSV in PyTorch's notation: written, read and checked, and `from_csv`, which embeds one. No LibTorch.

#include <chevron/show/csv/csv.hpp>
#include <chevron/show/csv/csv_check.hpp>
#include <chevron/show/csv/csv_source.hpp>
