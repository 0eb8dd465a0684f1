#pragma once

#include <string>
#include <string_view>

#include <chevron/csv/csv.hpp>
#include <chevron/csv/csv_check.hpp>

namespace show_test {

/// The verdict on a schedule file, in words.
inline std::string said(std::string_view csv) {
  chevron::csv_schedule const read = chevron::read_csv(csv);
  return describe(check(read, csv), read, csv);
}

}  // namespace show_test
