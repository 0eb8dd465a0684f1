// Messages that change on their way are found with `check_messages`, whatever bit it is; those that do not train to the same bits.
#include "support/faulty_link.hpp"
#include "support/small_model.hpp"

#include <cstdint>
#include <mutex>
#include <string>
#include <vector>

#include <chevron/run/comm/message_checksum.hpp>
#include <chevron/run/train/evaluator.hpp>

#include <doctest/doctest.h>

namespace message_checksum_test {

using chevron::tensors;

std::uint64_t checksum_of(tensors const& values) { return chevron::detail::checksum_of(values).value(); }

struct outcome {
  double loss = 0, held_out = 0;
  std::vector<std::string> errors;  // by rank
  std::vector<int> codes;
};

/// \param corrupted the rank that receives something else than was sent; -1: none
outcome train(std::string const& schedule, int replicas, bool checks, int corrupted = -1) {
  constexpr int ranks = 3, micro_batches = 4;
  outcome out;
  out.errors.resize(static_cast<std::size_t>(ranks * replicas));
  out.codes.resize(out.errors.size());
  std::mutex guard;
  auto const program = chevron::lower(chevron::prove(small_model::plan_of(schedule.c_str(), ranks, micro_batches)));
  auto const body = [&](chevron::transport& inner) {
    faulty_link::transport comm(inner, corrupted, 1);
    auto const me = static_cast<std::size_t>(comm.topology().global_rank);
    try {
      chevron::trainer trainer(small_model::setup(program, comm, small_model::build_stage, {.check_messages = checks},
                                                  chevron::optimizer<torch::optim::SGD>(0.05)));
      auto const data = small_model::make_batch(2 * micro_batches, comm.topology().replica());
      for (int step = 0; step < 3; ++step) trainer.step(data.input, data.target);
      chevron::evaluator evaluator(trainer);
      double const held_out = evaluator.loss(data.input, data.target);
      std::lock_guard const hold(guard);
      if (me == 0) out.loss = trainer.synchronize().loss, out.held_out = held_out;
    } catch (chevron::error const& e) {
      std::lock_guard const hold(guard);
      out.errors[me] = e.what();
      out.codes[me] = e.code();
    }
  };
  chevron::run_threads({.pipeline_ranks = ranks, .replicas = replicas}, body);
  return out;
}

TEST_CASE("a checksum is of values, wherever they lie, and of each of their bits") {
  at::Tensor const a = at::arange(12, at::kFloat).reshape({3, 4});
  CHECK(checksum_of({a}) == checksum_of({a.t().contiguous().t()}));
  CHECK(checksum_of({a}) == checksum_of({a.clone().requires_grad_()}));
  CHECK(checksum_of({a}) == checksum_of({a, at::Tensor()}));
  CHECK(checksum_of({at::zeros({2, 2})}) == checksum_of({at::_efficientzerotensor({2, 2})}));
  CHECK(checksum_of({a}) != checksum_of({a.neg()}));
  CHECK(checksum_of({at::zeros({1})}) != checksum_of({at::zeros({2})}));
  auto const right = checksum_of({a});
  for (std::size_t bit = 0; bit < 8 * a.nbytes(); ++bit) {
    at::Tensor const other = a.clone();
    static_cast<unsigned char*>(other.mutable_data_ptr())[bit / 8] ^= static_cast<unsigned char>(1u << bit % 8);
    CHECK(checksum_of({other}) != right);
  }
  CHECK_THROWS_WITH_AS(checksum_of({a.to_sparse()}), doctest::Contains("check_messages needs dense tensors"), chevron::usage_error);
}

TEST_CASE("messages with checksums train to the same bits, and evaluate to them") {
  for (std::string const schedule : {"1F1B", "ZBVZeroBubble", "DualPipeV"}) {
    CAPTURE(schedule);
    auto const plain = train(schedule, 1, false), checked = train(schedule, 1, true);
    for (std::string const& each : checked.errors) CHECK(each == "");
    CHECK(plain.loss == checked.loss);
    CHECK(plain.held_out == checked.held_out);
    CHECK(plain.loss > 0);
  }
}

TEST_CASE("what came otherwise than it was sent is named with its sender, on all ranks; without checksums it is computed with") {
  for (std::string const schedule : {"1F1B", "ZBVZeroBubble"}) {
    CAPTURE(schedule);
    auto const found = train(schedule, 2, true, 4);  // pipeline rank 1 of replica 1
    CHECK(found.errors[4].find("rank 4, step 1, ") == 0);
    CHECK(found.errors[4].find("the received message is not the message that rank 3 sent: its checksum is ") != std::string::npos);
    CHECK(found.errors[4].find("Remedy: ") != std::string::npos);
    for (std::size_t r = 0; r < found.errors.size(); ++r) {
      CAPTURE(r);
      CHECK(found.codes[r] == 8);
      if (r != 4) CHECK(found.errors[r].find("rank 3 sent something else than came to rank 4 with ") != std::string::npos);
    }
    auto const unseen = train(schedule, 2, false, 4);
    for (std::string const& each : unseen.errors) CHECK(each == "");
    CHECK(unseen.loss != train(schedule, 2, false).loss);
  }
}

}  // namespace message_checksum_test
