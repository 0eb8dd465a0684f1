// Rows of text that ranks gather to compare themselves.
#include <string>
#include <vector>

#include <chevron/run.hpp>
#include <chevron/run/comm/agreement.hpp>

#include <doctest/doctest.h>

TEST_CASE("every rank gets the rows of all ranks as they were added, whatever their texts") {
  chevron::run_threads({.pipeline_ranks = 3}, [](chevron::transport& comm) {
    std::string const with_zero("a\0b", 3);
    chevron::agreement mine;
    if (comm.topology().global_rank == 0) {
      mine.add({});
      mine.add({"", "7 lines\n\tand 3: words", ""});
    }
    if (comm.topology().global_rank == 2) mine.add({with_zero});  // rank 1 adds no row
    std::vector<chevron::agreement_row> const all = mine.gather(comm);
    REQUIRE(all.size() == 3);
    CHECK(all[0].rank == 0);
    CHECK(all[0].fields.empty());
    CHECK(all[1].rank == 0);
    CHECK(all[1].fields == std::vector<std::string>{"", "7 lines\n\tand 3: words", ""});
    CHECK(all[2].rank == 2);
    CHECK(all[2][0] == with_zero);
  });
}

TEST_CASE("of all values that differ, every rank names the first, with both ranks and values") {
  chevron::run_threads({.pipeline_ranks = 3}, [](chevron::transport& comm) {
    int const rank = comm.topology().global_rank;
    chevron::named_values mine;
    mine.add("model", "one: of two");
    if (rank > 0) mine.add("seed", std::to_string(rank));
    mine.add("steps", std::to_string(rank == 1 ? 5 : 4));
    std::string found;
    try {
      chevron::check_consistency(comm, mine);
    } catch (chevron::preflight_error const& e) {
      found = e.what();
    }
    CHECK(found.find("rank 1 has `steps: 5` where rank 0 has `steps: 4`: start all ranks") != std::string::npos);
  });
}
