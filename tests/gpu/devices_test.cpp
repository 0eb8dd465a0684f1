// What is said where there is no GPU. Needs none.
#include <chevron/run/cuda/cuda_devices.hpp>

#include <cstdlib>
#include <optional>

namespace {

using namespace chevron;

/// Sets or unsets CUDA_VISIBLE_DEVICES for a while.
class visible_devices {
 public:
  explicit visible_devices(char const* value) {
    if (char const* const now = std::getenv(name)) before_ = now;
    value == nullptr ? ::unsetenv(name) : ::setenv(name, value, 1);
  }
  ~visible_devices() { before_ ? ::setenv(name, before_->c_str(), 1) : ::unsetenv(name); }
  visible_devices(visible_devices const&) = delete;
  visible_devices& operator=(visible_devices const&) = delete;

 private:
  static constexpr char const* name = "CUDA_VISIBLE_DEVICES";
  std::optional<std::string> before_;
};

bool says(std::string const& sentence, std::string const& words) { return sentence.find(words) != std::string::npos; }

std::string refusal(int local_rank, cuda_devices const& found, cuda_sharing const& how = {}) {
  try {
    cuda_device_of(local_rank, found, how);
  } catch (usage_error const& e) {
    CHECK(e.code() == 2);
    CHECK(says(e.what(), "Remedy: "));
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("each way to have no GPU has a sentence of its own, with a remedy") {
  visible_devices const all(nullptr);
  CHECK(says(why_no_cuda_device({.status = cudaErrorInsufficientDriver}), "there is no NVIDIA driver on this machine"));
  auto const old = why_no_cuda_device({.status = cudaErrorInsufficientDriver, .driver = 11080});
  CHECK(says(old, "is for CUDA 11.8, this program for CUDA " + std::to_string(CUDART_VERSION / 1000) + "."));
  CHECK(says(old, "a LibTorch built for CUDA 11"));
  CHECK(says(why_no_cuda_device({.status = cudaErrorStubLibrary}), "LD_LIBRARY_PATH"));
  CHECK(says(why_no_cuda_device({.status = cudaErrorNoDevice, .driver = 13000}), "sees no GPU. Remedy: see whether nvidia-smi"));
  CHECK(says(why_no_cuda_device({.status = cudaErrorSystemNotReady, .driver = 13000}), "(802). Remedy: "));
  CHECK(why_no_cuda_device({.count = 1, .driver = 13000}).empty());
  visible_devices const none("");
  CHECK(says(why_no_cuda_device({.status = cudaErrorNoDevice, .driver = 13000}), "CUDA_VISIBLE_DEVICES=(empty). Remedy: "));
}

TEST_CASE("a rank has the GPU of its number on the machine") {
  visible_devices const all(nullptr);
  cuda_devices const two{.count = 2, .driver = 13000};
  CHECK(cuda_device_of(0, two) == 0);
  CHECK(cuda_device_of(1, two) == 1);
  CHECK(says(refusal(2, two), "no GPU for local rank 2: there are 2 GPUs. Remedy: at most 2 ranks on this machine"));
  CHECK(cuda_device_of(2, two, {.share = true}) == 0);
  CHECK(says(refusal(0, {.status = cudaErrorInsufficientDriver}, {.share = true}), "there is no NVIDIA driver"));
}

TEST_CASE("a process that sees one GPU alone takes it, if its launcher may have given it that one") {
  visible_devices const one("3");
  cuda_devices const seen{.count = 1, .driver = 13000};
  CHECK(cuda_device_of(3, seen, {.own_view = true}) == 0);
  CHECK(says(refusal(3, seen), "there is 1 GPU with CUDA_VISIBLE_DEVICES=3. Remedy: at most 1 rank on this machine"));
  visible_devices const all(nullptr);
  CHECK(says(refusal(3, seen, {.own_view = true}), "there is 1 GPU. Remedy"));
}

TEST_CASE("a child that looks for GPUs finds what this process finds") {
  auto const asked = look_for_cuda_devices_before_fork();
  auto const seen = look_for_cuda_devices();
  CHECK(asked.count == seen.count);
  CHECK(asked.status == seen.status);
  CHECK(asked.driver == seen.driver);
}
