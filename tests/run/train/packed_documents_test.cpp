// Packed documents in slices: borders anywhere, cuts by microbatch, positions by the slice's first token. Gradients are those of
// a plain loop to the last bit, and those of whole sequences within rounding.
#include "support/gloo_ranks.hpp"
#include "support/sliced_model.hpp"

#include <random>

#include <doctest/doctest.h>

using namespace sliced_model;
using chevron::transport;
using small_model::mean_square, small_model::sgd;

namespace {

/// Attention within documents. Which document a carried token is of goes with the keys; positions are those in the whole row.
chevron::stage build_packed_attention(int number) {
  auto const module = make_attention(number);
  return chevron::stage(module,
                        [module](at::Tensor x, at::Tensor documents, at::Tensor start, at::Tensor keys, at::Tensor values,
                                 at::Tensor before) {
                          at::Tensor const all = before.defined() ? at::cat({before, documents}, 1) : documents;
                          at::Tensor const same = documents.unsqueeze(2).eq(all.unsqueeze(1));
                          at::Tensor const place = at::arange(x.size(1), at::kLong) + start;
                          auto [y, k, v] = module->attend(x + 0.1 * place.to(at::kFloat).unsqueeze(-1).cos(), keys, values, same);
                          return std::make_tuple(y, k, v, all);
                        })
      .side_inputs({"document", chevron::slice_start})
      .carries({"keys", "values", "documents"});
}

/// A recurrence whose state is emptied where a document begins.
struct restarted_impl : torch::nn::Module {
  restarted_impl() {
    in = register_module("in", torch::nn::Linear(width, width));
    back = register_module("back", torch::nn::Linear(width, width));
  }
  std::tuple<at::Tensor, at::Tensor, at::Tensor> forward(at::Tensor x, at::Tensor documents, at::Tensor state, at::Tensor last) {
    if (!state.defined()) {
      state = at::zeros({x.size(0), width});
      last = documents.select(1, 0);
    }
    tensors out;
    for (std::int64_t t = 0; t < x.size(1); ++t) {
      at::Tensor const document = documents.select(1, t);
      state = at::tanh(in(x.select(1, t)) + back(state * document.eq(last).unsqueeze(1)));
      last = document;
      out.push_back(state);
    }
    return {x + at::stack(out, 1), state, last};
  }
  torch::nn::Linear in{nullptr}, back{nullptr};
};
chevron::stage build_restarted(int number) {
  at::manual_seed(900 + number);
  return chevron::stage(std::make_shared<restarted_impl>()).side_inputs({"document"}).carries({"state", "last"});
}

/// Documents of random lengths, their numbers by token.
at::Tensor random_documents(std::int64_t samples, std::int64_t tokens, std::mt19937& random) {
  at::Tensor out = at::empty({samples, tokens}, at::kLong);
  for (std::int64_t n = 0; n < samples; ++n) {
    std::int64_t document = 0;
    for (std::int64_t t = 0; t < tokens; ++t) {
      if (t > 0 && random() % 4 == 0) ++document;
      out[n][t] = document;
    }
  }
  return out;
}

/// Boundaries at random; on all ranks alike, as they are made of the documents, which all of them are given.
std::vector<std::int64_t> random_cuts(at::Tensor const& documents, std::int64_t length, int slices) {
  std::mt19937 random(static_cast<unsigned>(documents.sum().item<std::int64_t>()));
  std::vector<std::int64_t> places(static_cast<std::size_t>(length - 1));
  for (std::size_t i = 0; i < places.size(); ++i) places[i] = static_cast<std::int64_t>(i) + 1;
  std::shuffle(places.begin(), places.end(), random);
  places.resize(static_cast<std::size_t>(slices - 1));
  std::sort(places.begin(), places.end());
  return places;
}
std::vector<std::int64_t> cuts_of(chevron::batch const& b, std::int64_t length, int slices) {
  return random_cuts(b.side_inputs.at(0).value, length, slices);
}

bool none_shares(int) { return false; }

}  // namespace

TEST_CASE("packed documents with borders and cuts anywhere") {
  at::set_num_threads(1);
  std::mt19937 random(7);
  for (builder const& build : {builder(build_packed_attention), builder(build_restarted)}) {
    for (char const* name : {"Seq1F1B", "SeqZB-H1", "GPipe"}) {
      for (int draw = 0; draw < 5; ++draw) {
        int const slices = 2 + draw % 3, count = 2;
        auto const plan = plan_of(name, {.ranks = 2, .micro_batches = count, .slices = slices});
        std::int64_t const tokens = 7 + draw;
        auto const data = make_sequences(3, tokens, 40 + draw);
        at::Tensor const documents = random_documents(3, tokens, random);
        auto const of_part = [&](int m) {
          auto const range = chevron::samples_of(3, count, m);
          return documents.narrow(0, range.first, range.count);
        };
        reference sliced(plan.stages, build), whole(plan.stages, build);
        auto const side_inputs = [&](int m, std::int64_t begin, std::int64_t end) {
          return std::vector<chevron::side_input>{{"document", of_part(m).narrow(1, begin, end - begin)},
                                                  {chevron::slice_start, at::full({}, begin, at::kLong)}};
        };
        sliced.run(plan, {parts_of(data, count)},
                   {.ends =
                        [&](std::int64_t length, int m) {
                          auto ends = random_cuts(of_part(m), length, slices);
                          ends.push_back(length);
                          return ends;
                        },
                    .side_inputs = side_inputs});
        auto const unsliced = plan_of("1F1B", {.ranks = 2, .micro_batches = count});
        whole.run(unsliced, {parts_of(data, count)}, {.side_inputs = side_inputs});
        for (std::size_t s = 0; s < sliced.gradients.size(); ++s) {
          for (std::size_t q = 0; q < sliced.gradients[s].size(); ++q) {
            at::Tensor const& a = whole.gradients[s][q];
            CHECK((a - sliced.gradients[s][q]).norm().item<double>() <= 1e-5 * a.norm().item<double>() + 1e-9);
          }
        }
        complaints wrong;
        auto const rank = [&](transport& comm) {
          chevron::trainer train(small_model::setup(plan, comm, build, {.slice_cuts = cuts_of}));
          chevron::batch const given{{data.input}, {data.target}, {{"document", documents}}};
          auto const report = train.step(given);
          wrong.require(report.loss == sliced.loss, words_of(plan) + "loss");
          compare_gradients(train, sliced, words_of(plan), wrong);
        };
        chevron::run_threads({.pipeline_ranks = 2}, rank);
        gloo_ranks::check_all_well(gloo_ranks::on_ranks(2, 1, draw % 2 == 0 ? gloo_ranks::all_share : none_shares, rank));
        for (auto const& w : wrong.all) FAIL_CHECK(w);
      }
    }
  }
}

TEST_CASE("packed documents in steps that do not wait for each other") {
  at::set_num_threads(1);
  std::mt19937 random(9);
  auto const plan = plan_of("SeqZB-H1", {.ranks = 2, .micro_batches = 2, .slices = 3});
  std::vector<std::vector<double>> losses;
  std::vector<chevron::batch> batches;
  for (int step = 0; step < 4; ++step) {
    auto const data = make_sequences(3, 9, step);
    batches.push_back({{data.input}, {data.target}, {{"document", random_documents(3, 9, random)}}});
  }
  for (bool const ahead : {false, true}) {
    auto& own = losses.emplace_back();
    chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
      chevron::trainer_options options{.clip_grad_norm = 0.01, .slice_cuts = cuts_of};
      options.post_validation = ahead;
      options.stable_steps = 0;
      options.on_report = [&](chevron::step_report const& report) {
        if (comm.topology().global_rank == 0) own.push_back(report.loss);
      };
      chevron::trainer train(small_model::setup(plan, comm, build_packed_attention, options));
      for (auto const& given : batches) train.step(given);
      train.synchronize();
    });
  }
  CHECK(losses[0].size() == 4);
  CHECK(losses[0] == losses[1]);
}

TEST_CASE("microbatches that the caller has cut may have sequences of other lengths") {
  at::set_num_threads(1);
  auto const plan = plan_of("SeqZB-H1", {.ranks = 2, .micro_batches = 3, .slices = 3});
  std::vector<sequences> parts;
  std::vector<chevron::batch> given;
  for (int m = 0; m < 3; ++m) {
    parts.push_back(make_sequences(1 + m % 2, 4 + 3 * m, m));
    given.push_back({{parts.back().input}, {parts.back().target}});
  }
  reference whole(plan.stages, build_attention);
  whole.run(plan, {parts});
  complaints wrong;
  chevron::run_threads({.pipeline_ranks = 2}, [&](transport& comm) {
    chevron::trainer train(small_model::setup(plan, comm, build_attention));
    auto const report = train.step(given);
    wrong.require(report.loss == whole.loss, "loss");
    wrong.require(report.samples == 4, "samples");
    compare_gradients(train, whole, words_of(plan), wrong);
  });
  for (auto const& w : wrong.all) FAIL_CHECK(w);
}
