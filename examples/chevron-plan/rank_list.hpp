#pragma once

#include <string>
#include <vector>

/// \file
/// Ranks in words.

namespace plan_program {

/// `rank 1`, `ranks 0, 1 and 3`, `ranks 0 to 7 and 9`; of many ranks the first ones: `ranks 0, 2, 4 and 90 more`.
/// \param ranks ascending; four or more in succession are a range
std::string rank_list(std::vector<int> const& ranks);

}  // namespace plan_program
