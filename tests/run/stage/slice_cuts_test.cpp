// How batches are cut into slices: the tensors, the places of the cuts, and the counts of slices.
#include <ATen/ATen.h>

#include <chevron/run/stage/split_batch.hpp>

#include <doctest/doctest.h>

using chevron::batch, chevron::slicing, chevron::detail::split_batch;

namespace {
std::int64_t length_of(split_batch const& cut, int unit) { return cut.inputs(unit)[0].size(1); }
}  // namespace

TEST_CASE("each microbatch is cut along its tokens, and its units are numbered as the plan's") {
  at::Tensor const x = at::arange(3 * 8).view({3, 8}), y = x + 100, mask = x.unsqueeze(-1).expand({3, 8, 2}),
                   weights = at::arange(3);
  batch const whole{{x}, {y}, {{"mask", mask}, {"weights", weights}, {"table", at::ones({5, 5}), true}}};
  split_batch cut;
  cut.split(whole, 2, {.slices = 3, .start_on = at::Device(at::kCPU)});
  REQUIRE(cut.count() == 6);
  CHECK(cut.samples() == 3);
  std::int64_t const starts[] = {0, 3, 6, 8};  // longer ones first
  for (int u = 0; u < 6; ++u) {
    int const m = u / 3, s = u % 3;
    auto const range = chevron::samples_of(3, 2, m);
    auto const of = [&](at::Tensor const& t) {
      return t.narrow(0, range.first, range.count).narrow(1, starts[s], starts[s + 1] - starts[s]);
    };
    CHECK(at::equal(cut.inputs(u)[0], of(x)));
    CHECK(cut.inputs(u)[0].data_ptr() == of(x).data_ptr());
    CHECK(at::equal(cut.targets(u)[0], of(y)));
    auto const extras = cut.side_inputs(u);
    REQUIRE(extras.size() == 4);
    CHECK(at::equal(extras[0].value, of(mask)));
    CHECK(at::equal(extras[1].value, weights.narrow(0, range.first, range.count)));
    CHECK(extras[2].value.sizes() == at::IntArrayRef({5, 5}));
    CHECK(extras[3].name == "slice_start");
    CHECK(extras[3].value.item<std::int64_t>() == starts[s]);
    CHECK(cut.counts(u) == double(range.count) * (double(starts[s + 1] - starts[s]) / 8));
  }
  CHECK(cut.counts() == 3);
  cut.weigh([](batch const& b) { return double(b.targets[0].gt(110).sum().item<std::int64_t>()); });
  CHECK(cut.counts() == 13);
  CHECK(cut.counts_nothing(0));
}

TEST_CASE("slices' fractions of samples count whole samples in all, also in a loss of a stage without a weight") {
  auto const weight = [](batch const& b) { return double(b.inputs[0].size(1)); };
  for (int samples = 1; samples <= 9; ++samples) {
    for (int tokens = 3; tokens <= 17; ++tokens) {
      split_batch cut;
      cut.split({{at::ones({samples, tokens})}, {}}, 1, {.slices = 3});
      cut.weigh_losses(std::vector<chevron::loss_weight_function>{{}, weight}, false);
      CHECK(cut.counts() == samples);
      CHECK(cut.loss_counts(0) == samples);
      CHECK(cut.loss_counts(1) == tokens);
    }
  }
}

TEST_CASE("microbatches that the caller has cut are cut on, each by its own length") {
  std::vector<batch> const parts{{{at::ones({2, 4})}, {}}, {{at::ones({1, 9})}, {}}};
  split_batch cut;
  cut.take(parts, 2, {.slices = 2});
  REQUIRE(cut.count() == 4);
  CHECK(length_of(cut, 0) == 2);
  CHECK(length_of(cut, 2) == 5);
  CHECK(length_of(cut, 3) == 4);
  CHECK(cut.samples() == 3);
  CHECK(cut.counts(1) == 1);
  // Nothing is given on ranks in the middle, and less on the last one.
  cut.take({}, 2, {.slices = 2});
  CHECK(cut.count() == 4);
  cut.split({}, 2, {.slices = 2});
  CHECK(cut.count() == 4);
  CHECK(cut.inputs(3).empty());
}

TEST_CASE("cuts by the cost of causal attention") {
  batch const none;
  CHECK(chevron::slices_by_cost(0)(none, 16, 4) == std::vector<std::int64_t>{4, 8, 12});
  CHECK(chevron::slices_by_cost(0.5)(none, 1000, 4) == std::vector<std::int64_t>{366, 618, 823});
  CHECK(chevron::slices_by_cost(0.8)(none, 1000, 4) == std::vector<std::int64_t>{448, 675, 851});
  CHECK(chevron::slices_by_cost(1)(none, 100, 4) == std::vector<std::int64_t>{50, 71, 87});
  CHECK(chevron::slices_by_cost(0.5, 64)(none, 1024, 4) == std::vector<std::int64_t>{384, 640, 832});
  // Where rounding would make two cuts one, they move apart.
  CHECK(chevron::slices_by_cost(0.5, 64)(none, 256, 4) == std::vector<std::int64_t>{64, 128, 192});
  CHECK(chevron::slices_by_cost(1)(none, 4, 4) == std::vector<std::int64_t>{1, 2, 3});
  for (std::int64_t length = 5; length < 40; ++length) {
    for (int slices = 1; slices <= 5; ++slices) {
      split_batch cut;
      cut.split({{at::ones({1, length})}, {}}, 1, {.slices = slices, .cuts = chevron::slices_by_cost(0.7)});
      std::int64_t sum = 0;
      for (int u = 0; u < slices; ++u) sum += length_of(cut, u);
      CHECK(sum == length);
    }
  }
}

TEST_CASE("a side input of the name by which stages ask for the slice's start is refused") {
  split_batch cut;
  batch const whole{{at::ones({2, 4})}, {}, {{"slice_start", at::ones({2, 4})}}};
  CHECK_THROWS_WITH_AS(cut.split(whole, 2, {.slices = 2, .start_on = at::Device(at::kCPU)}), doctest::Contains("`slice_start`"),
                       chevron::usage_error);
  CHECK_NOTHROW(cut.split(whole, 2, {.slices = 2}));
  cut.split({{at::ones({2})}, {}}, 2, {.start_on = at::Device(at::kCPU)});
  CHECK(cut.side_inputs(1)[0].value.item<std::int64_t>() == 0);
}
