// UNSHARD and RESHARD in files: written, read back, judged, and the sentence of each fault.
#include <string>
#include <string_view>

#include <doctest/doctest.h>

#include <chevron/csv/csv.hpp>
#include <chevron/csv/csv_gathers.hpp>
#include <chevron/csv/csv_source.hpp>
#include <chevron/lower/gathers.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/schedule.hpp>

#include "unit/csv/csv_support.hpp"
#include "unit/tools/show/show_support.hpp"

using namespace chevron;
using show_test::said;

namespace {

// In the compiler, too.
constexpr law verdict(std::string_view csv, shape size) { return csv_source{csv}(size).problem.broken; }
static_assert(verdict("0UNSHARD,0F0,0B0,0RESHARD\n", {1, 1, 0}) == law::none);
static_assert(verdict("0UNSHARD,0F0,0RESHARD,0B0\n", {1, 1, 0}) == law::resident);

std::string without_gathers(std::string const& csv) {
  std::string out;
  for (std::size_t at = 0; at < csv.size();) {
    std::size_t const end = csv.find_first_of(",\n", at);
    std::string const cell = csv.substr(at, end - at);
    if (cell.find("SHARD") == std::string::npos) {
      out += cell + csv[end];
    } else if (csv[end] == '\n') {
      out.back() = '\n';
    }
    at = end + 1;
  }
  return out;
}

csv_gathers judged(std::string_view csv, int resident = 0) { return judge_gathers(read_csv(csv), csv, resident); }
std::string said_with(std::string_view csv, int resident) { return describe(judged(csv, resident).broken).str(); }

}  // namespace

TEST_SUITE("csv gathers") {
  TEST_CASE("the catalogue in both dialects, with every limit: all laws hold, and but for the gathers it is the same file") {
    int seen = 0;
    show_test::for_each_plan([&](plan const& p) {
      if (p.problem) return;
      owned_program const lowered = lower(prove(p)).copy();
      for (show::csv_waits waits : {show::csv_waits::left_out, show::csv_waits::written}) {
        std::string const plain = show::csv_with_communication(lowered, waits);
        CHECK(judged(plain).gathers == 0);
        for (int resident = 1; resident <= p.size.chunks + 1; ++resident) {
          gather_plan const gathers = fewest_gathers(p, resident);
          if (gathers.problem) {
            CHECK(resident == 1);
            continue;
          }
          std::string const csv = show::csv_with_communication(lowered, waits, gathers);
          CAPTURE(csv);
          CHECK(said(csv) == "all laws hold");
          CHECK(without_gathers(csv) == plain);
          csv_gathers const found = judged(csv, resident);
          CHECK(!found.broken);
          CHECK(found.resident <= resident);
          CHECK(found.gathers >= p.stages);
          if (resident >= 4) CHECK(found.late == 0);  // room for two pairs
          if (found.resident == resident && resident > 1)
            CHECK(said_with(csv, resident - 1).find("the limit is " + std::to_string(resident - 1)) != std::string::npos);
          ++seen;
        }
      }
    });
    CHECK(seen > 100);
  }

  TEST_CASE("1F1B of two ranks, in full") {
    plan const p = catalogue::make_plan("1F1B", {2, 2, 0});
    owned_program const lowered = lower(prove(p)).copy();
    CHECK(show::csv_with_communication(lowered, show::csv_waits::written, fewest_gathers(p, 1)) ==
          "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0WAIT_SEND_F0,0WAIT_SEND_F1,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD,"
          "0WAIT_REDUCE_GRAD\n"
          "1RECV_F0,1UNSHARD,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1WAIT_SEND_B0,1B1,1SEND_B1,1REDUCE_GRAD,1WAIT_SEND_B1,1RESHARD,"
          "1WAIT_REDUCE_GRAD\n");
  }

  TEST_CASE("faults: line, column, rank, action and remedy") {
    CHECK(said("0UNSHARD,0F0,0F1,0B0,0B1,0RESHARD") == "all laws hold");
    CHECK(said("0F0,0F1,0B0,0B1") == "all laws hold");
    CHECK(said("0UNSHARD,0F0,0RESHARD,0F1,0B0,0B1") ==
          "line 1, column 23: rank 0: 0F1 runs while its stage is not gathered. Remedy: before it, best one computation earlier, "
          "0UNSHARD");
    CHECK(said("0F0,0UNSHARD,0F1,0B0,0B1,0RESHARD").starts_with("line 1, column 1: rank 0: 0F0 runs while its stage is not"));
    // A file that gathers one stage gathers all of them.
    CHECK(said("0F0,0SEND_F0,0RECV_B0,0B0\n1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0,1RESHARD")
              .starts_with("line 1, column 1: rank 0: 0F0 runs while its stage is not gathered"));
    CHECK(
        said("0UNSHARD,0F0,0UNSHARD,0B0,0RESHARD") ==
        "line 1, column 14: rank 0: 0UNSHARD gathers a stage that is gathered already. Remedy: a RESHARD of the stage before it, "
        "or no second UNSHARD");
    CHECK(said("0UNSHARD,0F0,0B0,0RESHARD,0RESHARD") ==
          "line 1, column 27: rank 0: 0RESHARD frees a stage that is not gathered. Remedy: an UNSHARD of the stage before it, or "
          "no "
          "RESHARD");
    CHECK(
        said("0UNSHARD,0RESHARD,0UNSHARD,0F0,0B0,0RESHARD") ==
        "line 1, column 10: rank 0: 0RESHARD frees a stage that has not computed since its UNSHARD, and PyTorch refuses to free "
        "it. Remedy: neither of the two");
    CHECK(said("0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0RESHARD\n1UNSHARD,1RECV_F0,1F0,1B0,1SEND_B0") ==
          "line 2, column 1: rank 1: 1UNSHARD is never freed, and the next step gathers the stage again. Remedy: a RESHARD after "
          "the "
          "stage's last computation");
    // The half of a pair.
    CHECK(said("0UNSHARD,0F0,1UNSHARD,1F0,1RESHARD,(0F1;1B0)OVERLAP_F_B,0B0,1UNSHARD,1F1,1B1,0B1,0RESHARD,1RESHARD")
              .starts_with("line 1, column 41: rank 0: 1B0 runs while its stage is not gathered"));
    // The limit.
    std::string const two = "0UNSHARD,1UNSHARD,0F0,1F0,1B0,1RESHARD,0B0,0RESHARD";
    CHECK(said_with(two, 2) == "all laws hold");
    CHECK(said_with(two, 1) ==
          "line 1, column 10: rank 0: 1UNSHARD gathers one stage more than the rank may have gathered at once. Remedy: a RESHARD "
          "of "
          "another stage before it; the limit is 1");
    // A file with own actions begins with a line of its own.
    CHECK(said("# own actions: X after=W\n0UNSHARD,0F0,0I0,0W0,0RESHARD,0X0").starts_with("line 2, column 31: rank 0: 0X0 runs"));
  }

  TEST_CASE("gathers without a computation before their use are counted") {
    CHECK(judged("0UNSHARD,1UNSHARD,0F0,1F0,1B0,0B0,0RESHARD,1RESHARD").late == 0);
    CHECK(judged("0UNSHARD,0F0,1UNSHARD,1F0,1B0,0B0,0RESHARD,1RESHARD").late == 1);
    // The second half of a pair waits for its gather with the first.
    CHECK(judged("0UNSHARD,1UNSHARD,0F0,1F0,1RESHARD,1UNSHARD,(0F1;1B0)OVERLAP_F_B,1F1,1B1,0B0,0B1,0RESHARD,1RESHARD").late == 1);
    csv_gathers const found = judged("0UNSHARD,0F0,0RESHARD,1UNSHARD,1F0,1B0,1RESHARD,0UNSHARD,0B0,0RESHARD");
    CHECK(found.gathers == 3);
    CHECK(found.resident == 1);
    CHECK(found.late == 2);
  }
}
