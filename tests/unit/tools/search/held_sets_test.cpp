// Peak memory from the sets of chunks that ranks hold, beside the walk through all actions, for every schedule and drawn bytes.
// computes: peaks of every schedule
#include <doctest/doctest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/describe/recomputed.hpp>
#include <chevron/prove/footprint.hpp>
#include <chevron/search.hpp>

using namespace chevron;

namespace {

/// Bytes of which W may keep more than F stored, as profiles with gradients have.
stage_bytes drawn_bytes(int stages, std::mt19937& random) {
  stage_bytes out;
  for (int s = 0; s < stages; ++s) {
    auto const up_to = [&](unsigned top) { return static_cast<std::int64_t>(random() % top); };
    out.fixed.push_back(up_to(1000));
    out.activation.push_back(1 + up_to(100));
    out.kept.push_back(up_to(150));
    out.input.push_back(std::min(out.activation.back(), up_to(20)));
  }
  return out;
}

/// Compares all ranks of a plan, with and without recomputed stages. \returns the most sets of a rank
std::size_t compare(plan_view const& p, std::mt19937& random) {
  search::held_sets const held(p);
  std::size_t most = 0;
  for (int draw = 0; draw < 6; ++draw) {
    stage_bytes const bytes = drawn_bytes(p.stages, random);
    buffer<bool> recomputed(p.stages);
    for (bool& one : recomputed) one = draw % 3 == 1 || (draw % 3 == 2 && random() % 2 == 0);
    for (int r = 0; r < p.size.ranks; ++r) {
      footprint_view const of = bytes.view(recomputed.data);
      CAPTURE(r);
      REQUIRE(held.peak_memory(of, r) == peak_memory(p, of, r));
      most = std::max(most, held.count(r));
    }
  }
  return most;
}

}  // namespace

TEST_CASE("the sets of held chunks give each rank's peak memory, and are few") {
  std::mt19937 random(5);
  int plans = 0;
  std::size_t longest = 0;
  catalogue::for_each([&](auto const& one) {
    for (int const ranks : {1, 2, 3, 5}) {
      for (int const micro_batches : {1, 2, 7, 24}) {
        plan const p = expand(one, {ranks, micro_batches, 0});
        if (p.problem) continue;
        CAPTURE(p.name.characters);
        CAPTURE(micro_batches);
        longest = std::max(longest, compare(p, random));
        compare(with_recomputation(p), random);
        ++plans;
      }
    }
  });
  CHECK(plans > 13 * 12);
  CHECK(longest < 64);
}

TEST_CASE("of a rank that keeps more for W than F stored, the sum behind an I counts") {
  plan const p = catalogue::make_plan("ZB-H1", {2, 4, 0});
  stage_bytes bytes;
  for (auto* list : {&bytes.fixed, &bytes.input}) list->assign(2, 0);
  bytes.activation.assign(2, 10);
  bytes.kept.assign(2, 100);
  for (int r = 0; r < 2; ++r) CHECK(search::held_sets(p).peak_memory(bytes.view(), r) == peak_memory(p, bytes.view(), r));
}

TEST_CASE("slices count by their own bytes") {
  std::mt19937 random(11);
  int plans = 0;
  for (char const* name : {"Seq1F1B", "SeqZB-H1", "SeqInterleaved1F1B"}) {
    for (int const ranks : {2, 3}) {
      for (int const slices : {2, 3, 8}) {
        plan const p = catalogue::make_plan(name, {ranks, 7, name == std::string("SeqInterleaved1F1B") ? 2 : 1, slices});
        REQUIRE_FALSE(p.problem);
        search::held_sets const held(p);
        std::vector<stage_bytes> bytes;
        for (int i = 0; i < slices; ++i) bytes.push_back(drawn_bytes(p.stages, random));
        buffer<bool> recomputed(p.stages);
        for (bool& one : recomputed) one = random() % 2 == 0;
        std::vector<footprint_view> views;
        for (stage_bytes const& one : bytes) views.push_back(one.view(recomputed.data));
        for (int r = 0; r < ranks; ++r) {
          // The walk through the rank's actions, each with the bytes of its slice.
          std::int64_t now = static_bytes(p, views.front(), r), most = now;
          for (int i = p.begin[r]; i < p.begin[r + 1]; ++i) {
            action const a = p.actions[i];
            footprint_changes const changes{
                views[static_cast<std::size_t>(a.micro_batch) % views.size()], false, recomputed_chunks(p), {}};
            most = std::max(most, changes(a, now));
            most = std::max(most, now);
          }
          CAPTURE(name);
          CHECK(held.peak_memory(views, r) == most);
          CHECK(held.count(r) < 128);
        }
        ++plans;
      }
    }
  }
  CHECK(plans == 18);
}
