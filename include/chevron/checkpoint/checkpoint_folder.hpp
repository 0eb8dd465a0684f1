#pragma once

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <vector>

#include <chevron/checkpoint/safetensors.hpp>

/// \file
/// Finds the checkpoints of a folder, and removes old checkpoints.
/// Model for SPIN: tests/model_checking/checkpoint_publication.pml.

namespace chevron {

namespace detail {

inline std::string checkpoint_name(long step) {
  char name[32];
  std::snprintf(name, sizeof name, "step-%08ld", step);
  return name;
}

inline std::filesystem::path stage_file(std::filesystem::path const& folder, char const* sort, std::size_t stage) {
  return folder / (std::string(sort) + "-" + std::to_string(stage) + ".safetensors");
}

/// Returns the step N if a name is exactly `before` followed by `checkpoint_name(N)`; -1 for any other name.
inline long step_of(std::string const& name, std::string const& before = "") {
  long step = -1;
  std::size_t const digits = before.size() + 5;
  if (name.size() <= digits || std::from_chars(name.data() + digits, name.data() + name.size(), step).ec != std::errc{})
    return -1;
  return name == before + checkpoint_name(step) ? step : -1;
}

/// Whether a name is that of a file of a checkpoint, whole or partly written.
inline bool is_checkpoint_file(std::string name) {
  constexpr std::string_view partial = partial_ending, ending = ".safetensors";
  if (name.ends_with(partial)) {
    name.resize(name.size() - partial.size());
    std::size_t const unique = name.rfind('.') + 1;
    if (name.size() - unique != 16 || name.find_first_not_of("0123456789abcdef", unique) != name.npos) return false;
    name.resize(unique - 1);
  }
  if (name == "manifest.json") return true;
  for (std::string_view const sort : {"model-", "optimizer-"}) {
    if (!name.starts_with(sort) || !name.ends_with(ending) || name.size() <= sort.size() + ending.size()) continue;
    auto const number = std::string_view(name).substr(sort.size(), name.size() - sort.size() - ending.size());
    if (number.find_first_not_of("0123456789") == number.npos) return true;
  }
  return false;
}

/// Waits up to five seconds, since a network disk may show a file late, until a folder has files that other ranks have written.
/// \returns the first name whose file the folder does not have; empty: it has all
inline std::string first_missing(std::filesystem::path const& folder, std::vector<std::string> const& names) {
  constexpr int most_naps = 100;
  int naps = 0;
  for (std::string const& name : names) {
    std::error_code ignored;
    while (!std::filesystem::exists(folder / name, ignored)) {
      if (++naps > most_naps) return name;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  }
  return "";
}

/// Syncs a folder's entries to the disk, so that they survive a loss of power, if the file system supports that for folders.
inline void bring_to_disk(std::filesystem::path const& folder) {
  int const opened = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  bool const kept = opened >= 0 && (::fsync(opened) == 0 || errno == EINVAL || errno == ENOTSUP);
  int const fault = errno;
  if (opened >= 0) ::close(opened);
  if (!kept) refuse_file(folder, std::string("cannot be flushed to the disk: ") + std::strerror(fault));
}

/// Removes a checkpoint's manifest, then its other files. Partial files and files of other kinds are not removed.
inline void remove_files(std::filesystem::path const& folder) {
  // Even after a loss of power no manifest may be left without the files that it names.
  if (std::filesystem::remove(folder / "manifest.json")) bring_to_disk(folder);
  std::vector<std::filesystem::path> old;
  for (auto const& entry : std::filesystem::directory_iterator(folder)) {
    std::string const name = entry.path().filename().string();
    if (name.ends_with(".safetensors") && is_checkpoint_file(name)) old.push_back(entry.path());
  }
  for (auto const& one : old) std::filesystem::remove(one);
}

/// Removes a symbolic link in place of a checkpoint's folder, so that a new checkpoint of this step is written here, and the
/// checkpoint that the link leads to is unchanged.
inline void remove_link_to_checkpoint(std::filesystem::path const& folder) {
  std::error_code gone;
  if (std::filesystem::is_symlink(folder, gone)) std::filesystem::remove(folder);
}

/// Whether a path is a folder, not a link, that contains only files of a checkpoint.
inline bool holds_only_a_checkpoint(std::filesystem::path const& folder) {
  std::error_code gone;
  if (!std::filesystem::is_directory(std::filesystem::symlink_status(folder, gone))) return false;
  for (auto const& entry : std::filesystem::directory_iterator(folder, gone)) {
    if (!is_checkpoint_file(entry.path().filename().string()) || !std::filesystem::is_regular_file(entry.symlink_status(gone)))
      return false;
  }
  return !gone;
}

inline constexpr char const* removed_prefix = "removed-";

/// Deletes folders that have names of removed checkpoints. A folder that cannot be deleted (because it is being read over a
/// network) is left to the next call.
inline void delete_removed(std::filesystem::path const& folder) {
  std::error_code ignored;
  std::vector<std::filesystem::path> removed;
  for (auto const& entry : std::filesystem::directory_iterator(folder, ignored)) {
    if (step_of(entry.path().filename().string(), removed_prefix) >= 0 && holds_only_a_checkpoint(entry.path()))
      removed.push_back(entry.path());
  }
  for (auto const& one : removed) {
    std::vector<std::filesystem::path> files;
    for (auto const& entry : std::filesystem::directory_iterator(one, ignored)) files.push_back(entry.path());
    for (auto const& file : files) std::filesystem::remove(file, ignored);
    std::filesystem::remove(one, ignored);  // fails if the folder is not empty
  }
}

/// Returns a folder's path without links and without a final `/`.
inline std::filesystem::path without_links(std::filesystem::path const& folder) {
  std::error_code failed;
  auto const out = std::filesystem::canonical(folder, failed);
  return failed ? folder : out;
}
/// Returns a folder's own name, after links were resolved.
inline std::string name_of(std::filesystem::path const& folder) { return without_links(folder).filename().string(); }
/// Returns the parent of a folder, after links were resolved.
inline std::filesystem::path folder_of(std::filesystem::path const& folder) { return without_links(folder).parent_path(); }

/// Returns the last whole checkpoint before a step. \param end the step, excluded
inline std::optional<std::filesystem::path> last_checkpoint_before(std::filesystem::path const& folder, long end) {
  std::optional<std::filesystem::path> last;
  long last_step = -1;
  std::error_code gone;
  for (auto const& entry : std::filesystem::directory_iterator(folder, gone)) {
    long const step = step_of(entry.path().filename().string());
    if (step > last_step && step < end && std::filesystem::exists(entry.path() / "manifest.json", gone)) {
      last_step = step;
      last = entry.path();
    }
  }
  return last;
}

}  // namespace detail

/// Returns the last whole checkpoint (one with a manifest) in a folder; nullopt if there is none.
inline std::optional<std::filesystem::path> last_checkpoint(std::filesystem::path const& folder) {
  return detail::last_checkpoint_before(folder, std::numeric_limits<long>::max());
}

namespace detail {

/// Returns the checkpoint at a path: the folder itself, or the last whole checkpoint in the folder; empty if there is none.
inline std::filesystem::path checkpoint_in(std::filesystem::path const& folder) {
  return std::filesystem::exists(folder / "manifest.json") ? folder : last_checkpoint(folder).value_or("");
}

}  // namespace detail

/// Removes old checkpoints from a folder, on a single rank: all whole checkpoints up to step `newest`, except for the last
/// `keep`. Removes nothing if step `newest` does not exist, and leaves later checkpoints, partial ones, links, checkpoints with
/// other files in them, and all other entries of the folder alone. Renames a checkpoint to `removed-step-N`, then deletes it:
/// if the process is killed in between, the folder no longer counts as a checkpoint, and the next call deletes the rest.
/// \param keep number of checkpoints to keep, 1 or more
/// \throws checkpoint_error if a checkpoint cannot be renamed
inline void remove_old_checkpoints(std::filesystem::path const& folder, long newest, int keep) {
  std::vector<long> whole;
  std::error_code gone;
  for (auto const& entry : std::filesystem::directory_iterator(folder, gone)) {
    long const step = detail::step_of(entry.path().filename().string());
    if (step < 0 || step > newest || !std::filesystem::exists(entry.path() / "manifest.json")) continue;
    if (step == newest || detail::holds_only_a_checkpoint(entry.path())) whole.push_back(step);
  }
  std::sort(whole.begin(), whole.end());
  // Nothing is removed before the newest checkpoint is on the disk.
  if (whole.empty() || whole.back() != newest) return;
  whole.resize(whole.size() - std::min(whole.size(), static_cast<std::size_t>(std::max(keep, 1))));
  if (!whole.empty()) {
    detail::bring_to_disk(folder / detail::checkpoint_name(newest));
    detail::bring_to_disk(folder);
  }
  detail::delete_removed(folder);
  for (long const step : whole) {
    std::filesystem::path const from = folder / detail::checkpoint_name(step);
    std::error_code failed;
    std::filesystem::rename(from, folder / (detail::removed_prefix + detail::checkpoint_name(step)), failed);
    if (failed && failed != std::errc::directory_not_empty && failed != std::errc::file_exists)
      detail::refuse_file(
          from, "is an old checkpoint and cannot be removed: " + failed.message() + ". Remedy: a folder that may be written to");
  }
  detail::delete_removed(folder);
}

}  // namespace chevron
