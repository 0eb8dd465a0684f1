#pragma once

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include <chevron/base/no_size_signal.hpp>
#include <chevron/base/random_digits.hpp>

/// \file
/// Writes files beside their paths and renames them, so that a path leads to the old file or to the whole new one, and no write
/// follows a symbolic link.

namespace chevron::detail {

/// The ending of a file that has not got its name yet: `NAME.0123456789abcdef.partial`.
inline constexpr char const* partial_ending = ".partial";

/// Returns the system's last error.
inline std::error_code last_fault() { return {errno, std::generic_category()}; }

/// A file that the constructor creates beside `path`, and that `give_name` renames to `path`.
///
/// The rename replaces an entry of the folder: a symbolic link at `path` is replaced by the new file, and its target is
/// unchanged; the other hard links of an old file keep the old content. Without `give_name`, the destructor removes the file.
class new_file {
 public:
  /// Creates the empty file, with the permissions of the regular file at `path` if there is one.
  /// \throws std::system_error if the folder is missing or cannot be written to
  explicit new_file(std::filesystem::path path)
      : path_(std::move(path)), partial_(path_.string() + "." + random_digits(2) + partial_ending) {
    opened_ = ::open(partial_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0666);
    if (opened_ < 0) throw std::system_error(last_fault());
    struct stat old {};
    if (::lstat(path_.c_str(), &old) == 0 && S_ISREG(old.st_mode)) (void)::fchmod(opened_, old.st_mode & 0777);
  }
  new_file(new_file&& other) noexcept
      : path_(std::move(other.path_)), partial_(std::exchange(other.partial_, {})), opened_(std::exchange(other.opened_, -1)) {}
  new_file& operator=(new_file&&) = delete;
  ~new_file() {
    if (opened_ >= 0) ::close(opened_);
    if (!partial_.empty()) ::unlink(partial_.c_str());
  }

  std::filesystem::path const& path() const { return path_; }
  /// The file's path before `give_name`, unlike the path of any other file; empty afterwards.
  std::filesystem::path partial() const { return partial_; }

  /// Appends bytes. \throws std::system_error if they cannot be written
  void write(void const* bytes, std::size_t count) {
    no_size_signal const as_an_error;
    auto const* from = static_cast<char const*>(bytes);
    while (count > 0) {
      ssize_t const written = ::write(opened_, from, count);
      if (written < 0 && errno == EINTR) continue;
      if (written < 0) throw std::system_error(last_fault());
      from += written;
      count -= static_cast<std::size_t>(written);
    }
  }
  /// Brings the bytes to the disk. \throws std::system_error if that fails
  void sync() {
    if (::fsync(opened_) != 0) throw std::system_error(last_fault());
  }
  /// Closes the file. \throws std::system_error if bytes that were written before are lost, as on a full disk of a network
  void close() {
    if (::close(std::exchange(opened_, -1)) != 0) throw std::system_error(last_fault());
  }
  /// Renames the file to `path`. \throws std::system_error if that fails
  void give_name() {
    if (std::rename(partial_.c_str(), path_.c_str()) != 0) throw std::system_error(last_fault());
    partial_.clear();
  }
  /// Returns the open descriptor, which the caller closes.
  int release() { return std::exchange(opened_, -1); }

 private:
  std::filesystem::path path_;
  std::string partial_;  // empty: renamed
  int opened_ = -1;
};

/// Whether a path is opened and written in place, since it names no file: a device, a pipe, a socket, and an open descriptor of
/// the process, such as /dev/stdout and /dev/fd/3, which are links.
inline bool is_stream(std::filesystem::path const& path) {
  struct stat about {};
  if (::lstat(path.c_str(), &about) == 0 && !S_ISREG(about.st_mode) && !S_ISDIR(about.st_mode) && !S_ISLNK(about.st_mode))
    return true;
  std::error_code failed;
  std::string const folder = std::filesystem::canonical(path.has_parent_path() ? path.parent_path() : ".", failed).string();
  return !failed && (folder == "/dev" || folder.starts_with("/proc/"));
}

/// Returns the error with which writing a file would fail; none if it would not. Creates a file beside the path, and removes it.
inline std::error_code fault_of_writing(std::filesystem::path const& path) {
  std::error_code ignored;
  if (std::filesystem::is_directory(path, ignored)) return std::make_error_code(std::errc::is_a_directory);
  struct stat about {};
  bool const is_there = ::lstat(path.c_str(), &about) == 0, is_link = is_there && S_ISLNK(about.st_mode);
  bool const streams = is_stream(path);
  if (is_there && (streams || !is_link) && ::access(path.c_str(), W_OK) != 0) return last_fault();
  if (streams) return {};
  try {
    new_file const never_named(path);
    return {};
  } catch (std::system_error const& e) {
    return e.code();
  }
}

/// Writes a whole file, as `new_file`, or all of a text to a stream.
/// \throws std::system_error if the path leads to a folder or to a file without permission to write, and if writing fails
inline void write_file(std::filesystem::path const& path, std::string_view text) {
  if (std::error_code const fault = fault_of_writing(path)) throw std::system_error(fault);
  if (!is_stream(path)) {
    new_file out(path);
    out.write(text.data(), text.size());
    out.close();
    return out.give_name();
  }
  no_size_signal const as_an_error;
  errno = EIO;
  std::FILE* const stream = std::fopen(path.c_str(), "w");
  if (stream == nullptr) throw std::system_error(last_fault());
  bool const whole = std::fwrite(text.data(), 1, text.size(), stream) == text.size();
  auto const fault = last_fault();
  if (std::fclose(stream) != 0) throw std::system_error(last_fault());
  if (!whole) throw std::system_error(fault);
}

}  // namespace chevron::detail
