// Which tensors a stage takes and gives beside its inputs and outputs.

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/stage/companions.hpp>
#include <chevron/run/stage/declared_losses.hpp>
#include <chevron/run/stage/skip.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/stage/stage_carries.hpp>

#include <doctest/doctest.h>

namespace {

using chevron::detail::companions_of;

chevron::stage plain_stage() {
  return chevron::stage([](at::Tensor x) { return x; });
}

template <class Companion>
bool is_first(chevron::stage const& of) {
  auto const all = companions_of(of);
  return all.size() == 1 && dynamic_cast<Companion const*>(all.front().get()) != nullptr;
}

}  // namespace

TEST_CASE("a plain stage has no companions") {
  CHECK(companions_of(plain_stage()).empty());
  CHECK(companions_of(plain_stage().recompute()).empty());
  CHECK(companions_of(plain_stage().side_inputs({"mask"}).targets()).empty());
  CHECK(companions_of(chevron::in_sequence({plain_stage(), plain_stage()})).empty());
}

TEST_CASE("each declaration adds a companion: of skip connections, then of losses, then of carries") {
  chevron::stage losing = plain_stage().losses({{.name = "balance"}});
  chevron::stage carrying = plain_stage().carries({"state"});
  CHECK(is_first<chevron::detail::declared_losses>(losing));
  CHECK(is_first<chevron::detail::stage_carries>(carrying));
  CHECK(is_first<chevron::detail::declared_losses>(chevron::in_sequence({plain_stage(), losing})));
  CHECK(is_first<chevron::detail::stage_carries>(chevron::in_sequence({plain_stage(), carrying})));

  auto const build = [&](int number) { return number == 0 ? chevron::in_sequence({losing, carrying}) : plain_stage(); };
  auto const connected = chevron::with_skips(build, {{.from = 0, .to = 2}});
  auto const all = companions_of(connected(0));
  REQUIRE(all.size() == 3);
  CHECK(dynamic_cast<chevron::detail::passing_tensors const*>(all[0].get()) != nullptr);
  CHECK(dynamic_cast<chevron::detail::declared_losses const*>(all[1].get()) != nullptr);
  CHECK(dynamic_cast<chevron::detail::stage_carries const*>(all[2].get()) != nullptr);
  // The tensor passes stage 1 and arrives at stage 2.
  CHECK(is_first<chevron::detail::passing_tensors>(connected(1)));
  CHECK(is_first<chevron::detail::passing_tensors>(connected(2)));
  CHECK(companions_of(connected(3)).empty());
}
