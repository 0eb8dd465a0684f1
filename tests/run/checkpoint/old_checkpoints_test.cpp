// Old checkpoints go, the last ones stay, and whatever is not ours stays in any case.
// timeout: 60
#include <ATen/ATen.h>
#include <chevron/checkpoint/checkpoint.hpp>
#include "support/scratch_folder.hpp"
#include "support/small_model.hpp"

#include <doctest/doctest.h>

#include <filesystem>
#include <fstream>
#include <set>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

/// With files in it.
struct scratch : scratch_folder {
  void put(fs::path const& file) const {
    fs::create_directories((path / file).parent_path());
    std::ofstream(path / file) << "x";
  }
  std::string step(long number) const { return chevron::detail::checkpoint_name(number); }
  /// Writes the files of a checkpoint of two stages.
  void checkpoint(long number, bool whole = true) const {
    for (char const* file : {"model-0.safetensors", "model-1.safetensors", "optimizer-0.safetensors", "optimizer-1.safetensors"})
      put(step(number) + "/" + file);
    if (whole) put(step(number) + "/manifest.json");
  }
  std::set<std::string> names() const {
    std::set<std::string> out;
    for (auto const& entry : fs::directory_iterator(path)) out.insert(entry.path().filename().string());
    out.erase(chevron::detail::folder_lock::file_name);
    return out;
  }
};

using names = std::set<std::string>;

}  // namespace

TEST_CASE("the last ones stay") {
  for (int keep : {1, 2, 3, 5, 9}) {
    scratch const folder;
    for (long n = 1; n <= 5; ++n) folder.checkpoint(10 * n);
    chevron::remove_old_checkpoints(folder.path, 50, keep);
    names left;
    for (int n = std::max(1, 6 - keep); n <= 5; ++n) left.insert(folder.step(10 * n));
    CHECK(folder.names() == left);
    CHECK(chevron::last_checkpoint(folder.path) == folder.path / folder.step(50));
  }
}

TEST_CASE("what is not an old checkpoint of ours stays") {
  scratch const folder;
  folder.checkpoint(10);
  folder.checkpoint(20, false);  // half written
  folder.checkpoint(30);
  folder.put("step-00000030/notes.txt");  // somebody wrote into it
  folder.checkpoint(40);
  fs::create_directory(folder.path / "step-00000040/logs");
  folder.checkpoint(50);
  folder.checkpoint(60);
  folder.checkpoint(99);  // of a later run
  folder.put("step-7/manifest.json");
  folder.put("step-00000008-mine/manifest.json");
  folder.put("readme.txt");
  fs::create_directory(folder.path / "elsewhere");
  folder.put("elsewhere/manifest.json");
  fs::create_directory_symlink(folder.path / "elsewhere", folder.path / folder.step(9));
  fs::create_directory(folder.path / ("removed-" + folder.step(3)));
  folder.put("removed-" + folder.step(3) + "/theirs.txt");
  names wanted = folder.names();
  wanted.erase(folder.step(10));
  wanted.erase(folder.step(50));
  chevron::remove_old_checkpoints(folder.path, 60, 1);
  CHECK(folder.names() == wanted);
  CHECK(fs::exists(folder.path / folder.step(9) / "manifest.json"));
  CHECK(fs::exists(folder.path / folder.step(30) / "model-0.safetensors"));
  // 0 still keeps the last checkpoint.
  chevron::remove_old_checkpoints(folder.path, 60, 0);
  CHECK(folder.names() == wanted);
}

TEST_CASE("nothing goes while the newest is not whole") {
  scratch const folder;
  folder.checkpoint(10);
  folder.checkpoint(20);
  folder.checkpoint(30, false);
  names const all = folder.names();
  chevron::remove_old_checkpoints(folder.path, 30, 1);
  CHECK(folder.names() == all);
  chevron::remove_old_checkpoints(folder.path, 25, 1);
  CHECK(folder.names() == all);
  chevron::remove_old_checkpoints(folder.path / "nowhere", 30, 1);
}

TEST_CASE("killed while it removes: the next call removes the rest, and nobody takes the rest for a checkpoint") {
  std::vector<std::string> const files = {"manifest.json", "model-0.safetensors", "model-1.safetensors.0123456789abcdef.partial",
                                          "optimizer-0.safetensors"};
  for (std::size_t deleted = 0; deleted <= files.size(); ++deleted) {
    scratch const folder;
    fs::create_directory(folder.path / "removed-step-00000010");
    for (std::size_t i = deleted; i < files.size(); ++i) folder.put("removed-step-00000010/" + files[i]);
    CHECK_FALSE(chevron::last_checkpoint(folder.path));
    folder.checkpoint(10);  // the same step again, of a run that went on from before
    folder.checkpoint(20);
    chevron::remove_old_checkpoints(folder.path, 20, 1);
    CHECK(folder.names() == names{folder.step(20)});
  }
}

TEST_CASE("a folder that may not be written to is an error that says so") {
  if (::geteuid() == 0) return;  // root may write everywhere
  scratch const folder;
  folder.checkpoint(10);
  folder.checkpoint(20);
  fs::permissions(folder.path, fs::perms::owner_read | fs::perms::owner_exec);
  CHECK_THROWS_WITH_AS(chevron::remove_old_checkpoints(folder.path, 20, 1), doctest::Contains("cannot be removed"),
                       chevron::checkpoint_error);
  fs::permissions(folder.path, fs::perms::owner_all);
}

TEST_CASE("a trainer keeps the last two of the four it saved, on all ranks, and goes on from the last") {
  scratch const folder;
  auto const plan = small_model::plan_of("1F1B", 2, 4);
  auto const data = small_model::make_batch(8, 1);
  chevron::run_threads({.pipeline_ranks = 2}, [&](chevron::transport& comm) {
    chevron::trainer train(small_model::setup(plan, comm, small_model::build_stage, {}, small_model::adamw));
    for (int i = 0; i < 4; ++i) {
      train.step({data.input}, {data.target});
      chevron::save_checkpoint(train, folder.path);
      chevron::remove_old_checkpoints(train, folder.path, 2);
    }
  });
  CHECK(folder.names() == names{folder.step(3), folder.step(4)});
  chevron::run_threads({.pipeline_ranks = 2}, [&](chevron::transport& comm) {
    chevron::trainer train(small_model::setup(plan, comm, small_model::build_stage, {}, small_model::adamw));
    if (chevron::load_checkpoint(train, folder.path).next_step != 4) throw std::runtime_error("not the last one");
  });
}
