// Loaded by LD_PRELOAD before CUDA's runtime: answers for it, from PRETENDED_GPUS="status driver count", how many GPUs there are.
#include <cstdio>
#include <cstdlib>

namespace {

struct answer {
  int status = 0, driver = 0, count = 0;
  answer() {
    char const* const told = std::getenv("PRETENDED_GPUS");
    if (told == nullptr || std::sscanf(told, "%d %d %d", &status, &driver, &count) != 3) std::abort();
  }
};

}  // namespace

extern "C" {

int cudaDriverGetVersion(int* version) {
  *version = answer().driver;
  return 0;
}

int cudaGetDeviceCount(int* count) {
  answer const known;
  *count = known.count;
  return known.status;
}
}
