#pragma once

#include <initializer_list>
#include <string_view>

#include <chevron/plan/plan.hpp>

/// \file
/// Plans written by hand, while compiling as well: rows such as `"0F0 (0F1;0B0) 0B1"`, where brackets make a fused pair.

namespace chevron::tests {

namespace detail {

constexpr int number_at(std::string_view row, unsigned& at) {
  int value = 0;
  while (at < row.size() && row[at] >= '0' && row[at] <= '9') value = value * 10 + (row[at++] - '0');
  return value;
}

/// The actions of a row; `out` null: only counted.
constexpr int read_row(std::string_view row, action* out) {
  int count = 0;
  for (unsigned at = 0; at < row.size();) {
    if (row[at] < '0' || row[at] > '9') {
      ++at;
      continue;
    }
    bool const fused = at > 0 && row[at - 1] == '(';
    int const stage = number_at(row, at);
    char const letter = row[at++];
    kind const what = letter == 'F'   ? kind::forward
                      : letter == 'B' ? kind::backward
                      : letter == 'I' ? kind::backward_input
                                      : kind::backward_weight;
    action a = make_action(what, stage, number_at(row, at));
    a.fused = fused ? 1 : 0;
    if (out != nullptr) out[count] = a;
    ++count;
  }
  return count;
}

}  // namespace detail

/// A plan with a row for each rank and a rank for each stage.
constexpr plan by_hand(std::initializer_list<std::string_view> rows, std::initializer_list<int> rank_of_stage,
                       int micro_batches) {
  plan made;
  int const ranks = static_cast<int>(rows.size());
  made.stages = static_cast<int>(rank_of_stage.size());
  made.size = {ranks, micro_batches, made.stages / ranks};
  int total = 0;
  for (std::string_view row : rows) total += detail::read_row(row, nullptr);
  made.actions = buffer<action>(total);
  made.begin = buffer<int>(ranks + 1, zeroed);
  made.rank_of = buffer<std::int16_t>(made.stages, zeroed);
  int r = 0;
  for (std::string_view row : rows) {
    made.begin.data[r + 1] = made.begin.data[r] + detail::read_row(row, made.actions.data + made.begin.data[r]);
    ++r;
  }
  int s = 0;
  for (int rank : rank_of_stage) made.rank_of.data[s++] = static_cast<std::int16_t>(rank);
  return made;
}

}  // namespace chevron::tests
