#include <chevron/transports/gpu/cuda_devices.hpp>

#include <cstdio>
#include <iostream>
#include <string>

#define DOCTEST_CONFIG_IMPLEMENT
#include <doctest/doctest.h>

#include "gpus.hpp"

namespace {
bool skipped = false;  // a test
bool tested = false;   // another one, on a GPU
}  // namespace

bool gpus::at_least(int count) {
  static chevron::cuda_devices const found = chevron::look_for_cuda_devices();
  if (found.count >= count) {
    tested = true;
    return true;
  }
  std::string why = chevron::why_no_cuda_device(found);
  if (why.empty()) why = "GPUs: " + std::to_string(found.count) + ", needed: " + std::to_string(count);
  std::printf("skipped: %s\n", why.c_str());
  skipped = true;
  return false;
}

int main(int argc, char** argv) {
  std::cout << std::unitbuf;  // a test that hangs is killed; earlier output must be readable
  int const failed = doctest::Context(argc, argv).run();
  return failed == 0 && skipped && !tested ? 77 : failed;
}
