#include "gpu_double/double.hpp"

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "gpu/gpus.hpp"

/// Tests on GPUs call this first: the double always has enough.
bool gpus::at_least(int) { return true; }

int main(int argc, char** argv) {
  gpu_double::install();
  return doctest::Context(argc, argv).run();
}
