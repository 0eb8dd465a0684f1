#include <chevron/run/core/error.hpp>

#include <functional>
#include <string>
#include <vector>

#include <chevron/run/core/failure.hpp>

#include <doctest/doctest.h>

namespace error_test {

using chevron::error_context;

/// Sets the grid for errors, and sets a grid without shards at the end.
struct grid_of_errors {
  grid_of_errors(int pipeline_ranks, int shards) {
    chevron::detail::job_grid::set({.pipeline_ranks = pipeline_ranks, .shards = shards});
  }
  ~grid_of_errors() { chevron::detail::job_grid::set({}); }
};

/// The message of each type of error for one sentence and context.
std::vector<std::string> of_all_types(std::string const& sentence, error_context const& where) {
  using namespace chevron;
  return {error(exit_code::other, sentence, where).what(),
          usage_error(sentence, where).what(),
          stage_error(exit_code::other, sentence, where).what(),
          peer_lost_error(sentence, where).what(),
          timeout_error(sentence, where).what(),
          preflight_error(sentence, where).what(),
          numerical_error(sentence, where).what(),
          checkpoint_error(sentence, where).what()};
}

TEST_CASE("all types of errors place the ranks of their context, once, and no number of their sentence") {
  grid_of_errors const grid(2, 2);
  std::string const of_tensors = "expected a tensor of rank 4, but got one of ranks 2 and 3";
  for (std::string const& each : of_all_types(of_tensors, {})) CHECK(each == of_tensors);
  std::string const in_3 = "rank 3 (replica 0, pipeline rank 1, shard 1), step 7, 1F0: ";
  for (std::string const& each : of_all_types(of_tensors, {.rank = 3, .step = 7, .action = "1F0"})) CHECK(each == in_3 + of_tensors);
  for (std::string const& each : of_all_types("ranks 5 and 2 differ", {.rank = 3, .peer = 5, .step = 7, .action = "1F0", .ranks = {3, 2, 5, -1}}))
    CHECK(each == in_3 + "ranks 5 and 2 differ. Places: rank 2 (replica 0, pipeline rank 1, shard 0), rank 5 (replica 1, pipeline rank 0, shard 1)");
  for (std::string const& each : of_all_types("too many", {.ranks = {0, 1, 2, 3, 4, 5, 6, 7, 8}}))
    CHECK(each == "too many. A rank's number is (replica × 2 + pipeline rank) × 2 + shard");
}

TEST_CASE("without shards no message has a place") {
  grid_of_errors const grid(4, 1);
  for (std::string const& each : of_all_types("ranks 1 and 2 differ", {.rank = 0, .peer = 1, .ranks = {1, 2}}))
    CHECK(each == "rank 0: ranks 1 and 2 differ");
}

TEST_CASE("a failure carries its ranks to the other ranks, whose errors place them once") {
  grid_of_errors const grid(2, 2);
  chevron::preflight_error const found("rank 1 has 2 rows where rank 2 has 3", {.rank = 1, .step = 4, .action = "preflight", .ranks = {2}});
  auto const told = chevron::detail::failure_of(chevron::detail::to_line(chevron::detail::failure_by(1, found)));
  CHECK(told.reason == "rank 1, step 4, preflight: rank 1 has 2 rows where rank 2 has 3");
  CHECK(told.ranks == std::vector<int>{2, 1});
  try {
    chevron::throw_failure(told, {.peer = 3, .what = {.kind = chevron::kind::receive_backward, .fused = 0, .stage = 0, .micro_batch = 1}, .step = 4}, 0);
  } catch (chevron::preflight_error const& e) {
    CHECK(std::string(e.what()) ==
          "rank 0 (replica 0, pipeline rank 0, shard 0), step 4, 0RECV_B1: rank 1, step 4, preflight: rank 1 has 2 rows where rank 2 "
          "has 3; this rank was waiting for 0RECV_B1 from rank 3. Places: rank 1 (replica 0, pipeline rank 0, shard 1), rank 2 (replica 0, "
          "pipeline rank 1, shard 0), rank 3 (replica 0, pipeline rank 1, shard 1)");
    CHECK(e.unplaced().find("(replica") == std::string::npos);
  }
}

TEST_CASE("the line of a rank whose job's failure another rank prints") {
  using chevron::exit_code;
  auto const line = [](int rank, int of, exit_code code, std::string const& mine = "whole: rank 1 was lost; this rank was waiting") {
    return chevron::detail::short_line(rank, {.rank = rank, .step = 2, .action = "sum of gradients", .reason = mine},
                                       {.code = static_cast<int>(code), .rank = of, .reason = "rank 1 was lost"}, 0);
  };
  std::string const where = "rank 3, step 2, sum of gradients: ", end = "; rank 0's message says more";
  CHECK(line(3, 1, exit_code::peer_lost) == where + "stopped, as rank 1 is gone" + end);
  CHECK(line(3, 1, exit_code::timeout) == where + "stopped, as rank 1 does not answer" + end);
  CHECK(line(3, 1, exit_code::usage) == where + "stopped, as rank 1 failed" + end);
  CHECK(line(3, 1, exit_code::usage, "rank 3, step 2: the same fault") == where + "failed" + end);
  CHECK(line(3, -1, exit_code::preflight) == where + "stopped with the job" + end);
  CHECK(line(3, 3, exit_code::other) == where + "failed" + end);
  CHECK(line(3, 3, exit_code::timeout) == where + "given up by the other ranks" + end);
  grid_of_errors const grid(2, 2);
  CHECK(line(3, 1, exit_code::usage) ==
        "rank 3 (replica 0, pipeline rank 1, shard 1), step 2, sum of gradients: stopped, as rank 1 (replica 0, pipeline rank 0, "
        "shard 1) failed" +
            end);
}

TEST_CASE("a rank that found its own fault failed: the other ranks neither lost it nor gave it up") {
  using chevron::exit_code;
  for (exit_code const code : {exit_code::peer_lost, exit_code::timeout}) {
    chevron::failure const found{.code = static_cast<int>(code), .rank = 1, .reason = "rank 1's GPU failed", .by_itself = true};
    chevron::failure const told = chevron::detail::failure_of(chevron::detail::to_line(found));
    CHECK(!told.given_up());
    for (int const rank : {1, 3}) {
      chevron::failure const mine{.rank = rank, .step = 2, .action = "1F0", .reason = "whole: rank 1's GPU failed; this rank was waiting"};
      CHECK(chevron::detail::short_line(rank, mine, told, 0) ==
            "rank " + std::to_string(rank) + ", step 2, 1F0: " + (rank == 1 ? "failed" : "stopped, as rank 1 failed") +
                "; rank 0's message says more");
      try {
        chevron::throw_failure(told, {.words = "sum of gradients"}, rank);
      } catch (chevron::error const& e) {
        CHECK(e.code() == static_cast<int>(code));
        CHECK(std::string(e.what()) == "rank " + std::to_string(rank) +
                                           ", sum of gradients: rank 1's GPU failed; this rank was waiting for sum of gradients");
      }
    }
  }
}

TEST_CASE("ranks that find one fault say the same sentence; a rank with a fault of its own says another") {
  using chevron::detail::failure_by;
  using chevron::detail::same_sentence;
  auto const of = [](int rank, long step, std::string const& sentence) {
    return failure_by(rank, chevron::preflight_error(sentence, {.rank = rank, .step = step, .action = "OPTIMIZER_STEP"}));
  };
  CHECK(same_sentence(of(1, 2, "the loss is not finite"), of(0, 2, "the loss is not finite")));
  CHECK(!same_sentence(of(1, 2, "the loss is not finite"), of(0, 2, "the norm is not finite")));
  CHECK(!same_sentence(of(1, 2, "finite"), of(0, 2, "the loss is not finite")));
  CHECK(same_sentence(failure_by(1, "no file", 1, {}), failure_by(0, "no file", 1, {})));
  CHECK(!same_sentence(failure_by(1, "no disk", 1, {}), failure_by(0, "no file", 1, {})));
  CHECK(same_sentence(failure_by(1, "building stage 1 threw: no `w12`", 1, {}), failure_by(0, "building stage 0 threw: no `w3`", 1, {})));
  CHECK(!same_sentence(failure_by(1, "building stage 1 threw: no `w1`", 1, {}), failure_by(0, "building stage 0 threw: no `b1`", 1, {})));
}

}  // namespace error_test
