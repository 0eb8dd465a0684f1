// Files are written beside their paths and renamed: a link's target and another hard link keep their bytes, and a process that is
// killed leaves the old file or the whole new one.
#include "support/checkpoint_refusal.hpp"
#include "support/file_content.hpp"
#include "support/scratch_folder.hpp"
#include "support/small_model.hpp"

#include <chevron/base/new_file.hpp>
#include <chevron/checkpoint.hpp>
#include <chevron/run/core/end_process.hpp>
#include <chevron/run/core/flight_log.hpp>

#include <torch/nn/modules/linear.h>

#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <functional>
#include <iterator>
#include <map>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include <doctest/doctest.h>

using namespace small_model;
namespace fs = std::filesystem;
using checkpoint_refusal::check_says;
using checkpoint_refusal::failure_of;
using chevron::detail::fault_of_writing;
using chevron::detail::new_file;
using chevron::detail::write_file;

namespace {

std::size_t entries(fs::path const& folder) {
  return static_cast<std::size_t>(std::distance(fs::directory_iterator(folder), fs::directory_iterator()));
}

/// Ways of writing a file of which the name is given.
std::pair<char const*, std::function<void(fs::path const&)>> const writers[] = {
    {"write_file", [](fs::path const& file) { write_file(file, "new"); }},
    {"write_safetensors",
     [](fs::path const& file) {
       chevron::write_safetensors(file, {{"a", at::ones({3})}});
     }},
    {"flight log", [](fs::path const& file) { chevron::detail::write_within_a_second(file, "new"); }},
    {"torchrun's error file",
     [](fs::path const& file) {
       ::setenv("TORCHELASTIC_ERROR_FILE", file.c_str(), 1);
       chevron::detail::write_torchrun_error("a message");
       ::unsetenv("TORCHELASTIC_ERROR_FILE");
     }},
};

/// The identity of a file, which a rename replaces and a write in place keeps.
ino_t number_of(fs::path const& file) {
  struct stat about {};
  CHECK(::lstat(file.c_str(), &about) == 0);
  return about.st_ino;
}

}  // namespace

TEST_CASE("links: the new file replaces a symbolic link, a dangling one and a hard link, whose targets keep their bytes") {
  for (auto const& [name, writes] : writers) {
    for (std::string const kind : {"symbolic", "hard", "dangling", "no link"}) {
      CAPTURE(name);
      CAPTURE(kind);
      scratch_folder const folder;
      fs::path const other = folder.path / "other", file = folder.path / "file";
      write_content(other, "of another run");
      if (kind == "symbolic") fs::create_symlink("other", file);
      if (kind == "hard") fs::create_hard_link(other, file);
      if (kind == "dangling") fs::create_symlink("nothing", file);
      if (kind == "no link") write_content(file, "old");
      ino_t const before = number_of(other), mine = number_of(file);
      writes(file);
      CHECK(content_of(other) == "of another run");
      CHECK(number_of(other) == before);
      CHECK(number_of(file) != mine);
      CHECK(fs::is_regular_file(fs::symlink_status(file)));
      CHECK(content_of(file) != "of another run");
      CHECK(content_of(file) != "old");
      CHECK_FALSE(content_of(file).empty());
      CHECK(entries(folder.path) == 2);
    }
  }
}

TEST_CASE("permissions of a replaced file stay, and those of a link's target are not taken") {
  scratch_folder const folder;
  fs::path const file = folder.path / "file", link = folder.path / "link";
  write_content(file, "old");
  fs::permissions(file, fs::perms(0600));
  fs::create_symlink("file", link);
  write_file(file, "new");
  CHECK(fs::status(file).permissions() == fs::perms(0600));
  auto const mask = ::umask(0022);
  write_file(link, "new");
  ::umask(mask);
  CHECK(fs::symlink_status(link).permissions() == fs::perms(0644));
}

TEST_CASE("a fault of writing is known before anything is written, and no probe stays") {
  scratch_folder const folder;
  write_content(folder.path / "file", "old");
  fs::create_directory(folder.path / "sub");
  fs::create_directory_symlink("sub", folder.path / "link");
  CHECK_FALSE(fault_of_writing(folder.path / "file"));
  CHECK_FALSE(fault_of_writing(folder.path / "none yet"));
  CHECK(fault_of_writing(folder.path / "sub") == std::errc::is_a_directory);
  CHECK(fault_of_writing(folder.path / "link") == std::errc::is_a_directory);
  CHECK(fault_of_writing(folder.path / "nowhere" / "file") == std::errc::no_such_file_or_directory);
  CHECK(fault_of_writing(folder.path / "file" / "below") == std::errc::not_a_directory);
  CHECK_THROWS_AS(write_file(folder.path / "link", "new"), std::system_error);
  CHECK(fs::is_symlink(folder.path / "link"));
  CHECK(content_of(folder.path / "file") == "old");
  CHECK(entries(folder.path) == 3);
  if (::geteuid() != 0) {
    fs::permissions(folder.path / "file", fs::perms(0444));
    CHECK(fault_of_writing(folder.path / "file") == std::errc::permission_denied);
  }
}

TEST_CASE("streams are written in place: a pipe, and what the process has open") {
  scratch_folder const folder;
  fs::path const pipe = folder.path / "pipe", open = folder.path / "open";
  CHECK(::mkfifo(pipe.c_str(), 0600) == 0);
  std::string read;
  std::thread reader([&] { read = content_of(pipe); });
  write_file(pipe, "through the pipe");
  reader.join();
  CHECK(read == "through the pipe");
  CHECK(fs::is_fifo(pipe));
  write_content(open, "");
  int const number = ::open(open.c_str(), O_WRONLY);
  fs::path const descriptor = "/dev/fd/" + std::to_string(number);
  CHECK_FALSE(fault_of_writing(descriptor));
  write_file(descriptor, "by its number");
  ::close(number);
  CHECK(content_of(open) == "by its number");
  CHECK(fs::is_character_file("/dev/null"));
  CHECK(chevron::detail::is_stream("/dev/null"));
  check_says(failure_of([] { chevron::write_safetensors("/dev/null", {{"a", at::ones({3})}}); }), {"/dev/null: is no file"});
}

TEST_CASE("a process that is killed while it writes leaves the old file; a full disk too") {
  scratch_folder const folder;
  fs::path const file = folder.path / "file";
  write_content(file, "old");
  pid_t const child = ::fork();
  if (child == 0) {
    new_file out(file);
    out.write("half", 4);
    ::raise(SIGKILL);
  }
  int status = 0;
  CHECK(::waitpid(child, &status, 0) == child);
  CHECK(WIFSIGNALED(status));
  CHECK(content_of(file) == "old");
  rlimit before{};
  ::getrlimit(RLIMIT_FSIZE, &before);
  rlimit const small{100, before.rlim_max};
  ::setrlimit(RLIMIT_FSIZE, &small);
  std::error_code fault;
  try {
    write_file(file, std::string(1000, 'x'));
  } catch (std::system_error const& e) {
    fault = e.code();
  }
  ::setrlimit(RLIMIT_FSIZE, &before);
  CHECK(fault == std::errc::file_too_large);
  CHECK(content_of(file) == "old");
  CHECK(entries(folder.path) == 2);  // with the killed process's
}

TEST_CASE("weights: links in the folder are replaced, and a folder in place of weights is refused before anything is removed") {
  scratch_folder const folder;
  fs::path const out = folder.path / "out", other = folder.path / "other.safetensors";
  fs::create_directory(out);
  torch::nn::Linear const module(2, 3);
  chevron::write_safetensors(other, {{"other", at::ones({3})}});
  std::string const content = content_of(other);
  fs::create_symlink("../other.safetensors", out / "model.safetensors");
  fs::create_symlink("../other.safetensors", out / "model.safetensors.index.json");
  chevron::save_weights(module, out);
  CHECK(content_of(other) == content);
  CHECK(fs::is_regular_file(fs::symlink_status(out / "model.safetensors")));
  CHECK(entries(out) == 1);
  fs::create_directories(out / "model-00001-of-00002.safetensors");
  check_says(failure_of([&] { chevron::save_weights(module, out); }), {"is a folder in place of a file of weights"});
  CHECK(fs::exists(out / "model.safetensors"));
}

TEST_CASE("checkpoints: links to another run's files are replaced, and these files keep their bytes") {
  scratch_folder const folder;
  fs::path const other = folder.path / "other", mine = folder.path / "mine";
  static auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 1, 2)));
  auto const job = [&](std::function<void(chevron::trainer&)> const& what) {
    chevron::run_threads({.pipeline_ranks = 1}, [&](transport& comm) {
      chevron::trainer train(
          {.program = program, .transport = comm, .stages = build_stage, .loss = mean_square, .optimizer = adamw});
      what(train);
    });
  };
  job([&](chevron::trainer& train) {
    chevron::save_checkpoint(train, other);
    auto const data = make_batch(8, 1);
    train.step({data.input}, {data.target});
    chevron::save_checkpoint(train, other);
  });
  auto const contents = [&] {
    std::map<std::string, std::string> out;
    for (auto const& entry : fs::recursive_directory_iterator(other)) {
      if (entry.is_regular_file()) out[entry.path()] = content_of(entry.path());
    }
    return out;
  };
  std::string kind;
  SUBCASE("each checkpoint is a link") { kind = "folders"; }
  SUBCASE("each file is a link") { kind = "files"; }
  SUBCASE("each file is a hard link") { kind = "hard"; }
  job([&](chevron::trainer& of_other) {  // which holds the lock meanwhile
    chevron::load_checkpoint(of_other, other);
    chevron::save_checkpoint(of_other, other);
    write_content(other / "step-00000000" / "model-0.safetensors.0123456789abcdef.partial", "being written");
    auto const before = contents();
    fs::create_directory(mine);
    for (auto const& entry : fs::directory_iterator(other)) {
      if (kind == "folders") fs::create_symlink("../other" / entry.path().filename(), mine / entry.path().filename());
    }
    for (auto const& entry : fs::recursive_directory_iterator(other)) {
      if (kind == "folders") break;
      fs::path const copy = mine / fs::relative(entry.path(), other);
      if (entry.is_directory()) fs::create_directory(copy);
      if (!entry.is_regular_file()) continue;
      kind == "hard" ? fs::create_hard_link(entry.path(), copy) : fs::create_symlink(entry.path(), copy);
    }
    job([&](chevron::trainer& train) {
      chevron::load_checkpoint(train, mine);
      chevron::save_checkpoint(train, mine);
    });
    CHECK(contents() == before);
  });
  CHECK(fs::is_regular_file(fs::symlink_status(mine / "step-00000001" / "manifest.json")));
  CHECK(fs::is_directory(fs::symlink_status(mine / "step-00000001")));
  CHECK(fs::is_regular_file(fs::symlink_status(mine / ".chevron-lock")));
  CHECK(chevron::detail::read_manifest(mine / "step-00000001").next_step == 1);
}
