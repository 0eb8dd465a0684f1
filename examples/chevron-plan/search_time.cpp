#include "search_time.hpp"

#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <cstring>
#include <utility>

#include <chevron/base/format.hpp>

#include "../common/terminal.hpp"

namespace plan_program {
namespace {

constexpr int ending_signals[] = {SIGINT, SIGTERM};
struct sigaction before[2];
std::sig_atomic_t volatile caught = 0;

extern "C" void note_signal(int number) {
  caught = number;
  // The next one ends the program, whichever it is of those that are not ignored.
  for (int i = 0; i < 2; ++i) {
    if (before[i].sa_handler != SIG_IGN) std::signal(ending_signals[i], SIG_DFL);
  }
}

}  // namespace

search_time::search_time(double seconds) : seconds_(seconds), next_line_(seconds > 0 ? 0.1 : 1) {
  char const* const kind = std::getenv("TERM");
  terminal_ = isatty(STDERR_FILENO) == 1 && kind != nullptr && std::strcmp(kind, "dumb") != 0;
  caught = 0;
  for (int i = 0; i < 2; ++i) {
    sigaction(ending_signals[i], nullptr, &before[i]);
    // Who starts a program with a signal ignored, as nohup does, means it.
    if (before[i].sa_handler == SIG_IGN) continue;
    struct sigaction noted {};
    noted.sa_handler = note_signal;
    sigemptyset(&noted.sa_mask);
    sigaction(ending_signals[i], &noted, nullptr);
  }
}

search_time::~search_time() {
  wipe();
  for (int i = 0; i < 2; ++i) sigaction(ending_signals[i], &before[i], nullptr);
}

int search_time::signal() { return caught; }

double search_time::passed() const { return std::chrono::duration<double>(clock::now() - began_).count(); }

void search_time::begin(std::string what, double share) {
  what_ = std::move(what);
  until_ = seconds_ * share;
}

bool search_time::ask(chevron::search::progress const& now, void* with) {
  auto& self = *static_cast<search_time*>(with);
  if (caught != 0) return true;
  double const at = self.passed();
  if (self.limited() && at >= self.until_) return true;
  if (self.terminal_ && at >= self.next_line_) self.show(now, at);
  return false;
}

void search_time::show(chevron::search::progress const& now, double at) {
  using chevron::show::fixed;
  next_line_ = at + 0.1;
  std::string line = what_;
  if (now.round > 1) line += ", round " + std::to_string(now.round);
  if (now.limit > 0) line += ", " + std::to_string(now.limit) + (now.limit == 1 ? " chunk in flight" : " chunks in flight");
  if (now.length > 0) {
    line += ": " + chevron::show::number(now.length);
    if (bound_shown_ && now.bound > 0) line += ", " + fixed((now.length / now.bound - 1) * 100, 2) + " % above the bound";
  }
  line += ", " + fixed(at, 1) + (limited() ? " of " + chevron::show::number(seconds_) : "") + " s";
  std::string const hint = "; Ctrl-C keeps the best so far";
  // What goes on in a second line could not be written over.
  auto const width = static_cast<std::size_t>(terminal::columns(STDERR_FILENO, 2, 80) - 1);
  if (line.size() + hint.size() <= width) line += hint;
  if (line.size() > width) line.resize(width);
  line = "\r\x1b[K" + line;
  shown_ = true;
  if (write(STDERR_FILENO, line.data(), line.size()) < 0) terminal_ = false;
}

void search_time::wipe() {
  if (shown_ && write(STDERR_FILENO, "\r\x1b[K", 4) < 0) terminal_ = false;
  shown_ = false;
}

}  // namespace plan_program
