// waits: jobs that wait for a folder
// A folder of checkpoints is one job's: another one is refused before it can do harm, whatever it saves and however it came
// there.
#include "support/file_content.hpp"
#include "support/scratch_folder.hpp"
#include "support/small_model.hpp"

#include <chevron/checkpoint/checkpoint.hpp>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <set>
#include <string>
#include <thread>

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <doctest/doctest.h>

using namespace small_model;
namespace fs = std::filesystem;

namespace {

using scratch = scratch_folder;

/// One job: calls `what` with a trainer on each of two ranks.
void job(std::function<void(chevron::trainer&)> const& what) {
  static auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 4)));
  chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
    chevron::trainer train(
        {.program = program, .transport = comm, .stages = build_stage, .loss = mean_square, .optimizer = adamw});
    what(train);
  });
}

void step(chevron::trainer& train, int count = 1) {
  for (int i = 0; i < count; ++i) {
    auto const data = make_batch(8, static_cast<int>(train.next_step()));
    train.step({data.input}, {data.target});
  }
}

std::string said_of(std::function<void()> const& what) {
  try {
    what();
  } catch (chevron::checkpoint_error const& e) {
    return e.what();
  }
  return {};
}

/// The error of `what` on each of a job's two ranks, which train on afterwards.
std::string refused(std::function<void(chevron::trainer&)> const& what) {
  std::set<std::string> said;
  std::mutex guard;
  job([&](chevron::trainer& train) {
    std::string const mine = said_of([&] { what(train); });
    step(train);
    std::lock_guard const hold(guard);
    said.insert(mine);
  });
  return said.size() == 1 ? *said.begin() : "ranks say different things";
}

bool contains(std::string const& text, std::string const& words) {
  INFO(text << " | " << words);
  bool const there = text.find(words) != std::string::npos;
  CHECK(there);
  return there;
}

std::string job_of(fs::path const& checkpoint) { return chevron::detail::read_manifest(checkpoint).job; }

}  // namespace

TEST_CASE("a job does not save where another one has, be it before, at or after the same step, and nothing there changes") {
  scratch at;
  job([&](chevron::trainer& train) {
    step(train, 2);
    chevron::save_checkpoint(train, at.path);
  });
  auto const before = content_of(at.path / "step-00000002" / "model-0.safetensors");
  for (int const steps : {1, 2, 3}) {
    CAPTURE(steps);
    contains(refused([&](chevron::trainer& train) {
               step(train, steps);
               chevron::save_checkpoint(train, at.path);
             }),
             "step-00000002: is of an earlier run or of another job");
  }
  contains(refused([&](chevron::trainer& train) { chevron::check_checkpoint_folder(train, at.path); }), "Remedy");
  CHECK(content_of(at.path / "step-00000002" / "model-0.safetensors") == before);
  job([&](chevron::trainer& train) {
    if (chevron::load_checkpoint(train, at.path).next_step != 2) throw std::runtime_error("another step");
  });
}

TEST_CASE("the job's name is kept by those that go on from it, and is another for each that begins") {
  scratch at, other;
  job([&](chevron::trainer& train) {
    for (int i = 0; i < 2; ++i) {
      step(train);
      chevron::save_checkpoint(train, at.path);
    }
  });
  job([&](chevron::trainer& train) {
    chevron::load_checkpoint(train, at.path);
    chevron::check_checkpoint_folder(train, at.path);
    step(train);
    chevron::save_checkpoint(train, at.path);
  });
  job([&](chevron::trainer& train) { chevron::save_checkpoint(train, other.path); });
  CHECK(job_of(at.path / "step-00000001").size() == 16);
  CHECK(job_of(at.path / "step-00000001") == job_of(at.path / "step-00000002"));
  CHECK(job_of(at.path / "step-00000002") == job_of(at.path / "step-00000003"));
  CHECK(job_of(other.path / "step-00000000") != job_of(at.path / "step-00000003"));
}

TEST_CASE("a folder that another process holds is refused with the holder's name; one that is about to end is waited for") {
  scratch at;
  fs::path const file = at.path / ".chevron-lock";
  int const theirs =
      ::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666);  // another opening is locked out like another process
  REQUIRE(::flock(theirs, LOCK_EX | LOCK_NB) == 0);
  std::string const name = "process 4711 on elsewhere\n";
  REQUIRE(::write(theirs, name.data(), name.size()) > 0);
  auto const check = [&](chevron::trainer& train) { chevron::check_checkpoint_folder(train, at.path); };
  contains(refused(check),
           "another job saves its checkpoints into this folder: process 4711 on elsewhere. Remedy: a folder for each job");
  CHECK(fs::is_empty(at.path) == false);
  CHECK(std::distance(fs::directory_iterator(at.path), fs::directory_iterator()) == 1);
  std::thread ends([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    ::close(theirs);
  });
  job([&](chevron::trainer& train) {
    check(train);
    if (train.comm().topology().global_rank == 0) {
      int const again = ::open(file.c_str(), O_RDWR | O_CLOEXEC);
      bool const free = ::flock(again, LOCK_EX | LOCK_NB) == 0;
      ::close(again);
      if (free) throw std::runtime_error("it does not hold the folder");
    }
    train.comm().all_gather_text("");
  });
  ends.join();
  contains(content_of(file), "process " + std::to_string(::getpid()) + " on ");
  job(check);  // a trainer that is gone holds nothing
}

TEST_CASE("trainers of one process: who goes on from the other may save beside it, another job may not") {
  scratch at;
  job([&](chevron::trainer& train) {
    step(train);
    chevron::save_checkpoint(train, at.path);
    auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 4)));
    chevron::trainer second(
        {.program = program, .transport = train.comm(), .stages = build_stage, .loss = mean_square, .optimizer = adamw});
    chevron::load_checkpoint(second, at.path);
    step(second);
    chevron::save_checkpoint(second, at.path);
    chevron::trainer third(
        {.program = program, .transport = train.comm(), .stages = build_stage, .loss = mean_square, .optimizer = adamw});
    std::string const said = said_of([&] { chevron::save_checkpoint(third, at.path); });
    if (said.find("a trainer of this process") == said.npos) throw std::runtime_error("said: " + said);
  });
  CHECK(job_of(at.path / "step-00000001") == job_of(at.path / "step-00000002"));
}

TEST_CASE("where files cannot be locked, the job's name still tells, before each save") {
  scratch at;
  std::string const lock = (at.path / ".chevron-lock").string();
  REQUIRE(::mknod(lock.c_str(), S_IFSOCK | 0600, 0) == 0);  // a socket, which no process can open as a file
  REQUIRE(::open(lock.c_str(), O_RDONLY | O_CLOEXEC) < 0);
  job([&](chevron::trainer& first) {
    chevron::check_checkpoint_folder(first, at.path);
    auto const program = chevron::lower(chevron::prove(plan_of("1F1B", 2, 4)));
    chevron::trainer second(
        {.program = program, .transport = first.comm(), .stages = build_stage, .loss = mean_square, .optimizer = adamw});
    chevron::check_checkpoint_folder(second, at.path);
    step(first);
    step(second, 2);
    chevron::save_checkpoint(first, at.path);
    std::string const said = said_of([&] { chevron::save_checkpoint(second, at.path); });
    if (said.find("is of an earlier run or of another job") == said.npos) throw std::runtime_error("said: " + said);
    step(first);
    chevron::save_checkpoint(first, at.path);
  });
  CHECK(job_of(at.path / "step-00000001") == job_of(at.path / "step-00000002"));
}

TEST_CASE("who went on from an earlier checkpoint does not save before a later one, nor over what came since") {
  scratch at;
  auto const save = [&](chevron::trainer& train, int steps) {
    step(train, steps);
    chevron::save_checkpoint(train, at.path);
  };
  job([&](chevron::trainer& train) {
    for (int i = 0; i < 4; ++i) save(train, 1);
    // Back to an earlier one, in the same job.
    chevron::load_checkpoint(train, at.path / "step-00000002");
    std::string const said = said_of([&] { save(train, 1); });
    if (said.find("step-00000004: is later than step 3") == said.npos) throw std::runtime_error("said: " + said);
    train.comm().all_gather_text("");
    if (train.comm().topology().global_rank == 0) fs::remove_all(at.path / "step-00000004");
    train.comm().all_gather_text("");
    chevron::save_checkpoint(train, at.path);
  });
  contains(refused([&](chevron::trainer& train) {
             chevron::load_checkpoint(train, at.path / "step-00000002");
             save(train, 1);
           }),
           "step-00000003: is of an earlier run");
  // Two that go on from the same checkpoint: the second comes too late.
  auto const of_first = chevron::lower(chevron::prove(plan_of("1F1B", 2, 4)));
  job([&](chevron::trainer& second) {
    chevron::load_checkpoint(second, at.path);
    {
      chevron::trainer first(
          {.program = of_first, .transport = second.comm(), .stages = build_stage, .loss = mean_square, .optimizer = adamw});
      chevron::load_checkpoint(first, at.path);
      save(first, 1);
    }
    std::string const said = said_of([&] { save(second, 1); });
    if (said.find("step-00000004: is of an earlier run or of another job") == said.npos)
      throw std::runtime_error("said: " + said);
  });
}

TEST_CASE("a checkpoint that was damaged since it was saved ends no job; at its beginning it is told") {
  scratch at;
  fs::path const manifest = at.path / "step-00000002" / "manifest.json";
  job([&](chevron::trainer& train) {
    for (int i = 0; i < 3; ++i) {
      step(train);
      if (i == 2 && train.comm().topology().global_rank == 0) std::ofstream(manifest) << "damaged";
      chevron::save_checkpoint(train, at.path);
    }
  });
  std::ofstream(at.path / "step-00000003" / "manifest.json") << "damaged";
  contains(refused([&](chevron::trainer& train) { chevron::load_checkpoint(train, at.path); }),
           "move step-00000003 away; the last checkpoint is then step-00000002");
  contains(refused([&](chevron::trainer& train) { chevron::save_checkpoint(train, at.path); }),
           "was damaged, or changed by hand");
}

TEST_CASE("a folder that is removed and made again is held again") {
  scratch at;
  job([&](chevron::trainer& train) {
    step(train);
    chevron::save_checkpoint(train, at.path / "saved");
    train.comm().all_gather_text("");
    if (train.comm().topology().global_rank == 0) fs::remove_all(at.path / "saved");
    step(train);
    chevron::save_checkpoint(train, at.path / "saved");
    if (train.comm().topology().global_rank != 0) return;
    int const again = ::open((at.path / "saved" / ".chevron-lock").c_str(), O_RDWR | O_CLOEXEC);
    bool const free = again < 0 || ::flock(again, LOCK_EX | LOCK_NB) == 0;
    ::close(again);
    if (free) throw std::runtime_error("it does not hold the folder");
  });
  CHECK(job_of(at.path / "saved" / "step-00000002").size() == 16);
}

TEST_CASE("what a killed job left half written goes when the next one begins, and nothing else") {
  scratch at;
  auto const put = [&](fs::path const& file) {
    fs::create_directories((at.path / file).parent_path());
    std::ofstream(at.path / file) << "x";
  };
  put("manifest.json.0123456789abcdef.partial");
  put("step-00000007/model-0.safetensors.0123456789abcdef.partial");
  put("step-00000007/model-0.safetensors");
  put("step-00000007/mine.partial");
  put("mine.0123456789abcdef.partial");
  put("other/model-0.safetensors.0123456789abcdef.partial");
  job([&](chevron::trainer& train) { chevron::check_checkpoint_folder(train, at.path); });
  CHECK_FALSE(fs::exists(at.path / "manifest.json.0123456789abcdef.partial"));
  CHECK_FALSE(fs::exists(at.path / "step-00000007/model-0.safetensors.0123456789abcdef.partial"));
  for (char const* stays : {"step-00000007/model-0.safetensors", "step-00000007/mine.partial", "mine.0123456789abcdef.partial",
                            "other/model-0.safetensors.0123456789abcdef.partial"})
    CHECK(fs::exists(at.path / stays));
}

TEST_CASE("words that training depends on are compared before anything is changed") {
  scratch at;
  job([&](chevron::trainer& train) {
    step(train);
    chevron::save_checkpoint(train, at.path, {{"seed", "7"}, {"text", "12 bytes"}});
  });
  auto const load = [&](std::map<std::string, std::string> const& expected) {
    return refused([&](chevron::trainer& train) {
      auto const before = train.stages()[train.stages()[0] ? 0 : 1].parameters()[0].value.detach().clone();
      auto const check = [&] {
        if (!at::equal(before, train.stages()[train.stages()[0] ? 0 : 1].parameters()[0].value) || train.next_step() != 0)
          throw std::runtime_error("something was changed");
      };
      try {
        chevron::load_checkpoint(train, at.path, expected);
      } catch (...) {
        check();
        throw;
      }
    });
  };
  CHECK(load({{"seed", "7"}, {"text", "12 bytes"}}).empty());
  CHECK(load({{"seed", "7"}}).empty());
  contains(load({{"seed", "8"}}), "was saved by a run with seed 7, this one has 8");
  contains(load({{"heads", "2"}}), "was saved by a run whose manifest has no heads, this one has 2");
  contains(load({{"text", "13 bytes"}}), "Remedy: the same text");
}
