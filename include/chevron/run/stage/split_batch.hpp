#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <numeric>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/core/fingerprint.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/batch.hpp>
#include <chevron/run/stage/slice_cuts.hpp>

/// \file
/// Cuts one step's batch into microbatches, and each microbatch into slices.

namespace chevron::detail {

/// Refuses a step whose microbatches' weights sum to 0. \param here rank and step, for the error \throws usage_error always
[[noreturn]] inline void refuse_empty_mean(error_context const& here = {}) {
  throw usage_error(
      "the microbatches of this step count nothing, so that the mean loss is undefined. Remedy: a batch with at least one sample "
      "or, if trainer_options::loss_weight counts labels, with at least one label",
      here);
}

/// A batch of one replica in M microbatches, which are views cut along dimension 0, or the microbatches that the user cut. If a
/// plan has slices, each microbatch is also cut along dimension 1 (tokens) into slices; "microbatch" in this class then means a
/// slice, and m is the slice's index in the plan.
///
/// The counts of a microbatch are its number of samples, or of tokens; its weight is this number divided by the counts of all
/// microbatches of *all* replicas. The sum of mean losses times weights is the mean loss over all samples (or tokens), so the
/// products' gradients need no scaling afterwards, even if microbatches have different sizes.
class split_batch {
 public:
  /// Cuts a batch. A microbatch counts its samples; a slice counts these samples times its share of the microbatch's tokens.
  /// \param count number of microbatches \param into how each microbatch is cut into slices
  /// \throws usage_error for tensors of different numbers of samples, and for fewer samples than microbatches
  void split(batch const& whole, int count, slicing const& into = {}) {
    std::optional<std::int64_t> const samples =
        detail::size_along(0, whole, "", "samples",
                           ". Remedy: as many in each; a number without dimensions, or a side input that is `whole` (of a stage "
                           "or of the loss), goes "
                           "to each microbatch as it is; or cut microbatches yourself, step(std::vector<batch>)");
    if (!samples && is_given(whole)) {
      throw usage_error("no input or target has a dimension of samples (dimension 0) to be cut. Remedy: inputs with samples "
                        "along dimension 0, or microbatches that are cut already, step(std::vector<batch>)");
    }
    samples_ = samples.value_or(0);
    if (samples && samples_ < count) {
      throw usage_error("a batch of " + std::to_string(samples_) + " samples cannot be cut into " + std::to_string(count) +
                        " microbatches. Remedy: at least one sample per microbatch, or fewer microbatches");
    }
    parts_.resize(static_cast<std::size_t>(count));
    for (int m = 0; m < count; ++m) {
      sample_range const range = samples_of(samples_, count, m);
      part& p = parts_[static_cast<std::size_t>(m)];
      p.data = whole;
      detail::each_tensor(p.data, [&](at::Tensor& t, bool all, auto const&) {
        t = counted_alone(!all && has_samples(t) ? t.narrow(0, range.first, range.count) : t);
      });
      p.counts = samples ? static_cast<double>(range.count) : unknown;
    }
    counts_ = sum_of_parts();
    slice(into);
  }

  /// Uses microbatches that the user cut; none on a rank without a batch. If, within each microbatch, all inputs and targets
  /// have equally many samples, a microbatch counts its samples; otherwise each microbatch counts 1.
  /// \throws usage_error if the number of microbatches is not `count`
  void take(std::span<batch const> micro_batches, int count, slicing const& into = {}) {
    if (!micro_batches.empty() && micro_batches.size() != static_cast<std::size_t>(count)) {
      throw usage_error("the program runs " + std::to_string(count) + " microbatches a step, " +
                        std::to_string(micro_batches.size()) + " were given");
    }
    samples_ = 0;
    bool by_samples = true;
    parts_.resize(static_cast<std::size_t>(count));
    for (std::size_t m = 0; m < parts_.size(); ++m) {
      part& p = parts_[m];
      p.data = micro_batches.empty() ? batch{} : micro_batches[m];
      std::optional<std::int64_t> const samples = samples_if_equal(p.data);
      by_samples = by_samples && (samples || !is_given(p.data));
      samples_ += samples.value_or(0);
      p.counts = samples ? static_cast<double>(*samples) : unknown;
      detail::each_tensor(p.data, [](at::Tensor& t, bool, auto const&) { t = counted_alone(t); });
    }
    if (!by_samples) {
      samples_ = count;
      for (part& p : parts_) p.counts = is_given(p.data) ? 1 : unknown;
    }
    counts_ = sum_of_parts();
    slice(into);
  }

  /// Sets each microbatch's counts to what `weigh` returns, instead of its samples.
  /// \param everywhere false: `weigh` may read targets, so the counts of microbatches without targets are unknown
  /// \throws usage_error for a weight that is not finite or below 0
  void weigh(loss_weight_function const& weigh, bool everywhere = true) {
    for (std::size_t m = 0; m < parts_.size(); ++m) {
      bool const known = everywhere || !parts_[m].data.targets.empty();
      parts_[m].counts = known ? weight_of(weigh, m) : unknown;
    }
    counts_ = sum_of_parts();
  }

  /// Sets each microbatch's counts in the losses that this rank's stages declare beside the model's loss.
  /// \param weights a function for each declared loss; an empty function: the counts in the model's loss
  /// \param of_targets true: functions may read targets, so the counts of microbatches without targets are unknown
  /// \throws usage_error for a weight that is not finite or below 0
  void weigh_losses(std::span<loss_weight_function const> weights, bool of_targets) {
    for (std::size_t m = 0; m < parts_.size(); ++m) {
      part& p = parts_[m];
      p.losses.assign(weights.size(), {p.counts, 0, 0});
      for (std::size_t k = 0; k < weights.size(); ++k) {
        if (!weights[k]) continue;
        bool const given = of_targets ? !p.data.targets.empty() : is_given(p.data) || has_side_inputs(p.data);
        p.losses[k].counts = given ? weight_of(weights[k], m) : unknown;
      }
    }
    loss_counts_.assign(weights.size(), counts_);
    for (std::size_t k = 0; k < weights.size(); ++k) {
      if (weights[k]) loss_counts_[k] = sum_of_parts([k](part const& p) { return p.losses[k].counts; });
    }
  }

  /// Checks that a loss of slices can tell labels of tokens from labels of sequences, if each slice is weighted by its tokens.
  /// \param slices of each microbatch
  /// \throws usage_error if a microbatch has targets with samples, and none with tokens
  void check_labels(int slices) const {
    for (std::size_t m = 0; slices > 1 && m < parts_.size(); m += static_cast<std::size_t>(slices)) {
      tensors const& targets = parts_[m].data.targets;
      auto const has = [](std::int64_t dimensions) {
        return [=](at::Tensor const& t) { return t.defined() && t.dim() >= dimensions; };
      };
      bool const by_token = std::any_of(targets.begin(), targets.end(), has(2));
      if (by_token || std::none_of(targets.begin(), targets.end(), has(1))) continue;
      throw usage_error("no target of microbatch " + std::to_string(m / static_cast<std::size_t>(slices)) +
                        " has a dimension of tokens (dimension 1), so each of its " + std::to_string(slices) +
                        " slices is given the label of the whole sequence, and the end of each slice would be trained towards "
                        "the label. Remedy: trainer_options::loss_weight, which returns 0 for all slices but the one with the "
                        "label's token; or a plan with slices = 1");
    }
  }

  /// The index of the first microbatch without inputs and targets; the number of microbatches if all have inputs or targets.
  int first_not_given() const {
    auto const found = std::find_if(parts_.begin(), parts_.end(), [](part const& p) { return !is_given(p.data); });
    return static_cast<int>(found - parts_.begin());
  }

  /// The sum of all microbatches' counts; NaN if any counts are unknown. Samples are summed before slices divide them: the
  /// slices' fractions (1.8 of 3 samples, and 1.2) need not add up to a whole number.
  double counts() const { return counts_; }

  /// Computes each microbatch's weights.
  /// \param global_weight the sum of counts over all microbatches of the step and all replicas
  /// \param of_losses such sums for each loss of `weigh_losses` \param factors these losses' factors in the minimized sum
  void share(double global_weight, std::span<double const> of_losses = {}, std::span<double const> factors = {}) {
    for (part& p : parts_) {
      p.weight = p.counts / global_weight;
      for (std::size_t k = 0; k < p.losses.size(); ++k) {
        p.losses[k].weight = p.losses[k].counts / of_losses[k];
        p.losses[k].factor = factors[k];
      }
    }
  }

  int count() const { return static_cast<int>(parts_.size()); }  ///< the number of microbatches
  /// The number of samples of all microbatches; if each microbatch counts 1, the number of microbatches; 0 on a rank that was
  /// given no samples.
  std::int64_t samples() const { return samples_; }
  tensors const& inputs(int m) const { return of(m).data.inputs; }                         ///< of microbatch m
  tensors const& targets(int m) const { return of(m).data.targets; }                       ///< of microbatch m
  std::span<side_input const> side_inputs(int m) const { return of(m).data.side_inputs; }  ///< of microbatch m
  double counts(int m) const { return of(m).counts; }  ///< of microbatch m; NaN if unknown on this rank
  double weight(int m) const { return of(m).weight; }  ///< the share of microbatch m in the model's loss
  /// Whether microbatch m counts 0: the step then leaves out its gradients and its loss, which as a mean over no tokens is NaN.
  bool counts_nothing(int m) const { return of(m).counts == 0; }
  /// Whether any microbatch counts 0, in the model's loss or in a stage's loss.
  bool any_counts_nothing() const {
    return any_counts([](double counts) { return counts == 0; });
  }
  /// Whether any counts are unknown on this rank, in the model's loss or in a stage's loss.
  bool any_unknown() const {
    return any_counts([](double counts) { return std::isnan(counts); });
  }
  /// Whether a stage has changed inputs or side inputs of microbatch m in place.
  bool was_changed(int m) const {
    batch const& b = of(m).data;
    return std::any_of(b.inputs.begin(), b.inputs.end(), changed_in_place) || side_inputs_were_changed(m);
  }
  /// Whether a stage changed a side input of microbatch m in place.
  bool side_inputs_were_changed(int m) const {
    std::vector<side_input> const& given = of(m).data.side_inputs;
    return std::any_of(given.begin(), given.end(), [](side_input const& e) { return changed_in_place(e.value); });
  }
  /// The gradient with which the backward of microbatch m's loss starts: the microbatch's weight, or 1, times the factor of loss
  /// scaling; NaN if counts are unknown.
  double gradient_weight(int m) const { return (weighed_ ? of(m).weight : 1.0) * scale_; }
  /// Sets the factor of loss scaling. \param weighed false: backwards start with the factor alone (`loss_function::unweighed`)
  void scale_gradients(double factor, bool weighed = true) {
    scale_ = factor;
    weighed_ = weighed;
  }

  /// Counts and weight of one microbatch in a loss that a stage of this rank declares.
  struct loss_share {
    double counts = 0;  ///< NaN if unknown on this rank
    double weight = 0;  ///< the microbatch's share of the mean over the step
    double factor = 0;  ///< the factor of the loss in the sum that the step minimizes
  };
  /// The share of microbatch m in loss k of `weigh_losses`; before `weigh_losses` is called, the counts are unknown (NaN).
  loss_share loss(std::size_t k, int m) const { return k < of(m).losses.size() ? of(m).losses[k] : loss_share{unknown, 0, 0}; }
  /// Copies each microbatch's `loss_share`s from another batch.
  void share_losses_as(split_batch const& other) {
    for (std::size_t m = 0; m < parts_.size(); ++m) parts_[m].losses = other.parts_[m].losses;
  }
  /// The gradient with which the backward of loss k's value in microbatch m starts.
  double loss_gradient(std::size_t k, int m) const {
    loss_share const one = loss(k, m);
    return one.weight * one.factor * scale_;
  }
  /// The sum of all microbatches' counts in loss k of `weigh_losses`.
  double loss_counts(std::size_t k) const { return loss_counts_[k]; }

  /// The first two slices of microbatch 0 as one slice, and the numbers of tokens of the first slice and of both; 0 if this rank
  /// was given no tensor with tokens.
  struct joined {
    batch data;
    std::int64_t first = 0, both = 0;
  };
  joined first_two_slices() const {
    joined out{.data = beginning_.whole, .first = beginning_.first, .both = beginning_.both};
    if (out.both > 0) out.data = detail::slice_of(out.data, 0, out.both);
    if (beginning_.start_on) detail::add_slice_start(out.data, 0, *beginning_.start_on);
    return out;
  }

  /// A fingerprint of the boundaries of all slices, as an integer of 32 bits, from 1; 0 if this rank does not know the
  /// boundaries, or if slices have equal lengths by default.
  double cuts_mark() const { return cuts_mark_; }

  /// Sets the first microbatch's number within the optimizer step, which may accumulate several batches.
  /// \param first from 0
  void number_from(int first) { first_ = first; }
  int number(int m) const { return first_ + m; }  ///< the number of microbatch m within the optimizer step

  /// Appends the number of inputs, and dtypes and sizes of all tensors, to `out`: if they are equal, messages between stages have
  /// equal shapes. The number tells a rank with inputs alone from a rank with targets alone, whose shapes change apart.
  void append_shapes(std::vector<std::int64_t>& out) const {
    auto const add = [&](at::Tensor const& t, bool, auto const&) {
      out.push_back(t.defined() ? static_cast<std::int64_t>(t.scalar_type()) : -1);
      if (!t.defined()) return;
      out.push_back(t.dim());
      out.insert(out.end(), t.sizes().begin(), t.sizes().end());
    };
    for (part const& p : parts_) {
      out.push_back(static_cast<std::int64_t>(p.data.inputs.size()));
      detail::each_tensor(p.data, add);
    }
  }
  /// A fingerprint of dtypes and sizes, as an integer of 32 bits.
  double shapes_mark() const {
    std::vector<std::int64_t> shapes;
    append_shapes(shapes);
    detail::byte_fingerprint mark;
    mark.add(shapes.data(), shapes.size() * sizeof(std::int64_t));
    return static_cast<double>(mark.value() >> 32);
  }

 private:
  static bool changed_in_place(at::Tensor const& t) { return t.defined() && t._version() != 0; }
  struct part {
    batch data;
    double counts = 0;
    double weight = 0;
    std::vector<loss_share> losses;
  };
  static constexpr double unknown = std::numeric_limits<double>::quiet_NaN();

  static bool is_given(batch const& data) { return !data.inputs.empty() || !data.targets.empty(); }
  /// Whether the caller gave side inputs, not counting `slice_start`, which Chevron adds.
  static bool has_side_inputs(batch const& data) {
    return std::any_of(data.side_inputs.begin(), data.side_inputs.end(),
                       [](side_input const& e) { return e.name != slice_start; });
  }
  static bool has_samples(at::Tensor const& t) { return t.defined() && t.dim() > 0; }
  /// The number of samples in each input and target of a microbatch; empty if two tensors differ, or if all are scalars.
  static std::optional<std::int64_t> samples_if_equal(batch const& data) {
    std::optional<std::int64_t> samples;
    for (tensors const* const all : {&data.inputs, &data.targets}) {
      for (at::Tensor const& t : *all) {
        if (!has_samples(t)) continue;
        if (samples.value_or(t.size(0)) != t.size(0)) return {};
        samples = t.size(0);
      }
    }
    return samples;
  }

  /// Replaces each microbatch by its slices.
  void slice(slicing const& into) {
    cuts_mark_ = 0;
    if (into.slices == 1 && !into.start_on) return;
    detail::byte_fingerprint cuts;
    bool all_known = static_cast<bool>(into.cuts) && into.slices > 1;
    std::vector<part> const whole = std::exchange(parts_, {});
    for (std::size_t m = 0; m < whole.size(); ++m) {
      std::string const which = "microbatch " + std::to_string(m);
      batch const& data = whole[m].data;
      std::optional<std::int64_t> const length = detail::sequence_length_in(data, which);
      if (!length && is_given(data) && into.slices > 1) {
        throw usage_error("no input or target of " + which + " has a dimension of tokens (dimension 1) to be cut into " +
                          std::to_string(into.slices) +
                          " slices. Remedy: tensors of [samples, tokens, ...], or a plan with slices = 1");
      }
      if (!length && into.start_on && into.slices > 1) {
        throw usage_error("a stage or loss of this rank asks for `" + std::string(slice_start) + "`, and no tensor of " + which +
                          " that this rank was given has tokens (dimension 1), which give the beginnings of its " +
                          std::to_string(into.slices) +
                          " slices. Remedy: inputs or targets of [samples, tokens, ...] for this rank's step, too");
      }
      std::vector<std::int64_t> const bounds = length ? detail::slice_bounds(data, *length, into, which)
                                                      : std::vector<std::int64_t>(static_cast<std::size_t>(into.slices) + 1);
      all_known = all_known && length;
      cuts.add(bounds.data(), bounds.size() * sizeof bounds[0]);
      if (m == 0 && into.slices > 1) beginning_ = {data, bounds[1], bounds[2], into.start_on};
      for (std::size_t s = 0; s + 1 < bounds.size(); ++s) {
        part& p = parts_.emplace_back();
        p.data = detail::slice_of(data, bounds[s], bounds[s + 1]);
        p.counts = whole[m].counts * (length ? static_cast<double>(bounds[s + 1] - bounds[s]) / static_cast<double>(*length) : 1);
        if (into.start_on) detail::add_slice_start(p.data, bounds[s], *into.start_on);
      }
    }
    if (all_known) cuts_mark_ = static_cast<double>(cuts.value() >> 32) + 1;
  }

  template <class Is>
  bool any_counts(Is const& is) const {
    return std::any_of(parts_.begin(), parts_.end(), [&](part const& p) {
      return is(p.counts) || std::any_of(p.losses.begin(), p.losses.end(), [&](loss_share const& one) { return is(one.counts); });
    });
  }

  template <class Counts>
  double sum_of_parts(Counts const& counts) const {
    return std::accumulate(parts_.begin(), parts_.end(), 0.0, [&](double sum, part const& p) { return sum + counts(p); });
  }
  double sum_of_parts() const {
    return sum_of_parts([](part const& p) { return p.counts; });
  }
  double weight_of(loss_weight_function const& weigh, std::size_t m) const {
    double const out = weigh(parts_[m].data);
    if (std::isfinite(out) && out >= 0) return out;
    throw usage_error("microbatch " + std::to_string(m) + " was weighed as " + std::to_string(out) +
                      ". Remedy: a weight function that returns a finite number from 0 on");
  }

  /// Microbatch 0 before it was cut into slices, and the ends of its first two slices.
  struct first_slices {
    batch whole;
    std::int64_t first = 0, both = 0;
    std::optional<at::Device> start_on = {};
  };

  part const& of(int m) const { return parts_[static_cast<std::size_t>(m)]; }

  std::vector<part> parts_;
  first_slices beginning_;
  double cuts_mark_ = 0;
  std::int64_t samples_ = 0;
  double counts_ = 0;
  std::vector<double> loss_counts_;  // by loss of `weigh_losses`
  int first_ = 0;
  double scale_ = 1;
  bool weighed_ = true;
};

}  // namespace chevron::detail
