#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>

#include <chevron/base/no_size_signal.hpp>
#include <chevron/base/random_digits.hpp>

/// \file
/// Memory shared by processes of one machine: a file without a name in any file system, so no process leaves the file behind.

namespace chevron::detail {

/// A file in memory and its mapping. Pages that were never written use no memory.
class shared_file {
 public:
  /// Creates and maps a file. \returns null if the system refuses the file or its size (`ulimit -f` applies here, too)
  static std::unique_ptr<shared_file> make(std::size_t bytes) {
    std::string const name = "chevron-" + random_digits(4);
    int const file = ::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (file < 0) return nullptr;
    auto out = std::unique_ptr<shared_file>(new shared_file);
    out->file_ = file;
    out->name_ = name;
    no_size_signal const as_an_error;
    // Sealed, since a process that reads beyond the end of a shortened file would be killed.
    bool const good = ::ftruncate(file, static_cast<off_t>(bytes)) == 0 &&
                      ::fcntl(file, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0 && out->map(bytes);
    return good ? std::move(out) : nullptr;
  }

  /// Opens and maps another rank's file. \param address by `address` of that rank
  /// \returns null unless the file is on this machine and may be opened by this process
  static std::unique_ptr<shared_file> open(std::string const& address) {
    std::istringstream in(address);
    std::string machine, process, number, name;
    if (!(in >> machine >> process >> number >> name) || machine != this_machine()) return nullptr;
    std::filesystem::path const path = "/proc/" + process + "/fd/" + number;
    std::error_code problem;
    // The random name identifies the file; in another container the same process and number may be any other file.
    if (std::filesystem::read_symlink(path, problem) != "/memfd:" + name + " (deleted)" || problem) return nullptr;
    auto out = std::unique_ptr<shared_file>(new shared_file);
    out->file_ = ::open(path.c_str(), O_RDWR | O_CLOEXEC);
    struct stat about {};
    if (out->file_ < 0 || ::fstat(out->file_, &about) != 0) return nullptr;
    if (!out->map(static_cast<std::size_t>(about.st_size))) return nullptr;
    out->close();
    return out;
  }

  ~shared_file() {
    if (memory_ != nullptr) ::munmap(memory_, bytes_);
    close();
  }
  shared_file(shared_file const&) = delete;
  shared_file& operator=(shared_file const&) = delete;

  /// The address for `open`, valid until this rank closes the file.
  std::string address() const {
    return this_machine() + " " + std::to_string(::getpid()) + " " + std::to_string(file_) + " " + name_;
  }
  /// Closes the file: no further process can open it; mappings are unchanged.
  void close() {
    if (file_ >= 0) ::close(std::exchange(file_, -1));
  }

  std::byte* memory() const { return memory_; }
  std::size_t bytes() const { return bytes_; }

 private:
  shared_file() = default;

  bool map(std::size_t bytes) {
    void* const at = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file_, 0);
    if (at == MAP_FAILED) return false;
    memory_ = static_cast<std::byte*>(at);
    bytes_ = bytes;
    return true;
  }

  /// The boot id, drawn when the machine started.
  static std::string this_machine() {
    std::ifstream in("/proc/sys/kernel/random/boot_id");
    std::string id;
    in >> id;
    return id.empty() ? "unknown" : id;
  }

  int file_ = -1;
  std::string name_;
  std::byte* memory_ = nullptr;
  std::size_t bytes_ = 0;
};

}  // namespace chevron::detail
