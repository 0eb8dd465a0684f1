#pragma once

#include <cstddef>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>

/// \file
/// Compares, before the first step, values that must be equal on all ranks: in a step, a difference would corrupt results or
/// make ranks hang.

namespace chevron {

/// One rank's values for the comparison. Ranks that add the same name must add the same value.
class named_values {
 public:
  /// Adds a value. \param name without `: ` \param value without a line break
  void add(std::string name, std::string value) { text_ += std::move(name) + ": " + std::move(value) + "\n"; }
  std::string const& text() const { return text_; }

 private:
  std::string text_;
};

/// Compares the values of all ranks. Collective; every rank throws the same error.
/// \throws preflight_error naming the first value that differs, the two ranks and their values
inline void check_consistency(transport& comm, named_values const& mine) {
  std::vector<std::string> const all = comm.all_gather_text(mine.text());
  struct said {
    std::string row;
    std::size_t rank;
  };
  std::unordered_map<std::string, said> known;
  for (std::size_t r = 0; r < all.size(); ++r) {
    std::istringstream rows(all[r]);
    for (std::string row; std::getline(rows, row);) {
      said const& first = known.try_emplace(row.substr(0, row.find(": ")), said{row, r}).first->second;
      if (first.row == row) continue;
      throw preflight_error("rank " + std::to_string(r) + " has `" + row + "` where rank " + std::to_string(first.rank) +
                                " has `" + first.row + "`: start all ranks with the same program and options",
                            {comm.topology().global_rank, static_cast<int>(r), -1, "preflight"});
    }
  }
}

}  // namespace chevron
