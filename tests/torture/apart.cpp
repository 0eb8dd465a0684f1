#include "apart.hpp"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <vector>

namespace torture {

namespace {

using clock = std::chrono::steady_clock;

/// Whether a process of the group goes on. Those that have ended are collected: they came to this process when their parent ended.
bool somebody_left(pid_t group) {
  while (::waitpid(-group, nullptr, WNOHANG) > 0) {
  }
  return ::kill(-group, 0) == 0;
}

void write_all(int to, std::string const& text) {
  for (std::size_t at = 0; at < text.size();) {
    ssize_t const count = ::write(to, text.data() + at, text.size() - at);
    if (count <= 0) ::_exit(1);
    at += static_cast<std::size_t>(count);
  }
}

}  // namespace

outcome run_apart(std::function<int()> const& body, std::chrono::milliseconds longest,
                  std::function<void(pid_t)> const& while_it_runs) {
  outcome out;
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw std::runtime_error("no pipe");
  std::fflush(nullptr);
  auto const begin = clock::now();
  pid_t const job = ::fork();
  if (job < 0) throw std::runtime_error("no process");
  if (job == 0) {
    ::setpgid(0, 0);
    int const nothing = ::open("/dev/null", O_RDONLY);
    ::dup2(nothing, 0);
    ::dup2(ends[1], 1);
    ::dup2(ends[1], 2);
    ::close(ends[0]);
    ::setenv("OMP_NUM_THREADS", "1", 1);
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    int const code = body();
    std::fflush(nullptr);
    ::_exit(code);
  }
  ::setpgid(job, job);
  ::close(ends[1]);
  if (while_it_runs) while_it_runs(job);
  // Reads until all processes that can write have ended.
  for (;;) {
    auto const left = std::chrono::duration_cast<std::chrono::milliseconds>(begin + longest - clock::now());
    pollfd news{ends[0], POLLIN, 0};
    if (left.count() <= 0 || ::poll(&news, 1, static_cast<int>(left.count())) == 0) {
      out.hangs = true;
      break;
    }
    char buffer[4096];
    ssize_t const got = ::read(ends[0], buffer, sizeof buffer);
    if (got <= 0) break;
    out.output.append(buffer, static_cast<std::size_t>(got));
  }
  ::close(ends[0]);
  if (out.hangs) ::kill(-job, SIGKILL);
  int status = 0;
  ::waitpid(job, &status, 0);
  out.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  out.seconds = std::chrono::duration<double>(clock::now() - begin).count();
  for (int look = 0; somebody_left(job) && look < 50; ++look) ::usleep(20000);
  if (somebody_left(job)) {
    out.hangs = true;
    ::kill(-job, SIGKILL);
  }
  return out;
}

void share_out(std::size_t count, std::size_t processes, std::function<std::string(std::size_t)> const& piece,
               std::function<void(std::size_t, std::string const&)> const& heard) {
  int ends[2];
  if (::pipe(ends) != 0) throw std::runtime_error("no pipe");
  std::fflush(nullptr);
  std::vector<pid_t> workers;
  for (std::size_t w = 0; w < processes; ++w) {
    pid_t const id = ::fork();
    if (id < 0) throw std::runtime_error("no process");
    if (id == 0) {
      ::close(ends[0]);
      for (std::size_t i = w; i < count; i += processes) {
        std::string said = piece(i);
        std::replace(said.begin(), said.end(), '\n', '\r');
        // A write of up to a page does not mix with those of others.
        write_all(ends[1], std::to_string(i) + " " + said.substr(0, 3500) + "\n");
      }
      ::_exit(0);
    }
    workers.push_back(id);
  }
  ::close(ends[1]);
  FILE* const from = ::fdopen(ends[0], "r");
  char* text = nullptr;
  std::size_t room = 0;
  for (ssize_t size; (size = ::getline(&text, &room, from)) > 0;) {
    std::string line(text, static_cast<std::size_t>(size) - 1);
    auto const space = line.find(' ');
    if (space == std::string::npos) continue;
    std::string said = line.substr(space + 1);
    std::replace(said.begin(), said.end(), '\r', '\n');
    heard(std::stoul(line.substr(0, space)), said);
  }
  std::free(text);
  std::fclose(from);
  for (pid_t const id : workers) ::waitpid(id, nullptr, 0);
}

}  // namespace torture
