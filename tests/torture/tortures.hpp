#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "apart.hpp"

/// \file
/// The kinds of torture besides faults at actions, and their results.

namespace torture {

/// One line of a table.
struct result {
  std::string name;
  long tried = 0;
  long refused = 0;   ///< with the right words, and nothing was changed
  long harmless = 0;  ///< it goes on as if nothing had happened
  long wrong = 0;     ///< anything else; told on stdout
  std::string note;   ///< for the table
};

/// In one line, as a process tells another.
std::string to_line(result const& r);
/// The results in a process's output, among other lines.
std::vector<result> results_in(std::string const& output);
/// The results of a process that has ended; a bad end is a wrong result itself. Prints all other lines of its output.
std::vector<result> results_of(std::string const& name, outcome const& of);

/// Checkpoints damaged in `count` ways, loaded again.
std::vector<result> damaged_checkpoints(std::size_t count, std::uint64_t seed);
/// Jobs that save after each step, killed at `count` random instants, and gone on with.
std::vector<result> killed_while_saving(std::size_t count, std::uint64_t seed, std::size_t processes);
/// Texts from outside, mutated and read, for so long.
std::vector<result> fuzz(double seconds, std::uint64_t seed, std::size_t processes);
/// Long runs of a small model: memory, descriptors, threads, and the same bits twice.
std::vector<result> soaks(long steps);

}  // namespace torture
