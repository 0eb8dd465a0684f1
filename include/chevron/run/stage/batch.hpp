#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>

/// \file
/// The data of one step, and how its samples are divided among microbatches.

namespace chevron {

/// The samples of a batch that one microbatch gets.
struct sample_range {
  std::int64_t first = 0;
  std::int64_t count = 0;
};

/// The samples of one microbatch. Microbatches differ by at most one sample; larger microbatches come first: 10 samples in 4
/// microbatches are 3, 3, 2, 2. \param micro_batch the microbatch's index, from 0
constexpr sample_range samples_of(std::int64_t samples, int micro_batches, int micro_batch) {
  std::int64_t const small = samples / micro_batches;
  std::int64_t const larger = samples % micro_batches;
  std::int64_t const before = micro_batch < larger ? micro_batch : larger;
  return {micro_batch * small + before, small + (micro_batch < larger ? 1 : 0)};
}

/// One step's data of one replica, the same on all ranks of its pipeline. A rank needs only the tensors that its stages and the
/// loss read: inputs on the rank of stage 0, targets on the rank of the last stage. All other tensors may be left out of the
/// batch that a rank is given.
///
/// Dimension 0 of inputs, of targets and of side inputs that are not `whole` counts samples, equally many in each tensor. Each
/// microbatch gets undefined tensors and scalars, which have no dimension 0, whole. No tensor may need a gradient.
struct batch {
  tensors inputs;                            ///< inputs of stage 0
  tensors targets;                           ///< arguments of the loss, after the last stage's outputs
  std::vector<side_input> side_inputs = {};  ///< for stages that ask for them by name (`stage::side_inputs`)
};

/// A tensor that shares the memory of `t` but has its own version counter, so that a change in place of one microbatch leaves
/// the autograd graphs of all other microbatches valid.
inline at::Tensor counted_alone(at::Tensor const& t) { return t.defined() ? t.variable_data() : t; }

namespace detail {

/// Calls `see(tensor, whole, name)` for each tensor of a batch; `name()` returns the tensor's name, for errors.
template <class Batch, class See>
void each_tensor(Batch& of, See const& see) {
  auto const each = [&](auto& all, char const* called) {
    for (std::size_t i = 0; i < all.size(); ++i) see(all[i], false, [&] { return called + std::to_string(i); });
  };
  each(of.inputs, "input ");
  each(of.targets, "target ");
  for (auto& e : of.side_inputs) see(e.value, e.whole, [&] { return "side input `" + e.name + "`"; });
}

/// The size of the dimension along which a batch is cut, which must be equal in all tensors of the batch that are not whole and
/// have the dimension; empty if no tensor has the dimension.
/// \param which words for the batch, which the error appends to a tensor's name \param unit what the dimension counts
/// \param remedy the last words of the error \throws usage_error where two tensors have different sizes, and for a sparse
/// tensor, since microbatches and slices are views
inline std::optional<std::int64_t> size_along(std::int64_t dimension, batch const& of, std::string const& which, char const* unit,
                                              char const* remedy) {
  std::optional<std::int64_t> size;
  std::string first;
  each_tensor(of, [&](at::Tensor const& t, bool whole, auto const& name) {
    if (whole || !t.defined() || t.dim() <= dimension) return;
    if (t.layout() != at::kStrided) {
      throw usage_error(name() + which + " is sparse, and cannot be cut into " + unit + " (dimension " +
                        std::to_string(dimension) +
                        "). Remedy: to_dense(), or, in a plan without slices, microbatches that are cut already, "
                        "step(std::vector<batch>)");
    }
    if (!size) {
      size = t.size(dimension);
      first = name();
    } else if (t.size(dimension) != *size) {
      throw usage_error(name() + which + " has " + std::to_string(t.size(dimension)) + " " + unit + " (dimension " +
                        std::to_string(dimension) + ") but " + first + " has " + std::to_string(*size) + remedy);
    }
  });
  return size;
}

}  // namespace detail

/// Refuses a batch whose tensors need gradients: no gradient leaves the pipeline, so a module that computed the batch would not
/// be trained.
/// \throws usage_error for a tensor that needs a gradient
inline void check_detached(batch const& given) {
  detail::each_tensor(given, [](at::Tensor const& t, bool, auto const& name) {
    if (!t.defined() || !t.requires_grad()) return;
    throw usage_error(
        name() +
        " needs a gradient, which does not leave the pipeline: parameters that computed this tensor would not be trained. "
        "Remedy: compute it in stage 0 or in the loss, or detach() it");
  });
}

/// Returns the weight of a microbatch in the mean loss and its gradients, for example the number of tokens over which the loss
/// function takes the mean. A weight is finite and at least 0; a microbatch of weight 0 is left out.
using loss_weight_function = std::function<double(batch const& micro_batch)>;

}  // namespace chevron
