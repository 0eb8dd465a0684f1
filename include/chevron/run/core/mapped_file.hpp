#pragma once

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <system_error>
#include <utility>

/// \file
/// Maps a file into memory: a page uses memory once it is read, until it is released.

namespace chevron::detail {

/// A regular file mapped for reading. The file must not shrink while the mapping lives, since the kernel ends a process that
/// reads beyond the end of the file: call `still_whole` before reading a longer piece.
class mapped_file {
 public:
  /// Maps a file. \throws std::filesystem::filesystem_error if it cannot be opened or mapped, or is no regular file
  explicit mapped_file(std::filesystem::path file) : path_(std::move(file)) {
    opened_ = ::open(path_.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    struct stat about {};
    if (opened_ < 0 || ::fstat(opened_, &about) != 0) fail(errno);
    if (!S_ISREG(about.st_mode)) fail(S_ISDIR(about.st_mode) ? EISDIR : EINVAL);
    size_ = static_cast<std::size_t>(about.st_size);
    if (size_ == 0) return;
    void* const at = ::mmap(nullptr, size_, PROT_READ, MAP_SHARED, opened_, 0);
    if (at == MAP_FAILED) fail(errno);
    begin_ = static_cast<std::byte const*>(at);
  }
  mapped_file(mapped_file const&) = delete;
  mapped_file& operator=(mapped_file const&) = delete;
  ~mapped_file() {
    if (begin_ != nullptr) ::munmap(const_cast<std::byte*>(begin_), size_);
    if (opened_ >= 0) ::close(opened_);
  }

  std::filesystem::path const& path() const { return path_; }
  std::size_t size() const { return size_; }
  /// The first byte; null for an empty file.
  std::byte const* data() const { return begin_; }

  /// Whether the file still has at least the size with which it was mapped.
  bool still_whole() const {
    struct stat about {};
    return ::fstat(opened_, &about) == 0 && static_cast<std::size_t>(about.st_size) >= size_;
  }

  /// Releases the pages of these bytes, which then no longer count as this process's memory; a later read loads them again.
  void give_back(std::size_t first, std::size_t count) const {
    auto const page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    std::size_t const begin = first / page * page;
    if (begin_ != nullptr && count > 0)
      ::madvise(const_cast<std::byte*>(begin_ + begin), first + count - begin, MADV_DONTNEED);  // a hint, which may fail
  }

 private:
  [[noreturn]] void fail(int fault) {
    if (opened_ >= 0) ::close(opened_);
    throw std::filesystem::filesystem_error("cannot be mapped", path_, std::error_code(fault, std::generic_category()));
  }

  std::filesystem::path path_;
  int opened_ = -1;
  std::size_t size_ = 0;
  std::byte const* begin_ = nullptr;
};

}  // namespace chevron::detail
