#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/optim/optimizer.h>

#include <chevron/base/format.hpp>
#include <chevron/run/comm/agreement.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/fingerprint.hpp>
#include <chevron/run/core/tensor_fingerprint.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/core/text_parts.hpp>
#include <chevron/run/train/optimizer_state.hpp>
#include <chevron/run/train/rank_gradients.hpp>
#include <chevron/run/train/rank_optimizer.hpp>
#include <chevron/run/train/step_part.hpp>
#include <chevron/run/train/tied_parameters.hpp>
#include <chevron/run/train/trainer_options.hpp>

/// \file
/// Compares the ranks' copies of each parameter, whose bits must remain equal.

namespace chevron::detail {

/// Compares copies of parameters: a stage's copies on all replicas, the copies of a whole parameter on all shards, and the
/// copies of a tied parameter on several stages. Copies remain equal only if their initial values and their gradients are
/// equal, and if each rank's optimizer steps them with equal options from equal states. Float32 masters are compared as a part
/// of the state.
///
/// The gather that ends a step also carries fingerprints: of options in every step, of values and states in every n-th step.
/// Every rank receives the fingerprints of all ranks. If some differ, every rank calls `check`, whose error names stage, tensor
/// and ranks.
class copy_agreement {
 public:
  /// \param gradients of this rank's stages
  /// \param optimizer of this rank, whose states are compared unless it is sharded; must outlive this object
  copy_agreement(topology const& where, rank_gradients const& gradients, tied_parameters const& tied,
                 rank_optimizer const& optimizer, trainer_options const& options)
      : where_(where),
        optimizer_(&optimizer),
        every_(options.check_copies),
        one_rate_(static_cast<bool>(options.learning_rate)) {
    std::map<std::pair<std::size_t, std::size_t>, std::size_t> trained;  // by stage and parameter: index in `copies_`
    for (std::size_t s = 0; s < gradients.stages(); ++s) {
      if (gradients[s] == nullptr) continue;
      for (std::size_t i = 0; i < gradients[s]->trained().size(); ++i) {
        parameter const& p = gradients[s]->trained()[i];
        bool const on_shards = where.shards > 1 && p.held != over_shards::cut;
        if (where.replicas == 1 && p.tied_as.empty() && !on_shards) continue;
        trained[{s, i}] = copies_.size();
        copies_.push_back({s, p});
      }
      for (parameter const& p : gradients[s]->frozen()) {
        if (where.replicas > 1 || (where.shards > 1 && p.held != over_shards::cut)) copies_.push_back({s, p});
      }
    }
    tied.each([&](std::string const& word, int rank, std::size_t stage, std::size_t index) {
      bool const here = rank == where.pipeline_rank();
      tied_.push_back({word, rank, here ? trained.at({stage, index}) : 0, here});
    });
  }

  /// The number of doubles that a rank contributes to a step's gather, the same on every rank.
  std::size_t width() const { return where_.replicas * where_.shards == 1 && tied_.empty() ? 0 : before_tied + 2 * tied_.size(); }

  /// Writes this rank's fingerprints for a step's gather, before the optimizer steps: of options and values, first over all
  /// copies of this rank, then for each tied parameter.
  /// \param to receives `width()` doubles
  void write(std::span<double> to) {
    if (to.empty()) return;
    std::fill(to.begin(), to.end(), 0.0);
    if (auto const* optimizer = optimizer_->get(); where_.replicas * where_.shards > 1 && optimizer != nullptr) {
      byte_fingerprint options;
      for (auto const& group : optimizer->param_groups()) add_options(options, group.options());
      to[0] = number(options);
    }
    bool const values = every_ > 0 && steps_++ % every_ == 0;
    std::vector<mark> const marks = values ? marks_of_copies() : std::vector<mark>(copies_.size());
    if (values && where_.replicas * where_.shards > 1) {
      byte_fingerprint on_replicas, on_shards, of_experts;
      for (std::size_t i = 0; i < marks.size(); ++i) {
        bool const cut = copies_[i].of.held == over_shards::cut;
        add(cut && copies_[i].of.cut_over == rank_group::experts ? of_experts : on_replicas, marks[i]);
        if (!cut) add(on_shards, marks[i]);
      }
      to[1] = number(on_replicas);
      to[2] = number(on_shards);
      to[3] = number(of_experts);
    }
    for (std::size_t i = 0; i < tied_.size(); ++i) {
      if (!tied_[i].here) continue;
      byte_fingerprint options, value;
      if (auto const* found = optimizer_->options_of(copies_[tied_[i].copy].of.value)) add_options(options, *found);
      add(value, marks[tied_[i].copy]);
      to[before_tied + 2 * i] = number(options);
      to[before_tied + 1 + 2 * i] = values ? number(value) : 0;
    }
  }

  /// Compares the gathered fingerprints of all ranks.
  /// \param of_rank returns the fingerprints of a rank, given its global rank
  /// \returns the first two ranks whose fingerprints differ, and words that name them, equal on every rank; empty words if no
  /// fingerprints differ
  template <class OfRank>
  unequal_ranks difference(OfRank const& of_rank) const {
    if (width() == 0) return {};
    auto const differs = [&](int a, std::size_t i, int b, std::size_t j, bool options) -> unequal_ranks {
      if (of_rank(a)[i] == of_rank(b)[j]) return {};
      return {"ranks " + std::to_string(a) + " and " + std::to_string(b) +
                  (options ? " stepped copies of a parameter with different options" : " held different copies of a parameter"),
              {a, b}};
    };
    for (std::size_t kind : {0u, 1u}) {
      for (int r = 0; r < where_.world(); ++r) {
        topology at = where_;
        at.global_rank = r;
        for (auto const& [among, of_values] :
             {std::pair{rank_group::replicas, 1U}, {rank_group::shards, 2U}, {rank_group::expert_copies, 3U}}) {
          std::size_t const number = kind == 0 ? 0 : of_values;
          if (unequal_ranks found = differs(at.member(among, 0), number, r, number, kind == 0); !found.words.empty())
            return found;
        }
      }
      std::size_t first = 0;  // index of the first tied parameter of the group
      for (std::size_t i = 0; i < tied_.size(); ++i) {
        if (tied_[i].word != tied_[first].word) first = i;
        for (int shard = 0; shard < where_.shards; ++shard) {
          unequal_ranks found = differs(where_.rank_at(0, tied_[first].rank, shard), before_tied + 2 * first + kind,
                                        where_.rank_at(0, tied_[i].rank, shard), before_tied + 2 * i + kind, kind == 0);
          if (!found.words.empty()) return found;
        }
      }
    }
    return {};
  }

  /// Gathers a row about every copy, and compares the rows. Collective.
  /// \param values true: also compares values and states; false: options alone
  /// \throws the same error on every rank: usage_error for tied parameters that are stepped with different options;
  /// preflight_error for copies on replicas or shards that are stepped with different options, and for different values or
  /// states
  void check(transport& comm, bool values, error_context const& here) const {
    if (width() == 0) return;
    std::vector<agreement_row> const all = rows(values).gather(comm);
    for (std::size_t what : {of_options, of_value, of_state}) {
      std::map<std::string, agreement_row const*> known;
      for (agreement_row const& one : all) {
        for (bool const as_tied : {false, true}) {
          if (as_tied && one[of_tie].empty()) continue;
          // A piece of a cut parameter is compared only with copies of that piece.
          std::string const key = (as_tied ? "tied " + one[of_tie] : one[of_stage] + " " + one[of_name]) + one[of_piece];
          agreement_row const& first = *known.try_emplace(key, &one).first->second;
          if (first[what] != one[what]) refuse(what, first, one, as_tied, here);
        }
      }
    }
  }

 private:
  struct copy {
    std::size_t stage;
    parameter of;
  };
  struct tied_copy {
    std::string word;
    int rank = 0;
    std::size_t copy;
    bool here;
  };
  struct mark {
    std::uint64_t value = 0, state = 0;
  };
  /// The fields of a row about a copy.
  enum field : std::size_t { of_stage, of_name, of_tie, of_piece, of_options, of_value, of_state };

  /// The count of doubles before those of tied parameters: for options; for values on all replicas, on all shards, on copies of
  /// experts.
  static constexpr std::size_t before_tied = 4;

  /// Returns 53 bits of a fingerprint, which a double represents exactly.
  static double number(byte_fingerprint const& of) { return static_cast<double>(of.value() >> 11); }
  static void add(byte_fingerprint& to, mark const& one) {
    to.add(&one.value, sizeof one.value);
    to.add(&one.state, sizeof one.state);
  }
  template <class See>
  void each_option(torch::optim::OptimizerOptions const& options, See const& see) const {
    bool rate = true;  // `visit_options` visits the learning rate first
    visit_options(options, [&](char const* name, double value) {
      if (!std::exchange(rate, false) || !one_rate_) see(name, value);
    });
  }
  void add_options(byte_fingerprint& to, torch::optim::OptimizerOptions const& options) const {
    each_option(options, [&](char const*, double value) { to.add(&value, sizeof value); });
  }

  std::vector<mark> marks_of_copies() const {
    tensors all;
    std::vector<byte_fingerprint> states(copies_.size());
    std::vector<std::size_t> ends;
    for (std::size_t i = 0; i < copies_.size(); ++i) {
      at::Tensor const& p = copies_[i].of.value;
      all.push_back(p);
      optimizer_->visit_copied(
          p, [&](at::Tensor const& t) { all.push_back(t); }, [&](auto& value) { states[i].add(&value, sizeof value); });
      ends.push_back(all.size());
    }
    std::vector<std::uint64_t> const each = fingerprints(all);
    std::vector<mark> out;
    for (std::size_t i = 0, k = 0; i < copies_.size(); ++i) {
      std::uint64_t const value = each[k++];
      for (; k < ends[i]; ++k) states[i].add(&each[k], sizeof each[k]);
      out.push_back({value, states[i].value()});
    }
    return out;
  }

  /// Returns a row for each copy, with the values of `field`.
  agreement rows(bool values) const {
    std::vector<mark> const marks = values ? marks_of_copies() : std::vector<mark>(copies_.size());
    agreement out;
    for (std::size_t i = 0; i < copies_.size(); ++i) {
      std::string options;
      if (auto const* found = optimizer_->options_of(copies_[i].of.value)) {
        options = class_name_of(*optimizer_->get()) + ";";
        each_option(*found, [&](char const* name, double v) { options += std::string(name) + " " + number_text(v) + ";"; });
      }
      out.add({std::to_string(copies_[i].stage), copies_[i].of.name, copies_[i].of.tied_as,
               copies_[i].of.held == over_shards::cut ? piece_in_words(copies_[i].of, where_) : std::string(), options,
               std::to_string(marks[i].value), std::to_string(marks[i].state)});
    }
    return out;
  }
  /// Returns the first option of `mine` that differs from the option at that position in `other`.
  static std::string differing_option(std::string const& mine, std::string const& other) {
    if (mine.empty()) return "no optimizer";
    std::string const out = first_difference(other, mine, ';');
    return out.empty() ? mine : out;
  }

  [[noreturn]] static void refuse(std::size_t what, agreement_row const& a, agreement_row const& b, bool as_tied,
                                  error_context const& here) {
    auto const called = [](agreement_row const& of) {
      return "stage " + of[of_stage] + "'s " + of[of_name] + " on rank " + std::to_string(of.rank);
    };
    error_context const there = naming(here, {a.rank, b.rank});
    if (what != of_options) {
      throw preflight_error(
          (what == of_value ? "the values of " : "the optimizer's states of ") + called(a) + " and " + called(b) + " differ" +
              (as_tied ? ", which are tied as `" + a[of_tie] + "`" : ", which are copies of one") +
              ": copies of a parameter must stay equal. Remedy: change parameters, gradients and the optimizer's state on the "
              "ranks of all copies alike, between two steps or in before_optimizer_step, with overlap_gather or post_validation "
              "after trainer.synchronize(); trainer_options::check_copies = 1 tells in which step they part, and "
              "load_checkpoint makes them equal",
          there);
    }
    std::string const options = called(a) + " is stepped with " + differing_option(a[of_options], b[of_options]) + " and " +
                                called(b) + " with " + differing_option(b[of_options], a[of_options]);
    if (as_tied) {
      throw usage_error(options + ", but they are tied as `" + a[of_tie] +
                            "` and would not stay equal. Remedy: groups of parameters that give all copies the same options",
                        there);
    }
    throw preflight_error(options +
                              ", but they are copies of one and would not stay equal. Remedy: give the optimizers of all "
                              "ranks the same options, and step a scheduler of learning rates on all of them",
                          there);
  }

  topology where_;
  rank_optimizer const* optimizer_;
  std::vector<copy> copies_;     // this rank's copies that are compared
  std::vector<tied_copy> tied_;  // all tied parameters of a pipeline, by group and stage
  int every_;
  bool one_rate_;
  long steps_ = 0;
};

/// Lets the gather that ends a step compare copies. Made only if a parameter may have a copy.
class copies_of_step final : public step_part {
 public:
  /// \param copies must outlive this object
  copies_of_step(record& to, copy_agreement& copies) : copies_(&copies), marks_(to.add(copies.width())) {}

  void write(record& mine) override { copies_->write(mine.numbers(marks_)); }
  void judge(records_of_ranks const& all, decision& found, step_report&, error_context const&) override {
    found.copies = copies_->difference([&](int rank) { return all.numbers(rank, marks_).data(); });
  }

 private:
  copy_agreement* copies_;
  record::field marks_;
};

}  // namespace chevron::detail
