#pragma once

#include <cstddef>
#include <functional>
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

/// A value that two ranks gave differently.
struct inconsistency {
  std::string name;                ///< of the value
  int first_rank, other_rank;      ///< the ranks
  std::string of_first, of_other;  ///< their values
};

/// Compares the values of all ranks. Collective; every rank throws the same error.
/// \param words returns cause and remedy of a difference, from arguments that are equal on all ranks; empty, or an empty result:
/// the general words
/// \returns the rows of all ranks, `name: value`
/// \throws preflight_error naming the first value that differs, the two ranks and their values
inline std::vector<std::string> check_consistency(transport& comm, named_values const& mine,
                                                  std::function<std::string(inconsistency const&)> const& words = {}) {
  std::vector<std::string> all = comm.all_gather_text(mine.text());
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
      error_context const here{comm.topology().global_rank, static_cast<int>(r), -1, "preflight", {static_cast<int>(first.rank)}};
      std::size_t const end = row.find(": ");
      std::string const special = words ? words({row.substr(0, end), static_cast<int>(first.rank), static_cast<int>(r),
                                                 first.row.substr(end + 2), row.substr(end + 2)})
                                        : std::string();
      if (!special.empty()) throw preflight_error(special, here);
      throw preflight_error("rank " + std::to_string(r) + " has `" + row + "` where rank " + std::to_string(first.rank) +
                                " has `" + first.row + "`: start all ranks with the same program and options",
                            here);
    }
  }
  return all;
}

}  // namespace chevron
