#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

#include <nlohmann/json.hpp>

/// \file
/// A reader of Python's pickle format for plain data: numbers, texts, lists, tuples and dictionaries.

namespace plan_program {

/// A pickle that is refused; the message names the opcode or the value, and its byte offset.
struct pickle_error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// Limits of the value that a pickle expands to. A pickle may refer to one list many times: without limits a few hundred bytes
/// could expand to any size.
struct pickle_limits {
  std::size_t values = std::size_t{1} << 23;      ///< numbers, texts, lists and dictionaries together
  std::size_t text_bytes = std::size_t{1} << 29;  ///< bytes of all texts together
  int depth = 64;                                 ///< lists inside lists
};

/// Reads a pickle of protocol 2 to 5 (Python's pickletools describes the opcodes). Tuples become arrays, bytes become texts, and
/// integer keys of dictionaries become texts. No opcode that names or calls a Python object is accepted, so no code can run.
/// \param bytes  the whole file
/// \param limits of the result's size
/// \throws pickle_error for another opcode, a file that ends early or goes on after its end, an unknown memo entry, an integer
///         beyond 64 bits, and a value beyond the limits
nlohmann::json read_pickle(std::string_view bytes, pickle_limits const& limits = {});

}  // namespace plan_program
