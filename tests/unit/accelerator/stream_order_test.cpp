#include "accelerator/stream_order.hpp"

#include <map>
#include <string>
#include <utility>
#include <vector>

#include "unit/prove/mutants.hpp"

#include <doctest/doctest.h>

using namespace chevron;
using namespace chevron::tests;

namespace {

std::string listed(buffer<stream_operation> const& list) {
  std::string out;
  for (stream_operation const& o : list) out += to_text(o).str() + "\n";
  return out;
}

constexpr stream_name compute{stream_kind::compute}, side{stream_kind::side};

}  // namespace

TEST_SUITE("stream_order") {
  TEST_CASE("1F1B on two ranks, operation by operation") {
    owned_program const p = lower(prove(expand(catalogue::one_f_one_b, {2, 3}))).copy();
    DOCTEST_CHECK(listed(stream_order(p, 0)) ==
                  "[compute] 0F0\n"
                  "[compute] record computed\n"
                  "[to 1] wait for computed\n"
                  "[to 1] 0SEND_F0 from 0\n"
                  "[to 1] record sent 0\n"
                  "[compute] record computed\n"
                  "[from 1] wait for computed\n"
                  "[from 1] 0RECV_B0 into 0\n"
                  "[from 1] record arrived 0\n"
                  "[compute] 0F1\n"
                  "[compute] record computed\n"
                  "[to 1] wait for computed\n"
                  "[to 1] 0SEND_F1 from 1\n"
                  "[to 1] record sent 1\n"
                  "[compute] wait for arrived 0\n"
                  "[compute] 0B0 from 0\n"
                  "[compute] wait for sent 0\n"
                  "[host] let go of 0\n"
                  "[compute] wait for sent 1\n"
                  "[host] let go of 1\n"
                  "[compute] record computed\n"
                  "[from 1] wait for computed\n"
                  "[from 1] 0RECV_B1 into 0\n"
                  "[from 1] record arrived 0\n"
                  "[compute] 0F2\n"
                  "[compute] record computed\n"
                  "[to 1] wait for computed\n"
                  "[to 1] 0SEND_F2 from 1\n"
                  "[to 1] record sent 1\n"
                  "[compute] record computed\n"
                  "[from 1] wait for computed\n"
                  "[from 1] 0RECV_B2 into 1\n"
                  "[from 1] record arrived 1\n"
                  "[compute] wait for arrived 0\n"
                  "[compute] 0B1 from 0\n"
                  "[compute] wait for sent 1\n"
                  "[host] let go of 1\n"
                  "[compute] wait for arrived 1\n"
                  "[compute] 0B2 from 1\n"
                  "[compute] record computed\n"
                  "[sums] wait for computed\n"
                  "[sums] 0REDUCE_GRAD\n"
                  "[sums] record summed 0\n"
                  "[compute] wait for summed 0\n"
                  "[compute] OPTIMIZER_STEP\n");
  }

  TEST_CASE("a fused pair: both messages are there, then two lanes, then one again") {
    // Rank 0 has stages 0 and 3.
    owned_program const p = lower(prove(expand(catalogue::dual_pipe_v, {2, 5}))).copy();
    buffer<stream_operation> const list = stream_order(p, 0);
    std::string const all = listed(list);
    DOCTEST_CHECK(all.find("[compute] record computed\n"
                           "[side] wait for computed\n"
                           "[side] 0F3\n"
                           "[compute] 3B1\n"
                           "[side] record side computed\n"
                           "[compute] wait for side computed\n"
                           "[compute] record computed\n"
                           "[to 1] wait for computed\n"
                           "[to 1] 0SEND_F3 from ") != std::string::npos);
    DOCTEST_CHECK(all.find("[compute] wait for arrived 0\n"
                           "[compute] wait for arrived 2\n"
                           "[compute] record computed\n"
                           "[side] wait for computed\n"
                           "[side] 3F2 from 0\n"
                           "[compute] 0B0 from 2\n"
                           "[side] record side computed\n"
                           "[compute] wait for side computed\n") != std::string::npos);
    // The backward of an F on the side stream runs there, too: in a pair, whose F is then on the compute stream, and alone.
    DOCTEST_CHECK(all.find("[compute] 0F4\n"
                           "[side] 3B2\n") != std::string::npos);
    DOCTEST_CHECK(all.find("[compute] record computed\n"
                           "[side] wait for computed\n"
                           "[side] 3B3\n"
                           "[side] record side computed\n"
                           "[compute] wait for side computed\n") != std::string::npos);
  }

  TEST_CASE("which lane: an F alone runs on compute, a backward where its F ran, the halves of a pair apart") {
    int seen = 0, alone_on_side = 0;
    for (unsigned seed = 0; seed < 500; ++seed) {
      dice d{std::mt19937(seed)};
      plan const of = lawful_plan_of_fbiw(d);
      owned_program const p = lower(prove(of)).copy();
      std::map<std::pair<unsigned, unsigned>, stream_name> ran;  // F, by stage and microbatch
      for (int r = 0; r < of.size.ranks; ++r) {
        buffer<stream_operation> const list = stream_order(p, r);
        std::vector<stream_operation> work;
        for (stream_operation const& o : list) {
          if (o.does == stream_task::work && is_compute(o.op.kind)) work.push_back(o);
        }
        DOCTEST_REQUIRE(static_cast<int>(work.size()) == of.view().length(r));
        for (std::size_t i = 0; i < work.size(); ++i) {
          stream_operation const& o = work[i];
          action const a = of.view().at(r, static_cast<int>(i));
          bool const half = a.fused != 0 || (i > 0 && of.view().at(r, static_cast<int>(i) - 1).fused != 0);
          bool right = o.op == a && (o.on == compute || o.on == side);
          if (a.kind == kind::forward) {
            ran[{a.stage, a.micro_batch}] = o.on;
            right = right && (half ? !(o.on == work[i + 1].on) : o.on == compute);
          } else {
            right = right && o.on == ran.at({a.stage, a.micro_batch});
            alone_on_side += !half && o.on == side ? 1 : 0;
          }
          DOCTEST_CHECK_MESSAGE(right, "seed ", seed, ", rank ", r, ": ", to_text(o).str());
          ++seen;
        }
      }
    }
    DOCTEST_CHECK(seen > 5000);
    DOCTEST_CHECK(alone_on_side > 50);
  }
}
