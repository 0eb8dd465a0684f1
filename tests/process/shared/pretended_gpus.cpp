// Loaded by LD_PRELOAD before CUDA's runtime: answers for it, from PRETENDED_GPUS="status driver count", how many GPUs there are.
// It bears the driver's name, too: with a fourth number, 1, the last of the GPUs has a context of this process.
#include <cstdio>
#include <cstdlib>

namespace {

struct answer {
  int status = 0, driver = 0, count = 0, context = 0;
  answer() {
    char const* const told = std::getenv("PRETENDED_GPUS");
    if (told == nullptr || std::sscanf(told, "%d %d %d %d", &status, &driver, &count, &context) < 3) std::abort();
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

int cuDeviceGetCount(int* count) {
  *count = answer().count;
  return 0;
}

int cuDeviceGet(int* device, int number) {
  *device = number;
  return 0;
}

int cuDevicePrimaryCtxGetState(int device, unsigned* flags, int* active) {
  answer const known;
  *flags = 0;
  *active = device == known.count - 1 ? known.context : 0;
  return 0;
}
}
