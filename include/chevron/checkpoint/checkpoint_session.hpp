#pragma once

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include <chevron/base/no_size_signal.hpp>
#include <chevron/base/random_digits.hpp>
#include <chevron/checkpoint/checkpoint_folder.hpp>
#include <chevron/checkpoint/checkpoint_manifest.hpp>
#include <chevron/checkpoint/safetensors.hpp>
#include <chevron/run/core/error.hpp>

/// \file
/// Ensures that a folder of checkpoints belongs to one job: if two jobs saved into one folder, each could load checkpoints of
/// the other job.

namespace chevron::detail {

/// A lock on a folder for one process at a time. The system releases the lock when the process ends, however it ends. Trainers
/// of one process and one job share the lock.
class folder_lock {
 public:
  static constexpr char const* file_name = ".chevron-lock";

  /// Takes the lock; if another job has the lock, tries again for 2 s, since that job's process may be about to end.
  /// \returns null if files cannot be locked, as on some network disks
  /// \throws checkpoint_error if another job has the lock, naming its process
  static std::shared_ptr<folder_lock> take(std::filesystem::path const& folder, std::string const& job) {
    constexpr std::chrono::milliseconds moment{2000}, again{50};
    auto const until = std::chrono::steady_clock::now() + moment;
    for (;;) {
      std::string holder;
      auto lock = try_to_take(folder / file_name, job, holder);
      if (lock != nullptr || holder.empty()) return lock;
      if (std::chrono::steady_clock::now() > until) {
        refuse_file(folder, "another job saves its checkpoints into this folder: " + holder +
                                ". Remedy: a folder for each job, or wait until that job has ended");
      }
      std::this_thread::sleep_for(again);
    }
  }

  folder_lock(folder_lock const&) = delete;
  folder_lock& operator=(folder_lock const&) = delete;
  ~folder_lock() { ::close(opened_); }

  /// Whether the locked file is still in the folder, which may have been deleted and created again.
  bool stands_in(std::filesystem::path const& folder) const {
    struct stat there {};
    return ::stat((folder / file_name).c_str(), &there) == 0 && identity(there.st_dev, there.st_ino) == file_;
  }

 private:
  using identity = std::pair<dev_t, ino_t>;

  folder_lock(int opened, identity file, std::string job) : opened_(opened), file_(file), job_(std::move(job)) {}

  /// Tries once to take the lock. \param holder receives words for the process that has the lock; empty, with result null: the
  /// file cannot be opened or locked
  static std::shared_ptr<folder_lock> try_to_take(std::filesystem::path const& file, std::string const& job,
                                                  std::string& holder) {
    static std::mutex mutex;
    static std::map<identity, std::weak_ptr<folder_lock>> held;  // by this process
    std::lock_guard const hold(mutex);
    constexpr int at_most = 10;  // a disk may show a file by its path as another one than the opened one
    for (int tries = 1;; ++tries) {
      int const opened = open_file(file);
      if (opened < 0) return nullptr;  // saving will report why
      struct stat about {};
      if (::fstat(opened, &about) != 0) return ::close(opened), nullptr;
      identity const known(about.st_dev, about.st_ino);
      if (auto const mine = held[known].lock()) {
        ::close(opened);
        if (mine->job_ == job) return mine;
        holder = "a trainer of this process, " + std::to_string(::getpid());
        return nullptr;
      }
      if (::flock(opened, LOCK_EX | LOCK_NB) != 0) {
        if (errno == EWOULDBLOCK) holder = read_from(opened);
        ::close(opened);
        return nullptr;
      }
      // A copy of a folder by hard links (cp -al) shares this file with that folder: here a new file replaces it.
      if (tries < at_most && about.st_nlink > 1 && ::unlink(file.c_str()) == 0) {
        ::close(opened);
        continue;
      }
      std::shared_ptr<folder_lock> const out(new folder_lock(opened, known, job));
      if (tries < at_most && !out->stands_in(file.parent_path())) continue;  // replaced since it was opened
      held[known] = out;
      write_to(opened);
      return out;
    }
  }

  /// Opens the file, or a new one. A symbolic link is removed: its target may be the lock of another folder. \returns -1 if that
  /// fails
  static int open_file(std::filesystem::path const& file) {
    if (std::error_code ignored; std::filesystem::is_symlink(file, ignored)) ::unlink(file.c_str());
    int const opened = ::open(file.c_str(), O_RDWR | O_CREAT | O_NOFOLLOW | O_CLOEXEC, 0666);
    return opened >= 0 ? opened : ::open(file.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
  }
  static void write_to(int opened) {
    char host[256] = "?";
    ::gethostname(host, sizeof host - 1);
    std::string const text = "process " + std::to_string(::getpid()) + " on " + host + "\n";
    no_size_signal const as_an_error;
    if (::ftruncate(opened, 0) != 0 || ::pwrite(opened, text.data(), text.size(), 0) < 0) return;  // the text is for people only
  }
  static std::string read_from(int opened) {
    char text[300];
    auto const got = ::pread(opened, text, sizeof text, 0);
    std::string out;
    for (ssize_t i = 0; i < got && text[i] >= ' ' && text[i] <= '~'; ++i) out += text[i];
    return out.empty() ? "a process whose name is not in the lock file" : out;
  }

  int opened_;
  identity file_;
  std::string job_;
};

/// A trainer's state for checkpoints on one rank: the job's name, and the folders into which the trainer saves.
struct checkpoint_session {
  struct claim {
    std::string job;
    std::shared_ptr<detail::folder_lock> lock;
  };
  std::string job;     ///< random, or from the loaded checkpoint
  std::string loaded;  ///< fingerprint of the loaded checkpoint's manifest
  std::map<std::filesystem::path, claim> folders;
  std::map<detail::saved_name, std::string> base;  ///< fingerprints of this rank's frozen parameters that checkpoints leave out
};

/// Removes partial files of jobs that were killed.
inline void remove_partial_files(std::filesystem::path const& folder) {
  std::error_code ignored;
  std::vector<std::filesystem::path> left;
  auto const look = [&](std::filesystem::path const& in) {
    for (auto const& entry : std::filesystem::directory_iterator(in, ignored)) {
      std::string const name = entry.path().filename().string();
      if (name.ends_with(partial_ending) && is_checkpoint_file(name)) left.push_back(entry.path());
    }
  };
  look(folder);
  for (auto const& entry : std::filesystem::directory_iterator(folder, ignored)) {
    if (step_of(entry.path().filename().string()) >= 0 && !entry.is_symlink(ignored)) look(entry.path());
  }
  for (auto const& one : left) std::filesystem::remove(one, ignored);
}

/// Checks that a folder's checkpoints are this job's, and locks the folder. Called on global rank 0, before anything is written
/// there.
/// \param next_step next step of the trainer; the folder may have checkpoints up to this step
/// \returns the job's name
/// \throws checkpoint_error for checkpoints of another job or of later steps
inline std::string claim_folder(checkpoint_session& session, std::filesystem::path const& folder, long next_step) {
  if (session.job.empty()) session.job = random_digits(2);
  std::filesystem::path const key = std::filesystem::weakly_canonical(folder);
  auto const found = session.folders.find(key);
  bool const first = found == session.folders.end();
  checkpoint_session::claim mine = first ? checkpoint_session::claim{session.job, nullptr} : found->second;
  if (mine.lock == nullptr || !mine.lock->stands_in(folder)) {
    mine.lock.reset();
    mine.lock = folder_lock::take(folder, mine.job);
  }
  if (auto const last = last_checkpoint(folder)) {
    std::optional<manifest> about;
    try {
      about = read_manifest(*last);
    } catch (checkpoint_error const&) {
      if (first) throw;  // a later load reports the damage, which does not end this job
    }
    if (about && (about->job != mine.job || (first && about->fingerprint != session.loaded))) {
      refuse_file(*last,
                  "is of an earlier run or of another job, and a later run could resume from it by mistake. Remedy: "
                  "resume from this checkpoint (--resume), or save into another folder");
    }
    if (step_of(last->filename().string()) > next_step) {
      refuse_file(*last,
                  "is later than step " + std::to_string(next_step) +
                      ", at which this job saves, and would remain the last checkpoint. Remedy: move this folder away, or save "
                      "into another one");
    }
  }
  if (first && mine.lock != nullptr) remove_partial_files(folder);
  session.folders[key] = mine;
  return mine.job;
}

}  // namespace chevron::detail
