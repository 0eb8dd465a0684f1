#pragma once

/// \file
/// What tests that need GPUs ask first.

namespace gpus {

/// True with at least so many GPUs. Else says why there are not; where no test had what it asked for, the program ends with 77:
/// CTest then counts it as skipped.
///
///     TEST_CASE("…") { if (!gpus::at_least(1)) return; … }
bool at_least(int count);

}  // namespace gpus
