#pragma once

/// \file
/// Asks for GPUs: called first in tests that need them.

namespace gpus {

/// True with at least `count` GPUs. Otherwise prints the reason; if no test had enough GPUs, the program ends with 77, which
/// CTest counts as skipped.
///
///     TEST_CASE("…") { if (!gpus::at_least(1)) return; … }
bool at_least(int count);

}  // namespace gpus
