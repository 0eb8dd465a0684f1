// timeout: 120
// Slices and their carries on the simulated device: bit for bit as in main memory, and no operator without its order, also where
// the halves of a pair run on two streams.
#include "accelerator/training.hpp"

using accelerator::job, accelerator::joined;

namespace {

/// Adds up its outputs along the sequence, and hands the sum on: slices compute like the whole sequence.
chevron::stage build_sum(int number) {
  at::manual_seed(number);
  torch::nn::Sequential inner(torch::nn::LayerNorm(torch::nn::LayerNormOptions({sliced_model::width})),
                              torch::nn::Linear(sliced_model::width, sliced_model::width));
  return chevron::stage(inner,
                        [inner](at::Tensor x, at::Tensor state) mutable {
                          at::Tensor const sum = inner->forward(x).tanh().cumsum(1), out = state.defined() ? sum + state : sum;
                          return std::make_tuple(out, out.narrow(1, out.size(1) - 1, 1).clone());
                        })
      .carries({"state"});
}

}  // namespace

TEST_CASE("carries go from slice to slice on streams") {
  for (char const* const name : {"Seq1F1B", "SeqZB-H1", "SeqInterleaved1F1B"}) {
    job what{.schedule = name, .ranks = 2, .replicas = 2, .micro_batches = 3, .build = build_sum, .slices = 3};
    accelerator::compare(what, "streams");
    what.by = joined::threads;
    accelerator::compare(what, "threads");
  }
}

TEST_CASE("carries of fused pairs, whose halves run on two streams") {
  for (bool const split : {false, true}) {
    job what{.schedule = "pairs", .ranks = 1, .micro_batches = 3, .build = build_sum, .steps = 4, .slices = 2};
    what.plan = [split] { return sliced_model::alternating(split); };
    what.by = joined::threads;
    accelerator::compare(what, split ? "I and W" : "B");
    what.late = true;
    accelerator::compare(what, "late operators");
  }
}
