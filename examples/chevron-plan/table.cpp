#include "table.hpp"

#include <algorithm>
#include <cstddef>

#include <range/v3/algorithm/max.hpp>
#include <range/v3/range/conversion.hpp>
#include <range/v3/view/enumerate.hpp>
#include <range/v3/view/iota.hpp>
#include <range/v3/view/join.hpp>
#include <range/v3/view/transform.hpp>

#include <chevron/base/format.hpp>

namespace plan_program {

namespace views = ranges::views;

std::string table_text(std::vector<table_row> const& rows, std::vector<align> const& sides, std::string const& gap) {
  if (rows.empty()) return "";
  auto const width_of = [&](std::size_t column) {
    return ranges::max(rows | views::transform([=](table_row const& row) { return chevron::show::columns_of(row[column]); }));
  };
  auto const widths = views::iota(std::size_t{0}, rows.front().size()) | views::transform(width_of) | ranges::to<std::vector>();
  auto const cell = [&](auto const& numbered) {
    auto const& [column, text] = numbered;
    std::string const blanks(static_cast<std::size_t>(widths[column] - chevron::show::columns_of(text)), ' ');
    return sides[std::min(column, sides.size() - 1)] == align::left ? text + blanks : blanks + text;
  };
  auto const line = [&](table_row const& row) {
    auto text = row | views::enumerate | views::transform(cell) | views::join(gap) | ranges::to<std::string>();
    return text.erase(text.find_last_not_of(' ') + 1) + "\n";
  };
  return rows | views::transform(line) | views::join | ranges::to<std::string>();
}

}  // namespace plan_program
