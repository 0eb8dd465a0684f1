#pragma once

#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include <cuda_runtime_api.h>

#include <c10/core/Device.h>
#include <c10/cuda/CUDAFunctions.h>

#include <chevron/jobs/process_settings.hpp>
#include <chevron/run/core/error.hpp>

/// \file
/// Finds the GPUs that this process may use and the GPU of a rank, or the reason why there is none.

namespace chevron {

/// The answer of CUDA's runtime to a query for GPUs.
struct cuda_devices {
  int count = 0;   ///< GPUs that CUDA_VISIBLE_DEVICES leaves
  int status = 0;  ///< a `cudaError_t`
  int driver = 0;  ///< newest CUDA version that the driver supports, 1000 × major + 10 × minor; 0: no driver
};

namespace detail {

/// Whether this process has a context on a GPU, which the first kernel or allocation creates. Queries the driver only if the
/// driver is loaded.
inline bool has_cuda_context() {
  void* const driver = ::dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
  if (driver == nullptr) return false;
  auto const function = [&]<class... A>(int (*&to)(A...), char const* name) {
    to = reinterpret_cast<int (*)(A...)>(::dlsym(driver, name));
    return to != nullptr;
  };
  // CUdevice and CUresult are integers; 0 is success.
  int (*count_of)(int*) = nullptr;
  int (*get)(int*, int) = nullptr;
  int (*state_of)(int, unsigned*, int*) = nullptr;
  bool found = false;
  if (function(count_of, "cuDeviceGetCount") && function(get, "cuDeviceGet") &&
      function(state_of, "cuDevicePrimaryCtxGetState")) {
    int count = 0;
    if (count_of(&count) != 0) count = 0;  // CUDA is not initialised
    for (int i = 0; i < count && !found; ++i) {
      int device = 0, active = 0;
      unsigned flags = 0;
      found = get(&device, i) == 0 && state_of(device, &flags, &active) == 0 && active != 0;
    }
  }
  ::dlclose(driver);
  return found;
}

/// Refuses environment variables under which ranks would wait for each other for ever; sets the number of queues if unset.
///
/// A GPU receives the work of its streams through queues: eight, or as many as the environment sets before CUDA starts, at most
/// 32. Work in one queue runs in order: two ranks hang if each has its receive from the other rank queued before its send to
/// the other rank. Ranks also hang if each kernel, receives included, blocks the host, or if freeing memory waits for all work
/// of a GPU, receives included.
/// \param has_context returns whether this process has a context: CUDA has then already read the number of queues
/// \throws usage_error with the setting, the reason and the remedy
inline void refuse_settings_that_hang(bool (*has_context)() = has_cuda_context) {
  constexpr char const* queues = device_queues;
  if (std::getenv(queues) == nullptr && has_context()) {
    throw usage_error(std::string("this process has used a GPU before ") + queues +
                      " could be set, so that streams wait for each other, and ranks for each other for ever. Remedy: " + queues +
                      "=32 in the environment, or look_for_cuda_devices() before anything else is done on a GPU");
  }
  if (std::getenv(queues) == nullptr) ask_for_device_queues();
  struct setting {
    char const* name;
    bool (*hangs)(char const* value);
    char const* why;
    char const* remedy;
  };
  constexpr auto is_on = [](char const* value) { return std::atoi(value) != 0; };
  constexpr auto is_set = [](char const*) { return true; };  // NCCL and LibTorch ask whether the variable exists
  constexpr auto collects = [](char const* value) { return std::strstr(value, "garbage_collection_threshold") != nullptr; };
  constexpr char const* in_order = "has the host wait for messages in the order of its calls";
  constexpr char const* frees = "has the allocator give memory back in the middle of a step, which waits for receives";
  constexpr setting refused[] = {
      {"CUDA_LAUNCH_BLOCKING", is_on, in_order, "unset it"},
      {"NCCL_LAUNCH_ORDER_IMPLICIT", is_on, in_order, "unset it"},
      {"NCCL_COMM_ID", is_set, "gives all of a rank's communicators one address", "unset it"},
      {"PYTORCH_NO_CUDA_MEMORY_CACHING", is_set, frees, "unset it"},
      {"PYTORCH_CUDA_ALLOC_CONF", collects, frees, "leave that setting out"},
      {"PYTORCH_ALLOC_CONF", collects, frees, "leave that setting out"},
  };
  auto const refuse = [](char const* name, char const* value, char const* why, char const* remedy) {
    throw usage_error(std::string(name) + "=" + value + " " + why + ", and so ranks for each other for ever. Remedy: " + remedy);
  };
  if (char const* const value = std::getenv(queues); std::atoi(value) < 32)
    refuse(queues, value, "lets streams wait for each other", "unset it, or give 32");
  for (setting const& s : refused) {
    char const* const value = std::getenv(s.name);
    if (value != nullptr && s.hangs(value)) refuse(s.name, value, s.why, s.remedy);
  }
}

}  // namespace detail

/// Queries CUDA in this process, which must not fork afterwards: CUDA does not work in children of a process that has used CUDA.
/// \throws usage_error as `refuse_settings_that_hang`
inline cuda_devices look_for_cuda_devices() {
  detail::refuse_settings_that_hang();  // before CUDA's first use, which reads the number of queues
  cuda_devices out;
  if (cudaDriverGetVersion(&out.driver) != cudaSuccess) out.driver = 0;
  out.status = cudaGetDeviceCount(&out.count);
  if (out.status != cudaSuccess) {
    out.count = 0;
    (void)cudaGetLastError();  // clears the error, which the next check would report
  }
  return out;
}

/// Queries CUDA in a child process, so that this process can still fork. To be called while this process has one thread.
/// \throws usage_error as `refuse_settings_that_hang`, and if no pipe can be opened
inline cuda_devices look_for_cuda_devices_before_fork() {
  detail::refuse_settings_that_hang();
  cuda_devices out{.status = cudaErrorUnknown};
  int ends[2];
  if (::pipe(ends) != 0) {
    throw usage_error(std::string("no pipe to a process that looks for GPUs: ") + std::strerror(errno) +
                      ". Remedy: a higher limit of open files (ulimit -n)");
  }
  std::fflush(nullptr);
  pid_t const child = ::fork();
  if (child == 0) {
    cuda_devices const found = look_for_cuda_devices();
    ::_exit(::write(ends[1], &found, sizeof found) == sizeof found ? 0 : 1);
  }
  ::close(ends[1]);
  cuda_devices told;
  if (child > 0 && ::read(ends[0], &told, sizeof told) == sizeof told) out = told;
  ::close(ends[0]);
  while (child > 0 && ::waitpid(child, nullptr, 0) < 0 && errno == EINTR) {
  }
  return out;
}

namespace detail {

inline std::string cuda_version_text(int number) {
  return std::to_string(number / 1000) + "." + std::to_string(number % 1000 / 10);
}

/// Returns ` with CUDA_VISIBLE_DEVICES=0,1` if that variable is set: this process sees only the GPUs in the list, which may be
/// empty.
inline std::string with_visible_devices() {
  char const* const value = std::getenv("CUDA_VISIBLE_DEVICES");
  return value == nullptr ? "" : std::string(" with CUDA_VISIBLE_DEVICES=") + (*value == 0 ? "(empty)" : value);
}

}  // namespace detail

/// Returns the reason why a query found no GPU, and the remedy, as the end of a sentence:
/// "there is no NVIDIA driver …. Remedy: …". Empty if a GPU was found.
/// \param found result of `look_for_cuda_devices`
inline std::string why_no_cuda_device(cuda_devices const& found) {
  if (found.count > 0) return "";
  auto const visible = detail::with_visible_devices();
  if (found.status == cudaErrorInsufficientDriver && found.driver == 0)
    return "there is no NVIDIA driver on this machine (no libcuda.so.1). Remedy: a machine with GPUs and their driver";
  if (found.status == cudaErrorInsufficientDriver) {
    return "the NVIDIA driver of this machine is for CUDA " + detail::cuda_version_text(found.driver) +
           ", this program for CUDA " + detail::cuda_version_text(CUDART_VERSION) +
           ". Remedy: a newer driver, or a LibTorch built for CUDA " + std::to_string(found.driver / 1000);
  }
  if (found.status == cudaErrorStubLibrary)
    return "the libcuda.so.1 that was found is a stub, made to link with. Remedy: take its folder out of LD_LIBRARY_PATH";
  if (found.status == cudaErrorNoDevice || found.status == cudaSuccess) {
    return "the NVIDIA driver sees no GPU" + visible + ". Remedy: " +
           (visible.empty() ? "see whether nvidia-smi lists one"
                            : "numbers that nvidia-smi lists, or unset CUDA_VISIBLE_DEVICES");
  }
  return "CUDA cannot use the GPUs of this machine" + visible + ": " +
         cudaGetErrorString(static_cast<cudaError_t>(found.status)) + " (" + std::to_string(found.status) +
         "). Remedy: see whether nvidia-smi lists them without an error";
}

/// The division of a machine's GPUs among its ranks.
struct cuda_sharing {
  bool own_view = false;  ///< whether a process may see its own GPU alone, as under srun --gpus-per-task=1
  bool share = false;     ///< whether ranks may share a GPU
  int given = -1;         ///< the caller's choice among visible GPUs; -1: by the rank's number on its machine
};

/// Returns the GPU of a rank, chosen by the caller or by the rank's number on its machine.
/// \param local_rank `job::local_rank` \param found result of `look_for_cuda_devices`
/// \returns the GPU's number among the GPUs that CUDA_VISIBLE_DEVICES leaves
/// \throws usage_error if no GPU is left for the rank, or `how.given` does not exist: with the rank, the reason and the remedy
/// (exit code 2)
inline int cuda_device_of(int local_rank, cuda_devices const& found, cuda_sharing const& how = {}) {
  auto const rank = "no GPU for local rank " + std::to_string(local_rank) + ": ";
  if (auto const why = why_no_cuda_device(found); !why.empty()) throw usage_error(rank + why);
  if (how.given >= found.count || how.given < -1) {
    throw usage_error(rank + "GPU " + std::to_string(how.given) + " was asked for, and this process sees " +
                      std::to_string(found.count) + detail::with_visible_devices() +
                      ", numbered from 0. Remedy: one of these numbers, or -1 for the GPU of the local rank's number");
  }
  if (how.given >= 0) return how.given;
  if (local_rank < found.count) return local_rank;
  if (how.share) return local_rank % found.count;
  auto const visible = detail::with_visible_devices();
  if (how.own_view && found.count == 1 && !visible.empty()) return 0;
  throw usage_error(rank + "there " + (found.count == 1 ? "is 1 GPU" : "are " + std::to_string(found.count) + " GPUs") + visible +
                    ". Remedy: at most " + std::to_string(found.count) + (found.count == 1 ? " rank" : " ranks") +
                    " on this machine");
}

namespace detail {

/// Returns the GPU on which a rank computes, and makes it this thread's current GPU.
/// \param local_rank `job::local_rank`
/// \throws usage_error as `cuda_device_of`, and for settings under which ranks would hang
inline at::Device rank_gpu(int local_rank, cuda_sharing const& how) {
  int const index = cuda_device_of(local_rank, look_for_cuda_devices(), how);
  at::Device const device(at::kCUDA, static_cast<c10::DeviceIndex>(index));
  c10::cuda::set_device(device.index());
  return device;
}

}  // namespace detail
}  // namespace chevron
