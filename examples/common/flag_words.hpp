#pragma once

#include <string>

/// \file
/// Errors of the library in the words of a program's user, who has flags and no C++.

namespace chevron::train {

/// A sentence with the program's flags in place of options of a trainer: `trainer_options::learning_rate` becomes
/// `--learning-rate`. Remedies for which the program has no flag are left out.
std::string in_flags(std::string sentence);

}  // namespace chevron::train
