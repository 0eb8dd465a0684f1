#pragma once

#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>

#include "program.hpp"

/// \file
/// The batches of a program, and the harness's own way of cutting them.

namespace differential {

struct samples {
  at::Tensor input, target;
  double share = 1;  ///< of a slice: its tokens, as a part of the sequence's
  std::int64_t count() const { return input.size(0); }
};

/// The data of one replica in one pass of one step: a whole batch, or with `cut=own` microbatches of their own sizes.
struct feed {
  samples whole;
  std::vector<samples> parts;  ///< always M of them
  std::vector<samples> units;  ///< the same; with slices each part's, in their order
  bool own_parts = false;
};

/// \param pass of a step's accumulated batches; -1: for evaluation
/// The number of a pass whose gradients are dropped.
inline constexpr int dropped_pass = 7;

feed feed_of(program const& p, int step, int pass, int replica);

/// A target as rows of numbers, one a sample. With slices it has a dimension of tokens.
at::Tensor rows_of(at::Tensor const& target);

/// The count of a microbatch or slice: its samples, or with `weigh` its drawn weight; with `odd`, if a target has another first
/// dimension, 1.
double counts_of(program const& p, samples const& part);

/// Its count in the loss `own` of stages.
double counts_of_own(samples const& part);
double total_of_own(program const& p, int step);

/// The count of a whole step over all passes and replicas.
double total_of(program const& p, int step, bool evaluation);

}  // namespace differential
