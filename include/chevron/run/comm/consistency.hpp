#pragma once

#include <cstddef>
#include <string>
#include <utility>
#include <vector>

#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>

/// \file
/// Compares values that must be equal on all ranks, before the first step depends on them: later a difference would corrupt
/// results or hang ranks.

namespace chevron {

/// The values of one rank for the comparison. Ranks that add the same name must add the same value.
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
    std::string name, value;
    std::size_t rank;
  };
  std::vector<said> known;
  for (std::size_t r = 0; r < all.size(); ++r) {
    std::size_t hint = 0;  // ranks mostly have the same lines in the same order
    for (std::size_t at = 0; at < all[r].size();) {
      std::size_t const end = all[r].find('\n', at);
      std::string const row = all[r].substr(at, end - at);
      at = end + 1;
      std::size_t const colon = row.find(": ");
      std::string const name = row.substr(0, colon), value = row.substr(colon + 2);
      std::size_t found = known.size();
      for (std::size_t tried = 0; tried < known.size() && found == known.size(); ++tried) {
        std::size_t const k = (hint + tried) % known.size();
        if (known[k].name == name) found = k;
      }
      if (found == known.size()) {
        known.push_back({name, value, r});
      } else if (known[found].value != value) {
        throw preflight_error("rank " + std::to_string(r) + " has `" + row + "` where rank " + std::to_string(known[found].rank) +
                                  " has `" + known[found].name + ": " + known[found].value +
                                  "`: start all ranks with the same program and options",
                              {comm.topology().global_rank, static_cast<int>(r), -1, "preflight"});
      }
      hint = found + 1;
    }
  }
}

}  // namespace chevron
