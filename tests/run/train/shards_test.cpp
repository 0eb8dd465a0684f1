#include <algorithm>
#include <chrono>
#include <cmath>
#include <limits>
#include <mutex>
#include <string>
#include <vector>

#include <chevron/transports/gloo/gloo_transport.hpp>

#include "support/shard_model.hpp"
#include "support/thread_ranks.hpp"

#include <doctest/doctest.h>

using namespace shard_model;

namespace {

constexpr char const* schedules[] = {"1F1B", "ZB-H1", "GPipe", "ZB-V", "Interleaved1F1B"};

setting alone(setting what) {
  what.shards = 1;
  return what;
}

/// The largest difference of a parameter's elements, relative to its largest, of all parameters.
double largest_difference(std::vector<named_value> const& a, std::vector<named_value> const& b) {
  REQUIRE(a.size() == b.size());
  double largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    REQUIRE(a[i].name == b[i].name);
    largest =
        std::max(largest, (a[i].value - b[i].value).abs().max().item<double>() / (1 + a[i].value.abs().max().item<double>()));
  }
  return largest;
}

/// Checks that training over shards computes the results of one shard, up to the order of sums.
void check_close(setting const& what, double within = 1e-9) {
  CAPTURE(what.schedule);
  CAPTURE(what.shards);
  CAPTURE(what.sequence_parallel);
  auto const expected = on_threads(alone(what)), got = on_threads(what);
  CHECK(largest_difference(whole_values(expected, alone(what)), whole_values(got, what)) <= within);
  REQUIRE(expected[0].reports.size() == got[0].reports.size());
  for (std::size_t k = 0; k < expected[0].reports.size(); ++k) {
    for (auto const& rank : got) {
      CHECK(rank.reports[k].loss == got[0].reports[k].loss);
      CHECK(rank.reports[k].grad_norm == got[0].reports[k].grad_norm);
    }
    CHECK(got[0].reports[k].loss == doctest::Approx(expected[0].reports[k].loss).epsilon(within));
    CHECK(got[0].reports[k].grad_norm == doctest::Approx(expected[0].reports[k].grad_norm).epsilon(within));
    CHECK(got[0].reports[k].samples == expected[0].reports[k].samples);
  }
}

/// The message with which a job is refused; empty if it trains.
std::string refusal(setting const& what) {
  try {
    on_threads(what);
  } catch (chevron::error const& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("shards compute what one rank computes") {
  for (char const* schedule : schedules) {
    for (bool const sequence_parallel : {false, true}) {
      for (int const shards : {2, 4})
        check_close({.schedule = schedule, .shards = shards, .sequence_parallel = sequence_parallel});
    }
  }
}

TEST_CASE("50 steps of five schedules over shards and replicas: copies stay equal bit for bit, and all is that of one shard") {
  int number = 0;  // by turns 2 shards and 4, and both with whole sequences and with cut ones
  for (char const* schedule : schedules) {
    setting what{.schedule = schedule, .replicas = 2, .shards = number % 2 == 0 ? 2 : 4, .steps = 50};
    what.sequence_parallel = number / 2 % 2 == 0;
    what.make = chevron::optimizer<torch::optim::SGD>(0.05);
    what.options.clip_grad_norm = 0.5;
    check_close(what);
    ++number;
  }
}

TEST_CASE("five schedules over Gloo, shards beside replicas: the bits of threads") {
  at::set_num_threads(1);
  int number = 0;  // by turns 2 shards and 4, and both with whole sequences and with cut ones
  for (char const* schedule : schedules) {
    CAPTURE(schedule);
    setting what{.schedule = schedule, .replicas = 2, .shards = number % 2 == 0 ? 2 : 4};
    what.sequence_parallel = number / 2 % 2 == 0;
    std::vector<outcome> got(static_cast<std::size_t>(what.ranks * what.replicas * what.shards));
    auto const body = [&](chevron::topology const& where, auto const& store, auto const& watch) {
      chevron::gloo_transport comm(where, store, watch);
      comm.deadline(std::chrono::seconds(60));
      got[static_cast<std::size_t>(where.global_rank)] = train_on(comm, what);
      comm.close();
    };
    for (auto const& each : thread_ranks::said(thread_ranks::run({what.ranks, what.replicas, 0, what.shards}, body)))
      CHECK(each == "");
    CHECK(largest_difference(whole_values(on_threads(what), what), whole_values(got, what)) == 0);
    ++number;
  }
}

TEST_CASE("shards beside replicas, clipping, recomputation, ties and a sharded optimizer") {
  setting what{.replicas = 2, .sequence_parallel = true, .recompute = true};
  what.options.clip_grad_norm = 0.5;
  check_close(what);
  what.schedule = "ZB-H1";
  what.tied = true;
  check_close(what);
  what.make = chevron::optimizer<torch::optim::AdamW>(torch::optim::AdamWOptions(1e-2));
  what.options.shard = chevron::sharding::optimizer;
  check_close(what, 1e-6);
  what.options.shard = chevron::sharding::gradients;
  check_close(what, 1e-6);
  what.options.shard = chevron::sharding::nothing;
  what.options.post_validation = true;
  what.options.stable_steps = 0;
  check_close(what, 1e-6);
}

TEST_CASE("three shards, whose pieces differ in size") { check_close({.shards = 3, .sequence_parallel = true}); }

TEST_CASE("random numbers: alike on all shards outside of cut regions, each its own within") {
  setting what{.dropout = 0.3};
  check_close(what);  // whole tensors lose the same elements, however many shards there are
  what.recompute = true;
  what.sharded_dropout = 0.3;
  auto const once = whole_values(on_threads(what), what), again = whole_values(on_threads(what), what);
  for (std::size_t i = 0; i < once.size(); ++i) CHECK(once[i].value.equal(again[i].value));
  auto stored = what;
  stored.recompute = false;  // a recomputed F draws the same numbers
  auto const kept = whole_values(on_threads(stored), stored);
  for (std::size_t i = 0; i < once.size(); ++i) CHECK(once[i].value.equal(kept[i].value));
  auto alike = what;
  alike.wrong = fault::same_dropout;
  auto const others = whole_values(on_threads(alike), alike);
  int equal = 0;
  for (std::size_t i = 0; i < once.size(); ++i) equal += once[i].value.equal(others[i].value) ? 1 : 0;
  CHECK(equal == 0);
}

TEST_CASE("each cut region of a stage draws its own numbers, on each shard") {
  auto const drawn = [](int shard) {
    chevron::random_scope const stage({.seed = 5});
    std::vector<at::Tensor> out;
    for (int region = 0; region < 2; ++region) {
      chevron::sharded_random const own(shard);
      out.push_back(at::rand({8}));
    }
    out.push_back(at::rand({8}));
    return out;
  };
  auto const first = drawn(0), again = drawn(0), second = drawn(1);
  CHECK(first[0].equal(again[0]));
  CHECK(!first[0].equal(first[1]));
  CHECK(!first[0].equal(second[0]));
  CHECK(first[2].equal(second[2]));
}

TEST_CASE("a gradient that overflows on one shard alone is skipped by all, with one loss scale") {
  setting what{.steps = 4};
  what.options.scaling = chevron::loss_scaling{.initial = 8};
  what.options.when_not_finite = chevron::not_finite::skip;
  std::mutex mutex;
  std::vector<std::string> lines;
  chevron::run_threads({.pipeline_ranks = 2, .shards = 2}, [&](transport& comm) {
    std::vector<chevron::step_report> reports;
    chevron::trainer train = make_trainer(comm, what, reports);
    for (auto const& s : train.stages()) {
      for (auto const& p : s.parameters()) {
        if (comm.topology().global_rank != 1 || p.name != "column_weight") continue;
        p.value.register_hook([&train](at::Tensor const& g) {  // a piece that shard 0 does not hold
          return train.next_step() == 1 ? at::full_like(g, std::numeric_limits<double>::infinity()) : g;
        });
      }
    }
    train_steps(train, what, 4);
    train.synchronize();
    std::string line;
    for (auto const& each : reports) line += (each.skipped ? "skipped " : "stepped ") + std::to_string(each.loss_factor) + "; ";
    std::lock_guard const hold(mutex);
    lines.push_back(line);
  });
  for (std::string const& line : lines) CHECK(line == "stepped 8.000000; skipped 8.000000; stepped 4.000000; stepped 4.000000; ");
}

TEST_CASE("an evaluation over shards counts each loss once") {
  auto const evaluated = [](int shards) {
    double loss = 0;
    chevron::run_threads({.pipeline_ranks = 2, .shards = shards}, [&](transport& comm) {
      setting const what{.shards = shards, .steps = 1};
      std::vector<chevron::step_report> reports;
      chevron::trainer train = make_trainer(comm, what, reports);
      chevron::evaluator evaluate(train);
      auto const generator = at::make_generator<at::CPUGeneratorImpl>(std::uint64_t{3});
      at::Tensor const x = at::randn({8, tokens, wide}, generator, at::kDouble),
                       y = at::randn({8, tokens, wide}, generator, at::kDouble);
      double const mine = evaluate.loss({x}, {y});
      if (comm.topology().global_rank == 0) loss = mine;
    });
    return loss;
  };
  CHECK(evaluated(2) == doctest::Approx(evaluated(1)).epsilon(1e-9));
}

TEST_CASE("the guard refuses what would be silently wrong, on all ranks, before a parameter changes") {
  auto const has = [](std::string const& text, std::string const& part) {
    CAPTURE(text);
    CHECK(text.find(part) != std::string::npos);
  };
  for (char const* schedule : {"1F1B", "ZB-H1"}) {
    setting const cut{.schedule = schedule, .sequence_parallel = true};
    setting const whole{.schedule = schedule};
    auto const with = [](setting what, fault wrong) {
      what.wrong = wrong;
      return what;
    };
    std::string const undeclared = refusal(with(cut, fault::partial_not_declared));
    has(undeclared, "shards 0 and 1 have unequal gradients of stage 0's norm_weight, but each holds the whole parameter");
    has(undeclared, "stage.partial({\"norm_weight\"})");
    has(refusal(with(whole, fault::whole_declared_partial)),
        "all 2 shards computed the same gradient of stage 0's norm_weight, which is declared partial: their sum would count it 2 "
        "times");
    has(refusal(with(whole, fault::no_copy)),
        "shards 0 and 1 of stage 1 got equal values of input 0, a whole tensor, and gave unequal gradients");
    has(refusal(with(cut, fault::gathered_as_whole)),
        "shards 0 and 1 have unequal gradients of the result of shard_group::all_gather in stage 1");
    setting drops = with(whole, fault::own_dropout_outside);
    drops.dropout = 0.3;
    has(refusal(drops), "pass different tensors to shard_group::copy");
    has(refusal(with(cut, fault::loss_of_own_part)), "shards 0 and 1 ");
  }
}

TEST_CASE("norms of what all shards hold are compared in every step") {
  setting what{.steps = 3};
  what.options.check_copies = 0;
  int calls = 0;
  what.options.on_report = {};
  std::string said;
  try {
    chevron::run_threads({.pipeline_ranks = 2, .shards = 2}, [&](transport& comm) {
      std::vector<chevron::step_report> reports;
      chevron::trainer train = make_trainer(comm, what, reports);
      train_steps(train, what, 2);
      for (auto const& s : train.stages()) {
        for (auto const& p : s.parameters()) {
          if (comm.topology().shard() == 1 && p.name == "norm_weight") p.value.detach().add_(0.01);
        }
      }
      train_steps(train, what, 1);
    });
  } catch (chevron::preflight_error const& e) {
    said = e.what();
    ++calls;
  }
  CHECK(calls == 1);
  CHECK(said.find("shards 0 and 1 ") != std::string::npos);
}

TEST_CASE("ranks that disagree about shards are refused when the trainer is made") {
  std::string said;
  try {
    chevron::run_threads({.pipeline_ranks = 1, .shards = 2}, [&](transport& comm) {
      setting const what{.ranks = 1};
      chevron::trainer const train(
          {.program = chevron::lower(chevron::prove(chevron::catalogue::make_plan("1F1B", {.ranks = 1, .micro_batches = 4}))),
           .transport = comm,
           .stages =
               [&](int s) {
                 auto made = build(comm, what, s, true);
                 if (comm.topology().shard() == 1) made.partial({"norm_bias"});
                 return made;
               },
           .loss = [](at::Tensor y, at::Tensor t) { return at::mse_loss(y, t); },
           .optimizer = what.make});
    });
  } catch (chevron::preflight_error const& e) {
    said = e.what();
  }
  CHECK(said.find("stage 0 norm_bias") != std::string::npos);
}

TEST_CASE("names and dimensions that a stage has not are refused") {
  chevron::run_threads({.pipeline_ranks = 1}, [&](transport& comm) {
    setting const what{.ranks = 1};
    auto made = build(comm, what, 0, true);
    CHECK_THROWS_WITH_AS(made.cut("columns", 0), doctest::Contains("no parameter `columns` to be cut; it has norm_weight"),
                         chevron::usage_error);
    CHECK_THROWS_WITH_AS(made.cut("norm_bias", 1), doctest::Contains("`norm_bias` has 1 dimensions, and none 1"),
                         chevron::usage_error);
    CHECK_THROWS_WITH_AS(made.partial({"x"}), doctest::Contains("no parameter `x` to be partial"), chevron::usage_error);
  });
}
