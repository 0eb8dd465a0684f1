// timeout: 300
// waits: deadlines run out
// Whole jobs that fail, on ranks that are threads and on ranks that are processes: how soon they end, their exit
// codes, and every rank's message.
#include "support/small_model.hpp"
#include "support/subprocess.hpp"
#include "support/thread_ranks.hpp"

#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <chevron/checkpoint/checkpoint.hpp>
#include <chevron/checkpoint/save_weights.hpp>
#include <chevron/jobs/run_main.hpp>
#include <chevron/transports/gloo/gloo_transport.hpp>
#include <chevron/transports/streams/stream_transport.hpp>
#include "support/host_streams.hpp"

#include <doctest/doctest.h>

namespace {

using namespace small_model;
using namespace std::chrono_literals;

/// A trainer of two stages with all that a program has beside it.
struct small_job {
  explicit small_job(transport& on, builder const& build = build_stage)
      : comm(on),
        train({.program = chevron::lower(chevron::prove(plan)),
               .transport = on,
               .stages = build,
               .loss = mean_square,
               .optimizer = sgd}),
        evaluate(chevron::lower(chevron::prove(chevron::forward_part(plan))), train) {}
  void steps(int count) {
    for (int i = 0; i < count; ++i) train.step({data.input}, {data.target});
  }
  int rank() const { return comm.topology().global_rank; }

  transport& comm;
  chevron::plan plan = plan_of("1F1B", 2, 4);
  batch data = make_batch(8, 1);
  chevron::trainer train;
  chevron::evaluator evaluate;
};

/// Stage 1 does this at its so-many-th forward.
builder breaks_at(int call, std::function<void(at::Tensor&)> const& what) {
  return [=](int s) -> chevron::stage {
    if (s == 0) return build_stage(s);
    auto calls = std::make_shared<int>(0);
    torch::nn::Linear inner(width, width);
    return chevron::stage(inner, [=](at::Tensor x) mutable {
      if (++*calls == call) what(x);
      return inner(x);
    });
  };
}
builder const throws_late = breaks_at(11, [](at::Tensor&) { throw std::out_of_range("the tokenizer ran out of ids"); });

/// Two steps of two microbatches in three slices. In the second step stage 1 throws in slice 1 of microbatch 1, in its forward or
/// where the gradient of the carry that it gave arrives.
void train_in_slices(transport& comm, bool in_backward) {
  auto const calls = std::make_shared<int>(0);
  auto const build = [=](int s) {
    at::manual_seed(s);
    torch::nn::Linear inner(width, width);
    auto const forward = [=](at::Tensor x, at::Tensor state) mutable {
      at::Tensor const y = inner(x);
      at::Tensor sums = y.cumsum(1);  // of a token and all tokens before
      if (state.defined()) sums = sums + state.unsqueeze(1);
      at::Tensor const next = sums.select(1, -1);
      // The comparison of slices with their sequence computes no graph, and is no part of a step.
      if (s == 1 && at::GradMode::is_enabled() && ++*calls == 6 + 5) {
        if (!in_backward) throw std::out_of_range("slice 1 is too long");
        next.register_hook([](at::Tensor const&) -> at::Tensor { throw std::out_of_range("slice 1 has no gradient"); });
      }
      return std::make_tuple(y + sums, next);
    };
    return chevron::stage(inner, forward).carries({"state"});
  };
  auto const plan = chevron::catalogue::make_plan("Seq1F1B", {.ranks = 2, .micro_batches = 2, .slices = 3});
  chevron::trainer train(small_model::setup(plan, comm, build));
  for (int step = 0; step < 3; ++step) train.step(at::ones({2, 7, width}), at::zeros({2, 7, width}));
}

[[noreturn]] void sleep_for_ever() {
  for (;;) std::this_thread::sleep_for(1s);
}

using body = std::function<void(transport&)>;
/// The work of each job's ranks. Deadlines are five minutes where none is set.
std::map<std::string, body> const jobs = {
    {"evaluates-alone",
     [](transport& comm) {
       small_job job(comm);
       job.steps(2);
       if (job.rank() == 0) job.evaluate.loss({job.data.input}, {job.data.target});
       job.steps(1);
     }},
    {"saves-alone",
     [](transport& comm) {
       small_job job(comm);
       job.steps(2);
       if (job.rank() == 0) chevron::save_checkpoint(job.train, std::filesystem::temp_directory_path() / "chevron-saves-alone");
       job.steps(1);
     }},
    {"saves-weights-alone",
     [](transport& comm) {
       small_job job(comm);
       job.steps(2);
       if (job.rank() == 0)
         chevron::save_weights(job.train, std::filesystem::temp_directory_path() / "chevron-saves-alone",
                               [](std::size_t, std::string const& name) { return name; });
       job.steps(1);
     }},
    {"compares-alone",
     [](transport& comm) {
       small_job job(comm);
       job.steps(2);
       if (job.rank() == 0) job.train.check_copies();
       job.steps(1);
     }},
    {"steps-alone",
     [](transport& comm) {
       small_job job(comm);
       job.steps(job.rank() == 0 ? 3 : 2);
       if (job.rank() == 1) job.evaluate.loss({job.data.input}, {job.data.target});
     }},
    {"leaves-early",
     [](transport& comm) {
       small_job job(comm);
       job.steps(job.rank() == 0 ? 4 : 2);
     }},
    {"waits-long",
     [](transport& comm) {
       small_job job(comm);
       job.steps(1);
       if (job.rank() == 1) std::this_thread::sleep_for(4s);  // rank 0 waits for a message
       job.steps(1);
       if (job.rank() == 0) std::this_thread::sleep_for(4s);  // rank 1 waits in a collective call
       job.evaluate.loss({job.data.input}, {job.data.target});
     }},
    {"sleeps",
     [](transport& comm) {
       small_job job(comm);
       job.steps(1);
       comm.deadline(1s);
       if (job.rank() == 1) sleep_for_ever();
       job.steps(1);
     }},
    {"stage-sleeps",
     [](transport& comm) {
       comm.deadline(1s);
       small_job job(comm, breaks_at(5, [](at::Tensor&) { sleep_for_ever(); }));
       job.steps(2);
     }},
    {"stage-throws",
     [](transport& comm) {
       small_job job(comm, throws_late);
       job.steps(3);
     }},
    {"stage-throws-a-number",
     [](transport& comm) {
       small_job job(comm, breaks_at(2, [](at::Tensor&) { throw 42; }));
       job.steps(1);
     }},
    {"slice-throws", [](transport& comm) { train_in_slices(comm, false); }},
    {"slice-throws-in-its-backward", [](transport& comm) { train_in_slices(comm, true); }},
    {"shapes",
     [](transport& comm) {
       small_job job(comm, breaks_at(2, [](at::Tensor& x) { x = x.view({-1, 5}); }));
       job.steps(1);
     }},
    {"too-large-a-tensor",
     [](transport& comm) {
       small_job job(comm, breaks_at(2, [](at::Tensor& x) { x = at::empty({std::int64_t{1} << 45}, x.options()); }));
       job.steps(1);
     }},
    {"accelerator-fails",
     [](transport& comm) {
       small_job job(comm, breaks_at(2, [](at::Tensor&) {
                       throw c10::AcceleratorError({__func__, __FILE__, __LINE__}, 700, "CUDA error: an illegal memory access");
                     }));
       job.steps(1);
     }},
    {"builder-throws",
     [](transport& comm) {
       small_job job(comm, [](int s) -> chevron::stage {
         if (s == 1) throw std::runtime_error("no file weights.pt");
         return build_stage(s);
       });
     }},
    {"loop-throws",
     [](transport& comm) {
       small_job job(comm);
       job.steps(2);
       if (job.rank() == 0) throw std::runtime_error("cannot read batch 3");
       job.steps(1);
     }},
    {"throws-while-files-are-locked",
     [](transport& comm) {
       small_job job(comm);
       job.steps(1);
       if (job.rank() == 1) {
         std::thread([] {
           ::flockfile(stdout);
           ::flockfile(stderr);
           sleep_for_ever();
         }).detach();
         std::this_thread::sleep_for(300ms);
         throw std::runtime_error("cannot read batch 3");
       }
       job.steps(1);
     }},
    {"catches",
     [](transport& comm) {
       small_job job(comm, throws_late);
       try {
         job.steps(3);
       } catch (chevron::stage_error const& e) {
         std::fprintf(stderr, "caught on rank %d: %s\n", job.rank(), e.what());
         std::this_thread::sleep_for(300ms);  // busy with something else
         job.steps(1);
       }
     }},
};

/// A job of two ranks as the main program of a process.
int run_job(std::string const& name, std::string const& how) {
  body const& work = jobs.at(name);
  if (how == "threads") {
    chevron::run_threads({.pipeline_ranks = 2}, work);
    return 0;
  }
  auto const rank = chevron::launch({.nproc = 2});
  chevron::gloo_transport comm(rank.topology(2), rank);
  try {
    work(comm);
    comm.close();
  } catch (chevron::error const& e) {
    std::fprintf(stderr, "<%d: %d>\n", rank.rank, e.code());
    throw;
  }
  return 0;
}

class started_job : public subprocess::started {
 public:
  started_job(std::string const& name, std::string const& how, bool bare = false)
      : subprocess::started("a failing job", {"CHEVRON_FAILING_JOB=" + name + " " + how + (bare ? " bare" : ""), "OMP_NUM_THREADS=1"}),
        name_(name) {}
  void ends(int code, std::vector<std::string> const& words, std::chrono::milliseconds within = 60s) {
    end_ = wait();
    INFO(name_ << ": " << end_.output);
    CHECK(end_.code == code);
    CHECK(end_.took < within);
    for (auto const& each : words) CHECK_MESSAGE(end_.lines_with(each) >= 1, each);
    CHECK(end_.output.find("the the") == std::string::npos);
  }
  /// As `ends`, and one rank alone prints the sentence, whichever rank that is; the other rank prints a short line.
  void ends_with_one_message(int code, std::string const& sentence, std::vector<std::string> const& words,
                             std::chrono::milliseconds within = 60s) {
    ends(code, words, within);
    INFO(name_ << ": " << end_.output);
    std::istringstream in(end_.output);
    int whole = 0, brief = 0;
    for (std::string line; std::getline(in, line);) {
      if (!line.starts_with("rank ")) continue;
      whole += line.find(sentence) != std::string::npos;
      if (line.find("'s message says more") == std::string::npos) continue;
      ++brief;
      CHECK(line.size() < 120);
      CHECK(line.find("Remedy") == std::string::npos);
    }
    CHECK(whole == 1);
    CHECK(brief == 1);
  }

 private:
  std::string name_;
  subprocess::program_end end_;
};

void in_threads(std::string const& name) { chevron::run_threads({.pipeline_ranks = 2}, jobs.at(name)); }

/// The message of each rank of a job over host streams.
std::vector<std::string> over_streams(body const& work) {
  return thread_ranks::said(thread_ranks::run(2, 1, [&](chevron::topology const& where, auto const& store, auto const& watch) {
    chevron::stream_transport<chevron::host_streams> comm(where, store, watch, 60000ms);
    work(comm);
    comm.close();
  }));
}

}  // namespace

TEST_CASE("a failing job" * doctest::skip()) {
  char const* const text = std::getenv("CHEVRON_FAILING_JOB");
  if (text == nullptr) return;
  std::istringstream in(text);
  std::string name, how, bare;
  in >> name >> how >> bare;
  int const code =
      bare.empty() ? chevron::run_main(0, nullptr, [&](int, char**) { return run_job(name, how); }) : run_job(name, how);
  std::fflush(nullptr);
  _exit(code);  // past doctest's own report
}

TEST_CASE("ranks that wait for each other are told at once, in threads, with the call that each is in") {
  CHECK_THROWS_WITH_AS(
      in_threads("evaluates-alone"),
      doctest::Contains("rank 0 sends step 2, evaluate, 0SEND_F0 to rank 1 where rank 1 expects step 2, 1RECV_F0 from rank 0"),
      chevron::preflight_error);
  for (auto const& [name, call] : {std::pair{"saves-alone", "save_checkpoint"}, std::pair{"saves-weights-alone", "save_weights"},
                                   std::pair{"compares-alone", "check_copies"}}) {
    std::string const words =
        std::string("none can go on: rank 0 waiting in step 1, ") + call + "; rank 1 in step 2, 1RECV_F0 from rank 0";
    CHECK_THROWS_WITH_AS(in_threads(name), doctest::Contains(words.c_str()), chevron::preflight_error);
  }
  CHECK_THROWS_WITH_AS(
      in_threads("steps-alone"),
      doctest::Contains("rank 0 sends step 2, 0SEND_F0 to rank 1 where rank 1 expects step 2, evaluate, 1RECV_F0 from rank 0"),
      chevron::preflight_error);
  CHECK_THROWS_WITH_AS(in_threads("leaves-early"), doctest::Contains("rank 0, step 2, 0RECV_B0: rank 1 has ended"),
                       chevron::peer_lost_error);
}

TEST_CASE("ranks that wait for each other are told within seconds, in processes, with the call that each is in") {
  // Together: most of their time they wait.
  started_job evaluates("evaluates-alone", "gloo"), saves("saves-alone", "gloo"), steps("steps-alone", "gloo"),
      leaves("leaves-early", "gloo"), slow("waits-long", "gloo");
  std::string const wait = "the ranks wait for each other, and none can go on: ";
  evaluates.ends_with_one_message(
      5, wait + "rank 0 waiting in step 2, evaluate; rank 1 in step 2, 1RECV_F0 from rank 0",
      {"rank 0, step 2, evaluate: ", "rank 1, step 2, 1RECV_F0: ", ": stopped with the job; rank ", "<0: 5>", "<1: 5>"});
  saves.ends_with_one_message(5, wait + "rank 0 waiting in step 1, save_checkpoint; rank 1 in step 2, 1RECV_F0 from rank 0",
                              {"rank 0, step 1, save_checkpoint: ", "rank 1, step 2, 1RECV_F0: "});
  steps.ends_with_one_message(
      5, wait + "rank 0 waiting in step 2, 0RECV_B0 from rank 1; rank 1 in step 2, evaluate, 1RECV_F0 from rank 0",
      {"rank 0, step 2, 0RECV_B0: ", "rank 1, step 2, 1RECV_F0: "});
  leaves.ends_with_one_message(
      3, "rank 1 has ended: " + wait + "rank 0 waiting in step 2, 0RECV_B0 from rank 1; rank 1 in step 1, the end of the job",
      {"rank 0, step 2, 0RECV_B0: ", "rank 1, step 1, the end of the job: "});
  slow.ends(0, {});
}

TEST_CASE("hosts that wait for each other are told within seconds, over streams") {
  auto const said = [](body const& first, body const& second) {
    return over_streams([&](transport& comm) { (comm.topology().global_rank == 0 ? first : second)(comm); });
  };
  body const gathers = [](transport& comm) {
    chevron::collective_scope const doing(comm, "norm of the gradient");
    double const mine = 1;
    double all[2];
    comm.all_gather({&mine, 1}, all);
  };
  body const saves = [](transport& comm) {
    chevron::collective_scope const doing(comm, "save_checkpoint");
    comm.all_gather_text("x");
  };
  body const evaluates = [](transport& comm) {
    chevron::collective_scope const doing(comm, "evaluate");
    comm.all_gather_text("y");
  };
  body const leaves = [](transport&) {};
  std::string const wait = "the ranks wait for each other, and none can go on: ";
  auto const one_saves = said(saves, gathers);
  CHECK(one_saves[0].find("rank 0, save_checkpoint: " + wait + "rank 0 waiting in save_checkpoint") == 0);
  CHECK(one_saves[1].find("rank 1, norm of the gradient: " + wait) == 0);
  auto const one_leaves = said(gathers, leaves);
  CHECK(one_leaves[0].find("rank 0, norm of the gradient: rank 1 has ended: " + wait) == 0);
  CHECK(one_leaves[1].find("rank 1, the end of the job: the other ranks have given this one up, and say: rank 1 has ended") == 0);
  auto const different = said(saves, evaluates);
  CHECK(different[0].find("rank 1 is in evaluate where rank 0 is in save_checkpoint") != std::string::npos);
  CHECK(different[1].find("rank 0 is in save_checkpoint where rank 1 is in evaluate") != std::string::npos);
}

TEST_CASE("a rank that never comes back ends its process soon after the deadline, with the failure's message and code") {
  started_job sleeps("sleeps", "threads"), stage("stage-sleeps", "threads"), bare("sleeps", "threads", true);
  std::string const left = "; rank 1 did not come back within 1500 ms after that, and so this process ends";
  sleeps.ends(
      4,
      {"rank 0, step 1, 0RECV_B0: rank 1 did not answer within 1000 ms; this rank was waiting for 0RECV_B0 from rank 1" + left},
      30s);
  stage.ends(4, {"rank 0, step 1, 0RECV_B0: rank 1 did not answer within 1000 ms", left}, 30s);
  bare.ends(4, {left}, 30s);
}

TEST_CASE("a thread that keeps stdout and stderr locked does not keep its rank from ending, nor from saying why") {
  for (char const* const how : {"threads", "gloo"})
    started_job("throws-while-files-are-locked", how).ends(1, {"rank 1 ended: cannot read batch 3"}, 30s);
}

TEST_CASE("what a stage throws has a type of its own, with the original in it") {
  using chevron::exit_code;
  auto const nested = [](std::string const& name) {
    try {
      in_threads(name);
    } catch (chevron::stage_error const& e) {
      std::string text = std::to_string(e.code()) + ": " + e.what();
      try {
        std::rethrow_if_nested(e);
      } catch (std::out_of_range const& original) {
        return text + " <- out_of_range: " + original.what();
      } catch (c10::Error const&) {
        return text + " <- c10::Error";
      } catch (std::runtime_error const& original) {
        return text + " <- runtime_error: " + original.what();
      } catch (int number) {
        return text + " <- " + std::to_string(number);
      }
    }
    return std::string("something else");
  };
  CHECK(nested("stage-throws") ==
        "1: rank 1, step 2, 1F2: stage 1 threw: the tokenizer ran out of ids <- out_of_range: the tokenizer ran out of ids");
  CHECK(nested("stage-throws-a-number") == "1: rank 1, step 0, 1F1: stage 1 threw: something that is no std::exception <- 42");
  CHECK(nested("builder-throws") == "1: rank 1: building stage 1 threw: no file weights.pt <- runtime_error: no file weights.pt");
  std::string const memory = nested("too-large-a-tensor");
  INFO(memory);
  CHECK(memory.find("1: rank 1, step 0, 1F1: stage 1 threw: ") == 0);
  CHECK(memory.find("can't allocate memory") != std::string::npos);
  CHECK(nested("accelerator-fails").find("1: rank 1, step 0, 1F1: stage 1 threw: CUDA error: an illegal memory access") == 0);
  std::string const shapes = nested("shapes");
  INFO(shapes);
  CHECK(shapes.find("2: rank 1, step 0, 1F1: stage 1 threw: ") == 0);
  CHECK(shapes.find(" <- c10::Error") != std::string::npos);
  // Between steps an exception keeps its type.
  CHECK_THROWS_WITH_AS(in_threads("loop-throws"), "cannot read batch 3", std::runtime_error);
}

TEST_CASE("a stage that throws in the middle of a sliced step: its rank, slice and words on all ranks, at once") {
  for (bool const in_backward : {false, true}) {
    std::string const name = in_backward ? "slice-throws-in-its-backward" : "slice-throws";
    std::string const words = in_backward ? "rank 1, step 1, 1B1.1: stage 1 threw: slice 1 has no gradient"
                                          : "rank 1, step 1, 1F1.1: stage 1 threw: slice 1 is too long";
    CHECK_THROWS_WITH_AS(in_threads(name), words.c_str(), chevron::stage_error);
    started_job(name, "gloo").ends_with_one_message(1, words, {"rank 0, step 1, ", "<0: 1>", "<1: 1>"}, 30s);
    auto const said = over_streams(jobs.at(name));
    CHECK(said[0].find(words + "; this rank was waiting for") != std::string::npos);
    CHECK(said[1].find(words) == 0);
  }
}

TEST_CASE("a failure that its rank catches reaches the others at once") {
  // Rank 0 is told though rank 1 goes on; on rank 1 the trainer refuses to be used.
  CHECK_THROWS_WITH_AS(in_threads("catches"),
                       doctest::Contains("rank 1, step 2: a step or an evaluation failed on this rank before"),
                       chevron::usage_error);
  auto const said = over_streams(jobs.at("catches"));
  CHECK(said[0].find("rank 1, step 2, 1F2: stage 1 threw: the tokenizer ran out of ids; this rank was waiting for") !=
        std::string::npos);
  CHECK(said[1].find("rank 1, step 2: a step or an evaluation failed on this rank before") == 0);

  started_job catches("catches", "gloo"), number("stage-throws-a-number", "gloo"), building("builder-throws", "gloo"),
      loop("loop-throws", "gloo"), loop_in_threads("loop-throws", "threads");
  // Rank 1 prints the refusal that followed its stage's failure; if it prints first, its message ends with that failure.
  catches.ends(1, {"caught on rank 1: rank 1, step 2, 1F2: stage 1 threw",
                   "rank 0, step 2, 0RECV_B2: ", "rank 1, step 2: a step or an evaluation failed on this rank before",
                   ": rank 1, step 2, 1F2: stage 1 threw: the tokenizer ran out of ids"});
  number.ends_with_one_message(1, "rank 1, step 0, 1F1: stage 1 threw: something that is no std::exception",
                               {"rank 0, step 0, ", "rank 1, step 0, 1F1: "});
  building.ends_with_one_message(1, "rank 1: building stage 1 threw: no file weights.pt", {});
  loop.ends_with_one_message(1, "rank 0 ended: cannot read batch 3", {"rank 1, step 2, 1RECV_F0: "});
  loop_in_threads.ends(1, {"rank 0 ended: cannot read batch 3"});
}

TEST_CASE("after an evaluation that failed, the trainer refuses") {
  auto const fails = [](transport& comm) {
    small_job job(comm, breaks_at(9, [](at::Tensor&) { throw std::runtime_error("no such file"); }));
    job.steps(2);
    std::string first;
    try {
      job.evaluate.loss({job.data.input}, {job.data.target});
    } catch (chevron::error const& e) {
      first = e.what();
    }
    INFO(first);
    bool const culprit = job.rank() == 1;
    if (culprit && first.find("rank 1, step 2, 1F0: stage 1 threw: no such file") == std::string::npos)
      throw std::logic_error(first);
    if (!culprit &&
        first.find("rank 1, step 2, 1F0: stage 1 threw: no such file; this rank was waiting for evaluate") == std::string::npos)
      throw std::logic_error(first);
    job.steps(1);
  };
  CHECK_THROWS_WITH_AS(chevron::run_threads({.pipeline_ranks = 2}, fails),
                       doctest::Contains("rank 1, step 2: a step or an evaluation failed on this rank before"),
                       chevron::usage_error);
}

TEST_CASE("the exit code is that of the rank that failed first, in every run") {
  std::map<int, int> codes;
  for (int round = 0; round < 5; ++round) {
    std::vector<started_job> together;
    for (int i = 0; i < 3; ++i) together.emplace_back("shapes", "gloo");
    for (auto& each : together) {
      auto const end = each.wait();
      INFO(end.output);
      ++codes[end.code];
      CHECK(end.lines_with("<0: 2>") == 1);
      CHECK(end.lines_with("<1: 2>") == 1);
    }
  }
  CHECK(codes == std::map<int, int>{{2, 15}});
}
