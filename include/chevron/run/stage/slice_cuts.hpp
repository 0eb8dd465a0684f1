#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/ops/full.h>
#include <c10/core/Device.h>

#include <chevron/plan/slices.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/batch.hpp>

/// \file
/// Decides where the sequences of a microbatch are cut into slices.

namespace chevron {

/// Returns the inner boundaries of a microbatch's slices (one fewer than slices), as numbers of tokens from the beginning,
/// ascending, above 0 and below `length`. Each rank calls the function with its own tensors of the microbatch; the result must be
/// equal on all ranks.
using slice_cuts_function = std::function<std::vector<std::int64_t>(batch const& micro_batch, std::int64_t length, int slices)>;

/// The name of a side input that Chevron adds for stages and losses that ask for it: the position of the slice's first token,
/// an int64 scalar, for position ids and rotary embeddings. If any asks for it, no side input of a batch may have this name.
inline constexpr char const* slice_start = "slice_start";

/// Returns a function for `trainer_options::slice_cuts` that cuts sequences into slices of equal time (plan/slices.hpp).
/// \param attention share of causal attention in the time of a whole sequence, from 0 to 1; 0: equal lengths
/// \param multiple inner boundaries are multiples of this number, from 1
/// \throws usage_error for arguments out of range
inline slice_cuts_function slices_by_cost(double attention, std::int64_t multiple = 1) {
  if (!(attention >= 0 && attention <= 1))
    throw usage_error("slices_by_cost: attention is " + std::to_string(attention) + ". Remedy: a share of the time, from 0 to 1");
  if (multiple < 1) throw usage_error("slices_by_cost: multiple is " + std::to_string(multiple) + ". Remedy: a number from 1");
  return [=](batch const&, std::int64_t length, int slices) { return cuts_of_equal_time(length, slices, attention, multiple); };
}

/// How microbatches are cut into slices.
struct slicing {
  int slices = 1;                           ///< number of slices of each microbatch
  slice_cuts_function cuts = {};            ///< chooses the cuts; empty: equal lengths, the longer ones first
  std::optional<at::Device> start_on = {};  ///< the device of `slice_start`; empty: no stage or loss of this rank asks for it
};

namespace detail {

/// The number of tokens of a microbatch's sequences: the size of dimension 1; empty if no tensor to be cut has dimension 1.
/// \param which words for the microbatch, for the error
/// \throws usage_error where two tensors have different numbers of tokens
inline std::optional<std::int64_t> sequence_length_in(batch const& micro_batch, std::string const& which) {
  return size_along(1, micro_batch, " of " + which, "tokens",
                    ", and both are cut into slices. Remedy: as many in each; a side input that is `whole`, or a tensor of "
                    "fewer dimensions, goes to each slice as it is");
}

/// The boundaries of slices, from 0 to `length`, in tokens.
/// \throws usage_error for fewer tokens than slices, and if `how.cuts` returns a wrong number of cuts, or cuts that do not
/// ascend between 0 and `length`
inline std::vector<std::int64_t> slice_bounds(batch const& micro_batch, std::int64_t length, slicing const& how,
                                              std::string const& which) {
  if (length < how.slices) {
    throw usage_error("the sequences of " + which + " have " + std::to_string(length) + " tokens (dimension 1), too few for " +
                      std::to_string(how.slices) + " slices. Remedy: longer sequences, or a plan with fewer slices");
  }
  std::vector<std::int64_t> bounds{0};
  if (how.cuts) {
    std::vector<std::int64_t> const inner = how.cuts(micro_batch, length, how.slices);
    bounds.insert(bounds.end(), inner.begin(), inner.end());
    bounds.push_back(length);
    bool const rising = std::adjacent_find(bounds.begin(), bounds.end(), std::greater_equal<>()) == bounds.end();
    if (inner.size() + 1 == static_cast<std::size_t>(how.slices) && rising) return bounds;
    std::string words;
    for (std::int64_t const one : inner) words += (words.empty() ? "" : ", ") + std::to_string(one);
    throw usage_error("slice_cuts gives [" + words + "] for " + which + ", whose sequences have " + std::to_string(length) +
                      " tokens. Remedy: " + std::to_string(how.slices - 1) + " boundaries for " + std::to_string(how.slices) +
                      " slices, rising, above 0 and below " + std::to_string(length));
  }
  for (int s = 0; s < how.slices; ++s) bounds.push_back(bounds.back() + samples_of(length, how.slices, s).count);
  return bounds;
}

/// Views of a microbatch's tokens [begin, end) along dimension 1; tensors that are `whole` or lack dimension 1 are not cut.
inline batch slice_of(batch const& micro_batch, std::int64_t begin, std::int64_t end) {
  batch out = micro_batch;
  each_tensor(out, [&](at::Tensor& t, bool whole, auto const&) {
    t = counted_alone(!whole && t.defined() && t.dim() > 1 ? t.narrow(1, begin, end - begin) : t);
  });
  for (side_input& e : out.side_inputs) e.whole = true;
  return out;
}

/// Adds `slice_start`, the position of the slice's first token, to the slice's side inputs.
/// \throws usage_error if the slice already has a side input of this name
inline void add_slice_start(batch& slice, std::int64_t start, at::Device where) {
  for (side_input const& e : slice.side_inputs) {
    if (e.name != slice_start) continue;
    throw usage_error(
        "the batch has a side input `slice_start`, the name by which a stage asks for its slice's first token. "
        "Remedy: another name");
  }
  // The version is 0, so that split_batch::was_changed detects a change in place.
  at::Tensor const number = counted_alone(at::full({}, start, at::TensorOptions(at::kLong).device(where)));
  slice.side_inputs.push_back({slice_start, number, true});
}

}  // namespace detail
}  // namespace chevron
