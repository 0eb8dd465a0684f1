#include "children.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>

namespace differential {

namespace {

constexpr std::chrono::seconds longest{60};

void send(int to, std::string const& line) {
  for (std::size_t at = 0; at < line.size();) {
    ssize_t const count = ::write(to, line.data() + at, line.size() - at);
    if (count <= 0) ::_exit(1);
    at += static_cast<std::size_t>(count);
  }
}

[[noreturn]] void work_on(std::vector<program> const& work, int to) {
  ::setpgid(0, 0);
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (std::getenv("DIFFERENTIAL_LOUD") == nullptr) {
    int const nowhere = ::open("/dev/null", O_WRONLY);
    ::dup2(nowhere, 1);
    ::dup2(nowhere, 2);
  }
  std::string const folder = std::filesystem::temp_directory_path() / ("chevron-differential-" + std::to_string(::getpid()));
  for (program const& p : work) {
    judgement const j = judge(p, folder, [&](char const* who) { send(to, std::string("@") + who + "\n"); });
    std::string words = j.words;
    for (char& c : words) {
      if (c == '\n') c = ' ';
    }
    send(to, std::to_string(static_cast<int>(j.what)) + " " + words + "\n");
  }
  ::_exit(0);
}

}  // namespace

child::child(std::vector<program> work) : work_(std::move(work)), since_(std::chrono::steady_clock::now()) {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
  std::fflush(nullptr);
  id_ = ::fork();
  if (id_ < 0) throw std::runtime_error("no process");
  if (id_ == 0) {
    ::close(ends[0]);
    work_on(work_, ends[1]);
  }
  ::close(ends[1]);
  pipe_ = ends[0];
  ::fcntl(pipe_, F_SETFL, O_NONBLOCK);
}

child::~child() {
  if (!ended_) {
    ::kill(-id_, SIGKILL);
    ::kill(id_, SIGKILL);
    ::waitpid(id_, nullptr, 0);
  }
  ::close(pipe_);
}

std::vector<program> child::left() const { return {work_.begin() + static_cast<std::ptrdiff_t>(next_), work_.end()}; }

std::vector<std::pair<program, judgement>> child::poll() {
  std::vector<std::pair<program, judgement>> out;
  if (ended_) return out;
  bool closed = false;
  char buffer[4096];
  for (;;) {
    ssize_t const count = ::read(pipe_, buffer, sizeof buffer);
    if (count > 0) {
      heard_.append(buffer, static_cast<std::size_t>(count));
      continue;
    }
    closed = count == 0;
    break;
  }
  for (auto end = heard_.find('\n'); end != std::string::npos && next_ < work_.size(); end = heard_.find('\n')) {
    std::string const line = heard_.substr(0, end);
    heard_.erase(0, end + 1);
    if (line.starts_with("@")) {
      runs_ = line.substr(1);
      continue;
    }
    auto const space = line.find(' ');
    out.emplace_back(work_[next_++], judgement{static_cast<verdict>(std::atoi(line.c_str())), line.substr(space + 1)});
    since_ = std::chrono::steady_clock::now();
  }
  bool const late = std::chrono::steady_clock::now() - since_ > longest;
  if (!closed && !late) return out;
  if (late) {
    ::kill(-id_, SIGKILL);
    ::kill(id_, SIGKILL);
  }
  int status = 0;
  ::waitpid(id_, &status, 0);
  ::kill(-id_, SIGKILL);  // ranks that it left behind
  ended_ = true;
  if (next_ < work_.size()) {
    judgement j;
    if (runs_ == "plain") {
      j = {verdict::senseless, "LibTorch by itself does not come to an end"};
    } else if (late) {
      j = {verdict::hangs, "not done after " + std::to_string(longest.count()) + " s"};
    } else {
      j = {verdict::dies, WIFSIGNALED(status) ? std::string("ended by signal ") + std::to_string(WTERMSIG(status)) + " (" +
                                                    ::strsignal(WTERMSIG(status)) + ")"
                                              : "ended with exit code " + std::to_string(WEXITSTATUS(status))};
    }
    out.emplace_back(work_[next_++], j);
  }
  return out;
}

judgement judge_apart(program const& p) {
  child one({p});
  for (;;) {
    auto const judged = one.poll();
    if (!judged.empty()) return judged[0].second;
    pollfd news{one.handle(), POLLIN, 0};
    ::poll(&news, 1, 200);
  }
}

}  // namespace differential
