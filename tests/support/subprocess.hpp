#pragma once

// This test program, started again as another process: a rank, or a launcher of ranks.

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <sstream>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

namespace subprocess {

using steady = std::chrono::steady_clock;
using namespace std::chrono_literals;

struct program_end {
  int code = -1;
  std::string output;
  std::chrono::milliseconds took{};
  int lines_with(std::string const& words) const {
    std::istringstream in(output);
    int count = 0;
    for (std::string line; std::getline(in, line);) count += line.find(words) != std::string::npos;
    return count;
  }
};

/// A started program and its output. The program runs one test case, which a variable of the environment enables, and which is
/// skipped otherwise.
class started {
 public:
  started(std::string const& test_case, std::vector<std::string> environment, std::vector<std::string> in_front = {}) {
    std::array<int, 2> ends{};
    REQUIRE(pipe2(ends.data(), O_CLOEXEC) == 0);
    std::vector<std::string> words = in_front;
    for (auto const& word : {std::string(), std::string("--no-skip"), "--test-case=" + test_case}) words.push_back(word);
    std::array<char, 4096> self{};
    REQUIRE(readlink("/proc/self/exe", self.data(), self.size() - 1) > 0);
    words[in_front.size()] = self.data();
    std::vector<char*> argv;
    for (auto& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    std::vector<std::string> all = environment;
    for (char** each = environ; *each != nullptr; ++each) {
      std::string const entry = *each;
      bool const launchers = entry.starts_with("RANK=") || entry.starts_with("WORLD_SIZE=") || entry.starts_with("MASTER_") ||
                             entry.starts_with("OMPI_") || entry.starts_with("PMI_") || entry.starts_with("SLURM_");
      if (!launchers) all.push_back(entry);
    }
    std::vector<char*> envp;
    for (auto& entry : all) envp.push_back(entry.data());
    envp.push_back(nullptr);
    begin_ = steady::now();
    id_ = fork();
    if (id_ == 0) {
      dup2(ends[1], STDERR_FILENO);
      dup2(ends[1], STDOUT_FILENO);
      execve(argv[0], argv.data(), envp.data());
      _exit(127);
    }
    close(ends[1]);
    pipe_ = ends[0];
  }
  started(started&& other) noexcept
      : id_(std::exchange(other.id_, -1)),
        pipe_(std::exchange(other.pipe_, -1)),
        begin_(other.begin_),
        output_(std::move(other.output_)) {}
  ~started() {
    if (id_ > 0) {
      kill(id_, SIGKILL);
      waitpid(id_, nullptr, 0);
    }
    if (pipe_ >= 0) close(pipe_);
  }

  pid_t id() const { return id_; }
  std::string const& output() const { return output_; }

  /// Reads on until these words have come so many times.
  bool says(std::string const& words, int times = 1, std::chrono::milliseconds patience = 100s) {
    auto const until = steady::now() + patience;
    while (count(words) < times) {
      if (!read_some(until)) return false;
    }
    return true;
  }
  program_end wait(std::chrono::milliseconds patience = 100s) {
    auto const until = steady::now() + patience;
    while (read_some(until)) {
    }
    program_end out;
    int status = 0;
    pid_t got = 0;
    while ((got = waitpid(id_, &status, WNOHANG)) == 0 && steady::now() < until) std::this_thread::sleep_for(5ms);
    out.took = std::chrono::duration_cast<std::chrono::milliseconds>(steady::now() - begin_);
    if (got == id_) {
      out.code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
      id_ = -1;
    }
    out.output = output_;
    return out;
  }

 private:
  int count(std::string const& words) const {
    int n = 0;
    for (std::size_t at = 0; (at = output_.find(words, at)) != std::string::npos; at += words.size()) ++n;
    return n;
  }
  bool read_some(steady::time_point until) {
    auto const left = std::chrono::duration_cast<std::chrono::milliseconds>(until - steady::now()).count();
    pollfd what{pipe_, POLLIN, 0};
    if (left <= 0 || poll(&what, 1, static_cast<int>(left)) <= 0) return false;
    std::array<char, 4096> block;
    auto const got = read(pipe_, block.data(), block.size());
    if (got <= 0) return false;
    output_.append(block.data(), static_cast<std::size_t>(got));
    return true;
  }

  pid_t id_ = -1;
  int pipe_ = -1;
  steady::time_point begin_;
  std::string output_;
};

}  // namespace subprocess
