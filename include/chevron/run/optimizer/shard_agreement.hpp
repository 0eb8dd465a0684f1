#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include <chevron/run/comm/shard_group.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/number_text.hpp>
#include <chevron/run/core/tensor_fingerprint.hpp>
#include <chevron/run/core/text_parts.hpp>
#include <chevron/run/optimizer/gradient_buckets.hpp>

/// \file
/// Compares gradients over shards. Two faults make training over T shards silently wrong. First: each shard has a copy of a
/// parameter and computes only a part of the gradient, and the parts are not summed (copies drift apart, or all gradients are
/// too small). Second: shards sum gradients that are already whole (T times too large). Comparisons detect both faults before a
/// parameter changes:
///
/// - in every step, all shards of a stage must have equal losses, and equal norms of the gradients of whole parameters;
/// - in the first step, and in each step that compares copies (`trainer_options::check_copies`), all bits of these gradients
///   must be equal, too, and the parts of a partial gradient, which are summed next, must not all be equal.

namespace chevron::detail {

/// A parameter by stage and name.
struct stage_parameter {
  std::size_t stage;
  std::string name;
  std::string text() const { return "stage " + std::to_string(stage) + "'s " + name; }
};

inline std::string remedy_of_unequal(std::string const& name) {
  return ". No parameter was changed. Remedy: where a shard sees a part of the input, stage.partial({\"" + name +
         "\"}); where a shard holds a piece, stage.cut(\"" + name +
         "\", dimension); else shards compute different things with it: other random numbers, other inputs, or without a "
         "collective (shard_group::copy before what differs by shard)";
}

/// Whether the numbers of two shards are equal, within a tolerance; two numbers that are not finite count as equal.
/// \param tolerance relative; above 0 on an accelerator, where kernels add in varying order, so that the last digits differ
inline bool agree(double first, double other, double tolerance) {
  return first == other || !(std::isfinite(first) || std::isfinite(other)) ||
         std::abs(first - other) <= tolerance * std::abs(first);
}

/// Compares the squared norms of a parameter's gradient on two shards.
/// \param first norm on shard 0 \param other norm on shard `shard`
/// \throws preflight_error if the norms do not `agree`
inline void check_equal_norms(stage_parameter const& of, int shard, double first, double other, double tolerance,
                              error_context const& here) {
  if (agree(first, other, tolerance)) return;
  throw preflight_error("shards 0 and " + std::to_string(shard) + " have gradients of " + of.text() + " with the squared norms " +
                            number_text(first) + " and " + number_text(other) + ", but each holds the whole parameter" +
                            remedy_of_unequal(of.name),
                        here);
}
/// Compares a loss on two shards.
/// \param of words for the loss, such as `microbatch 3`
/// \throws preflight_error if the losses do not `agree`
inline void check_equal_losses(int shard, std::string const& of, double first, double other, double tolerance,
                               error_context const& here) {
  if (agree(first, other, tolerance)) return;
  throw preflight_error(
      "shards 0 and " + std::to_string(shard) + " computed the losses " + number_text(first) + " and " + number_text(other) +
          " of " + of +
          ", which counts once: each shard's has to be the whole loss. No parameter was changed. Remedy: "
          "shard_group::all_reduce over its parts; random numbers that differ by shard only where tensors are cut",
      here);
}

/// Compares gradients over the shards, bit for bit.
class shard_agreement {
 public:
  shard_agreement() = default;
  /// \param every steps from one comparison to the next; 0: only the first step compares
  /// \param exact whether equal computations give equal bits; false on an accelerator, where only partial gradients are
  /// compared
  shard_agreement(topology const& where, int every, bool exact) : shards_(where.shards), every_(every), exact_(exact) {}

  /// Begins a step, and decides whether gradients are compared in this step.
  void begin() {
    due_ = shards_ > 1 && (steps_ == 0 || (every_ > 0 && steps_ % every_ == 0));
    ++steps_;
    found_.clear();
  }
  /// Searches the partial gradients of a stage for one that is equal on all shards, for which `check` then throws. Called
  /// before the parts are summed. Collective over the shards.
  void before_sum(gradient_buckets const& of, std::size_t stage, transport& comm) {
    if (!due_) return;
    std::vector<std::string> names;
    std::vector<std::int64_t> mine;
    for (std::size_t i = 0; i < of.trained().size(); ++i) {
      at::Tensor const& part = of.views()[i];
      if (of.trained()[i].held != over_shards::partial || !part.defined()) continue;
      bool const any = part.count_nonzero().item<std::int64_t>() > 0;
      mine.push_back(any ? static_cast<std::int64_t>(fingerprint(part)) : 0);
      names.push_back(stage_parameter{stage, of.trained()[i].name}.text());
    }
    if (mine.empty()) return;
    auto const all = shard_group(comm).all_counts(mine);
    for (std::size_t i = 0; i < mine.size() && found_.empty(); ++i) {
      bool equal = mine[i] != 0;
      for (std::size_t t = 0; t < static_cast<std::size_t>(shards_); ++t) equal = equal && all[t * mine.size() + i] == mine[i];
      if (!equal) continue;
      found_ = "all " + std::to_string(shards_) + " shards computed the same gradient of " + names[i] +
               ", which is declared partial: their sum would count it " + std::to_string(shards_) +
               " times. No parameter was changed. Remedy: leave it out of stage.partial, or give each shard a part of the input "
               "(shard_group::scatter)";
    }
  }
  /// Compares the gradients of parameters of which each shard has a copy, after all sums. Collective over all ranks.
  /// \param by_stage null for stages of other ranks
  /// \throws preflight_error, the same on every rank, if shards have unequal gradients of a parameter, and for partial
  /// gradients that `before_sum` found equal
  void check(std::vector<std::unique_ptr<gradient_buckets>> const& by_stage, transport& comm, error_context const& here) const {
    if (!due_) return;
    std::string mine = found_ + "\n";
    for (std::size_t s = 0; exact_ && s < by_stage.size(); ++s) {
      for (std::size_t i = 0; by_stage[s] && i < by_stage[s]->trained().size(); ++i) {
        parameter const& p = by_stage[s]->trained()[i];
        if (p.held == over_shards::cut) continue;
        std::uint64_t const mark = fingerprint(by_stage[s]->here(i));
        mine += std::to_string(s) + " " + std::to_string(mark) + " " + p.name + "\n";
      }
    }
    topology const& where = comm.topology();
    auto const all = comm.all_gather_text(mine);
    for (std::string const& text : all) {
      if (std::size_t const end = text.find('\n'); end > 0) throw preflight_error(text.substr(0, end), here);
    }
    for (int r = 0; r < where.world(); ++r) {
      int const first = r - where.shard_of(r);
      if (std::string const line = first_difference(all[static_cast<std::size_t>(first)], all[static_cast<std::size_t>(r)], '\n');
          !line.empty()) {
        std::size_t const space = line.find(' '), of_name = line.find(' ', space + 1) + 1;
        stage_parameter const of{std::stoul(line), line.substr(of_name)};
        throw preflight_error("shards 0 and " + std::to_string(where.shard_of(r)) + " have unequal gradients of " + of.text() +
                                  ", but each holds the whole parameter" + remedy_of_unequal(of.name),
                              here);
      }
    }
  }

 private:
  int shards_ = 1, every_ = 0;
  bool exact_ = true, due_ = false;
  long steps_ = 0;
  std::string found_;  // words of `before_sum` for the first equal partial gradient of this step; empty: none
};

}  // namespace chevron::detail
