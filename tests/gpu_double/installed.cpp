// For programs with a main of their own: the double is there before it begins.
#include "gpu_double/double.hpp"

namespace {
bool const installed = [] {
  gpu_double::install();
  return true;
}();
}  // namespace
