#include <string>
#include <string_view>

#include <doctest/doctest.h>

#include <chevron/csv/csv_source.hpp>
#include <chevron/describe/expand.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/prove/check.hpp>

#include "unit/csv/csv_support.hpp"
#include "unit/tools/show/show_support.hpp"

// Published deadlocks of pipelines, each in the smallest schedule that has it: as a plan, or as a file with messages in which
// each send is waited for at once, as in a rendezvous. Each is refused with its cycle; the corrected schedule follows.

using namespace chevron;
using show_test::plan_from, show_test::said;

namespace {

std::string said(plan const& p) { return describe(check(p)).str(); }

// Megatron's unbatched exchange and NCCL's (nccl#479, #783, #784): both ranks send, then receive. As constants, so that the
// compiler refuses it too.
constexpr std::string_view both_send_first =
    "0F0,0SEND_F0,0WAIT_SEND_F0,0F1,0SEND_F1,0WAIT_SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1WAIT_SEND_B1\n";
constexpr std::string_view one_receives_first =
    "0F0,0SEND_F0,0WAIT_SEND_F0,0F1,0RECV_B0,0SEND_F1,0WAIT_SEND_F1,0B0,0RECV_B1,0B1\n"
    "1RECV_F0,1F0,1B0,1SEND_B0,1WAIT_SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1,1WAIT_SEND_B1\n";
static_assert(csv_source{both_send_first}(shape{2, 2, 0}).problem.broken == law::deadlock);
static_assert(!csv_source{one_receives_first}(shape{2, 2, 0}).problem);

}  // namespace

TEST_SUITE("known deadlocks") {
  TEST_CASE("both ranks send before they receive") {
    CHECK(said(both_send_first) ==
          "line 1, column 41: rank 0, step 5: 0WAIT_SEND_F1 waits for 1RECV_F1, which is queued on rank 1 behind 1WAIT_SEND_B0; "
          "1WAIT_SEND_B0 waits for 0RECV_B0, which is queued behind 0WAIT_SEND_F1; 1RECV_F1 is at line 2, column 41");
    CHECK(said(one_receives_first) == "all laws hold");
  }

  TEST_CASE("activations of two chunks cross on one pair of ranks (pytorch#172668: 0SEND_F1 against 1SEND_F0)") {
    auto const first = [](std::string const& from_0f1_to_2f0) {
      return "0F0,0SEND_F0,0F1," + from_0f1_to_2f0 +
             ",2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1,2RECV_B0,2B0,2SEND_B0,2RECV_B1,2B1,2SEND_B1,0RECV_B0,0B0,0RECV_B1,0B1,"
             "0WAIT_SEND_F0,2WAIT_SEND_F0,2WAIT_SEND_F1,2WAIT_SEND_B0,2WAIT_SEND_B1\n";
    };
    std::string const second =
        "1RECV_F0,1F0,1SEND_F0,1WAIT_SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3RECV_F1,3F1,3B0,3SEND_B0,3B1,3SEND_B1,1RECV_B0,"
        "1B0,1SEND_B0,1RECV_B1,1B1,1SEND_B1,1WAIT_SEND_F1,3WAIT_SEND_B0,3WAIT_SEND_B1,1WAIT_SEND_B0,1WAIT_SEND_B1\n";
    CHECK(said(first("0SEND_F1,0WAIT_SEND_F1,2RECV_F0") + second) ==
          "line 1, column 27: rank 0, step 4: 0WAIT_SEND_F1 waits for 1RECV_F1, which is queued on rank 1 behind 1WAIT_SEND_F0; "
          "1WAIT_SEND_F0 waits for 2RECV_F0, which is queued behind 0WAIT_SEND_F1; 1RECV_F1 is at line 2, column 37");
    // The lower rank of the pair posts its receive first.
    CHECK(said(first("2RECV_F0,0SEND_F1,0WAIT_SEND_F1") + second) == "all laws hold");
  }

  TEST_CASE("a receive is waited for before the send that its sender needs (pytorch PR #165664)") {
    // Rank 0 takes the gradient of microbatch 0 before it sends microbatch 1; rank 1 wants both microbatches first.
    plan const stuck = plan_from({"0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"}, {0, 1}, 2);
    CHECK(
        said(stuck) ==
        "rank 0, step 1: 0B0 waits for 1B0, which is queued on rank 1 behind 1F1; 1F1 waits for 0F1, which is queued behind 0B0");
    CHECK(said(plan_from({"0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1"}, {0, 1}, 2)) == "all laws hold");
    CHECK(said(plan_from({"0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1"}, {0, 1}, 2)) == "all laws hold");
    // As a file: the place too.
    CHECK(said(show::csv(stuck)) == "line 1, column 5: " + said(stuck) + "; 1B0 is at line 2, column 9");
  }

  TEST_CASE("two ranks take chunks in different orders (pytorch PR #127332, interleaved)") {
    // Rank 0 wants microbatch 0 through its second chunk before microbatch 1 enters; rank 1 begins with microbatch 1.
    CHECK(said(plan_from({"0F0 2F0 0F1 2F1 2B0 2B1 0B0 0B1", "1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1"}, {0, 1, 0, 1}, 2)) ==
          "all laws hold");
    plan const crossed = plan_from({"0F0 2F0 0F1 2F1 2B0 2B1 0B0 0B1", "1F1 1F0 3F0 3F1 3B0 3B1 1B0 1B1"}, {0, 1, 0, 1}, 2);
    CHECK(
        said(crossed) ==
        "rank 0, step 1: 2F0 waits for 1F0, which is queued on rank 1 behind 1F1; 1F1 waits for 0F1, which is queued behind 2F0");
  }

  TEST_CASE("round more ranks than two") {
    plan const ring =
        plan_from({"0F0 3F0 0F1 3F1 3B0 3B1 0B0 0B1", "1F0 1F1 4F0 4F1 4B0 4B1 1B0 1B1", "2F1 2F0 5F0 5F1 5B0 5B1 2B0 2B1"},
                  {0, 1, 2, 0, 1, 2}, 2);
    CHECK(
        said(ring) ==
        "rank 0, step 1: 3F0 waits for 2F0, which is queued on rank 2 behind 2F1; 2F1 waits for 1F1, and so on round 3 ranks to "
        "0F1, queued behind 3F0");
    CHECK(
        said(plan_from({"0F0 3F0 0F1 3F1 3B0 3B1 0B0 0B1", "1F0 1F1 4F0 4F1 4B0 4B1 1B0 1B1", "2F0 2F1 5F0 5F1 5B0 5B1 2B0 2B1"},
                       {0, 1, 2, 0, 1, 2}, 2)) == "all laws hold");
    // The report begins with a rank of the cycle, not with a rank that waits for the cycle.
    plan const spectator =
        plan_from({"0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1", "3F0 3B0 3F1 3B1"}, {0, 1, 2, 3}, 2);
    std::string const sentence = said(spectator);
    CHECK(sentence.starts_with("rank 0, step 1: 0B0 waits for 1B0, which is queued on rank 1 behind 1F1"));
  }

  TEST_CASE("more warm-up downstream than upstream, as a description") {
    using namespace letters;
    auto const upside_down = schedule(placement::linear, warmup(F * (rank + 1)) | steady(B, F) | cooldown(B));
    for (int ranks : {2, 3, 4, 8}) {
      std::string const sentence = said(expand(upside_down, shape{ranks, 8, 1}));
      CAPTURE(sentence);
      CHECK(sentence.find(" waits for ") != std::string::npos);
      CHECK(sentence.find(", which is queued on rank ") != std::string::npos);
      CHECK(sentence.find(", which is queued behind ") != std::string::npos);
    }
  }
}
