// The messages of a machine without a GPU. Needs no GPU.
#include <chevron/transports/gpu/cuda_devices.hpp>
#include <chevron/transports/gpu/nccl_transport.hpp>

#include <cstdlib>
#include <optional>

namespace {

using namespace chevron;

/// Sets or unsets a variable of the environment for a while.
class variable {
 public:
  variable(char const* name, char const* value) : name_(name) {
    if (char const* const now = std::getenv(name)) before_ = now;
    value == nullptr ? ::unsetenv(name) : ::setenv(name, value, 1);
  }
  ~variable() { before_ ? ::setenv(name_, before_->c_str(), 1) : ::unsetenv(name_); }
  variable(variable const&) = delete;
  variable& operator=(variable const&) = delete;

 private:
  char const* name_;
  std::optional<std::string> before_;
};
struct visible_devices : variable {
  explicit visible_devices(char const* value) : variable("CUDA_VISIBLE_DEVICES", value) {}
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

TEST_CASE("a rank has the GPU that its program chose, or an error with the choice and the GPUs that there are") {
  visible_devices const all(nullptr);
  cuda_devices const two{.count = 2, .driver = 13000};
  CHECK(cuda_device_of(0, two, {.given = 1}) == 1);
  CHECK(cuda_device_of(7, two, {.given = 0}) == 0);
  CHECK(says(refusal(0, two, {.given = 2}), "no GPU for local rank 0: GPU 2 was asked for, and this process sees 2, numbered"));
  CHECK(says(refusal(1, two, {.given = -2}), "GPU -2 was asked for"));
  CHECK(says(refusal(0, {.status = cudaErrorNoDevice, .driver = 13000}, {.given = 0}), "sees no GPU"));
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

TEST_CASE("a process that used a GPU before the number of its queues could be set is refused on every way to a GPU") {
  constexpr char const* queues = "CUDA_DEVICE_MAX_CONNECTIONS";
  constexpr auto used_before = +[] { return true; };
  variable const unset(queues, nullptr);
  for (int i = 0; i < 2; ++i) {
    CHECK_THROWS_WITH_AS(chevron::detail::refuse_settings_that_hang(used_before),
                         doctest::Contains("this process has used a GPU before CUDA_DEVICE_MAX_CONNECTIONS could be set"),
                         usage_error);
    CHECK(std::getenv(queues) == nullptr);
  }
  chevron::detail::refuse_settings_that_hang(+[] { return false; });
  CHECK(std::string(std::getenv(queues)) == "32");
  CHECK_NOTHROW(chevron::detail::refuse_settings_that_hang(used_before));
}

TEST_CASE("settings under which ranks would hang are refused on every way to a GPU, with reason and remedy") {
  struct {
    char const *name, *value, *says;
  } const refused[] = {
      {"CUDA_DEVICE_MAX_CONNECTIONS", "8", "CUDA_DEVICE_MAX_CONNECTIONS=8 lets streams wait for each other, and so ranks"},
      {"CUDA_LAUNCH_BLOCKING", "1", "CUDA_LAUNCH_BLOCKING=1 has the host wait"},
      {"NCCL_LAUNCH_ORDER_IMPLICIT", "1", "NCCL_LAUNCH_ORDER_IMPLICIT=1 has the host wait"},
      {"NCCL_COMM_ID", "10.0.0.1:4000", "NCCL_COMM_ID=10.0.0.1:4000 gives all of a rank's communicators one address"},
      {"PYTORCH_NO_CUDA_MEMORY_CACHING", "1", "PYTORCH_NO_CUDA_MEMORY_CACHING=1 has the allocator give memory back"},
      {"PYTORCH_NO_CUDA_MEMORY_CACHING", "0", "PYTORCH_NO_CUDA_MEMORY_CACHING=0 has the allocator give memory back"},
      {"PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True,garbage_collection_threshold:0.8", "Remedy: leave that setting out"},
      {"PYTORCH_ALLOC_CONF", "garbage_collection_threshold:0.8", "Remedy: leave that setting out"},
  };
  for (auto const& [name, value, words] : refused) {
    CAPTURE(name);
    variable const set(name, value);
    for (auto const& way : {+[] { (void)look_for_cuda_devices(); }, +[] { (void)look_for_cuda_devices_before_fork(); },
                            +[] { (void)gpu_of(0, {.device = 0}); }}) {
      std::string said;
      try {
        way();
      } catch (usage_error const& e) {
        said = e.what();
      }
      CHECK_MESSAGE(says(said, words), said);
    }
  }
  variable const allowed("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True");
  variable const off("CUDA_LAUNCH_BLOCKING", "0");
  CHECK_NOTHROW((void)look_for_cuda_devices());
}
