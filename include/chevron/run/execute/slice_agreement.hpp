#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros_like.h>

#include <chevron/base/format.hpp>
#include <chevron/plan/action.hpp>
#include <chevron/run/comm/agreement.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/run/stage/autocast.hpp>
#include <chevron/run/stage/buffers.hpp>
#include <chevron/run/stage/random_scope.hpp>
#include <chevron/run/stage/split_batch.hpp>
#include <chevron/run/stage/stage.hpp>

/// \file
/// Compares slices with the sequence that they are cut from, in the first run of a program.

namespace chevron::detail {

/// The conditions under which a stage of this rank runs its forwards.
struct slice_conditions {
  rng_key draws = {};  ///< of the step and this replica
  std::optional<at::ScalarType> autocast = {};
};

/// Compares, once, after a program's first run, each stage's outputs for the first two slices of microbatch 0 with its outputs
/// for both slices as one: a stage whose carries are missing or wrong, whose tokens depend on later tokens or on statistics
/// over a sequence, or whose positions begin anew in each slice would train another model without an error.
///
/// F stores copies of the inputs of both slices. After the run each stage runs three forwards of its own: slice 0, slice 1, and
/// both joined, in evaluation mode, without graphs and with its buffers restored afterwards. Outputs are compared at the last
/// token of slice 0 and at the first token of slice 1; at the last of slice 0 alone where slices were given unequal tensors of
/// one shape without tokens, such as an offset: both joined are given that of slice 0. A stage is not compared if it declares
/// `independent_slices`, if it draws random numbers in evaluation, if it changes side inputs in place, if a forward throws, and
/// if no dimension of an input or an output is as long as the slices: its tensors cannot be joined then.
class slice_agreement {
 public:
  /// \param stages by number, stages of other ranks empty
  explicit slice_agreement(std::vector<stage> const& stages) : seen_(stages.size()) {}

  /// The place for copies of the inputs of an F that will be compared; null for all other computations.
  tensors* place_of(action what) {
    if (what.kind != kind::forward || what.micro_batch > 1) return nullptr;
    recorded& here = seen_[what.stage];
    here.slices[what.micro_batch] = true;
    return &here.inputs[what.micro_batch];
  }

  /// Compares the stages of all ranks. Collective, once.
  /// \param stages by number, stages of other ranks empty \param batch the batch of the run
  /// \throws usage_error, the same on every rank, for the first stage whose slices differ from the sequence
  void check(transport& comm, std::vector<stage>& stages, split_batch const& batch, slice_conditions const& how) {
    collective_scope const doing(comm, "comparison of slices with their sequence");
    topology const& where = comm.topology();
    std::vector<recorded> const seen = std::exchange(seen_, {});
    split_batch::joined const pair = batch.first_two_slices();
    std::array<std::int64_t, 2> const tokens = lengths_of(comm, pair);
    std::vector<layout> ways(stages.size());
    std::vector<std::string> keys;
    for (std::size_t s = 0; s < stages.size(); ++s) {
      bool const changed = batch.side_inputs_were_changed(0) || batch.side_inputs_were_changed(1);
      if (stages[s] && !changed) ways[s] = layout_of(stages[s], seen[s], tokens, s == 0);
      keys.push_back(ways[s].key());
    }
    agreement of_this_rank;
    of_this_rank.add(keys);
    std::vector<agreement_row> const all = of_this_rank.gather(comm);
    std::vector<double> mine(stages.size() * numbers, 0.0);
    bool const watched = shards_watched(comm).set_on(false);  // these forwards are no part of the step that shards compare
    for (std::size_t s = 0; s < stages.size(); ++s) {
      if (!ways[s].joins || !alike(all, where, s)) continue;
      gap const found = compare(stages[s], seen[s], ways[s], pair.data, batch, of_stage(how, s, batch));
      mine[s * numbers] = found.at;
      mine[s * numbers + 1] = found.share;
      mine[s * numbers + 2] = stages[s].carries().empty() ? 0 : 1;
      mine[s * numbers + 3] = static_cast<double>(tokens[0]);
    }
    shards_watched(comm).set_on(watched);
    std::vector<double> of_all(mine.size() * static_cast<std::size_t>(where.world()));
    comm.all_gather(mine, of_all);
    for (std::size_t s = 0; s < stages.size(); ++s) {
      for (std::size_t r = 0; r < static_cast<std::size_t>(where.world()); ++r) {
        double const* const of = of_all.data() + r * mine.size() + s * numbers;
        if (of[0] != gap::none)
          refuse(s, of[0] == gap::last_of_first, of[1], of[2] != 0, static_cast<std::int64_t>(of[3]),
                 {where.global_rank, static_cast<int>(r), how.draws.step, "comparison of slices"});
      }
    }
  }

 private:
  static constexpr std::size_t numbers = 4;

  /// Copies of a stage's inputs in slices 0 and 1.
  struct recorded {
    std::array<bool, 2> slices{};
    std::array<tensors, 2> inputs;
  };

  /// How two slices' inputs are joined: for each tensor the dimensions that may count tokens, none for a tensor of which the
  /// joined slices are given that of slice 0.
  struct layout {
    bool joins = false;
    bool second = true;  ///< slice 1 was given the same tensors without tokens as slice 0, so that its outputs are compared
    std::vector<std::vector<std::int64_t>> dimensions;
    /// The number of ways to join. Each way takes each tensor's first, second … dimension; a tensor that has fewer its last.
    std::size_t ways() const {
      std::size_t most = 1;
      for (auto const& each : dimensions) most = std::max(most, each.size());
      return most;
    }
    std::string key() const { return joins ? std::to_string(ways()) : "-"; }
  };

  /// The difference at one of the two tokens beside the cut, as a share of the outputs' mean size.
  struct gap {
    static constexpr double none = 0, first_of_second = 1, last_of_first = 2;
    double at = none;
    double share = 0;
  };

  /// The lengths of the first two slices in this replica; a rank without the batch takes them from another rank.
  static std::array<std::int64_t, 2> lengths_of(transport& comm, split_batch::joined const& pair) {
    topology const& where = comm.topology();
    std::array<double, 2> const mine{static_cast<double>(pair.first), static_cast<double>(pair.both - pair.first)};
    std::vector<double> all(2 * static_cast<std::size_t>(where.world()));
    comm.all_gather(mine, all);
    int const from = where.rank_at(where.replica(), 0, 0);
    for (int r = from; r < from + where.ranks_of_replica(); ++r) {
      auto const* const of = all.data() + 2 * static_cast<std::size_t>(r);
      if (of[0] > 0) return {static_cast<std::int64_t>(of[0]), static_cast<std::int64_t>(of[1])};
    }
    return {};
  }

  /// Whether all ranks that call a stage's collectives together run the same forwards.
  static bool alike(std::vector<agreement_row> const& keys, topology const& where, std::size_t stage) {
    auto const key = [&](int rank) { return keys[static_cast<std::size_t>(rank)][stage]; };
    for (int k = 0; k < where.members(rank_group::experts); ++k) {
      if (key(where.member(rank_group::experts, k)) != key(where.global_rank)) return false;
    }
    return true;
  }

  /// \param given_by_batch the stage takes the batch's inputs, whose tokens are dimension 1
  static layout layout_of(stage const& of, recorded const& seen, std::array<std::int64_t, 2> tokens, bool given_by_batch) {
    if (of.has_independent_slices() || !seen.slices[0] || !seen.slices[1] || tokens[0] == 0) return {};
    auto const& [a, b] = seen.inputs;
    if (a.size() != b.size()) return {};
    layout out{.joins = true, .second = true, .dimensions = {}};
    for (std::size_t i = 0; i < a.size(); ++i) {
      std::vector<std::int64_t>& dimensions = out.dimensions.emplace_back();
      if (!a[i].defined() && !b[i].defined()) continue;
      if (!a[i].defined() || !b[i].defined() || a[i].layout() != at::kStrided || a[i].dim() != b[i].dim()) return {};
      for (std::int64_t d = 0; d < a[i].dim(); ++d) {
        if (given_by_batch ? d == 1 : fits(a[i], b[i], d, tokens)) dimensions.push_back(d);
      }
      if (dimensions.size() > 1 && dimensions[1] == 1) std::swap(dimensions[0], dimensions[1]);  // the usual dimension first
      if (dimensions.empty() && !at::equal(a[i], b[i])) {
        if (a[i].sizes() != b[i].sizes()) return {};
        out.second = false;
      }
    }
    return out;
  }
  static bool fits(at::Tensor const& a, at::Tensor const& b, std::int64_t along, std::array<std::int64_t, 2> tokens) {
    for (std::int64_t d = 0; d < a.dim(); ++d) {
      if (d != along && a.size(d) != b.size(d)) return false;
    }
    return a.size(along) == tokens[0] && b.size(along) == tokens[1];
  }

  static slice_conditions of_stage(slice_conditions how, std::size_t stage, split_batch const& batch) {
    how.draws.stage = static_cast<int>(stage);
    how.draws.micro_batch = batch.number(0);
    return how;
  }

  /// Runs a stage's forwards, and compares. All ways to join run, since all ranks of a group must call the same collectives.
  static gap compare(stage& of, recorded const& seen, layout const& way, batch const& both, split_batch const& batch,
                     slice_conditions const& how) {
    at::NoGradGuard const no_graph;
    buffer_snapshot before(std::span(&of, 1));
    before.take();
    auto const modes = of.modes();
    of.training(false);
    bool drew = false;
    std::vector<tensors> joined(way.ways());  // a way that the stage does not take has no outputs
    for (std::size_t w = 0; w < joined.size(); ++w) {
      attempt([&] {
        tensors carried(of.carries_before(of.parts()));
        joined[w] = forward(of, inputs_of(seen, way, w), both.side_inputs, both.targets, how, carried, drew);
      });
    }
    std::vector<std::vector<edge>> edges(joined.size());
    bool const ended = attempt([&] {
      tensors carried(of.carries_before(of.parts()));
      for (std::size_t s = 0; s < 2; ++s) {
        tensors inputs;
        for (at::Tensor const& t : seen.inputs[s]) inputs.push_back(t.defined() ? t.clone() : t);
        int const unit = static_cast<int>(s);
        tensors const apart = forward(of, std::move(inputs), batch.side_inputs(unit), batch.targets(unit), how, carried, drew);
        for (std::size_t w = 0; w < joined.size(); ++w) {
          if (s == 0) end(edges[w], apart, joined[w]);
          if (s == 1 && way.second) begin(edges[w], apart, joined[w]);
        }
      }
    });
    // Where two dimensions are as long as the slices: a stage without carries agrees along samples, whatever it does with
    // tokens, so the first way decides. A stage with carries agrees along tokens alone, if at all.
    bool const no_carries = of.carries().empty();
    std::optional<gap> best;
    double const tolerance = tolerance_of(of, seen, how);
    for (std::vector<edge> const& of_way : edges) {
      std::optional<gap> const one = drew || !ended ? std::nullopt : largest(of_way, tolerance);
      if (!one || (best && (no_carries || one->at != gap::none))) continue;
      best = one;
    }
    of.set_modes(modes);
    before.put_back();
    return best.value_or(gap{});
  }

  /// Runs forwards that a stage may refuse, such as those with more tokens than it has positions for, or for which memory does
  /// not suffice. \returns whether they ended
  template <class Run>
  static bool attempt(Run const& run) {
    try {
      run();
      return true;
    } catch (peer_lost_error const&) {
      throw;
    } catch (timeout_error const&) {
      throw;
    } catch (preflight_error const&) {
      throw;
    } catch (std::exception const&) {
      return false;
    }
  }

  static tensors inputs_of(recorded const& seen, layout const& way, std::size_t number) {
    tensors out;
    for (std::size_t i = 0; i < seen.inputs[0].size(); ++i) {
      at::Tensor const &a = seen.inputs[0][i], &b = seen.inputs[1][i];
      auto const& dimensions = way.dimensions[i];
      if (dimensions.empty()) {
        out.push_back(a.defined() ? a.clone() : a);
      } else {
        out.push_back(at::cat({a, b}, dimensions[std::min(number, dimensions.size() - 1)]));
      }
    }
    return out;
  }

  static tensors forward(stage& of, tensors inputs, std::span<side_input const> side_inputs, tensors const& targets,
                         slice_conditions const& how, tensors& carried, bool& drew) {
    autocast_scope const cast(how.autocast, inputs);
    std::vector<collected_losses::given> losses;
    tensors outputs;
    of.forward(inputs, outputs,
               {.side_inputs = side_inputs,
                .draws = how.draws,
                .drew = &drew,
                .targets = &targets,
                .losses = &losses,
                .carried = &carried});
    return outputs;
  }

  /// The share up to which sums over tensors of other sizes may differ.
  static double tolerance_of(stage const& of, recorded const& seen, slice_conditions const& how) {
    auto const half = [](at::Tensor const& t) {
      return t.defined() && (t.scalar_type() == at::kHalf || t.scalar_type() == at::kBFloat16);
    };
    bool const coarse =
        how.autocast || std::any_of(seen.inputs[0].begin(), seen.inputs[0].end(), half) ||
        std::any_of(of.parameters().begin(), of.parameters().end(), [&](parameter const& p) { return half(p.value); });
    bool const on_cpu =
        std::all_of(of.parameters().begin(), of.parameters().end(), [](parameter const& p) { return p.value.is_cpu(); });
    return coarse ? 0.05 : on_cpu ? 1e-3 : 1e-2;  // an accelerator may multiply float32 in fewer bits
  }

  /// An output beside the cut: its dimension of tokens, the number of tokens before the cut, and the differences of the two
  /// tokens beside the cut. No dimension: the output cannot be compared.
  struct edge {
    std::int64_t along = -1, cut = 0;
    double last_of_first = 0, first_of_second = 0;
  };

  /// Compares the last token of slice 0. Outputs of slices are compared one by one, so that those of one slice alone exist
  /// beside the joined outputs.
  static void end(std::vector<edge>& edges, tensors const& apart, tensors const& whole) {
    edges.assign(apart.size() == whole.size() ? whole.size() : 0, {});
    for (std::size_t i = 0; i < edges.size(); ++i) {
      at::Tensor const &a = apart[i], &all = whole[i];
      if (!values_of(a, all)) continue;
      std::int64_t along = -1;
      int others = 0;
      for (std::int64_t d = 0; d < all.dim(); ++d) {
        if (a.size(d) == all.size(d)) continue;
        ++others;
        along = d;
      }
      if (others != 1 || a.size(along) > all.size(along)) continue;
      edges[i] = {along, a.size(along), 0, 0};
      edges[i].last_of_first = share(a.select(along, a.size(along) - 1), all, edges[i], edges[i].cut - 1);
    }
  }
  /// Compares the first token of slice 1.
  static void begin(std::vector<edge>& edges, tensors const& apart, tensors const& whole) {
    if (apart.size() != edges.size()) edges.clear();
    for (std::size_t i = 0; i < edges.size(); ++i) {
      edge& one = edges[i];
      at::Tensor const &b = apart[i], &all = whole[i];
      if (one.along < 0) continue;
      bool fits = values_of(b, all);
      for (std::int64_t d = 0; fits && d < all.dim(); ++d) fits = all.size(d) == b.size(d) + (d == one.along ? one.cut : 0);
      if (!fits) {
        one = {};
        continue;
      }
      one.first_of_second = share(b.select(one.along, 0), all, one, one.cut);
    }
  }
  static bool values_of(at::Tensor const& part, at::Tensor const& all) {
    auto const compares = [](at::Tensor const& t) {
      return t.defined() && t.layout() == at::kStrided && !t.is_complex() && t.numel() > 0;
    };
    return compares(part) && compares(all) && part.dim() == all.dim();
  }
  /// The difference of a token's outputs as a share of the mean size of the two tokens beside the cut.
  static double share(at::Tensor const& of_part, at::Tensor const& all, edge const& of, std::int64_t token) {
    auto const size = [](at::Tensor const& t) { return t.square().sum().item<double>(); };
    at::Tensor const beside = all.narrow(of.along, of.cut - 1, 2).to(at::kDouble), mine = of_part.to(at::kDouble);
    at::Tensor const other = all.select(of.along, token).to(at::kDouble);
    double const mean = size(at::where(beside.isfinite(), beside, at::zeros_like(beside))) / 2;
    return std::sqrt(size(at::where(mine.eq(other), at::zeros_like(mine), mine - other)) / mean);
  }
  /// The gap of an output that depends on later tokens, or else of the first that differs; empty if no output can be compared.
  static std::optional<gap> largest(std::vector<edge> const& edges, double tolerance) {
    std::optional<gap> out;
    for (edge const& one : edges) {
      if (one.along < 0 || !std::isfinite(one.last_of_first) || !std::isfinite(one.first_of_second)) continue;
      gap found;
      if (one.first_of_second > tolerance) found = {gap::first_of_second, one.first_of_second};
      if (one.last_of_first > tolerance) found = {gap::last_of_first, one.last_of_first};
      if (!out || found.at > out->at) out = found;
    }
    return out;
  }

  [[noreturn]] static void refuse(std::size_t stage, bool depends_on_later, double share, bool has_carries, std::int64_t cut,
                                  error_context const& here) {
    std::string const token = depends_on_later ? "token " + std::to_string(cut - 1) + ", the last of slice 0,"
                                               : "token " + std::to_string(cut) + ", the first of slice 1,";
    std::string const why =
        depends_on_later
            ? "A token of its outputs depends on later tokens, or on statistics over the sequence (a mean, a norm over "
              "time, attention without a causal mask, a convolution to both sides)"
        : has_carries ? "Its carries do not pass on all that a later slice needs of earlier slices"
                      : "It has no carries, and a token of its outputs depends on earlier tokens, on its position, or on "
                        "statistics over the sequence";
    throw usage_error(
        "stage " + std::to_string(stage) + " computes another result for a sequence in slices than for the sequence: at " +
            token + " its outputs differ by " + number_text(std::round(share * 1e4) / 1e2) + " % of their mean size. " + why +
            ". No parameter was changed. Remedy: " +
            (depends_on_later
                 ? std::string("a plan with slices = 1 (whole microbatches)")
                 : std::string("stage.carries for keys, values and states of earlier slices; positions that begin at the side "
                               "input `slice_start`; samples in dimension 0 of the batch and tokens in dimension 1; else "
                               "a plan with slices = 1")) +
            "; or, where each slice is to be computed as a sequence of its own, stage.independent_slices()",
        here);
  }

  std::vector<recorded> seen_;  // by stage
};

}  // namespace chevron::detail
