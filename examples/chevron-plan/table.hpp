#pragma once

#include <string>
#include <vector>

#include <chevron/base/format.hpp>

/// \file
/// Tables on the terminal.

namespace plan_program {

using chevron::show::bytes;
using chevron::show::exact;
using chevron::show::json_string;
using chevron::show::number;
using chevron::show::percent;

enum class align { left, right };

/// One row of cells; every row of a table has as many.
using table_row = std::vector<std::string>;

/// A line for each row, its columns as wide as their widest cell. No line ends in blanks.
/// \param sides by column; the last one holds for all columns behind it
/// \param gap   between columns
std::string table_text(std::vector<table_row> const& rows, std::vector<align> const& sides, std::string const& gap = "  ");

}  // namespace plan_program
