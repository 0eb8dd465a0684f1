// The measured bytes of a step: of layers whose saved tensors are known by hand, the same with recomputation; results of the
// step are those without a measurement.
#include "support/small_model.hpp"

#include <doctest/doctest.h>

#include <map>
#include <mutex>
#include <utility>

namespace {

using chevron::measured_bytes;
using namespace small_model;

constexpr std::int64_t real = sizeof(float);

/// How a stage is built.
struct kind_of_stage {
  bool recompute = false;
  bool gives_what_it_saves = false;  ///< its output is what the tanh saved
};

/// Norm, product, tanh, square: the tensors that autograd saves are listed in LibTorch's derivatives.yaml. The tanh's result is
/// used three times, so one piece of memory is saved three times.
chevron::stage known_stage(int number, kind_of_stage with) {
  at::manual_seed(100 + number);
  torch::nn::LayerNorm norm(torch::nn::LayerNormOptions({width}));
  torch::nn::Linear product(width, width);
  torch::nn::Sequential both(norm, product);
  auto constant = at::ones({width});  // belongs to the stage, but is neither a parameter nor a buffer
  return chevron::stage(both, [both, constant, with](at::Tensor x) mutable {
           at::Tensor const y = both->forward(x).tanh();
           return with.gives_what_it_saves ? y : y * y + constant;
         }).recompute(with.recompute);
}

struct counted {
  std::map<int, measured_bytes> stages;
  chevron::profile profile;
  std::map<int, tensors> gradients;
  double loss = 0;
};

/// Some steps, of which the first is counted or not; loss and gradients of the first.
counted run(char const* name, int ranks, int samples, bool count, chevron::optimizer_factory const& optimizer,
            kind_of_stage with = {}, bool post_validation = false) {
  auto const plan = plan_of(name, ranks, 4);
  auto const data = make_batch(4 * samples, 1);
  counted out;
  std::mutex mutex;
  std::vector<std::string> texts;
  chevron::run_threads({.pipeline_ranks = ranks}, [&](transport& comm) {
    chevron::trainer train(small_model::setup(
        plan, comm, [&](int s) { return known_stage(s, with); },
        {.post_validation = post_validation, .stable_steps = 1}, optimizer));
    if (count) train.measure_bytes();
    double const loss = train.step({data.input}, {data.target}).loss;
    std::map<int, tensors> mine;
    for (std::size_t s = 0; s < train.stages().size(); ++s) {
      for (auto const& p : train.stages()[s].parameters()) mine[static_cast<int>(s)].push_back(p.value.grad().clone());
    }
    for (int more = 0; more < 4; ++more) train.step({data.input}, {data.target});
    train.synchronize();
    auto const all = comm.all_gather_text(chevron::text_of(train.bytes_by_stage()));
    std::lock_guard const hold(mutex);
    for (measured_bytes const& s : train.bytes_by_stage()) out.stages[s.stage] = s;
    out.gradients.merge(mine);
    out.loss = loss;
    texts = all;
  });
  out.profile.stages = plan.stages;
  chevron::add_bytes(out.profile, texts);
  return out;
}

// Of one sample: a row of `width` numbers.
constexpr std::int64_t row = width * real;
constexpr std::int64_t means = 2 * real;  // mean and reciprocal deviation, which the norm saves
constexpr std::int64_t parameters = (2 * width + width * width + width) * real;

}  // namespace

TEST_CASE("what a microbatch holds is what autograd saves, each piece of memory once, and no parameter") {
  for (int const samples : {1, 5}) {
    for (char const* name : {"1F1B", "ZB-H1", "ZBVZeroBubble", "DualPipeV"}) {
      for (kind_of_stage const with : {kind_of_stage{}, {.recompute = true}, {.gives_what_it_saves = true}}) {
        auto const found = run(name, 2, samples, true, sgd, with);
        bool const split = std::string(name) != "1F1B";
        int const last = found.profile.stages - 1;
        REQUIRE(found.stages.size() == static_cast<std::size_t>(last + 1));
        for (auto const& [s, bytes] : found.stages) {
          CAPTURE(name);
          CAPTURE(samples);
          CAPTURE(with.recompute);
          CAPTURE(with.gives_what_it_saves);
          CAPTURE(s);
          // The norm's input, means and result (the product's input), and the result of tanh, which the square saves, too. The
          // last one's output is saved by the loss.
          std::int64_t const of_loss = s == last && !with.gives_what_it_saves ? row : 0;
          CHECK(bytes.activation == samples * (3 * row + means + of_loss));
          CHECK(bytes.input == samples * row);
          CHECK(bytes.fixed == 2 * parameters);
          if (!split) continue;
          // W of the norm and of the product: their inputs, and the gradients of their results. Stage 0 computes nothing in I:
          // all activations, and the gradient of its output.
          CHECK(bytes.kept == samples * (4 * row + means));
        }
        CHECK(found.profile.activation_bytes.size() == static_cast<std::size_t>(last + 1));
        CHECK(found.profile.kept_bytes.size() == (split ? found.stages.size() : 0));
      }
    }
  }
}

TEST_CASE("counting changes no bit") {
  for (char const* name : {"1F1B", "ZBVZeroBubble"}) {
    for (kind_of_stage const with : {kind_of_stage{}, {.recompute = true}, {.gives_what_it_saves = true}}) {
      auto const counting = run(name, 2, 3, true, adamw, with), plain = run(name, 2, 3, false, adamw, with);
      CHECK(counting.loss == plain.loss);
      CHECK(plain.profile.activation_bytes.empty());
      REQUIRE((counting.gradients.size() == plain.gradients.size() && plain.gradients.size() >= 2));
      for (auto const& [s, list] : plain.gradients) {
        REQUIRE((list.size() == 4 && counting.gradients.at(s).size() == 4));
        for (std::size_t i = 0; i < list.size(); ++i) CHECK(at::equal(list[i], counting.gradients.at(s)[i]));
      }
    }
  }
}

TEST_CASE("what is always there: values, gradients, the optimizer's state, and copies that post-validation keeps") {
  CHECK(run("1F1B", 2, 1, true, adamw).profile.static_bytes == std::vector<std::int64_t>(2, 4 * parameters));
  auto const momentum = chevron::optimizer<torch::optim::SGD>(torch::optim::SGDOptions(0.1).momentum(0.9));
  CHECK(run("1F1B", 2, 1, true, momentum).profile.static_bytes == std::vector<std::int64_t>(2, 3 * parameters));
  CHECK(run("1F1B", 2, 1, true, adamw, {}, true).profile.static_bytes == std::vector<std::int64_t>(2, 7 * parameters));
}
