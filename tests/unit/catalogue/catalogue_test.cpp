#include <chevron/schedule.hpp>

#include <string>

#include <doctest/doctest.h>

using namespace chevron;

TEST_SUITE("catalogue") {
  // Below the warm-up depth, above it, any number of chunks: wherever a schedule exists it is lawful, on the lowered program too;
  // where it does not, the error names a size at which it does.
  TEST_CASE("every schedule at every P up to 8, V up to 4, M up to 20 is lawful or says what would be") {
    int lawful = 0, refused = 0;
    auto const go_over = [&](auto const& one) {
      CAPTURE(one.name);
      for (int p = 1; p <= 8; ++p) {
        for (int v = 0; v <= 4; ++v) {
          for (int m = 1; m <= 20; ++m) {
            plan const made = expand(one, {p, m, v});
            finding const found = check(made);
            if (!found) {
              ++lawful;
              if (v != 0) DOCTEST_REQUIRE(made.size.chunks == v);
              if (m <= 2 || m == 7 || m == 20) {
                owned_program const of_made = lower(prove(made)).copy();
                finding const lowered = check(of_made);
                DOCTEST_REQUIRE_MESSAGE(!lowered, to_text(made.size).str() << ": " << describe(lowered).str());
              }
              continue;
            }
            ++refused;
            // All that can be wrong is the number of chunks.
            std::string const said = describe(found).str();
            CAPTURE(said);
            CAPTURE(m);
            DOCTEST_REQUIRE(found.broken == law::shape);
            DOCTEST_REQUIRE(v != 0);
            std::string const needed = std::to_string(found.number);
            DOCTEST_REQUIRE(said == "with this placement chunks can be " + needed + ", not " + std::to_string(v));
            DOCTEST_REQUIRE(!check(expand(one, {p, m, static_cast<int>(found.number)})));
          }
        }
      }
    };
    catalogue::for_each(go_over);
    hana::for_each(catalogue::evaluation, [&](auto const* one) { go_over(*one); });
    DOCTEST_CHECK(lawful > 8 * 20 * static_cast<int>(decltype(hana::size(catalogue::all))::value));
    DOCTEST_CHECK(refused > 0);
  }

  TEST_CASE("every microbatch group that Megatron allows, and every other that keeps the ranks busy") {
    int groups = 0;
    for (int p = 1; p <= 8; ++p) {
      for (int v = 1; v <= 4; ++v) {
        for (int m = 1; m <= 20; ++m) {
          for (int n = 1; n <= m + 1; ++n) {
            finding const full = check(expand(catalogue::interleaved_1f1b_with(n), {p, m, v}));
            finding const split = check(expand(catalogue::interleaved_zero_bubble_with(n), {p, m, v}));
            int const least = p < m ? p : m;
            DOCTEST_REQUIRE(static_cast<bool>(full) == (n < least));
            DOCTEST_REQUIRE(static_cast<bool>(split) == (n < least));
            if (n < least) {
              DOCTEST_REQUIRE(describe(full).str() == "a group must have a microbatch for each rank, at least " +
                                                          std::to_string(least) + ", not " + std::to_string(n));
            }
            ++groups;
          }
        }
      }
    }
    DOCTEST_CHECK(groups == 8 * 4 * (20 * 21 / 2 + 20));
  }

  TEST_CASE("names: without regard to case, dashes and underscores, those of constants and papers, for training and for evaluation") {
    DOCTEST_CHECK(catalogue::contains("eager1f1b"));
    DOCTEST_CHECK(catalogue::contains("FORWARDONLY"));
    DOCTEST_CHECK_FALSE(catalogue::trains("ForwardOnly"));
    for (char const* const name : {"ZBVZeroBubble", "ZB-V", "zb_v", "zbv"})
      DOCTEST_CHECK(std::string(catalogue::make_plan(name, {2, 3}).name) == "ZBVZeroBubble");
    DOCTEST_CHECK(std::string(catalogue::make_plan("zb_h1", {2, 3}).name) == "ZB-H1");
    DOCTEST_CHECK(std::string(catalogue::make_plan("one_f_one_b", {2, 3}).name) == "1F1B");
    for (char const* const none : {"", "-", "ZB", "ZB-VV", "1F1B1", "V-"}) DOCTEST_CHECK_FALSE(catalogue::contains(none));
    DOCTEST_CHECK(std::string(catalogue::make_plan("hanayo", {2, 3, 4}).name) == "Hanayo");
    DOCTEST_CHECK(
        describe(catalogue::make_plan("", {2, 3}).problem).str().starts_with("no schedule of the catalogue has that name"));
  }
}
