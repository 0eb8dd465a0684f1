#pragma once

#include <map>
#include <string>
#include <vector>

#include <chevron/run/train/trainer.hpp>

#include <doctest/doctest.h>

/// \file
/// The results of a training run, to be compared bit for bit with the results of another run.

namespace small_model {

/// Losses and norms of the steps and, after the last one, every parameter by stage, name and replica.
struct trained {
  std::vector<double> losses, norms;
  std::map<std::string, at::Tensor> parameters;

  void keep(chevron::step_report const& report) {
    losses.push_back(report.loss);
    norms.push_back(report.grad_norm);
  }
  /// \param stages of one rank, or of a model in one piece
  template <class Stages>
  void keep_parameters(Stages const& stages, int replica) {
    for (std::size_t s = 0; s < stages.size(); ++s) {
      for (auto const& p : stages[s].parameters())
        parameters[std::to_string(s) + " " + p.name + " " + std::to_string(replica)] = p.value.detach().clone();
    }
  }
};

/// Losses and parameters.
inline void check_same(trained const& a, trained const& b) {
  CHECK(a.losses == b.losses);
  REQUIRE(a.parameters.size() == b.parameters.size());
  for (auto const& [name, value] : a.parameters) {
    CAPTURE(name);
    CHECK(at::equal(value, b.parameters.at(name)));
  }
}

}  // namespace small_model
