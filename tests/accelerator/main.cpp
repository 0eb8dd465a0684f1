#include "accelerator/device.hpp"
#include "accelerator/fallback.hpp"

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

int main(int argc, char** argv) {
  accelerator::install();
  accelerator::install_operators();
  return doctest::Context(argc, argv).run();
}
