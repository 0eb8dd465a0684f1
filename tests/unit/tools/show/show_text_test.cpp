#include <algorithm>
#include <cmath>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <chevron/base/format.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/tools/show/analysis_text.hpp>
#include <chevron/tools/show/text.hpp>

#include "show_support.hpp"

using namespace chevron;
using show_test::plan_from;
using show_test::split;

namespace {

/// The same text without its escape sequences.
std::string plain(std::string const& text) {
  std::string out;
  for (std::size_t i = 0; i < text.size(); ++i) {
    if (text[i] == '\x1b')
      i = text.find('m', i);
    else
      out += text[i];
  }
  return out;
}

/// All bands of a rank's row, joined, without its name.
std::string row_of(std::string const& text, int rank) {
  std::string const name = "   " + std::to_string(rank) + " ";
  std::string out;
  for (std::string const& line : split(text, '\n')) {
    if (line.starts_with(name)) out += line.substr(name.size());
  }
  return out;
}

}  // namespace

TEST_SUITE("show text") {
  TEST_CASE("a small timeline, exactly") {
    plan const p = plan_from({"0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"}, {0, 1}, 2, "1F1B");
    std::string const text = show::timeline_text(p, costs{}, {80, false, false});
    CHECK(text ==
          "1F1B   2 ranks, 2 microbatches\n"
          "makespan 9   bubble 33.3 %   first start to last end over all ranks\n"
          "span     9   bubble 33.3 %   the longest single rank\n"
          "in flight, peak chunks: 2 1   messages: 4\n"
          "\n"
          "rank 0           2           4           6           8\n"
          "   0 F0--- F1--- ............B0--------- ......B1---------\n"
          "   1 ......F0--- B0--------- F1--- B1--------- ............\n"
          "\n"
          "F forward   B backward   F3: microbatch 3   . idle\n");
  }

  TEST_CASE("every action of every schedule is readable, in its rank's order, within 80 and within 160 columns") {
    for (int width : {80, 160}) {
      for (costs const& cost : {costs{1, 1, 1, 0}, costs{2, 2, 1, 0}, costs{1, 1.5, 0.5, 0.25}}) {
        catalogue::for_each([&](auto const& schedule) {
          plan const p = expand(schedule, shape{4, 8, 0});
          CAPTURE(p.name);
          CAPTURE(width);
          for (bool const colour : {false, true}) {
            std::string const text = show::timeline_text(p, cost, {width, colour, true});
            CHECK((text.find('\x1b') != std::string::npos) == colour);
            for (std::string const& line : split(plain(text), '\n')) CHECK(show::columns_of(line) <= width);
            plan_view const view = p;
            for (int r = 0; r < 4; ++r) {
              std::string const row = row_of(plain(text), r);
              std::size_t from = 0;
              bool all = true;
              for (int i = 0; i < view.length(r); ++i) {
                show::box b;
                b.op = view.at(r, i);
                b.chunk = view.chunk_of(static_cast<int>(b.op.stage));
                std::size_t const at = row.find(show::detail::label_of(b, view.size.chunks), from);
                all = all && at != std::string::npos;
                if (all) from = at + 1;
              }
              CHECK(all);
            }
          }
        });
      }
    }
  }

  TEST_CASE("a box takes as many columns as it lasts") {
    plan const p = plan_from({"0F0 0B0"}, {0}, 1);
    std::string const row = row_of(show::rows_text(show::picture_of(p, costs{1, 2, 1, 0}), {80, false, false}), 0);
    std::size_t const forward = row.find('B');
    CHECK(row.size() - forward + 1 == 3 * forward);  // the last column is a gap, cut off at the end of the line
  }

  TEST_CASE("what has no time takes no columns and disturbs nothing") {
    plan const p = plan_from({"0F0 0I0 0W0"}, {0}, 1);
    double const forward = 1, nothing = 0, weight = 2;
    cost_view const cost{&forward, &nothing, &weight};
    std::string const row = row_of(show::rows_text(show::picture_of(p, cost), {80, false, false}), 0);
    CHECK(row.find("F0") != std::string::npos);
    CHECK(row.find('I') == std::string::npos);
    CHECK(row.find("W0") != std::string::npos);
  }

  TEST_CASE("a pair is one box with both labels") {
    plan const p = plan_from({"0F0 0F1 (0F2;0B0) (0F3;0B1) 0B2 0B3", "1F0 (1F1;1B0) (1F2;1B1) (1F3;1B2) 1B3"}, {0, 1}, 4);
    std::string const text = show::rows_text(show::picture_of(p, costs{}), {80, false, false});
    CHECK(text ==
          "rank 0              5              10             15             20\n"
          "   0 F0 F1 .........F2--+B0- .........F3--+B1- .........B2--- B3---\n"
          "   1 ...F0 F1--+B0- .........F2--+B1- .........F3--+B2- B3--- ......\n"
          "\n"
          "F forward   B backward   F3: microbatch 3   F3+B1: a pair, run as one   . idle\n");
    CHECK(show::steps_text(p).find("Step 02: 0F2+   1B0") != std::string::npos);
  }

  TEST_CASE("below the timeline: each rank's time, and the path with what stays on a rank in short") {
    plan const p = plan_from({"0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"}, {0, 1}, 2, "1F1B");
    show::figures const f = show::figures_of(p, costs{}, sizes{1536, 1 << 20});
    CHECK(show::header_text(show::picture_of(p, costs{}), f, {80, false, false}) ==
          "1F1B   2 ranks, 2 microbatches\n"
          "makespan 9   bubble 33.3 %   first start to last end over all ranks\n"
          "span     9   bubble 33.3 %   the longest single rank\n"
          "steady   9   bubble 33.3 %   each of many steps without a barrier between\n"
          "in flight, peak chunks: 2 1   messages: 4, 4 MiB\n");
    CHECK(show::ranks_text(f, {80, false, false}) ==
          "rank   computes   idle: filling   steady   draining   peak in flight   peak bytes\n"
          "   0          6               2        0          1                2        3 KiB\n"
          "   1          6               1        0          2                1      1.5 KiB\n"
          "filling: before the first backward   draining: after the last forward\n");
    CHECK(show::critical_path_text(p, costs{}, {80, false, false}) ==
          "critical path, 6 actions:\n"
          "  0F0 > 1F0 .. 1B1 (4 on rank 1) > 0B1\n");
    CHECK(show::critical_path_text(p, costs{.communication = 0.5}, {80, false, false})
              .starts_with("critical path, 6 actions and 1 for messages:\n"));
    plan const long_one = expand(catalogue::interleaved_1f1b, shape{8, 64, 4});
    for (int const width : {60, 100}) {
      std::string const text = show::critical_path_text(long_one, costs{.communication = 3}, {width, false, true});
      CHECK(text.find(" more stretches") != std::string::npos);
      for (std::string const& line : split(text, '\n')) CHECK(show::columns_of(line) <= width);
    }
  }

  TEST_CASE("a long plan becomes an overview that still fits") {
    plan const p = expand(catalogue::zb_h1, shape{8, 256, 0});
    for (int width : {60, 80, 200}) {
      std::string const text = show::timeline_text(p, costs{}, {width, false, true});
      CHECK(text.find("overview") != std::string::npos);
      for (std::string const& line : split(text, '\n')) CHECK(show::columns_of(line) <= width);
      // The last rank waits for the first forward to come through: idle first, busy in the middle.
      std::string const last = row_of(text, 7);
      CHECK(last.find('F') < 12);
      CHECK(std::count(last.begin(), last.end(), 'W') > 10);
    }
  }

  TEST_CASE("nothing and deadlock are drawn as far as they go") {
    CHECK(show::rows_text(show::picture{}) == "nothing to draw\n");
    plan const stuck = plan_from({"0F0 0B0 0F1 0B1", "1B0 1F0 1F1 1B1"}, {0, 1}, 2);
    std::string const text = show::rows_text(show::picture_of(stuck, costs{}), {80, false, false});
    CHECK(row_of(text, 0).starts_with("F0"));
    CHECK(row_of(text, 0).find('B') == std::string::npos);
    CHECK(row_of(text, 1).find_first_of("FB") == std::string::npos);
  }

  TEST_CASE("steps are each rank's list, with the finding's sentence on its row") {
    plan const p = plan_from({"0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1B1"}, {0, 1}, 2);
    CHECK(show::steps_text(p) ==
          "         Rank 0 Rank 1\n"
          "Step 00: 0F0    1F0\n"
          "Step 01: 0F1    1B0\n"
          "Step 02: 0B0    1F1\n"
          "Step 03: 0B1    1B1\n");
    plan const stuck = plan_from({"0F0 0B0", "1B0 1F0"}, {0, 1}, 1);
    finding const f = check(stuck);
    REQUIRE(f);
    std::string const text = show::steps_text(stuck, f);
    std::vector<std::string> const lines = split(text, '\n');
    REQUIRE(static_cast<std::size_t>(f.position) + 1 < lines.size());
    CHECK(lines[static_cast<std::size_t>(f.position) + 1].ends_with("<-- " + describe(f).str()));
    CHECK(std::count(text.begin(), text.end(), '<') == 1);
  }

  TEST_CASE("NaN, signs and noise in numbers") {
    CHECK(show::number(25.5) == "25.5");
    CHECK(show::number(-1e-17) == "0");
    CHECK(show::percent(-1e-16) == "0.0 %");
    CHECK(show::percent(1.0 / 17) == "5.9 %");
    CHECK(show::exact(0.1) == "0.1");
    CHECK(show::exact(1.0 / 0.0) == "null");
    using texts = std::pair<std::string, std::string>;
    CHECK(chevron::detail::texts_apart(0.0015, 0.00030000000000000003) == texts("0.0015", "0.0003"));
    CHECK(chevron::detail::texts_apart(0.01, 0.01 + 1e-13) == texts("0.01", "0.0100000000001"));
    CHECK(chevron::detail::texts_apart(0.1, std::nextafter(0.1, 1)) == texts("0.10000000000000001", "0.10000000000000002"));
    CHECK(show::axis_step(100, 10) == doctest::Approx(10));
    CHECK(show::axis_step(101, 10) == doctest::Approx(20));
  }
}
