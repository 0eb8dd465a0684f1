#pragma once

// Stages in half precision, and their gradients by plain autograd.

#include <cmath>
#include <cstddef>
#include <optional>
#include <vector>

#include "support/small_model.hpp"

namespace half_model {

using namespace small_model;

/// A stage in half precision, or with half-precision parts.
inline chevron::stage build_half(int number, at::ScalarType dtype) {
  at::manual_seed(100 + number);
  torch::nn::Sequential inner(torch::nn::Linear(width, width),
                              torch::nn::Functional([](at::Tensor const& x) { return x.tanh().mul(2); }));
  for (auto& p : inner->parameters()) p.set_data(p.to(dtype));
  return inner;
}

inline at::Tensor mean_square_in_float(at::Tensor output, at::Tensor target) {
  return at::mse_loss(output.to(at::kFloat), target.to(at::kFloat));
}

/// Steps of plain autograd: each microbatch's gradient times `factor` in half precision, added up in single precision.
struct half_reference {
  std::vector<chevron::stage> stages;
  std::vector<tensors> sums;
  double loss = 0, norm = 0;

  half_reference(int count, at::ScalarType dtype) {
    for (int s = 0; s < count; ++s) stages.push_back(build_half(s, dtype));
  }

  void run(chevron::plan const& plan, batch const& data, double factor, std::optional<at::ScalarType> autocast = {}) {
    int const count = plan.size.micro_batches;
    std::vector<std::vector<tensors>> each;
    loss = 0;
    for (int m = 0; m < count; ++m) {
      auto const part = chevron::samples_of(data.input.size(0), count, m);
      for (auto& s : stages) {
        for (auto& p : s.parameters()) p.value.mutable_grad().reset();
      }
      tensors values{data.input.narrow(0, part.first, part.count)}, next;
      at::Tensor one;
      {
        chevron::detail::autocast_scope const cast(autocast, values);
        for (auto& s : stages) {
          s.forward(values, next);
          values = next;
        }
        one = mean_square_in_float(values[0], data.target.narrow(0, part.first, part.count));
      }
      double const weight = static_cast<double>(part.count) / static_cast<double>(data.input.size(0));
      loss += one.item<double>() * weight;
      torch::autograd::backward({one}, {at::full({}, weight * factor, one.options())});
      each.emplace_back();
      for (auto& s : stages) {
        each.back().emplace_back();
        for (auto& p : s.parameters()) each.back().back().push_back(p.value.grad().to(at::kFloat));
      }
    }
    sums.clear();
    double squares = 0;
    for (std::size_t s = 0; s < stages.size(); ++s) {
      sums.emplace_back();
      for (std::size_t q = 0; q < stages[s].parameters().size(); ++q) {
        at::Tensor sum = at::zeros_like(each[0][s][q]);
        for (int const m : order_of(plan, static_cast<int>(s))) sum += each[static_cast<std::size_t>(m)][s][q];
        sum.mul_(1 / factor);
        squares += chevron::sum_of_squares(sum);
        sums.back().push_back(sum);
        auto const& p = stages[s].parameters()[q].value;
        p.mutable_grad() = sum.to(p.scalar_type());
      }
    }
    norm = std::sqrt(squares);
  }

  tensors parameters() { return small_model::parameters_of(stages); }
};

}  // namespace half_model
