#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/base/format.hpp>
#include <chevron/run/comm/agreement.hpp>
#include <chevron/run/comm/shard_group.hpp>
#include <chevron/run/comm/shard_watch.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/split_batch.hpp>
#include <chevron/run/train/gradient_buckets.hpp>
#include <chevron/run/train/record.hpp>
#include <chevron/run/train/step_part.hpp>

/// \file
/// Compares tensors over shards. Mistakes in a stage that is cut make training silently wrong: copies of a parameter drift
/// apart, or a gradient is too small, or T times too large. Comparisons detect them before a parameter changes:
///
/// - in every step, all shards of a stage must have equal losses, and equal norms of the gradients of whole parameters;
/// - in the first two steps (the first may have gradients of zero), and in each step that compares copies
///   (`trainer_options::check_copies`): whole tensors that collectives take, and gradients of whole tensors between stages and
///   slices and at collectives (shard_watch.hpp), must be equal, and all bits of the gradients of whole parameters; the parts
///   of a partial gradient, which are summed next, must not all be equal, nor the pieces of a cut parameter together with their
///   gradients.
///
/// A gradient that is not finite proves nothing, nor do parts that are found equal while the batch's samples or tokens repeat:
/// the next step then compares again.

namespace chevron::detail {

/// A parameter by stage and name.
struct stage_parameter {
  std::size_t stage;
  std::string name;
  std::string text() const { return "stage " + std::to_string(stage) + "'s " + name; }
};

/// The remedy for unequal gradients of a whole parameter.
/// \param before_cut whether the parameter precedes all cut parameters of its stage, so that a missing `shard_group::copy` is
/// the likely cause
inline std::string remedy_of_unequal(std::string const& name, bool before_cut) {
  std::string const
      copy = "shard_group::copy of the whole tensor before computations that differ by shard, such as a layer that is cut",
      cut = "where a shard holds a piece, stage.cut(\"" + name + "\", dimension)",
      partial = "where a shard sees a part of the input, stage.partial({\"" + name + "\"})",
      other = "equal random numbers and inputs on all shards outside of layers that are cut";
  return ". No parameter was changed. Remedy: " + (before_cut ? copy + "; " + cut + "; " + other + "; only " + partial
                                                              : partial + "; " + cut + "; " + copy + "; " + other);
}

/// Whether the numbers of two shards are equal, within a tolerance; two numbers that are not finite count as equal.
/// \param tolerance relative; above 0 on an accelerator, where kernels add in varying order, so that the last digits differ
inline bool agree(double first, double other, double tolerance) {
  return first == other || !(std::isfinite(first) || std::isfinite(other)) ||
         std::abs(first - other) <= tolerance * std::abs(first);
}

/// Compares the squared norms of a parameter's gradient on two shards.
/// \param first norm on shard 0 \param other norm on shard `shard`
/// \param before_cut as of `remedy_of_unequal` \throws preflight_error if the norms do not `agree`
inline void check_equal_norms(stage_parameter const& of, bool before_cut, int shard, double first, double other, double tolerance,
                              error_context const& here) {
  if (agree(first, other, tolerance)) return;
  auto const [norm, another] = texts_apart(first, other);
  throw preflight_error("shards 0 and " + std::to_string(shard) + " have gradients of " + of.text() + " with the squared norms " +
                            norm + " and " + another + ", but each holds the whole parameter" +
                            remedy_of_unequal(of.name, before_cut),
                        here);
}
/// Compares a loss on two shards.
/// \param of words for the loss, such as `microbatch 3`
/// \throws preflight_error if the losses do not `agree`
inline void check_equal_losses(int shard, std::string const& of, double first, double other, double tolerance,
                               error_context const& here) {
  if (agree(first, other, tolerance)) return;
  auto const [loss, another] = texts_apart(first, other);
  throw preflight_error(
      "shards 0 and " + std::to_string(shard) + " computed the losses " + loss + " and " + another + " of " + of +
          ", which counts once: each shard's has to be the whole loss. No parameter was changed. Remedy: "
          "shard_group::all_reduce over its parts; random numbers that differ by shard only where tensors are cut",
      here);
}

/// The first whole parameters of a stage's trained ones, up to the first cut one; none if a parameter is declared partial, as
/// under sequence parallelism, or none is cut.
inline std::size_t parameters_before_cut(std::span<over_shards const> held) {
  bool const parts = std::find(held.begin(), held.end(), over_shards::partial) != held.end();
  auto const first = std::find(held.begin(), held.end(), over_shards::cut);
  return parts || first == held.end() ? 0 : static_cast<std::size_t>(first - held.begin());
}

/// Compares tensors over the shards of each stage in the first two steps, and in every n-th. Made only with several shards.
class shard_agreement final : public step_part {
 public:
  /// \param comm must outlive this object \param of gradients of this rank by stage, null for stages of other ranks; must outlive
  /// this object
  /// \param every n, steps from one comparison to the next; 0: only the first two steps compare
  /// \param exact whether equal computations give equal bits; false on an accelerator, where norms are compared, and of
  /// whole parameters only those of every step
  shard_agreement(record&, transport& comm, std::vector<std::unique_ptr<gradient_buckets>> const& of, int every, bool exact)
      : comm_(&comm), by_stage_(&of), every_(every), exact_(exact) {}

  /// Decides whether tensors are compared in this step.
  void begin(bool) override {
    due_ = steps_ < first_steps || std::exchange(again_, false) || (every_ > 0 && steps_ % every_ == 0);
    ++steps_;
    found_ = {};
    repeats_ = true;
    not_finite_ = false;
    shards_watched(*comm_).begin(due_, exact_);
  }
  void begin_again(bool) override { shards_watched(*comm_).begin(due_, exact_); }
  /// Notes whether all batches of the step repeat themselves.
  void take(transport&, split_batch const& batch, long) override { repeats_ = due_ && repeats_ && repeats(batch); }

  /// Searches the partial gradients of a stage for one that is equal on all shards, for which `sum` then throws. Called
  /// before the parts are summed. Collective over the shards.
  void before_sum(gradient_buckets const& of, std::size_t stage) {
    if (!due_) return;
    std::vector<std::string> names;
    std::vector<tensor_mark> mine;
    for (std::size_t i = 0; i < of.trained().size(); ++i) {
      if (of.trained()[i].held != over_shards::partial || !of.views()[i].defined()) continue;
      mine.push_back(mark_unless_zero(of.views()[i]));
      names.push_back(stage_parameter{stage, of.trained()[i].name}.text());
    }
    for (std::size_t const i : equal_on_all(mine)) {
      note(equal_parts, stage,
           "all " + std::to_string(shards()) + " shards computed the same gradient of " + names[i] +
               ", which is declared partial: their sum would count it " + std::to_string(shards()) +
               " times. No parameter was changed. Remedy: leave it out of stage.partial, or give each shard a part of the input "
               "(shard_group::scatter)");
    }
  }

  /// Compares all that this step recorded.
  /// \throws preflight_error, the same on every rank, for the difference that explains all others
  void sum(transport&, slot_counts, error_context const& here) override {
    if (!due_) return;
    compare_records();
    find_whole_pieces();
    compare_gradients();
    shards_watched(*comm_).begin(false, exact_);
    finding first;
    bool repeated = false;
    agreement mine;
    mine.add({repeats_ ? "repeats" : "", not_finite_ ? "not finite" : "", std::to_string(found_.of), std::to_string(found_.stage),
              found_.words});
    for (agreement_row const& row : mine.gather(*comm_)) {
      repeated = repeated || !row[0].empty();
      again_ = again_ || !row[1].empty();
      finding other{std::stoi(row[2]), std::stoul(row[3]), row[4]};
      if (!other.words.empty() && (first.words.empty() || other.rank() < first.rank())) first = std::move(other);
    }
    if (first.words.empty()) return;
    if (repeated && first.by_chance()) {
      again_ = true;
    } else {
      throw preflight_error(first.words, here);
    }
  }

 private:
  static constexpr long first_steps = 2;

  /// The kinds of findings, a cause before its effects: values that differ lead to gradients that differ, and these to gradients
  /// of parameters that differ.
  enum cause : int { unequal_values, unequal_flow, equal_parts, whole_piece, in_sum, unequal_gradients };

  /// A difference over the shards of a stage.
  struct finding {
    int of = unequal_gradients;
    std::size_t stage = 0;
    std::string words = {};  // empty: none

    /// Findings with lower numbers explain those with higher ones. Values pass to later stages, and their gradients to earlier.
    long rank() const {
      long const at = static_cast<long>(stage);
      return of * most_stages + (of == unequal_flow ? most_stages - 1 - at : at);
    }
    /// Whether pieces that are equal by chance may be the cause.
    bool by_chance() const { return of == unequal_flow || of == equal_parts || of == whole_piece; }

    static constexpr long most_stages = 1L << 20;
  };

  int shards() const { return comm_->topology().shards; }
  void note(cause of, std::size_t stage, std::string words) {
    finding one{of, stage, std::move(words)};
    if (found_.words.empty() || one.rank() < found_.rank()) found_ = std::move(one);
  }

  /// Whether each input of each microbatch consists of equal parts along a dimension, one for each shard: then pieces of
  /// activations and of gradients may be equal by chance. False without inputs, as on ranks without the first stage.
  bool repeats(split_batch const& batch) const {
    auto const in_parts = [&](at::Tensor const& t) {
      for (std::int64_t d = 0; t.defined() && d < t.dim(); ++d) {
        if (t.size(d) < shards() || t.size(d) % shards() != 0) continue;
        std::int64_t const size = t.size(d) / shards();
        bool equal = true;
        for (int k = 1; equal && k < shards(); ++k) equal = t.narrow(d, k * size, size).equal(t.narrow(d, 0, size));
        if (equal) return true;
      }
      return false;
    };
    for (int m = 0; m < batch.count(); ++m) {
      tensors const& inputs = batch.inputs(m);
      if (inputs.empty() || !std::all_of(inputs.begin(), inputs.end(), in_parts)) return false;
    }
    return batch.count() > 0;
  }

  /// A mark of a gradient. A gradient of zeros is no evidence: it may be that of a tensor that a step does not use.
  tensor_mark mark_unless_zero(at::Tensor const& gradient) {
    if (!gradient.defined() || gradient.count_nonzero().item<std::int64_t>() == 0) return {};
    tensor_mark const mark(gradient, true);
    not_finite_ = not_finite_ || !mark.is_evidence();
    return mark;
  }
  /// The marks of all shards. Collective over the shards. \returns by shard; each has the marks in the order of `mine`
  std::vector<std::vector<tensor_mark>> of_all(std::vector<tensor_mark> const& mine) const {
    std::vector<std::int64_t> bits;
    for (tensor_mark const& one : mine) bits.push_back(one.bits());
    std::vector<std::vector<tensor_mark>> out(static_cast<std::size_t>(shards()));
    if (mine.empty()) return out;
    auto const all = shard_group(*comm_).all_counts(bits);
    for (std::size_t k = 0; k < all.size(); ++k) out[k / mine.size()].push_back(tensor_mark::of(all[k]));
    return out;
  }
  /// The indices of marks that are evidence, and equal on all shards. Collective over the shards.
  std::vector<std::size_t> equal_on_all(std::vector<tensor_mark> const& mine) const {
    auto const all = of_all(mine);
    std::vector<std::size_t> out;
    for (std::size_t i = 0; i < mine.size(); ++i) {
      if (equal_evidence(all, i)) out.push_back(i);
    }
    return out;
  }
  /// Whether all shards' marks are evidence and have the same bits.
  static bool equal_evidence(std::vector<std::vector<tensor_mark>> const& all, std::size_t i) {
    return all[0][i].is_evidence() &&
           std::all_of(all.begin(), all.end(), [&](auto const& shard) { return shard[i].equals(all[0][i], true); });
  }
  /// The first shard whose mark differs from shard 0's; 0 if none does, or a mark is no evidence.
  int first_other(std::vector<std::vector<tensor_mark>> const& all, std::size_t i) const {
    int other = 0;
    for (std::size_t t = 0; t < all.size(); ++t) {
      if (!all[t][i].is_evidence()) return 0;
      if (other == 0 && !all[t][i].equals(all[0][i], exact_)) other = static_cast<int>(t);
    }
    return other;
  }

  /// Compares the records of shard_watch.hpp. Collective over the shards.
  void compare_records() {
    auto const& records = shards_watched(*comm_).records();
    // Collectives would not return if shards called different ones, but not all records are of collectives.
    std::int64_t const count = static_cast<std::int64_t>(records.size());
    for (std::int64_t const other : shard_group(*comm_).all_counts({count})) {
      if (other != count) return;
    }
    using kind = shard_watch::kind;
    std::vector<tensor_mark> values, gradients;
    for (auto const& one : records) {
      bool const between = one.what == kind::input || one.what == kind::carry;
      values.push_back(one.value);
      gradients.push_back(between ? one.gradient : tensor_mark());
      bool const of_gradient = between || one.what == kind::reduced || one.what == kind::gathered;
      not_finite_ = not_finite_ || (of_gradient && !(between ? one.gradient : one.value).is_evidence());
    }
    auto const all_values = of_all(values), all_gradients = of_all(gradients);
    for (std::size_t i = 0; i < records.size(); ++i) {
      auto const& one = records[i];
      auto const stage = static_cast<std::size_t>(one.stage);
      std::string const where = "stage " + std::to_string(one.stage);
      if (one.what == kind::input || one.what == kind::carry) {
        int const other = equal_evidence(all_values, i) ? first_other(all_gradients, i) : 0;
        if (other == 0) continue;
        std::string const what = (one.what == kind::input ? "input " : "carry ") + std::to_string(one.index);
        note(unequal_flow, stage,
             "shards 0 and " + std::to_string(other) + " of " + where + " got equal values of " + what +
                 ", a whole tensor, and gave unequal gradients of this " + (one.what == kind::input ? "input" : "carry") +
                 " back" + (one.what == kind::input && one.stage > 0 ? " to stage " + std::to_string(one.stage - 1) : "") +
                 ". No parameter was changed. Remedy: in " + where +
                 ", shard_group::copy of the whole tensor before computations that differ by shard, such as the first layer that "
                 "is cut; equal random numbers on all shards outside of layers that are cut");
        continue;
      }
      if (one.what == kind::copied_parts || one.what == kind::gathered_parts) {
        if (!equal_evidence(all_values, i)) continue;
        bool const copied = one.what == kind::copied_parts;
        note(equal_parts, stage,
             "all " + std::to_string(shards()) + " shards computed the same gradient of the result of " +
                 (copied ? "shard_group::copy" : "shard_group::all_gather with after_gather::partial") + " in " + where +
                 ": the sum over the shards would be " + std::to_string(shards()) +
                 " times too large. No parameter was changed. Remedy: where all shards compute the same, " +
                 (copied ? "no copy" : "after_gather::whole"));
        continue;
      }
      int const other = first_other(all_values, i);
      if (other == 0) continue;
      std::string const pair = "shards 0 and " + std::to_string(other);
      if (one.what == kind::copied || one.what == kind::scattered) {
        std::string const call = one.what == kind::copied ? "shard_group::copy" : "shard_group::scatter";
        note(unequal_values, stage,
             pair + " pass different tensors to " + call + " in " + where +
                 ", which takes a whole tensor. No parameter was changed. Remedy: shard_group::all_reduce after a layer that is "
                 "cut along its inputs; equal random numbers and inputs on all shards outside of layers that are cut");
      } else {
        std::string const call = one.what == kind::reduced ? "shard_group::all_reduce" : "shard_group::all_gather";
        note(unequal_flow, stage,
             pair + " have unequal gradients of the result of " + call + " in " + where +
                 ", a whole tensor. No parameter was changed. Remedy: " +
                 (one.what == kind::gathered ? "after_gather::partial if shards compute different things with it, or " : "") +
                 "shard_group::copy of the result before computations that differ by shard, such as a layer that is cut");
      }
    }
  }

  /// Finds cut parameters whose pieces and gradients are equal on all shards: each shard has the whole. Collective over the
  /// shards.
  void find_whole_pieces() {
    std::vector<stage_parameter> all;
    std::vector<at::Tensor> values;
    std::vector<tensor_mark> gradients;
    each_trained([&](std::size_t s, std::size_t i, parameter const& p) {
      if (p.held != over_shards::cut || comm_->topology().plain(p.cut_over) != rank_group::shards) return;
      all.push_back({s, p.name});
      values.push_back(p.value);
      gradients.push_back(mark_unless_zero((*by_stage_)[s]->here(i)));
    });
    auto const suspects = equal_on_all(gradients);
    std::vector<tensor_mark> marks;
    for (std::size_t const i : suspects) marks.emplace_back(values[i], true);
    for (std::size_t const k : equal_on_all(marks)) {
      stage_parameter const& of = all[suspects[k]];
      note(whole_piece, of.stage,
           "all " + std::to_string(shards()) + " shards have equal values and equal gradients of " + of.text() +
               ", which is declared cut: a checkpoint would contain " + std::to_string(shards()) +
               " copies in a row, and the gradients' norm would count all of them. No parameter was changed. Remedy: leave " +
               of.name + " out of stage.cut if each shard has the whole, or begin with the pieces of one tensor, which differ");
    }
  }

  /// Compares the gradients of parameters of which each shard has a copy, on an accelerator only of those that are added over the
  /// shards. Collective over the shards.
  void compare_gradients() {
    struct whole_parameter {
      stage_parameter of;
      bool before_cut, added;
    };
    std::vector<whole_parameter> all;
    std::vector<tensor_mark> marks;
    each_trained([&](std::size_t s, std::size_t i, parameter const& p) {
      bool const added = shards_watched(*comm_).added(static_cast<int>(s), p.name);
      if (p.held == over_shards::cut || !(exact_ || added)) return;
      std::vector<over_shards> held;
      for (parameter const& one : (*by_stage_)[s]->trained()) held.push_back(one.held);
      all.push_back({{s, p.name}, i < parameters_before_cut(held), added});
      at::Tensor const gradient = (*by_stage_)[s]->here(i);
      marks.emplace_back(gradient, exact_);
      not_finite_ = not_finite_ || (gradient.defined() && gradient.numel() > 0 && !marks.back().is_evidence());
      if (added && gradient.defined() && gradient.count_nonzero().item<std::int64_t>() == 0) marks.back() = {};
    });
    auto const of_shards = of_all(marks);
    for (std::size_t i = 0; i < marks.size(); ++i) {
      int const other = first_other(of_shards, i);
      auto const& [of, before_cut, added] = all[i];
      bool const proves = std::all_of(of_shards.begin(), of_shards.end(), [&](auto const& one) { return one[i].is_evidence(); });
      if (added && proves && other == 0) {
        note(
            in_sum, of.stage,
            of.text() + " is whole on all " + std::to_string(shards()) +
                " shards, with equal gradients, and is added over them, inside of shard_group::all_reduce or reduce_scatter: the "
                "sum contains " +
                std::to_string(shards()) +
                " times the parameter. No parameter was changed. Remedy: add a bias after the sum, not in the layer whose "
                "results are summed");
      } else if (exact_ && other != 0) {
        note(unequal_gradients, of.stage,
             "shards 0 and " + std::to_string(other) + " have unequal gradients of " + of.text() +
                 ", but each holds the whole parameter" + remedy_of_unequal(of.name, before_cut));
      }
    }
  }

  template <class See>
  void each_trained(See const& see) const {
    for (std::size_t s = 0; s < by_stage_->size(); ++s) {
      auto const& of = (*by_stage_)[s];
      for (std::size_t i = 0; of && i < of->trained().size(); ++i) see(s, i, of->trained()[i]);
    }
  }

  transport* comm_;
  std::vector<std::unique_ptr<gradient_buckets>> const* by_stage_;
  int every_;
  bool exact_, due_ = false;
  bool again_ = false;       // the next step compares, since this one proved too little
  bool repeats_ = false;     // all batches of this step that this rank knows repeat themselves
  bool not_finite_ = false;  // a gradient of this step was no evidence
  long steps_ = 0;
  finding found_;  // of this rank's shards in this step
};

}  // namespace chevron::detail
