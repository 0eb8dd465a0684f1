// timeout: 1200
// waits: deadlines run out
// Jobs over channels of copies, of threads and of processes, that end well, and that break.
#include "gpu_double/jobs.hpp"
#include "gpu_double/within.hpp"

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <c10/cuda/CUDAGuard.h>

#include <chevron/transports/gpu/copy_transport.hpp>

using namespace jobs;

namespace {

at::Device gpu(int index) { return {at::kCUDA, static_cast<c10::DeviceIndex>(index)}; }

/// Trains on ranks that are threads. Returns the losses of rank 0, and each rank's error.
std::pair<std::string, std::vector<std::string>> over_copies(order const& o) {
  std::string losses;
  auto const thrown =
      thread_ranks::run(o.ranks, o.replicas, [&](chevron::topology const& where, auto const& store, auto const& watch) {
        chevron::copy_transport comm(where, store, watch, deadline_of(o), gpu(where.global_rank / o.per_gpu), small_pieces);
        comm.deadline(deadline_of(o));
        c10::cuda::CUDAGuard const here(comm.device());
        std::string const mine = train(o, comm, comm.device());
        if (where.global_rank == 0) losses = mine;
        comm.close();
      });
  return {losses, thread_ranks::said(thrown)};
}

}  // namespace

TEST_CASE("a job over copies" * doctest::skip()) { become_job(); }

// Each rank has a GPU of its own: autograd has one thread for a GPU, and in an operator that thread waits for all work of its
// stream, which may be a message of another rank's backward on the same GPU.
TEST_CASE("ranks that are threads train over copies as ranks on the CPU do") {
  for (order const& o : {order{.ranks = 2}, order{.ranks = 3, .schedule = "ZB-H1"}, order{.ranks = 2, .replicas = 2},
                         order{.ranks = 2, .replicas = 3}, order{.ranks = 4, .schedule = "Interleaved1F1B"},
                         order{.ranks = 2, .schedule = "ZBVZeroBubble"}}) {
    CAPTURE(o.text());
    std::string const wanted = losses_on_cpu(o);
    within(300s, o.text(), [&] {
      auto const [losses, said] = over_copies(o);
      CHECK(said == std::vector<std::string>(said.size()));
      CHECK(losses == wanted);
    });
  }
}

TEST_CASE("of ranks that are threads one breaks: all end, and memory is given back") {
  struct ending {
    std::string fault, words;
  };
  int const pinned = gpu_double::pinned_blocks();
  for (auto const& [fault, words] :
       {ending{"none", ""}, ending{"throw", "1F1: stage 1 threw: no such file"}, ending{"nap", "did not answer within "}}) {
    for (int const replicas : {1, 2}) {
      CAPTURE(fault);
      CAPTURE(replicas);
      order o{.ranks = 4 / replicas, .replicas = replicas, .fault = fault, .point = "later", .culprit = 1};
      judge_slowness(o, [](order const& same) {
        auto const said = over_copies(same).second;
        return said == std::vector<std::string>(said.size());
      });
      if (fault == "nap") o.deadline = short_deadline(o);
      auto const begun = steady::now();
      within(300s, o.text(), [&] {
        auto const [losses, said] = over_copies(o);
        for (std::string const& of_rank : said) {
          INFO(of_rank);
          CHECK(of_rank.find(words) != std::string::npos);
          CHECK(of_rank.empty() == words.empty());
          if (o.deadline > 0) CHECK(of_rank.find("within " + std::to_string(o.deadline) + " ms") != std::string::npos);
        }
      });
      if (fault == "throw") CHECK(steady::now() - begun < slowness() * 7s);
    }
    CHECK(gpu_double::lent_blocks() == 0);
    CHECK(gpu_double::pinned_blocks() == pinned);
  }
}

TEST_CASE("a gather that is done stays done where a rank ends before the host of another asks for it") {
  // Ends a rank as an exception does: without `close`, which waits for all ranks, and before a failure is published.
  struct ended {};
  for (bool const published : {true, false}) {
    CAPTURE(published);
    std::vector<double> all(2);
    std::atomic<bool> is_gone{false};
    within(300s, "a gather in two halves", [&] {
      auto const said =
          thread_ranks::said(thread_ranks::run(2, 1, [&](chevron::topology const& where, auto const& store, auto const& watch) {
            int const rank = where.global_rank;
            try {
              chevron::copy_transport comm(where, store, watch, 60s, gpu(rank), small_pieces);
              comm.deadline(60s);
              c10::cuda::CUDAGuard const here(comm.device());
              double const mine[] = {rank + 1.0};
              comm.start_all_gather(mine);
              std::this_thread::sleep_for(300ms);  // the monitors see the gather done
              if (rank == 0) {
                while (!is_gone) std::this_thread::sleep_for(1ms);
                comm.finish_all_gather(all);
              } else if (published) {
                comm.fail(chevron::usage_error("left"));
              } else {
                std::vector<double> got(2);
                comm.finish_all_gather(got);
              }
              if (!published) throw ended();
            } catch (ended const&) {
            }
            if (rank == 1) is_gone = true;
          }));
      // After a published failure rank 0 either has the numbers, or reports the failure.
      CHECK((said[0].empty() || (published && says(said[0], {"left"}))));
      if (said[0].empty()) CHECK(all == std::vector<double>{1, 2});
    });
  }
}

TEST_CASE("a GPU without stream memory operations, GPUs that do not reach each other: refused, with the place and the remedy") {
  for (auto const& [setting, words] :
       {std::pair("GPU_DOUBLE_NO_STREAM_MEMORY=1", "CU_DEVICE_ATTRIBUTE_CAN_USE_STREAM_WAIT_VALUE_NOR is 0"),
        std::pair("GPU_DOUBLE_NO_PEERS=1", "cannot reach the memory of GPU")}) {
    auto const end = subprocess::started("a job over copies", {"GPU_DOUBLE_JOB=" + order{.over = "copies"}.text(),
                                                               "OMP_NUM_THREADS=1", std::string(setting)})
                         .wait(300s);
    INFO(end.output);
    CHECK(end.code == 2);
    CHECK(says(end.output, {words, "Remedy: "}));
  }
}

TEST_CASE("a GPU that gives a rank no context ends the job with CUDA's words") {
  auto const end = subprocess::started("a job over copies", {"GPU_DOUBLE_JOB=" + order{.over = "copies"}.text(),
                                                             "OMP_NUM_THREADS=1", "GPU_DOUBLE_NO_CONTEXT=1"})
                       .wait(300s);
  INFO(end.output);
  CHECK(end.code == 1);
  CHECK(says(end.output, {"out of memory"}));
  CHECK(!says(end.output, {"terminate called"}));
}

TEST_CASE("a job of processes over copies ends well, with the losses of ranks that are threads") {
  std::vector<ending> all;
  for (order const& o : {order{.ranks = 2, .over = "copies"}, order{.ranks = 2, .replicas = 2, .over = "copies", .per_gpu = 2},
                         order{.ranks = 3, .schedule = "ZB-H1", .over = "copies"},
                         order{.ranks = 2, .schedule = "DualPipeV", .over = "copies", .per_gpu = 2}}) {
    all.push_back({o, 0, {"losses" + losses_on_cpu(o)}});
  }
  run(all);
}

TEST_CASE("a job of processes over copies that breaks ends soon after the deadline, with the cause's exit code and words") {
  auto const at = [](std::string fault, std::string point, int code, std::vector<std::string> words, int culprit = 1) {
    return ending{
        {.fault = std::move(fault), .point = std::move(point), .culprit = culprit, .over = "copies"}, code, std::move(words)};
  };
  std::string const killed = "rank 1 was lost (killed by signal 9)", silent = "rank 1 did not answer within @ ms",
                    thrown = "no such file";
  SUBCASE("while it joins and connects") {
    run({at("kill", "joining", 3, {killed}), at("stop", "joining", 4, {silent}), at("kill", "connecting", 3, {killed}),
         at("stop", "connecting", 4, {silent}), at("kill", "making", 3, {killed}), at("stop", "making", 4, {silent})});
  }
  for (char const* const point : {"first", "later"}) {
    std::string const step = std::string("step ") + (std::string(point) == "first" ? "0" : "2");
    CAPTURE(step);
    SUBCASE("in a step") {
      run({at("kill", point, 3, {"rank 0, " + step + ", 0", killed}), at("stop", point, 4, {"rank 0, " + step + ", 0", silent}),
           at("sleep", point, 4, {"rank 0, " + step + ", 0", silent}),
           at("throw", point, 1, {"rank 1, " + step + ", 1F1: stage 1 threw: " + thrown}),
           at("shape", point, 5, {"rank 0, step ", "0SEND_F1: would send Float["}, 0)});
    }
  }
  SUBCASE("at the end") {
    run({at("kill", "end", 3, {killed}), at("stop", "end", 4, {silent}), at("throw", "end", 1, {"rank 1 ended: " + thrown})});
  }
}
