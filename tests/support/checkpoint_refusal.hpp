#pragma once

// The error with which a checkpoint, or a file of weights, is refused.

#include <string>
#include <vector>

#include <chevron/run/core/error.hpp>

#include <doctest/doctest.h>

namespace checkpoint_refusal {

/// \returns its message; the exit code is checked
template <class Work>
std::string failure_of(Work const& what) {
  try {
    what();
  } catch (chevron::error const& e) {
    CHECK(e.code() == static_cast<int>(chevron::exit_code::checkpoint));
    return e.what();
  }
  return "nothing was thrown";
}

inline void check_says(std::string const& text, std::vector<char const*> const& words) {
  CAPTURE(text);
  for (char const* word : words) {
    CAPTURE(word);
    CHECK(text.find(word) != std::string::npos);
  }
}

}  // namespace checkpoint_refusal
