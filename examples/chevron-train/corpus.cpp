#include "corpus.hpp"

#include <link.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <system_error>

#include <chevron/run/core/error.hpp>

namespace chevron::train {
namespace {

namespace fs = std::filesystem;

/// Where LibTorch's headers are: beside the library this program runs with (`lib` and `include` are neighbours).
fs::path libtorch_headers() {
  fs::path library;
  auto const look = [](dl_phdr_info* loaded, std::size_t, void* found) {
    std::string_view const name = loaded->dlpi_name == nullptr ? "" : loaded->dlpi_name;
    if (name.find("/libc10.so") == std::string_view::npos) return 0;
    *static_cast<fs::path*>(found) = name;
    return 1;
  };
  ::dl_iterate_phdr(look, &library);
  std::error_code fault;
  library = fs::canonical(library, fault);
  return fault ? fs::path() : library.parent_path().parent_path() / "include";
}

/// Text is what has no zero byte and hardly any other control characters; the beginning of a file tells.
bool is_text(std::string_view bytes) {
  auto const look = bytes.substr(0, 8192);
  std::size_t odd = 0;
  for (char const c : look) {
    auto const u = static_cast<unsigned char>(c);
    if (u == 0) return false;
    odd += u < 0x20 && c != '\n' && c != '\t' && c != '\r' && c != '\f' ? 1 : 0;
  }
  return odd * 100 <= look.size();
}

std::string read_file(fs::path const& path, std::int64_t most) {
  std::error_code fault;
  auto const size = fs::file_size(path, fault);
  std::ifstream in;
  if (!fault) in.open(path, std::ios::binary);  // what has no size may be a pipe, whose writer would be waited for
  if (fault || !in) {
    throw usage_error("--data " + path.string() + " cannot be read: " + (fault ? fault.message() : std::strerror(errno)) +
                      ". Remedy: give files or folders that this user may read");
  }
  std::string bytes(static_cast<std::size_t>(std::min<std::int64_t>(most, static_cast<std::int64_t>(size))), 0);
  in.read(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  bytes.resize(static_cast<std::size_t>(in.gcount()));
  return bytes;
}

/// The regular files of a path, in the order of their names. Links to folders are not followed: they may lead round.
std::vector<fs::path> files_of(fs::path const& path) {
  std::error_code fault;
  auto const status = fs::status(path, fault);
  if (!fs::exists(status)) {
    throw usage_error("--data " + path.string() +
                      " does not exist. Remedy: give an existing text file or folder, or leave --data away");
  }
  if (!fs::is_directory(status)) return {path};
  std::vector<fs::path> out;
  for (fs::recursive_directory_iterator at(path, fs::directory_options::skip_permission_denied, fault), end; !fault && at != end;
       at.increment(fault)) {
    auto const name = at->path().filename().string();
    if (name.starts_with('.')) {
      if (at->is_directory()) at.disable_recursion_pending();
      continue;
    }
    if (at->is_regular_file()) out.push_back(at->path());
  }
  if (fault)
    throw usage_error("--data " + path.string() + " cannot be read: " + fault.message() +
                      ". Remedy: a folder that this user may read");
  std::sort(out.begin(), out.end());
  return out;
}

std::string megabytes(std::int64_t bytes) {
  char text[32];
  if (bytes < 100000)
    std::snprintf(text, sizeof text, "%.1f kB", static_cast<double>(bytes) / 1e3);
  else
    std::snprintf(text, sizeof text, "%.1f MB", static_cast<double>(bytes) / 1e6);
  return text;
}

}  // namespace

corpus read_corpus(corpus_options const& options) {
  corpus out;
  std::vector<fs::path> paths(options.paths.begin(), options.paths.end());
  std::string where;
  if (paths.empty()) {
    auto const headers = libtorch_headers();
    for (char const* part : {"c10", "torch/csrc/api", "torch/csrc/autograd"}) {
      if (fs::is_directory(headers / part)) paths.push_back(headers / part);
    }
    if (paths.empty()) {
      throw usage_error("the default text, LibTorch's C++ headers, is not at " +
                        (headers.empty() ? fs::path("include") : headers).string() + ". Remedy: give any text with --data PATH");
    }
    where = "LibTorch's C++ headers";
  } else {
    for (fs::path const& p : paths) where += (where.empty() ? "" : ", ") + p.string();
  }

  std::vector<std::string> texts;
  std::int64_t size = 0;
  for (fs::path const& path : paths) {
    for (fs::path const& file : files_of(path)) {
      if (size >= options.limit) {
        out.cut_short = true;
        break;
      }
      auto bytes = read_file(file, options.limit - size);
      if (bytes.empty()) continue;
      if (!is_text(bytes)) {
        ++out.skipped;
        continue;
      }
      size += static_cast<std::int64_t>(bytes.size());
      texts.push_back(std::move(bytes));
    }
  }
  out.files = static_cast<int>(texts.size());
  if (texts.empty()) {
    throw usage_error(
        "--data " + where +
        (out.skipped > 0 ? " holds no text, only other files (" + std::to_string(out.skipped) + ")" : " holds nothing") +
        ". Remedy: give text files, or a folder with some");
  }

  constexpr std::size_t every = 20;
  if (texts.size() >= every) {
    for (std::size_t i = 0; i < texts.size(); ++i) (i % every == every - 1 ? out.held_out : out.training) += texts[i];
  } else {
    for (auto const& text : texts) out.training += text;
    auto const kept = out.training.size() - out.training.size() / every;
    out.held_out = out.training.substr(kept);
    out.training.resize(kept);
  }
  if (static_cast<std::int64_t>(std::min(out.training.size(), out.held_out.size())) < options.least) {
    throw usage_error("--data " + where + " is too short: " + std::to_string(size) +
                      " bytes, of which a twentieth is held out; each part must have at least " + std::to_string(options.least) +
                      " (--context and one more). Remedy: more text, or a smaller --context");
  }
  out.source = where + ": " + std::to_string(out.files) + (out.files == 1 ? " file, " : " files, ") + megabytes(size) + ", " +
               megabytes(static_cast<std::int64_t>(out.held_out.size())) + " of it held out";
  if (out.skipped > 0) out.source += " (" + std::to_string(out.skipped) + " that are not text left out)";
  if (out.cut_short) out.source += " (the rest, beyond " + megabytes(options.limit) + ", left out)";
  return out;
}

std::uint64_t mixed(std::uint64_t seed, std::uint64_t step, std::uint64_t sample) {
  // SplitMix64's finalizer, applied to one input after the other.
  auto const stir = [](std::uint64_t z) {
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
    return z ^ (z >> 31);
  };
  std::uint64_t z = seed;
  for (std::uint64_t const part : {step, sample}) z = stir(z + 0x9e3779b97f4a7c15ULL * (part + 1));
  return z;
}

}  // namespace chevron::train
