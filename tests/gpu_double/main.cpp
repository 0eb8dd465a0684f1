#include "gpu_double/double.hpp"

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

int main(int argc, char** argv) {
  gpu_double::install();
  return doctest::Context(argc, argv).run();
}
