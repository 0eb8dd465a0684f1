#pragma once

// Checks the output of a failing job: one rank prints the whole message, each other rank a short line that names that rank.

#include <algorithm>
#include <sstream>
#include <string>
#include <vector>

namespace one_message {

/// Whether a line is that of a rank: `rank 2, step 5: …`, or with the rank's place in parentheses.
inline bool is_of(std::string const& line, int rank) {
  std::string const name = "rank " + std::to_string(rank);
  return line.starts_with(name + ",") || line.starts_with(name + ":") || line.starts_with(name + " (replica ") ||
         line.starts_with(name + " ended: ");
}

/// The fault in the lines of a failing job; empty if one rank prints the whole message, and each other rank prints one short line
/// with its own cause and the first rank's number.
/// \param output of all ranks \param ranks those that print \param whole words of the whole message
/// \param cause the words of a rank's short line: `stopped, as rank 2 is gone`
template <class Cause>
std::string fault(std::string const& output, std::vector<int> const& ranks, std::string const& whole, Cause const& cause) {
  int speaker = -1, speaking = 0;
  std::vector<std::string> lines;
  std::istringstream in(output);
  for (std::string line; std::getline(in, line);) {
    lines.push_back(line);
    if (line.find(whole) == std::string::npos || line.ends_with("'s message says more")) continue;
    for (int const rank : ranks) {
      if (!is_of(line, rank)) continue;
      speaker = rank;
      ++speaking;
    }
  }
  if (speaking != 1) return std::to_string(speaking) + " whole messages with `" + whole + "` in:\n" + output;
  for (int const rank : ranks) {
    if (rank == speaker) continue;
    std::string const end = ": " + cause(rank) + "; rank " + std::to_string(speaker) + "'s message says more";
    auto const found = std::count_if(lines.begin(), lines.end(),
                                     [&](std::string const& line) { return is_of(line, rank) && line.ends_with(end); });
    if (found != 1)
      return std::to_string(found) + " lines of rank " + std::to_string(rank) + " with `" + end + "` in:\n" + output;
  }
  auto const brief =
      std::count_if(lines.begin(), lines.end(), [](std::string const& line) { return line.ends_with("'s message says more"); });
  if (brief + 1 != static_cast<long>(ranks.size())) return std::to_string(brief) + " short lines in:\n" + output;
  return "";
}
inline std::string fault(std::string const& output, std::vector<int> const& ranks, std::string const& whole,
                         std::string const& cause) {
  return fault(output, ranks, whole, [&](int) { return cause; });
}

/// The numbers of a job's ranks, except one.
inline std::vector<int> all_but(int one, int world) {
  std::vector<int> out;
  for (int rank = 0; rank < world; ++rank) {
    if (rank != one) out.push_back(rank);
  }
  return out;
}

}  // namespace one_message
