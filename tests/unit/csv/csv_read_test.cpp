#include <string>
#include <string_view>

#include <doctest/doctest.h>

#include <chevron/csv/csv.hpp>
#include <chevron/csv/csv_source.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/lower/lowered.hpp>

#include "unit/tools/show/show_support.hpp"

using namespace chevron;

namespace {

// A schedule in a program's own source goes through the gate like any other.
inline constexpr auto by_hand = from_csv("0F0,0F1,,0B0,0B1\r\n,1F0,1B0,1F1,1B1");
constexpr auto proved = checked<by_hand, shape{.ranks = 2, .micro_batches = 2}>;
static_assert(proved.view().stages == 2);
static_assert(proved.view().size.chunks == 1);
static_assert(proved.view().at(1, 1) == make_action(kind::backward, 1, 0));
static_assert(lowered<by_hand, shape{2, 2, 1}>.view().total() > proved.view().total());

// The gate's message for a refused text.
constexpr std::string_view stuck_text = "0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0\n";
static_assert(check(csv_source{stuck_text}(shape{2, 2, 0})).broken == law::deadlock);
inline constexpr auto junk = from_csv("0F0,0B0\n1F0x,1B0\n");
constexpr text junk_said = describe(junk(shape{2, 1, 0}).problem);
static_assert(junk_said.view() ==
              "line 2, column 1: '1F0x' goes on after its microbatch: wanted is a comma or the end of the line there");
static_assert(describe(by_hand(shape{3, 2, 0}).problem).view() ==
              "asked for another number of ranks than the CSV has lines; it has 2");
static_assert(describe(by_hand(shape{2, 3, 0}).problem).view() ==
              "asked for another number of microbatches than the CSV has; it has 2");
static_assert(describe(by_hand(shape{2, 2, 2}).problem).view() ==
              "asked for another number of chunks than the CSV has; it has 1");
static_assert(by_hand(shape{2, 2, 1}).problem.broken == law::none);
inline constexpr auto quoted = from_csv(" 0F0 ,\"0F1\",0B0, \t0B1\n\" 1F0\" ,1B0,1F1,1B1 \r\n \n\n");
static_assert(lowered<quoted, shape{2, 2, 1}>.view().plan.stages == 2);

/// The sentence about the first thing wrong, with its place.
std::string said(std::string_view csv) {
  csv_schedule const read = read_csv(csv);
  return describe(check(read, csv), read, csv);
}

law broken(std::string_view csv) { return check(read_csv(csv), csv).broken; }

struct unreadable {
  std::string csv;
  std::string sentence;
};

}  // namespace

TEST_SUITE("csv read") {
  TEST_CASE("what is written is read back, idle cells or not") {
    show_test::for_each_plan([](plan const& p) {
      if (p.problem) return;
      for (show::idle_cells idle : {show::idle_cells::left_out, show::idle_cells::written}) {
        std::string const csv = show::csv(p, idle);
        csv_schedule const read = read_csv(csv);
        REQUIRE(!check(read, csv));
        CHECK(read.dialect == csv_dialect::compute_only);
        CHECK(read.plan.stages == p.stages);
        CHECK(read.plan.size == shape{p.size.ranks, p.size.micro_batches, p.stages / p.size.ranks});
        for (int s = 0; s < p.stages; ++s) CHECK(read.plan.rank_of.data[s] == p.rank_of.data[s]);
        CHECK(show::csv(read.plan) == show::csv(p));
      }
    });
  }

  TEST_CASE("line ends of both sorts, the last one missing, idle cells anywhere") {
    std::string const expected = "0F0,0B0\n1F0,1B0\n";
    for (char const* csv : {"0F0,0B0\n1F0,1B0\n", "0F0,0B0\n1F0,1B0", "0F0,0B0\r\n1F0,1B0\r\n", ",0F0,,0B0,,\n,,1F0,1B0",
                            "0F0,0B0\n1F0,1B0,", "0F0,0B0,\r\n1F0,1B0,\r\n"}) {
      CAPTURE(csv);
      CHECK(said(csv) == "all laws hold");
      CHECK(show::csv(read_csv(csv).plan) == expected);
    }
    CHECK(read_csv("0F0\n1F0").plan.forward_only);
  }

  TEST_CASE("cells between blanks and in quotes, blank lines at the end, as PyTorch's reader takes them") {
    std::string const expected = "0F0,0B0\n1F0,1B0\n";
    for (char const* csv :
         {" 0F0, 0B0\n1F0 ,\t1B0\t\n", "\"0F0\",\"0B0\"\n\"1F0\",\"1B0\"\n", "\" 0F0 \" ,\"0B0\"\t\r\n1F0,1B0 \r\n",
          "0F0, ,0B0,\"\",\" \"\n1F0,1B0", "0F0,0B0\n1F0,1B0\n\n", "0F0,0B0\n1F0,1B0\r\n\r\n \t\n", "0F0,0B0\n1F0,1B0, \n"}) {
      CAPTURE(csv);
      CHECK(said(csv) == "all laws hold");
      CHECK(show::csv(read_csv(csv).plan) == expected);
    }
    char const* const pair = "0F0, ( 0F1 ;\t0B0 )OVERLAP_F_B ,\"(0F2;0B1)OVERLAP_F_B\",0B2\n1F0,1B0,1F1,1B1,1F2,1B2";
    CHECK(said(pair) == "all laws hold");
    CHECK(show::csv(read_csv(pair).plan).starts_with("0F0,(0F1;0B0)OVERLAP_F_B,(0F2;0B1)OVERLAP_F_B,0B2\n"));
    // Columns are those of the action, not of the blanks before it.
    CHECK(said("0F0, 0B0\n1F0,  1F0") ==
          "line 2, column 7: rank 1, step 1: 1F0 was already done at step 0; the first is at line 2, column 1");
  }

  TEST_CASE("a file from before I and B had today's names says so") {
    CHECK(said("0F0,0F1,0B0,0W0,0B1,0W1\n1F0,1B0,1W0,1F1,1B1,1W1") ==
          "line 1, column 13: rank 0, step 3: 0W0 would add these gradients twice: this microbatch already has a B. Each B of "
          "this file "
          "has a W, so B is the old spelling of I here: write I for each B; the other backward is at line 1, column 9");
    for (char const* other : {"0F0,0F1,0B0,0W0,0B1\n1F0,1B0,1F1,1B1", "0F0,0F1,0I0,0W0,0B1,0W1\n1F0,1B0,1F1,1B1"})
      CHECK(said(other).find("old spelling") == std::string::npos);
  }

  TEST_CASE("the refusal of a type names the letter of every kind that a plan may hold") {
    std::string const refusal = said("0G0");
    std::string const wanted = refusal.substr(refusal.find("wanted is"));
    for (int k = 0; k < compute_kinds; ++k) {
      std::string const letter = letters_of(static_cast<kind>(k));
      CAPTURE(letter);
      bool const named = wanted.find(" " + letter + ",") != std::string::npos ||
                         wanted.find(" " + letter + " ") != std::string::npos ||
                         wanted.find("(" + letter + ",") != std::string::npos;
      CHECK(named);
      CHECK(said("0" + letter + "0").find("no type") == std::string::npos);
    }
  }

  TEST_CASE("forward-only files, and several stages on a rank") {
    CHECK(read_csv("0F0\n1F0").plan.forward_only);
    CHECK(said("0F0\n1F0") == "all laws hold");
    CHECK(said("0F0,1F0,1I0,0B0,1W0") == "all laws hold");  // both stages on one rank
  }

  TEST_CASE("what cannot be read is said with line and column, what is there and what is wanted") {
    std::string const fine = "0F0,0B0\n";
    for (unreadable const& one : {
             unreadable{"",
                        "line 1, column 1: nothing is here: wanted is a line of actions for each rank, such as 0F0,0F1,0B0,0B1"},
             {"\n \t\r\n", "line 1, column 1: nothing is here"},
             {"\n0F0", "line 1, column 1: this line has no computation: each line is a rank, and each rank has a stage"},
             {fine + "\n1F0", "line 2, column 1: this line has no computation"},
             {fine + ",", "line 2, column 1: this line has no computation"},
             {fine + "1F0x junk,1B0",
              "line 2, column 1: '1F0x junk' goes on after its microbatch: wanted is a comma or the end of the line there"},
             {fine + "1F0,1F0SEND_F1", "line 2, column 5: '1F0SEND_F1' goes on after its microbatch"},
             {fine + "1F,1B0", "line 2, column 1: '1F' has no microbatch: an action ends in its microbatch, such as 2F0"},
             {fine + "1F-1", "line 2, column 1: '1F-1' has no microbatch"},
             {"2BW0", "line 1, column 1: '2BW0': BW is a retired spelling: today the full backward is B"},
             {fine + "1F0,1G0",
              "line 2, column 5: '1G0' has no type that is known: wanted is F, B, I, W or R after the stage, such as 2F0 (X, Y "
              "or Z for own actions)"},
             {"0f0", "line 1, column 1: '0f0' has no type that is known"},
             {"00F0", "line 1, column 1: '00F0' has a stage with leading zeros"},
             {"0F01", "line 1, column 1: '0F01' has a microbatch with leading zeros"},
             {"F0", "line 1, column 1: 'F0' does not start with a stage"},
             {"-1F0", "line 1, column 1: '-1F0' does not start with a stage"},
             {"0F 0,0B0", "line 1, column 1: '0F 0' has no microbatch"},
             {"\"0F0,0B0", "line 1, column 1: '\"0F0,0B0' has no closing quote at its end: wanted is one action between quotes"},
             {"0F0,\"0B0\n1F0\"", "line 1, column 5: '\"0B0' has no closing quote"},
             {"0F0,\"", "line 1, column 5: '\"' has no closing quote"},
             {"0F0,\"0B0\"1", "line 1, column 5: '\"0B0\"1' has no closing quote at its end"},
             {"\"0F\"\"0\"", "line 1, column 1: '\"0F\"\"0\"' has no closing quote at its end"},
             {"0F0, \"0B0\"", "line 1, column 6: '\"0B0\"' does not start with a stage"},
             {"\"0F0,0B0\"", "line 1, column 2: '0F0,0B0' goes on after its microbatch"},
             {"1024F0", "line 1, column 1: '1024F0' names a stage above 1023"},
             {"99999999999999999999F0", "line 1, column 1: '99999999999999999999F0' names a stage above 1023"},
             {"0F65535", "line 1, column 1: '0F65535' names a microbatch above 65534"},
             {"0F4294967296", "line 1, column 1: '0F4294967296' names a microbatch above 65534"},
             {"\xef\xbb\xbf"
              "0F0",
              "line 1, column 1: '\\xef\\xbb\\xbf0F0' begins with a byte order mark: save the file as UTF-8"},
             {std::string("0F0,0\0F1", 8), "line 1, column 5: '0\\x00F1' holds a NUL byte"},
             {"0F0,\x1b[31m0B0", "line 1, column 5: '\\x1b[31m0B0' does not start with a stage"},
             {"0F0\r0B0", "line 1, column 1: '0F0\\x0d0B0' goes on after its microbatch"},
             {"0F0,(0F1;0B0", "line 1, column 5: '(0F1;0B0' has no closing bracket: a fused pair is an F and a B or I"},
             {"0F0,(0F1,0B0)OVERLAP_F_B", "line 1, column 5: '(0F1' has no closing bracket"},
             {"0F0,(0F1;0B0)", "line 1, column 5: '(0F1;0B0)': wanted is OVERLAP_F_B right after the bracket, and nothing else"},
             {"0F0,(0F1;0B0)OVERLAP_F_B0", "line 1, column 5: '(0F1;0B0)OVERLAP_F_B0': wanted is OVERLAP_F_B right after"},
             {"0F0,(0F1;0B0)OVERLAP_F_B junk",
              "line 1, column 5: '(0F1;0B0)OVERLAP_F_B junk': wanted is OVERLAP_F_B right after"},
             {"0F0,(0F1;0B0)F", "line 1, column 5: '(0F1;0B0)F': wanted is OVERLAP_F_B right after"},
             {"0F0,((0F1;0B0)OVERLAP_F_B;0B0)OVERLAP_F_B",
              "line 1, column 5: '((0F1;0B0)OVERLAP_F_B;0B0)OVERLA...' is a pair within a pair: each half is one action"},
             {"0F0,()OVERLAP_F_B", "line 1, column 5: '()OVERLAP_F_B' has not two halves: wanted are an F and a B or I"},
             {"0F0,(0F1)OVERLAP_F_B", "line 1, column 5: '(0F1)OVERLAP_F_B' has not two halves"},
             {"0F0,(0F1;)OVERLAP_F_B", "line 1, column 5: '(0F1;)OVERLAP_F_B' has not two halves"},
             {"0F0,(0F1;0B0;0W0)OVERLAP_F_B", "line 1, column 5: '(0F1;0B0;0W0)OVERLAP_F_B' has not two halves"},
             {"0F0,(0B0;0F1)OVERLAP_F_B", "line 1, column 6: '0B0': the first half of a fused pair must be an F"},
             {"0F0,(0F1;0F2)OVERLAP_F_B", "line 1, column 10: '0F2': the second half of a fused pair must be a B or an I"},
             {"0F0,(0F1;0W0)OVERLAP_F_B", "line 1, column 10: '0W0': the second half of a fused pair must be a B or an I"},
             {"0F0,(0SEND_F0;0B0)OVERLAP_F_B", "line 1, column 6: '0SEND_F0': the first half of a fused pair must be an F"},
             {"0F0,(0F1;0UNSHARD)OVERLAP_F_B", "line 1, column 10: '0UNSHARD': the second half of a fused pair must be a B"},
             {"0F0,(0F1;0B0x)OVERLAP_F_B", "line 1, column 10: '0B0x' goes on after its end: each half of a fused pair is one"},
             {"0F0,(0F1; )OVERLAP_F_B", "line 1, column 5: '(0F1; )OVERLAP_F_B' has not two halves"},
             {"0F0,(0F1;0B0) OVERLAP_F_B", "line 1, column 5: '(0F1;0B0) OVERLAP_F_B': wanted is OVERLAP_F_B right after"},
             {"0F0,(0F;0B0)OVERLAP_F_B", "line 1, column 6: '0F' has no microbatch"},
             {"0OVERLAP_F_B", "line 1, column 1: '0OVERLAP_F_B' has no type that is known"},
             {"0F0,0OPTIMIZER_STEP", "line 1, column 5: '0OPTIMIZER_STEP' has no type that is known"},
             {"0F0,0REDUCE_GRAD1", "line 1, column 5: '0REDUCE_GRAD1' goes on after its type: this type has no microbatch"},
             {"0F0,,0SEND_F0\n1F0", "line 1, column 5: an empty cell: with communication in the file there are no idle steps"},
         }) {
      CAPTURE(one.csv);
      std::string const sentence = said(one.csv);
      CHECK_MESSAGE(sentence.starts_with(one.sentence), sentence);
      CHECK(broken(one.csv) == law::description);
    }
    // Longer than a sentence: cut.
    std::string const sentence = said(std::string(100000, '7'));
    CHECK(sentence.size() < 200);
    CHECK(sentence.find("'77777777777777777777777777777777...'") != std::string::npos);
  }

  TEST_CASE("more of anything than there may be, without asking for its memory") {
    std::string rows;
    for (int i = 0; i < max_csv_ranks + 1; ++i) rows += "0F0\n";
    CHECK(said(rows).starts_with("line 1025, column 1: more than 1024 lines"));
    std::string const line(static_cast<std::size_t>(max_csv_line) + 2, ',');
    CHECK(said(line).starts_with("line 1, column 67108865: this line has more than 67108864 characters"));
    CHECK(said("0F0,0B0,1023F65534").starts_with("line 1, column 9: with this number there are more stages times microbatches"));
    CHECK(broken("0F0,0B0,1023F65534") == law::complete);
  }

  TEST_CASE("broken laws have both their places") {
    CHECK(said("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1F1,1B1") ==
          "line 2, column 13: rank 1, step 3: 1F1 was already done at step 2; the first is at line 2, column 9");
    CHECK(
        said("0F0,0B0\n0F1,0B1\n1F0,1B0,1F1,1B1") ==
        "line 2, column 1: rank 1, step 0: 0F1 is on the wrong rank: its stage lives on rank 0; stage 0 is at line 1, column 1");
    CHECK(said("0F0,0B0\n1F0,1I0,1W0,1B0") ==
          "line 2, column 13: rank 1, step 3: 1B0 would add these gradients twice: this microbatch already has an I or a W; the "
          "other "
          "backward is at line 2, column 5");
    CHECK(said("0F0,0F1,0B0,0B1\n1F0,1B0,1F1") ==
          "line 2, column 1: rank 1: 1B1 is missing: every F is followed by its B, or by its I and its W");
    CHECK(said("0F0,0B0\n,,1B0,1F0") ==
          "line 2, column 3: rank 1, step 0: 1B0 comes before 1F0, which it needs; 1F0 is at line 2, column 7");
    CHECK(
        said("0F0,0B0,0F1,0B1\n1F1,1B1,1F0,1B0") ==
        "line 1, column 5: rank 0, step 1: 0B0 waits for 1B0, which is queued on rank 1 behind 1F1; 1F1 waits for 0F1, which is "
        "queued behind 0B0; 1B0 is at line 2, column 13");
    CHECK(broken("0F0,0B0\n2F0,2B0,2F1,2B1") == law::complete);  // no stage 1
  }
}
