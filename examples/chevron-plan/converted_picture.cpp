#include "converted_picture.hpp"

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>
#include <thread>
#include <vector>

#include <chevron/base/format.hpp>

#include "request.hpp"

extern char** environ;

namespace plan_program {
namespace {

namespace fs = std::filesystem;
using chevron::show::number;

constexpr auto patience = std::chrono::seconds(60);

/// A folder of its own, removed at the end.
class own_folder {
 public:
  own_folder() {
    std::error_code failed;
    std::string name = (fs::temp_directory_path(failed) / "chevron-plan-XXXXXX").string();
    if (failed || ::mkdtemp(name.data()) == nullptr)
      throw usage("a folder for the conversion cannot be made (" + std::string(std::strerror(errno)) +
                  "): set TMPDIR to a folder that you may write to, or write svg");
    path = name;
  }
  own_folder(own_folder const&) = delete;
  own_folder& operator=(own_folder const&) = delete;
  ~own_folder() {
    std::error_code ignored;
    fs::remove_all(path, ignored);
  }
  fs::path path;
};

/// The path of a program, as a shell looks for it; empty if it is not installed.
std::string found_on_path(char const* name) {
  char const* const folders = std::getenv("PATH");
  std::string const all = folders == nullptr ? "" : folders;
  for (std::size_t at = 0; at <= all.size();) {
    std::size_t const end = std::min(all.find(':', at), all.size());
    std::string const candidate = (end == at ? "." : all.substr(at, end - at)) + "/" + name;
    std::error_code ignored;
    if (fs::is_regular_file(candidate, ignored) && ::access(candidate.c_str(), X_OK) == 0) return candidate;
    at = end + 1;
  }
  return {};
}

/// Runs a program without input and output. \returns words for its failure; empty if it ended with 0
std::string failure_of(std::vector<std::string> words) {
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  posix_spawn_file_actions_t files;
  posix_spawn_file_actions_init(&files);
  posix_spawn_file_actions_addopen(&files, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_addopen(&files, STDOUT_FILENO, "/dev/null", O_WRONLY, 0);
  posix_spawn_file_actions_addopen(&files, STDERR_FILENO, "/dev/null", O_WRONLY, 0);
  pid_t child = 0;
  int const fault = ::posix_spawn(&child, words.front().c_str(), &files, nullptr, arguments.data(), environ);
  posix_spawn_file_actions_destroy(&files);
  if (fault != 0) return std::string("could not be started (") + std::strerror(fault) + ")";
  int status = 0;
  for (auto const until = std::chrono::steady_clock::now() + patience;;) {
    pid_t const ended = ::waitpid(child, &status, WNOHANG);
    if (ended == child) break;
    if (ended < 0 && errno != EINTR) return std::string("was lost (") + std::strerror(errno) + ")";
    if (std::chrono::steady_clock::now() > until) {
      ::kill(child, SIGKILL);
      ::waitpid(child, &status, 0);
      return "took longer than " + std::to_string(patience.count()) + " s";
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
  if (WIFSIGNALED(status)) return "was ended by signal " + std::to_string(WTERMSIG(status));
  if (WEXITSTATUS(status) != 0) return "ended with exit code " + std::to_string(WEXITSTATUS(status));
  return {};
}

struct conversion {
  fs::path folder, svg, out;
  std::string width, height;  ///< pixels
  bool pdf = false;
};

std::vector<std::string> by_rsvg(std::string const& program, conversion const& c) {
  std::vector<std::string> words{program, "--format", c.pdf ? "pdf" : "png", "--output", c.out};
  if (!c.pdf) words.insert(words.end(), {"--zoom", "2"});
  words.push_back(c.svg);
  return words;
}

std::vector<std::string> by_inkscape(std::string const& program, conversion const& c) {
  std::vector<std::string> words{program, std::string("--export-type=") + (c.pdf ? "pdf" : "png"),
                                 "--export-filename=" + c.out.string()};
  if (!c.pdf) words.push_back("--export-dpi=192");
  words.push_back(c.svg);
  return words;
}

std::vector<std::string> by_chromium(std::string const& program, conversion const& c) {
  fs::path const page = c.folder / "page.html";
  std::ofstream(page) << "<!doctype html><meta charset=\"utf-8\"><style>@page { size: " << c.width << "px " << c.height
                      << "px; margin: 0 } body { margin: 0 } img { display: block }</style><img src=\""
                      << c.svg.filename().string() << "\">\n";
  std::vector<std::string> words{program,
                                 "--headless",
                                 "--disable-gpu",
                                 "--hide-scrollbars",
                                 "--no-first-run",
                                 "--disable-dev-shm-usage",
                                 "--user-data-dir=" + (c.folder / "profile").string()};
  if (::geteuid() == 0) words.push_back("--no-sandbox");  // Chromium's sandbox refuses root; the page is this program's own
  if (c.pdf)
    words.insert(words.end(), {"--no-pdf-header-footer", "--print-to-pdf-no-header", "--print-to-pdf=" + c.out.string()});
  else
    words.insert(words.end(), {"--force-device-scale-factor=2", "--window-size=" + c.width + "," + c.height,
                               "--screenshot=" + c.out.string()});
  words.push_back("file://" + page.string());
  return words;
}

struct converter {
  char const* name;
  std::vector<std::string> (*command)(std::string const& program, conversion const& c);
};
constexpr converter converters[] = {{"rsvg-convert", by_rsvg},      {"inkscape", by_inkscape},
                                    {"chromium", by_chromium},      {"chromium-browser", by_chromium},
                                    {"google-chrome", by_chromium}, {"google-chrome-stable", by_chromium}};

}  // namespace

std::string converted_picture(std::string const& svg, double width, double height, std::string const& format) {
  converter const* chosen = nullptr;
  std::string program;
  for (converter const& one : converters) {
    program = found_on_path(one.name);
    chosen = &one;
    if (!program.empty()) break;
  }
  if (program.empty())
    throw usage("a " + format +
                " needs rsvg-convert, inkscape or chromium, and none of them is installed: write svg, or install "
                "one (Debian: librsvg2-bin)");
  own_folder const folder;
  conversion const c{.folder = folder.path,
                     .svg = folder.path / "picture.svg",
                     .out = folder.path / ("picture." + format),
                     .width = number(width),
                     .height = number(height),
                     .pdf = format == "pdf"};
  if (!(std::ofstream(c.svg, std::ios::binary) << svg << std::flush))
    throw usage(c.svg.string() + " cannot be written: is the disk full?");
  std::string const failure = failure_of(chosen->command(program, c));
  std::ifstream in(c.out, std::ios::binary);
  std::string bytes(std::istreambuf_iterator<char>(in), {});
  bool const right = bytes.starts_with(c.pdf ? "%PDF" : "\x89PNG");
  if (failure.empty() && right) return bytes;
  throw usage(program + ", which was asked for a " + format + ", " + (failure.empty() ? "wrote none" : failure) +
              ": write svg, or put another of rsvg-convert, inkscape and chromium first "
              "on the path");
}

}  // namespace plan_program
