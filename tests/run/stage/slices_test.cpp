// Slices of sequences at run time: gradients are those of a plain loop over microbatches and slices, to the last bit, whatever
// the schedule, the way of the backward and the cut into parts.
// timeout: 400
#include "support/gloo_ranks.hpp"
#include "support/sliced_model.hpp"

#include <chevron/describe/recomputed.hpp>
#include <chevron/transports/streams/stream_transport.hpp>
#include "support/host_streams.hpp"

#include <doctest/doctest.h>

using namespace sliced_model;
using chevron::transport;
using small_model::adamw, small_model::mean_square, small_model::sgd;

namespace {

constexpr std::int64_t tokens_of_all = 9;

enum class line { threads, processes, streams };

/// A trainer's step over this plan against the plain loop's.
void compare_one_step(chevron::plan const& plan, builder const& build, chevron::trainer_options const& options = {},
                      builder const& plain = {}, line over = line::threads) {
  std::string const where = words_of(plan);
  auto const data = make_sequences(plan.size.micro_batches + 1, tokens_of_all, 3);
  reference whole(plan.stages, plain ? plain : build);
  whole.run(plan, {parts_of(data, plan.size.micro_batches)});
  auto const program = chevron::lower(chevron::prove(plan));
  complaints wrong;
  auto const rank = [&](transport& comm) {
    chevron::trainer train(
        {.program = program, .transport = comm, .stages = build, .loss = mean_square, .optimizer = sgd, .options = options});
    auto const report = train.step(data.input, data.target);
    if (options.post_validation) train.synchronize();
    wrong.require(report.loss == whole.loss,
                  where + "loss " + std::to_string(report.loss) + " instead of " + std::to_string(whole.loss));
    if (!options.post_validation) compare_gradients(train, whole, where, wrong);
  };
  if (over == line::processes) {
    gloo_ranks::check_all_well(gloo_ranks::on_ranks(plan.size.ranks, 1, gloo_ranks::all_share, rank));
  } else if (over == line::streams) {
    auto const said = thread_ranks::said(
        thread_ranks::run(plan.size.ranks, 1, [&](chevron::topology const& place, auto const& store, auto const& watch) {
          chevron::stream_transport<chevron::host_streams> comm(place, store, watch, std::chrono::seconds(100));
          comm.deadline(std::chrono::seconds(100));
          rank(comm);
          comm.close();
        }));
    for (auto const& each : said) CHECK(each == "");
  } else {
    chevron::run_threads({.pipeline_ranks = plan.size.ranks}, rank);
  }
  for (auto const& w : wrong.all) FAIL_CHECK(w);
}

chevron::stage build_in_parts(int number, int recomputed) {
  auto first = build_attention(2 * number), second = build_attention(2 * number + 1);
  at::manual_seed(700 + number);
  chevron::stage between = torch::nn::Sequential(torch::nn::Linear(width, width), torch::nn::Dropout(0.3));
  first.recompute((recomputed & 1) != 0);
  between.recompute((recomputed & 2) != 0);
  second.recompute((recomputed & 4) != 0);
  return chevron::in_sequence({first, between, second});
}

}  // namespace

TEST_CASE("gradients of slices are those of a plain loop over slices") {
  at::set_num_threads(1);
  int count = 0;
  for (char const* name : {"Seq1F1B", "SeqZB-H1", "GPipe"}) {
    for (int p = 1; p <= 4; ++p) {
      for (int m = 1; m <= 4; ++m) {
        for (int k = 1; k <= 4; ++k, ++count)
          compare_one_step(plan_of(name, {.ranks = p, .micro_batches = m, .slices = k}), build_attention);
      }
    }
  }
  for (char const* name : {"SeqInterleaved1F1B", "LoopedBFS"}) {
    for (int p = 2; p <= 4; ++p) {
      for (int m = 1; m <= 4; ++m) {
        for (int k = 1; k <= 4; ++k, ++count)
          compare_one_step(plan_of(name, {.ranks = p, .micro_batches = m, .chunks = 2, .slices = k}), build_attention);
      }
    }
  }
  CHECK(count == 3 * 64 + 2 * 48);
}

TEST_CASE("sliced: parts that are computed again, in B, in I and by R") {
  at::set_num_threads(1);
  for (char const* name : {"Seq1F1B", "SeqZB-H1"}) {
    auto const plan = plan_of(name, {.ranks = 2, .micro_batches = 3, .slices = 3});
    for (int recomputed = 0; recomputed < 8; ++recomputed) {
      CAPTURE(recomputed);
      auto const build = [=](int number) { return build_in_parts(number, recomputed); };
      compare_one_step(plan, build, {}, [](int number) { return build_in_parts(number, 0); });
    }
    bool const every[] = {true, true};
    compare_one_step(chevron::with_recomputation(plan, every), [](int number) { return build_in_parts(number, 5); });
    compare_one_step(chevron::with_recomputation(plan, every), [](int number) { return build_in_parts(number, 7); });
  }
}

TEST_CASE("sliced: the state of a recurrent layer, and the same detached") {
  at::set_num_threads(1);
  for (char const* name : {"Seq1F1B", "SeqZB-H1"}) {
    auto const plan = plan_of(name, {.ranks = 2, .micro_batches = 2, .slices = 4});
    compare_one_step(plan, build_recurrent);
    compare_one_step(plan, [](int number) {
      return build_recurrent(number).carries({chevron::detached_carry("hidden"), chevron::detached_carry("cell")});
    });
    compare_one_step(plan, [](int number) {
      return build_recurrent(number).carries({chevron::detached_carry("hidden"), "cell"});
    });
  }
}

TEST_CASE("sliced: processes, streams") {
  at::set_num_threads(1);
  for (char const* name : {"Seq1F1B", "SeqZB-H1", "SeqInterleaved1F1B"}) {
    auto const plan = plan_of(name, {.ranks = 2, .micro_batches = 3, .slices = 3});
    compare_one_step(plan, build_attention, {}, {}, line::processes);
    compare_one_step(plan, build_attention, {}, {}, line::streams);
  }
}
