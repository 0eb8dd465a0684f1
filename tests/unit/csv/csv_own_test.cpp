// Own actions in files: a plan's declaration is written and read back; actions without a declaration may stand anywhere.
#include <array>
#include <string>
#include <string_view>

#include <doctest/doctest.h>

#include <chevron/csv/csv.hpp>
#include <chevron/csv/csv_source.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/lower/lowered.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/schedule.hpp>

#include "unit/csv/csv_support.hpp"

using namespace chevron;
using namespace chevron::letters;
using show_test::said;

namespace {

inline constexpr auto X = own_action<'X'>({.after = {I, W}, .every = true});
inline constexpr auto Z = own_action<'Z'>({.before = {F}});
// A file in a program's source, too.
inline constexpr auto in_source = from_csv("# own actions: Y before=F\n0Y0,0F0,0B0\n1F0,1B0\n");
constexpr auto proved = checked<in_source, shape{.ranks = 2, .micro_batches = 1}>;
static_assert(proved.view().own[1].declared && proved.view().own[1].before == kind_bit(kind::forward));
static_assert(!proved.view().own[0].declared && proved.view().stages == 2);
static_assert(lowered<in_source, shape{2, 1, 1}>.view().plan.own[1].declared);
inline constexpr auto early = from_csv("# own actions: Y after=F\n0Y0,0F0,0B0\n1F0,1B0\n");
static_assert(early(shape{2, 1, 0}).problem.line == 2 && early(shape{2, 1, 0}).problem.broken == law::order);

bool same_rules(own_kind const& a, own_kind const& b) {
  return a.after == b.after && a.before == b.before && a.every == b.every && a.declared == b.declared;
}

}  // namespace

TEST_CASE("a plan's own actions and their rules are read back from its file, with idle cells and with communication") {
  shape const size{.ranks = 3, .micro_batches = 4};
  plan const other =
      expand(schedule(placement::linear, warmup(F * (ranks - 1 - rank)) | steady(F, I, W, X) | cooldown(I, W, X)), size);
  plan const made = expand(schedule(placement::linear, warmup(Z * micro_batches) | warmup(F * (ranks - 1 - rank)) |
                                                           steady(F, I, W, X) | cooldown(I, W, X)),
                           size);
  CHECK(show::csv(other).starts_with("# own actions: X after=IW every\n0F0,"));
  for (plan const* const one : {&other, &made}) {
    CHECK(!check(*one));
    std::string const text = show::csv(*one);
    proved_program const program = lower(prove(*one));
    std::string const lowered_text = show::csv_with_communication(program.view(), show::csv_waits::written);
    for (std::string const& file : {text, show::csv(*one, show::idle_cells::written), lowered_text}) {
      csv_schedule const read = read_csv(file);
      CHECK(said(file) == "all laws hold");
      for (int k = 0; k < own_kinds; ++k) CHECK(same_rules(read.plan.own[k], one->own[k]));
      CHECK(show::csv(read.plan) == text);
    }
  }
}

TEST_CASE("the rules that a file declares are checked, and places count the first line") {
  CHECK(said("# own actions: X after=W every\n0F0,0I0,0X0,0W0\n") ==
        "line 2, column 9: rank 0, step 2: 0X0 comes before 0W0, which it needs; 0W0 is at line 2, column 13");
}

TEST_CASE("own actions that a file does not declare stand anywhere, once each") {
  CHECK(said("0Z0,0F0,0X0,0B0,0Y0\n1F0,1B0\n") == "all laws hold");
  plan const read = read_csv("0Z0,0F0,0B0,0Y0\n").plan;
  CHECK(!read.own[0].declared);
  CHECK((same_rules(read.own[1], {.declared = true}) && same_rules(read.own[2], {.declared = true})));
  CHECK(said("0X0,0F0,0X0,0B0\n") ==
        "line 1, column 9: rank 0, step 2: 0X0 was already done at step 0; the first is at line 1, column 1");
  // Only the actions that a first line leaves out.
  CHECK(said("# own actions: X before=F\n0Y0,0X0,0F0,0B0,0Z0\n") == "all laws hold");
}

TEST_CASE("a first line that is no declaration is refused in words") {
  struct {
    char const* line;
    char const* words;
  } const cases[] = {
      {"# by hand",
       "line 1, column 1: '# by hand': a line that begins with # declares X, Y and Z, such as # own actions: X after=W every, Y "
       "before=B"},
      {"# own actions: X, X", "line 1, column 19: 'X' declares this action a second time"},
      {"# own actions: V after=W",
       "line 1, column 16: 'V after=W' declares no action: wanted is X, Y or Z, such as X after=W every"},
      {"# own actions:", "line 1, column 15: '# own actions:' declares no action: wanted is X, Y or Z, such as X after=W every"},
      {"# own actions: X after=Q",
       "line 1, column 16: 'after=Q' names no kind: wanted are letters such as after=IW, of F, B, I, W, R, X, Y and Z"},
      {"# own actions: X often",
       "line 1, column 16: 'often' is not known: wanted is after=, before= or every, such as X after=W every"}};
  for (auto const& one : cases) CHECK(said(std::string(one.line) + "\n0F0,0B0\n") == one.words);
  CHECK(said("# own actions: X\n") ==
        "line 1, column 1: nothing is here: wanted is a line of actions for each rank, such as 0F0,0F1,0B0,0B1");
  CHECK(said("0F0,0B0\n# own actions: X\n").find("line 2, column 1: '# own actions: X' does not start with a stage") == 0);
}
