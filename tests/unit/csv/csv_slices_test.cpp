#include <string>
#include <string_view>

#include <chevron/csv.hpp>
#include <chevron/schedule.hpp>
#include <chevron/show.hpp>

#include <doctest/doctest.h>

using namespace chevron;

namespace {

std::string problem_of(std::string_view text) {
  csv_schedule const read = read_csv(text);
  return describe(check(read, text), read, text);
}

bool same(plan_view const& a, plan_view const& b) {
  bool equal = a.total() == b.total() && a.size.ranks == b.size.ranks && a.size.micro_batches == b.size.micro_batches &&
               a.size.slices == b.size.slices;
  for (int i = 0; equal && i < a.total(); ++i) equal = a.actions[i] == b.actions[i];
  return equal;
}

}  // namespace

TEST_CASE("CSV names slices behind a point, and reads back what it wrote") {
  plan const made = expand(catalogue::seq_1f1b, {.ranks = 2, .micro_batches = 2, .slices = 2});
  CHECK(show::csv(made) ==
        "0F0.0,0F0.1,0F1.0,0B0.1,0F1.1,0B0.0,0B1.1,0B1.0\n"
        "1F0.0,1F0.1,1B0.1,1F1.0,1B0.0,1F1.1,1B1.1,1B1.0\n");
  for (int slices = 1; slices <= 4; ++slices) {
    for (char const* name : {"Seq1F1B", "SeqZB-H1", "SeqInterleaved1F1B", "GPipe", "ForwardOnly"}) {
      plan const one = catalogue::make_plan(name, {.ranks = 3, .micro_batches = 4, .slices = slices});
      std::string const text = show::csv(one);
      csv_schedule const read = read_csv(text);
      CHECK(problem_of(text) == "all laws hold");
      CHECK(same(one, read.plan));
      if (one.forward_only) continue;
      proved_program const program = lower(prove(one));
      std::string const lowered = show::csv_with_communication(program.view(), show::csv_waits::written);
      CHECK(problem_of(lowered) == "all laws hold");
      CHECK(same(one, read_csv(lowered).plan));
    }
  }
}

TEST_CASE("a slice out of its order, a point without a slice, slices of some actions alone: refused with their place") {
  CHECK(problem_of("0F0.1,0F0.0,0B0.1,0B0.0\n") ==
        "line 1, column 1: rank 0, step 0: 0F0.1 comes before 0F0.0, which it needs; 0F0.0 is at line 1, column 7");
  CHECK(problem_of("0F0.0,0F0.1,0B0.0,0B0.1\n") ==
        "line 1, column 13: rank 0, step 2: 0B0.0 comes before 0B0.1, which it needs; 0B0.1 is at line 1, column 19");
  CHECK(problem_of("0F0.,0B0.0\n").find("has no slice after its point: an action of a slice is such as 2F0.1") !=
        std::string::npos);
  CHECK(problem_of("0F0.0,0F0.1,0B0.1,0B0\n").find("some actions name a slice, such as 2F0.1, and some do not") !=
        std::string::npos);
  CHECK(problem_of("0F0.0,0F0.2,0B0.2,0B0.0\n").find("0F0.1 is missing") != std::string::npos);
  CHECK(problem_of("0F0.65000,0F65000.0,0B0.65000,0B65000.0\n").find("more than 65535 microbatches times slices") !=
        std::string::npos);
}

TEST_CASE("pictures, tables and programs name slices") {
  plan const made = expand(catalogue::seq_1f1b, {.ranks = 2, .micro_batches = 2, .slices = 2});
  CHECK(show::steps_text(made).find("0F1.1") != std::string::npos);
  proved_program const program = lower(prove(made));
  CHECK(show::program_text(program.view()).find("0SEND_F1.0") != std::string::npos);
  costs const each{.forward = 0.5, .backward_input = 0.5, .backward_weight = 0.5};
  CHECK(show::json(made, each).find("\"slices\": 2") != std::string::npos);
  CHECK(show::json(made, each).find("\"1B0.1\"") != std::string::npos);
  CHECK(show::chrome_trace(show::picture_of(made, each)).find("\"slice\": 1") != std::string::npos);
  CHECK(show::svg(show::picture_of(made, each)).find(">1.1<") != std::string::npos);
  CHECK(show::size_words(show::picture_of(made, each), "x") == "2 ranks, 2 microbatches x 2 slices");
}
