// Bytes of a rank: fixed ones, of chunks in flight, of recomputed chunks; and those in a profile.
#include <doctest/doctest.h>

#include <cstdint>
#include <string>
#include <vector>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/prove/footprint.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/tools/show/profile_file.hpp>

#include "unit/tools/show/show_support.hpp"

using namespace chevron;

namespace {

/// Bytes that differ from stage to stage.
stage_bytes uneven(int stages) {
  stage_bytes out;
  for (int s = 0; s < stages; ++s) {
    out.fixed.push_back(1000 + 10 * s);
    out.activation.push_back(100 + 7 * (s % 5));
    out.kept.push_back(60 + 5 * (s % 3));
    out.input.push_back(10 + s % 2);
  }
  return out;
}

buffer<bool> everything(int stages) {
  buffer<bool> out(stages);
  for (bool& one : out) one = true;
  return out;
}

/// The peak of bytes of two microbatches on one rank: 100 fixed bytes, 10 a microbatch, `kept` for W, an input of 1.
std::int64_t of_one_rank(std::string const& order, bool recomputed, std::int64_t kept = 4) {
  std::int64_t const fixed = 100, activation = 10, input = 1;
  return peak_memory(show_test::plan_from({order}, {0}, 2), {&fixed, &activation, &kept, &input, &recomputed}, 0);
}

template <class Look>
void each_plan(int micro_batches, Look look) {
  int seen = 0;
  catalogue::for_each([&](auto const& one) {
    plan const p = expand(one, {4, micro_batches, 0});
    if (p.problem) return;
    ++seen;
    INFO(p.name.characters);
    for (int r = 0; r < 4; ++r) look(p, r);
  });
  CHECK(seen >= 13);
}

std::string const small_profile =
    R"({"chevron_profile": 1, "unit": "ms", "schedule": "1F1B", "ranks": 4, "chunks": 1, "stages": 4, "micro_batches": 8,
"replicas": 1, "steps": 3, "pipeline": 20, "step": 21, "forward": [1, 1, 1, 1], "backward": [2, 2, 2, 2], "backward_input": [1, 1, 1, 1],
"backward_weight": [1, 1, 1, 1], "communication": [0, 0, 0], "hidden": null)";

}  // namespace

TEST_CASE("counted by hand: without recomputation, with it, and with W's that wait") {
  CHECK(of_one_rank("0F0 0F1 0I0 0W0 0I1 0W1", false) == 120);
  CHECK(of_one_rank("0F0 0I0 0F1 0I1 0W0 0W1", false) == 114);
  CHECK(of_one_rank("0F0 0F1 0I0 0W0 0I1 0W1", true) == 111);
  CHECK(of_one_rank("0F0 0F1 0I0 0I1 0W0 0W1", true) == 114);
  CHECK(of_one_rank("0F0 0F1 0B0 0B1", true) == 111);
  CHECK(of_one_rank("0F0 0B0 0F1 0B1", false) == 110);
  CHECK(of_one_rank("0F0 0I0 0W0", false, 15) == 115);
  CHECK(of_one_rank("0F0 0I0 0F1 0W0 0I1 0W1", false, 15) == 125);
  CHECK(of_one_rank("0F0 0F1 0I0 0W0 0I1 0W1", false, 15) == 125);
}

TEST_CASE("where W needs everything and nothing is recomputed, it is peak_bytes and what is always there") {
  each_plan(9, [](plan const& p, int r) {
    stage_bytes const bytes = uneven(p.stages);
    footprint_view view = bytes.view();
    view.kept = view.activation;
    size_view const sizes{bytes.activation.data(), nullptr, 1};
    CHECK(peak_memory(p, view, r) == static_bytes(p, view, r) + peak_bytes(p, sizes, r));
    CHECK(peak_memory(p, bytes.view(), r) <= peak_memory(p, view, r));
  });
}

TEST_CASE("recomputation never takes more, and less wherever two microbatches are in flight without a W between") {
  each_plan(9, [](plan const& p, int r) {
    stage_bytes const bytes = uneven(p.stages);
    buffer<bool> const all = everything(p.stages);
    CHECK(peak_memory(p, bytes.view(all.data), r) <= peak_memory(p, bytes.view(), r));
  });
  plan const gpipe = expand(catalogue::gpipe, {4, 9, 0});
  buffer<bool> const all = everything(4);
  stage_bytes const bytes = uneven(4);
  CHECK(peak_memory(gpipe, bytes.view(all.data), 0) == 1000 + 8 * 10 + 100);
  CHECK(peak_memory(gpipe, bytes.view(), 0) == 1000 + 9 * 100);
}

TEST_CASE("more microbatches never take less") {
  for (int m = 4; m < 12; m += 4) {
    each_plan(m, [&](plan const& p, int r) {
      plan const more = [&] {
        plan out;
        catalogue::for_each([&](auto const& one) {
          if (std::string(one.name) == p.name.characters) out = expand(one, {4, m + 4, 0});
        });
        return out;
      }();
      stage_bytes const bytes = uneven(p.stages);
      buffer<bool> const all = everything(p.stages);
      CHECK(peak_memory(more, bytes.view(), r) >= peak_memory(p, bytes.view(), r));
      CHECK(peak_memory(more, bytes.view(all.data), r) >= peak_memory(p, bytes.view(all.data), r));
    });
  }
}

TEST_CASE("a profile may hold bytes, and neighbouring stages add them up") {
  std::string const bytes =
      R"(, "static_bytes": [5, 6, 7, 8], "activation_bytes": [10, 20, 30, 40], "kept_bytes": [1, 2, 3, 4], "input_bytes": [9, 8, 7, 6])";
  auto const read = read_profile(small_profile + bytes + "}");
  REQUIRE(read.problem == "");
  stage_bytes const two = bytes_of(read.value, 2);
  CHECK(two.problem == "");
  CHECK((two.fixed == std::vector<std::int64_t>{11, 15} && two.activation == std::vector<std::int64_t>{30, 70}));
  CHECK((two.kept == std::vector<std::int64_t>{3, 7} && two.input == std::vector<std::int64_t>{9, 7}));
  CHECK(bytes_of(read.value, 3).problem == "it has 4 stages, which do not add up to 3");
  auto const again = read_profile(write_profile(read.value));
  CHECK((again.problem == "" && again.value.kept_bytes == read.value.kept_bytes &&
         again.value.input_bytes == read.value.input_bytes));

  auto const old = read_profile(small_profile + "}");
  REQUIRE(old.problem == "");
  CHECK(bytes_of(old.value, 4).problem == "'activation_bytes' is missing: write one entry for each stage, in bytes");
  CHECK(write_profile(old.value).find("_bytes") == std::string::npos);

  auto const problem = [&](std::string const& more) { return read_profile(small_profile + ", " + more + "}").problem; };
  CHECK(problem(R"("static_bytes": [1, 2])") == "'static_bytes' is no list with one entry for each of 4 stages");
  CHECK(problem(R"("static_bytes": [1, 2, -3, 4])").find("'static_bytes', entry 2, is -3, no whole number of bytes") == 0);
  CHECK(problem(R"("static_bytes": [1, 2.5, 3, 4])").find("'static_bytes', entry 1, is 2.5") == 0);
  CHECK(problem(R"("activation_bytes": [1, 2, 3, 4], "input_bytes": [1, 3, 3, 4])") ==
        "'input_bytes' of stage 1 is more than its 'activation_bytes'");
  CHECK(problem(R"("activation_bytes": [1, 2, 3, 4], "kept_bytes": [1, 3, 3, 4])") == "");  // gradients may make it more
  CHECK(problem(R"("other_bytes": [1, 2, 3, 4])") == "'other_bytes' is no key of a profile");
}
