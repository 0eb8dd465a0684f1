#include "console.hpp"

#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <optional>
#include <string>
#include <system_error>

#include <chevron/base/format.hpp>
#include <chevron/base/new_file.hpp>
#include <chevron/run/core/error.hpp>

#include "terminal.hpp"

namespace chevron::train {
namespace {

int terminal_width(int of) { return terminal::columns(of, 21, 100); }

long interval(long steps) {
  if (steps <= 20) return 1;
  if (steps <= 200) return 10;
  return (steps + 199) / 200 * 10;
}

/// Copies a file's lines up to the first one of a step from `step` on, or up to a last one without its end.
void copy_earlier_steps(std::filesystem::path const& from, detail::new_file& to, long step) {
  std::error_code ignored;
  if (!std::filesystem::is_regular_file(from, ignored)) return;
  std::ifstream in(from, std::ios::binary);
  std::string kept;
  for (std::string line; std::getline(in, line) && !in.eof();) {
    long number = -1;
    if (std::sscanf(line.c_str(), "{\"step\":%ld,", &number) == 1 && number >= step) break;
    kept += line + "\n";
    if (kept.size() < std::size_t{1} << 20) continue;
    to.write(kept.data(), kept.size());
    kept.clear();
  }
  to.write(kept.data(), kept.size());
}

/// Opens a stream, or a new file with its name, for lines. \param go_on_at as `metrics_file`
std::FILE* open_for_lines(std::string const& path, std::optional<long> go_on_at) {
  if (detail::is_stream(path)) return std::fopen(path.c_str(), "a");
  detail::new_file out(path);
  if (go_on_at) copy_earlier_steps(path, out, *go_on_at);
  out.give_name();
  return ::fdopen(out.release(), "w");
}

[[noreturn]] void refuse_file(char const* flag, std::string const& path, std::string const& why) {
  throw usage_error(std::string(flag) + " " + path + " cannot be written: " + why +
                    ". Remedy: a file in an existing folder that is writable, or none");
}

[[noreturn]] void refuse_folder(char const* flag, std::string const& path, std::error_code const& fault) {
  throw usage_error(std::string(flag) + " " + path + " cannot be written to: " + fault.message() +
                    ". Remedy: a folder that is writable, or one that can be made, or none");
}

std::string formatted(char const* how, double value) {
  char text[64];
  std::snprintf(text, sizeof text, how, value);
  return text;
}

}  // namespace

std::string grouped(std::int64_t number) {
  std::string out = std::to_string(number);
  for (int at = static_cast<int>(out.size()) - 3; at > (number < 0 ? 1 : 0); at -= 3)
    out.insert(static_cast<std::size_t>(at), ",");
  return out;
}

std::string some(std::int64_t count, std::string const& one) { return grouped(count) + " " + one + (count == 1 ? "" : "s"); }

std::string duration(double seconds) {
  if (seconds < 1e-3) return formatted("%.0f µs", seconds * 1e6);
  if (seconds < 0.1) return formatted("%.1f ms", seconds * 1e3);
  if (seconds < 1) return formatted("%.0f ms", seconds * 1e3);
  if (seconds < 100) return formatted("%.1f s", seconds);
  auto const whole = static_cast<long>(std::lround(seconds));
  return std::to_string(whole / 60) + " min " + std::to_string(whole % 60) + " s";
}

bool colour_wanted() {
  char const* const no = std::getenv("NO_COLOR");
  // Open MPI's mpirun gives each rank a terminal of its own, and copies what is written there to wherever its own output goes.
  return (no == nullptr || *no == 0) && ::isatty(STDOUT_FILENO) == 1 && std::getenv("OMPI_COMM_WORLD_RANK") == nullptr;
}
std::string bold(std::string const& words) { return colour_wanted() ? "\x1b[1m" + words + "\x1b[0m" : words; }
std::string faint(std::string const& words) { return colour_wanted() ? "\x1b[2m" + words + "\x1b[0m" : words; }

void print_facts(std::vector<std::pair<std::string, std::string>> const& facts) {
  constexpr int indent = 12;
  int const width = std::min(::isatty(STDOUT_FILENO) == 1 ? terminal_width(STDOUT_FILENO) : 100, 110) - indent;
  for (auto const& [name, words] : facts) {
    std::string line;
    bool first = true;
    auto const flush = [&] {
      std::string const head =
          first ? name + std::string(static_cast<std::size_t>(std::max(1, indent - static_cast<int>(name.size()))), ' ')
                : std::string(indent, ' ');
      std::printf("%s%s\n", first ? bold(head).c_str() : head.c_str(), line.c_str());
      first = false;
      line.clear();
    };
    for (std::size_t at = 0; at <= words.size();) {
      auto const space = std::min(words.find(' ', at), words.size());
      auto const word = words.substr(at, space - at);
      if (!line.empty() && show::columns_of(line) + 1 + show::columns_of(word) > width) flush();
      line += (line.empty() ? "" : " ") + word;
      at = space + 1;
    }
    flush();
  }
}

std::string shown(std::string const& bytes) {
  std::string out;
  for (std::string_view rest = bytes; !rest.empty();) {
    int const length = show::utf8_length(rest);
    auto const c = static_cast<unsigned char>(rest.front());
    if (length == 0 || (c < 0x20 && c != '\n' && c != '\t') || c == 0x7f)
      out += "\xef\xbf\xbd";
    else
      out += rest.substr(0, static_cast<std::size_t>(length));
    rest.remove_prefix(static_cast<std::size_t>(std::max(length, 1)));
  }
  return out;
}

memory_use of_device(std::int64_t bytes, told_step const& step) {
  auto const b = static_cast<double>(bytes);
  return {b / (1 << 30), b / static_cast<double>(step.device_memory.total)};
}

memory_use peak_memory(told_step const& step) {
  if (step.device_memory.total > 0) return of_device(step.device_memory.reserved, step);
  rusage use{};
  ::getrusage(RUSAGE_SELF, &use);  // kibibytes
  double const bytes = 1024.0 * static_cast<double>(use.ru_maxrss);
  double const all = static_cast<double>(::sysconf(_SC_PHYS_PAGES)) * static_cast<double>(::sysconf(_SC_PAGESIZE));
  return {bytes / (1 << 30), bytes / all};
}

step_lines::step_lines(long steps)
    : steps_(steps),
      progress_(::isatty(STDERR_FILENO) == 1),
      plain_(!(progress_ && ::isatty(STDOUT_FILENO) == 1)),
      begin_(clock::now()) {}

step_lines::~step_lines() { clear(); }

void step_lines::clear() {
  if (drawn_) std::fputs("\r\x1b[K", stderr);
  drawn_ = false;
}

std::string step_lines::line(told_step const& r) const {
  std::string losses;
  for (auto const& [name, value] : r.losses) losses += "  " + name + ": " + formatted("%.5f", value);
  char text[512];
  auto const digits = static_cast<int>(std::to_string(steps_).size());
  memory_use const memory = peak_memory(r);
  double const tps = tokens_ / seconds_ / r.ranks;
  std::snprintf(text, sizeof text,
                "step: %*ld  loss: %8.5f%s  grad_norm: %8.4f  memory: %5.2fGiB(%.2f%%)  tps: %s  tflops: %.2f  bubble: %4.1f%%",
                digits, r.step, r.loss, losses.c_str(), r.grad_norm, memory.gibibytes, 100 * memory.share,
                grouped(std::llround(tps)).c_str(), tps * r.flops_per_token * 1e-12, 100 * bubble_seconds_ / seconds_);
  return text;
}

void step_lines::add(told_step const& step) {
  tokens_ += step.tokens;
  seconds_ += step.seconds;
  bubble_seconds_ += step.bubble * step.seconds;
  constexpr double fade = 0.9;
  fading_tokens_ = fade * fading_tokens_ + step.tokens;
  fading_seconds_ = fade * fading_seconds_ + step.seconds;
  fading_bubble_ = fade * fading_bubble_ + step.bubble * step.seconds;
}

void step_lines::show(told_step const& step) {
  add(step);
  if (plain_ && (step.step == 1 || step.step % interval(steps_) == 0 || step.step == steps_)) {
    std::printf("%s\n", line(step).c_str());
    std::fflush(stdout);
    tokens_ = seconds_ = bubble_seconds_ = 0;
  }
  if (progress_) draw(step);
}

void step_lines::draw(told_step const& r) {
  auto const now = clock::now();
  // Ten times a second is plenty; the last step is always seen.
  if (drawn_ && r.step != steps_ && now - last_drawn_ < std::chrono::milliseconds(100)) return;
  last_drawn_ = now;
  double const spent = std::chrono::duration<double>(now - begin_).count();
  double const left = spent / static_cast<double>(r.step) * static_cast<double>(steps_ - r.step);
  auto const seconds = static_cast<long>(std::lround(left));
  char clock_text[32];
  std::snprintf(clock_text, sizeof clock_text, "%ld:%02ld left", seconds / 60, seconds % 60);
  std::string const words = "  step " + std::to_string(r.step) + "/" + std::to_string(steps_) + "  loss " +
                            formatted("%.4f", r.loss) + "  grad_norm " + formatted("%.2f", r.grad_norm) + "  tps " +
                            grouped(std::llround(fading_tokens_ / fading_seconds_ / r.ranks)) + "  bubble " +
                            formatted("%.0f%%", 100 * fading_bubble_ / fading_seconds_) + "  " + clock_text;
  int const room = terminal_width(STDERR_FILENO) - 1;
  int const bar = std::min(24, room - static_cast<int>(words.size()));
  std::string text;
  if (bar >= 8) {
    int const done = static_cast<int>(static_cast<double>(bar) * static_cast<double>(r.step) / static_cast<double>(steps_));
    for (int i = 0; i < bar; ++i) text += i < done ? "━" : "╌";
    text += words;
  } else {
    text = words.substr(2, static_cast<std::size_t>(std::max(room, 0)));
  }
  std::fprintf(stderr, "\r%s\x1b[K", text.c_str());
  std::fflush(stderr);
  drawn_ = true;
}

void check_file(char const* flag, std::string const& path) {
  if (path.empty()) return;
  if (auto const fault = detail::fault_of_writing(path)) refuse_file(flag, path, fault.message());
}

void check_folder(char const* flag, std::string const& path) {
  if (path.empty()) return;
  std::error_code fault;
  std::filesystem::create_directories(path, fault);
  if (!fault) fault = detail::fault_of_writing(std::filesystem::path(path) / "events");
  if (fault) refuse_folder(flag, path, fault);
}

std::unique_ptr<event_file> events_in(std::string const& folder, long first_step) {
  if (folder.empty()) return nullptr;
  try {
    return std::make_unique<event_file>(folder, first_step);
  } catch (std::system_error const& e) {
    refuse_folder("--tensorboard", folder, e.code());
  }
}

void write_file(char const* flag, std::string const& path, std::string const& content) {
  try {
    detail::write_file(path, content);
  } catch (std::system_error const& e) {
    refuse_file(flag, path, e.code().message());
  }
}

metrics_file::metrics_file(std::string const& path, std::optional<long> go_on_at) {
  if (path.empty()) return;
  path_ = path;
  try {
    file_ = open_for_lines(path, go_on_at);
  } catch (std::system_error const& e) {
    refuse_file("--metrics", path, e.code().message());
  }
  if (file_ == nullptr) refuse_file("--metrics", path, std::strerror(errno));
}
metrics_file::~metrics_file() {
  if (file_ != nullptr) std::fclose(file_);
}

named_figures figures_of(told_step const& r) {
  named_figures out;
  auto const entry = [&](std::string const& name, double value) { out.emplace_back(name, value); };
  memory_use const memory = peak_memory(r);
  entry("loss_metrics/global_avg_loss", r.loss);
  for (auto const& [name, value] : r.losses) entry("loss_metrics/" + name, value);
  entry("grad_norm", r.grad_norm);
  entry("lr", r.learning_rate);
  entry("n_tokens_seen", r.tokens_seen);
  entry("throughput(tps)", r.tokens_per_second());
  entry("tflops", r.tokens_per_second() * r.flops_per_token * 1e-12);
  entry("time_metrics/end_to_end(s)", r.seconds);
  entry("time_metrics/data_loading(s)", r.loading_seconds);
  entry("time_metrics/data_loading(%)", 100 * r.loading_seconds / r.seconds);
  if (r.device_memory.total > 0) {
    memory_use const active = of_device(r.device_memory.active, r);
    entry("memory/max_active(GiB)", active.gibibytes);
    entry("memory/max_active(%)", 100 * active.share);
  }
  entry("memory/max_reserved(GiB)", memory.gibibytes);
  entry("memory/max_reserved(%)", 100 * memory.share);
  entry("bubble", r.bubble);
  return out;
}

void metrics_file::write(long step, named_figures const& figures) {
  if (file_ == nullptr) return;
  std::string line = "{\"step\":" + std::to_string(step);
  for (auto const& [name, value] : figures) line += ",\"" + name + "\":" + show::exact(value);
  std::fprintf(file_, "%s}\n", line.c_str());
  if (std::fflush(file_) == 0) return;
  // Training is worth more than its metrics: it goes on.
  std::fprintf(stderr, "--metrics %s cannot be written from step %ld on: %s\n", path_.c_str(), step, std::strerror(errno));
  std::fclose(file_);
  file_ = nullptr;
}

}  // namespace chevron::train
