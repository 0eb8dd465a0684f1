#pragma once

#include <functional>
#include <string>

#include "program.hpp"

namespace differential {

enum class verdict {
  equal,      ///< in every bit
  as_cut,     ///< to the plain loop that cuts its graph where the stages are (limits.hpp)
  refused,    ///< as it has to be, or may be
  senseless,  ///< the plain loop fails, too: not a program that means something
  differs,    ///< a finding: other bits
  fails,      ///< a finding: an error where the plain loop has none
  hangs,      ///< a finding: neither came to an end in time
  dies        ///< a finding: the process was ended by a signal
};

char const* name_of(verdict v);
bool is_finding(verdict v);

struct judgement {
  verdict what = verdict::equal;
  std::string words;
};

/// Runs a program both ways, in this process.
/// \param folder for programs whose ranks are processes
/// \param begun called before the plain loop and before Chevron run, so that the parent knows which of them died
judgement judge(program const& p, std::string const& folder, std::function<void(char const*)> const& begun);

}  // namespace differential
