#pragma once

#include "support/small_model.hpp"

#include <string>
#include <utility>
#include <vector>

/// \file
/// The small model trained in one piece: losses and parameters that every schedule comes to, bit for bit.

namespace small_model {

class whole_training {
 public:
  whole_training(chevron::plan const& plan, batch of_each_step, chevron::optimizer_factory make, int steps)
      : data_(std::move(of_each_step)), make_(std::move(make)), whole_(plan.stages) {
    for (int s = 0; s < plan.stages; ++s) {
      for (auto& p : whole_.stages[static_cast<std::size_t>(s)].parameters()) named_.push_back({s, p.name, p.value});
    }
    auto const optimizer = make_(named_);
    for (long step = 0; step < steps; ++step) {
      whole_.run(plan, {data_}, step);
      losses_.push_back(whole_.loss);
      optimizer->step();
    }
  }

  /// Trains a rank of the pipeline with the same optimizer, and compares its losses and parameters.
  void compare(transport& comm, chevron::proved_program const& program, complaints& wrong) const {
    chevron::trainer train(
        {.program = program, .transport = comm, .stages = build_stage, .loss = mean_square, .optimizer = make_});
    for (double const loss : losses_) wrong.require(train.step({data_.input}, {data_.target}).loss == loss, "loss");
    for (auto const& p : named_) {
      for (auto& mine : train.stages()[static_cast<std::size_t>(p.stage)].parameters()) {
        if (mine.name == p.name) wrong.require(at::equal(mine.value, p.value), "stage " + std::to_string(p.stage) + " " + p.name);
      }
    }
  }

 private:
  batch data_;
  chevron::optimizer_factory make_;
  reference whole_;
  std::vector<chevron::named_parameter> named_;
  std::vector<double> losses_;
};

}  // namespace small_model
