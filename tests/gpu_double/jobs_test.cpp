// timeout: 1800
// waits: deadlines run out
// Jobs over NCCL that end well, and jobs that break at each point of their way: which exit code, which cause, how soon.
#include "gpu_double/jobs.hpp"

#include <chrono>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <chevron/transports/gpu/cuda_streams.hpp>
#include <chevron/transports/streams/stream_transport.hpp>

using namespace jobs;

TEST_CASE("a job over NCCL" * doctest::skip()) { become_job(); }

TEST_CASE("a job over NCCL ends well, with the losses of ranks that are threads") {
  std::vector<ending> all;
  for (order const& o : {order{.ranks = 2}, order{.ranks = 2, .replicas = 2}, order{.ranks = 4, .schedule = "ZBVZeroBubble"},
                         order{.ranks = 3, .schedule = "ZB-H1"}, order{.ranks = 8, .schedule = "Interleaved1F1B"}}) {
    all.push_back({o, 0, {"losses" + losses_on_cpu(o)}});
  }
  run(all);
}

TEST_CASE("ranks that may share GPUs pretend to be on several machines only where two of them have one GPU") {
  std::string const losses = "losses" + losses_on_cpu({.ranks = 4});
  order const own{.ranks = 4, .may_share = true}, shared{.ranks = 4, .per_gpu = 2, .may_share = true};
  run({{own, 0, {losses}},
       {own, 0, {"rank 3 is on the machine"}},
       {shared, 0, {losses}},
       {shared, 0, {"rank 0 is on a machine of its own"}}});
  // Without it NCCL refuses two ranks on one GPU.
  order const refused{.ranks = 2, .per_gpu = 2};
  auto const end = subprocess::started("a job over NCCL", {"GPU_DOUBLE_JOB=" + refused.text(), "OMP_NUM_THREADS=1"}).wait(300s);
  INFO(end.output);
  CHECK(end.code == 3);
  clean_up();
  using chevron::detail::gpu_place, chevron::detail::machine_shares_gpus;
  std::vector<gpu_place> const two_machines = {{"a", "0"}, {"b", "0"}, {"b", "0"}, {"a", "1"}};
  CHECK_FALSE(machine_shares_gpus(two_machines, 0));
  CHECK(machine_shares_gpus(two_machines, 1));
  CHECK(machine_shares_gpus(two_machines, 2));
  CHECK_FALSE(machine_shares_gpus(two_machines, 3));
}

TEST_CASE("shards over NCCL and over copies: communicators of shards beside those of replicas, edges and all ranks") {
  std::vector<ending> all;
  for (char const* const over : {"NCCL", "copies"}) {
    for (order o : {order{.ranks = 2, .shards = 2}, order{.ranks = 1, .replicas = 2, .shards = 2},
                    order{.ranks = 2, .schedule = "ZB-H1", .shards = 3}}) {
      o.over = over;
      all.push_back({o, 0, {"losses" + losses_on_cpu(o)}});
    }
    run(std::exchange(all, {}));
  }
  order const whole{.ranks = 2, .replicas = 2, .shards = 2};
  run({{whole, 0, {"losses" + losses_on_cpu(whole)}}});
}

TEST_CASE("a shard that breaks is told with its place, and all ranks end") {
  auto const at = [](std::string fault, char const* over, int code, std::vector<std::string> words,
                     std::vector<std::string> other_words = {}) {
    return ending{{.fault = std::move(fault), .point = "later", .culprit = 3, .over = over, .shards = 2},
                  code,
                  std::move(words),
                  std::move(other_words)};
  };
  std::string const place = "(replica 0, pipeline rank 1, shard 1)", there = "ank 3 " + place;
  for (char const* const over : {"NCCL", "copies"}) {
    CAPTURE(over);
    // One rank prints the message; rank 2 prints it or the short line.
    run({at("kill", over, 3, {", step 2", "rank 3 was lost (killed by signal 9)", there},
            {"rank 2 (replica 0, pipeline rank 1, shard 0), step 2", there}),
         at("stop", over, 4, {"rank 3 did not answer within @ ms", there}),
         at("throw", over, 1, {there, "step 2, 1F1: stage 1 threw: no such file"})});
  }
}

// Rank 1 of two fails: the message of each rank, and the exit code of the whole job.
TEST_CASE("a job that breaks ends soon after the deadline, with the cause's exit code and words") {
  auto const at = [](std::string fault, std::string point, int code, std::vector<std::string> words, int culprit = 1) {
    return ending{{.fault = std::move(fault), .point = std::move(point), .culprit = culprit}, code, std::move(words)};
  };
  std::string const killed = "rank 1 was lost (killed by signal 9)", silent = "rank 1 did not answer within @ ms",
                    absent = "rank 1 did not join within @ ms", refused = "NCCL: unhandled system error",
                    gone = "was lost (NCCL: remote process exited or there was a network error)", thrown = "no such file";
  SUBCASE("before it joins") {
    run({at("kill", "start", 3, {killed}), at("stop", "start", 4, {absent}), at("sleep", "start", 4, {absent}),
         at("throw", "start", 1, {"rank 1 ended: " + thrown})});
  }
  SUBCASE("while it joins") {
    run({at("kill", "joining", 3, {killed}), at("stop", "joining", 4, {silent}), at("sleep", "joining", 4, {"within @ ms"}),
         at("system-error", "joining", 3, {refused})});
  }
  SUBCASE("while it connects") {
    run({at("kill", "connecting", 3, {killed}), at("stop", "connecting", 4, {silent}),
         at("kernel-hangs", "connecting", 4, {"did not answer within @ ms"}),
         at("call-hangs", "connecting", 4, {"did not answer within @ ms"}), at("remote-error", "connecting", 3, {gone}),
         at("system-error", "connecting", 3, {refused})});
  }
  SUBCASE("while it makes its trainer") {
    std::string const place = ", making the trainer: ";
    run({at("kill", "making", 3, {place + killed}), at("stop", "making", 4, {place + silent}),
         at("kernel-hangs", "making", 4, {place, "within @ ms"}), at("call-hangs", "making", 4, {place, "within @ ms"}),
         at("remote-error", "making", 3, {place, gone}), at("system-error", "making", 3, {place, refused})});
  }
  for (char const* const point : {"first", "later"}) {
    std::string const step = std::string("step ") + (std::string(point) == "first" ? "0" : "2");
    CAPTURE(step);
    SUBCASE("in a step: a rank") {
      run({at("kill", point, 3, {"rank 0, " + step + ", 0", killed}), at("stop", point, 4, {"rank 0, " + step + ", 0", silent}),
           at("sleep", point, 4, {"rank 0, " + step + ", 0", silent}),
           at("throw", point, 1, {"rank 1, " + step + ", 1F1: stage 1 threw: " + thrown}),
           at("shape", point, 5, {"rank 0, step ", "0SEND_F1: would send Float["}, 0)});
    }
    SUBCASE("in a step: NCCL") {
      run({at("kernel-hangs", point, 4, {"did not answer within @ ms"}), at("call-hangs", point, 4, {silent}),
           at("remote-error", point, 3, {gone}), at("system-error", point, 3, {refused})});
    }
  }
  SUBCASE("at the end") {
    run({at("kill", "end", 3, {killed}), at("stop", "end", 4, {silent}), at("sleep", "end", 4, {silent}),
         at("throw", "end", 1, {"rank 1 ended: " + thrown})});
  }
}

TEST_CASE("communicators that the environment forbids to block are refused, with the remedy") {
  auto const end =
      subprocess::started("a job over NCCL", {"GPU_DOUBLE_JOB=" + order{}.text(), "OMP_NUM_THREADS=1", "NCCL_COMM_BLOCKING=0"})
          .wait(300s);
  INFO(end.output);
  CHECK(end.code == 3);
  CHECK(says(end.output, {"communicators do not block. Remedy: unset NCCL_COMM_BLOCKING"}));
  clean_up();
}

TEST_CASE("a stream to compute on is of one rank at a time, on its GPU") {
  at::Device const gpus[] = {{at::kCUDA, 0}, {at::kCUDA, 1}};
  std::set<c10::StreamId> seen;
  for (int round = 0; round < 2; ++round) {
    std::vector<chevron::compute_lane> held;
    std::set<c10::StreamId> now;
    for (int i = 0; i < 40; ++i) {
      at::Device const gpu = gpus[i % 2];
      held.push_back(chevron::cuda_streams::make_lane(gpu));
      CHECK(held.back().stream.device() == gpu);
      CHECK(gpu_double::device_of(c10::cuda::CUDAStream(held.back().stream).stream()) == gpu.index());
      now.insert(held.back().stream.id());
    }
    CHECK(now.size() == 40);
    if (round == 0) seen = now;
    CHECK(now == seen);  // those that were given back, and no more
  }
}

TEST_CASE("a transfer begins before computation that has waited for a place on the GPU longer") {
  at::Device const gpu(at::kCUDA, 3);
  chevron::compute_lane const lane = chevron::cuda_streams::make_lane(gpu);
  chevron::cuda_streams::stream const transfers(gpu);
  cudaStream_t const computes = c10::cuda::CUDAStream(lane.stream).stream();
  std::mutex guard;
  std::vector<std::string> begun;
  REQUIRE(gpu_double::take_places(3, gpu_double::places));
  auto const kernel = [&](cudaStream_t on, std::string const& name) {
    gpu_double::enqueue(on, [&, on, name] {
      gpu_double::take_places(
          3, 1, [] { return false; }, gpu_double::priority_of(on));
      std::lock_guard const hold(guard);
      begun.push_back(name);
      gpu_double::leave_places(3, 1);
    });
  };
  auto const until_waiting = [](int kernels) {
    while (gpu_double::kernels_without_places(3) < kernels) std::this_thread::sleep_for(1ms);
  };
  for (int i = 0; i < 200; ++i) kernel(computes, "operator");
  until_waiting(1);
  kernel(transfers.get(), "receive");
  until_waiting(2);
  gpu_double::leave_places(3, 1);  // a place for one of both
  gpu_double::drain(transfers.get());
  gpu_double::drain(computes);
  gpu_double::leave_places(3, gpu_double::places - 1);
  REQUIRE(begun.size() == 201);
  CHECK(begun.front() == "receive");
}

TEST_CASE("streams that a program makes by hand refuse settings under which ranks hang") {
  ::setenv("CUDA_LAUNCH_BLOCKING", "1", 1);
  CHECK_THROWS_WITH_AS(chevron::cuda_streams(at::Device(at::kCUDA, 0)),
                       doctest::Contains("CUDA_LAUNCH_BLOCKING=1 has the host wait"), chevron::usage_error);
  ::unsetenv("CUDA_LAUNCH_BLOCKING");
}

TEST_CASE("a channel that a rank does not join is named, and the rank") {
  auto const thrown = thread_ranks::run(2, 1, [&](chevron::topology const& where, auto const& store, auto const& watch) {
    at::Device const device(at::kCUDA, static_cast<c10::DeviceIndex>(where.global_rank));
    chevron::stream_transport<chevron::cuda_streams> comm(where, store, watch, 60s, device);
    comm.deadline(1s);
    if (where.global_rank == 0) comm.connect(std::vector<chevron::edge>{{0, 1}});
    while (!watch->failed()) std::this_thread::sleep_for(10ms);
  });
  std::string const said = thread_ranks::said(thrown)[0];
  INFO(said);
  CHECK(said.find("rank 1 did not answer within 1000 ms") != std::string::npos);
  CHECK(said.find("the other end of channel 'edge from 0 to 1' from rank 1") != std::string::npos);
}

TEST_CASE("a rank whose own call fails is at fault, with the call and the library's text, on all ranks") {
  struct row {
    order job;
    std::string what;  // of the culprit
  };
  using chevron::sharding;
  auto const at = [](char const* call, char const* point, std::string what, int culprit = 1, int replicas = 1,
                     sharding shard = sharding::nothing) {
    return row{
        {.ranks = 2 / replicas, .replicas = replicas, .fault = call, .point = point, .culprit = culprit, .sharding = shard},
        std::move(what)};
  };
  std::string const forth = " on channel 'edge from 0 to 1'", back = " on channel 'edge from 1 to 0'",
                    world = " on channel 'world'", replicas = " on channel 'replicas of rank 0'",
                    at_end = "call of ncclGroupEnd after ";
  for (row const& each :
       {at("ncclGetUniqueId", "joining", "call of ncclGetUniqueId", 0),
        at("ncclGetUniqueId", "making", "call of ncclGetUniqueId", 0),
        at("ncclCommInitRankConfig", "joining", "call of ncclCommInitRankConfig" + world),
        at("ncclCommInitRankConfig", "connecting", "call of ncclCommInitRankConfig" + forth),
        at("ncclGroupEnd", "joining", at_end + "ncclAllGather" + world),
        at("ncclGroupEnd", "connecting", at_end + "ncclRecv" + forth), at("ncclSend", "first", "call of ncclSend" + back),
        at("ncclSend", "later", "call of ncclSend" + back), at("ncclSend", "later", "call of ncclSend" + forth, 0),
        at("ncclRecv", "later", "call of ncclRecv" + forth), at("ncclRecv", "later", "call of ncclRecv" + back, 0),
        at("ncclGroupEnd", "later", at_end + "nccl"), at("ncclAllGather", "joining", "call of ncclAllGather" + world),
        at("ncclAllGather", "later", "call of ncclAllGather" + world),
        at("ncclAllReduce", "joining", "call of ncclAllReduce" + replicas, 1, 2),
        at("ncclAllReduce", "later", "call of ncclAllReduce" + replicas, 0, 2),
        at("ncclReduce", "later", "call of ncclReduce" + replicas, 1, 2, sharding::optimizer),
        at("ncclBroadcast", "first", "call of ncclBroadcast" + replicas, 1, 2, sharding::optimizer)}) {
    order const& o = each.job;
    CAPTURE(o.text());
    auto const begun = steady::now();
    auto const said = thread_ranks::said(
        thread_ranks::run(o.ranks, o.replicas, [&](chevron::topology const& where, auto const& store, auto const& watch) {
          at::Device const device(at::kCUDA, static_cast<c10::DeviceIndex>(where.global_rank));
          if (where.global_rank == o.culprit && o.point == "joining") strike(o.fault, o, device.index());
          chevron::stream_transport<chevron::cuda_streams> comm(where, store, watch, 30s, device);
          comm.deadline(30s);
          train(o, comm, device);
        }));
    CHECK(steady::now() - begun < 20s);  // no wait ended at its deadline
    std::string const fault = "rank " + std::to_string(o.culprit) + "'s " + each.what;
    for (std::string const& of_rank : said) {
      INFO(of_rank);
      CHECK(of_rank.find(fault) != std::string::npos);
      CHECK(of_rank.find(" failed " + failing_call_of(o.fault).quoted()) != std::string::npos);
      CHECK(of_rank.find("was lost") == std::string::npos);
      CHECK(of_rank.find("given this one up") == std::string::npos);
    }
  }
  gpu_double::fail_next("", 0, "", -1);
}

TEST_CASE("processes: the rank whose own call fails prints its message, the others that it failed") {
  auto const at = [](char const* call, char const* point, int code, std::string what, std::string other) {
    return ending{{.fault = call, .point = point, .culprit = 1}, code, {"rank 1", what, failing_call_of(call).quoted()}, {other}};
  };
  std::string const failed = "stopped, as rank 1 failed; rank 1's message says more";
  run({at("ncclCommInitRankConfig", "joining", 3, "rank 1's call of ncclCommInitRankConfig on channel 'world' failed", failed),
       at("ncclSend", "later", 3, "rank 1's call of ncclSend on channel 'edge from 1 to 0' failed", failed),
       at("ncclGroupEnd", "later", 3, "rank 1's call of ncclGroupEnd after nccl", failed),
       at("ncclAllGather", "later", 3, "rank 1's call of ncclAllGather on channel 'world' failed", failed)});
}

TEST_CASE("a lost peer is the other end of the channel on which NCCL reports the loss, not of the rank's oldest wait") {
  // In step 1 rank 1 waits for rank 0, which sends nothing; then rank 1's channel to rank 2 reports an error.
  auto const thrown = thread_ranks::run(3, 1, [&](chevron::topology const& where, auto const& store, auto const& watch) {
    at::Device const device(at::kCUDA, static_cast<c10::DeviceIndex>(where.global_rank));
    chevron::stream_transport<chevron::cuda_streams> comm(where, store, watch, 30s, device);
    comm.deadline(30s);
    comm.connect(std::vector<chevron::edge>{{0, 1}, {1, 2}});
    comm.open({.activation = 0, .receive = 1, .send = 1});
    at::Tensor const value = at::ones({3}, at::TensorOptions(device));
    for (int step = 0; step < 3; ++step) {
      comm.begin_step(step);
      if (where.global_rank == 0 && step == 0) {
        comm.post_send(1, thread_ranks::send_f(0, 0), 0, std::span(&value, 1));
        comm.wait_send(0);
      }
      if (where.global_rank == 1) {
        comm.post_receive(0, thread_ranks::recv_f(1, 0), 0);
        if (step == 1) {
          gpu_double::fail_next("ncclCommGetAsyncError on edge from 1 to 2", ncclRemoteError,
                                "socketProgress: Connection closed by remote peer", 1);
        }
        comm.receive(0);
      }
      while (step == 1 && !watch->failed()) std::this_thread::sleep_for(5ms);
    }
  });
  gpu_double::fail_next("", 0, "", -1);
  for (std::string const& said : thread_ranks::said(thrown)) {
    INFO(said);
    CHECK(
        said.find("rank 2 was lost (NCCL: remote process exited or there was a network error, socketProgress: Connection closed "
                  "by remote peer) on channel 'edge from 1 to 2'") != std::string::npos);
  }
}

TEST_CASE("eight ranks: one breaks, all end") {
  auto const at = [](std::string fault, std::string point, int code, std::vector<std::string> words, int culprit) {
    return ending{{.ranks = 8, .fault = std::move(fault), .point = std::move(point), .culprit = culprit}, code, std::move(words)};
  };
  run({at("kill", "joining", 3, {"rank 3 was lost (killed by signal 9)"}, 3)});
  run({at("kill", "later", 3, {"rank 4 was lost (killed by signal 9)"}, 4)});
  run({at("stop", "later", 4, {"rank 7 did not answer within @ ms"}, 7)});
  run({at("kernel-hangs", "first", 4, {"did not answer within @ ms"}, 2)});
}

TEST_CASE("ranks that are threads of one process, each with a GPU") {
  auto const over_nccl = [](order const& o) {
    std::vector<std::string> losses(static_cast<std::size_t>(o.ranks));
    auto const thrown = thread_ranks::run(o.ranks, 1, [&](chevron::topology const& where, auto const& store, auto const& watch) {
      at::Device const device(at::kCUDA, static_cast<c10::DeviceIndex>(where.global_rank));
      // Whichever device is current: a program need not set it.
      chevron::stream_transport<chevron::cuda_streams> comm(where, store, watch, deadline_of(o), device);
      comm.deadline(deadline_of(o));
      CHECK(comm.make_lane(device).owner != nullptr);  // of no pool
      losses[static_cast<std::size_t>(where.global_rank)] = train(o, comm, device);
      comm.close();
    });
    return std::pair(losses, thread_ranks::said(thrown));
  };
  for (int const ranks : {2, 8}) {
    CAPTURE(ranks);
    order const o{.ranks = ranks};
    std::string const expected = losses_on_cpu(o);
    auto const [losses, said] = over_nccl(o);
    CHECK(said == std::vector<std::string>(losses.size()));
    CHECK(losses[0] == expected);
  }
  struct ending {
    std::string fault, words;
  };
  for (auto const& [fault, words] :
       {ending{"throw", "1F1: stage 1 threw: no such file"}, ending{"kernel-hangs", "did not answer within "},
        ending{"remote-error", "NCCL: remote process exited"}, ending{"system-error", "NCCL: unhandled system error"}}) {
    CAPTURE(fault);
    order broken{.ranks = 4, .fault = fault, .point = "later", .culprit = 1};
    judge_slowness(broken, [&](order const& o) { return over_nccl(o).second == std::vector<std::string>(4); });
    if (fault == "kernel-hangs") broken.deadline = short_deadline(broken);
    auto const begun = steady::now();
    auto const [losses, said] = over_nccl(broken);
    CHECK(steady::now() - begun < slowness() * 7s);  // from the start
    for (std::string const& of_rank : said) {
      INFO(of_rank);
      CHECK(of_rank.find(words) != std::string::npos);
      if (broken.deadline > 0) CHECK(of_rank.find("within " + std::to_string(broken.deadline) + " ms") != std::string::npos);
    }
    CHECK(gpu_double::communicators() == 0);
    CHECK(gpu_double::kernels() == 0);
  }
}
