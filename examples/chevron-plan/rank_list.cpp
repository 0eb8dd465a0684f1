#include "rank_list.hpp"

#include <algorithm>

namespace plan_program {

std::string rank_list(std::vector<int> const& ranks) {
  constexpr std::size_t most = 16, least_range = 4;
  std::vector<std::string> parts;
  std::size_t next = 0;
  while (next < ranks.size() && parts.size() < most) {
    std::size_t end = next + 1;
    while (end < ranks.size() && ranks[end] == ranks[end - 1] + 1) ++end;
    if (end - next >= least_range) {
      parts.push_back(std::to_string(ranks[next]) + " to " + std::to_string(ranks[end - 1]));
      next = end;
    } else {
      parts.push_back(std::to_string(ranks[next++]));
    }
  }
  if (next < ranks.size()) parts.push_back(std::to_string(ranks.size() - next) + " more");
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < parts.size(); ++i) out += (i == 0 ? "" : i + 1 == parts.size() ? " and " : ", ") + parts[i];
  return out;
}

}  // namespace plan_program
