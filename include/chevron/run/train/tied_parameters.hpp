#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>

#include <chevron/lower/edges.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/run/comm/agreement.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/train/rank_gradients.hpp>
#include <chevron/run/train/step_part.hpp>

/// \file
/// Parameters that several stages share, such as the embedding and the output layer of a language model.

namespace chevron::detail {

/// The tied parameters of one rank: parameters of several stages that `stage::tie` puts into one group. Each stage has a copy
/// of its own (on one rank the copies may be one tensor). Every copy starts with the values of the first stage's copy, and gets
/// the sum of all copies' gradients, added in the order of stages, so copies remain equal to the last bit on any placement. The
/// norm counts one copy.
///
/// Ranks exchange the gradients at the end of each step, in one message per pair of ranks and direction.
class tied_parameters {
 public:
  tied_parameters() = default;

  /// Gathers the tie groups of all ranks, and copies the values of each group's first stage into all copies. Collective.
  /// \param gradients of this rank's stages; must outlive this object
  /// \throws usage_error, the same on every rank, for a group of one parameter, a frozen parameter, two parameters of one stage
  /// in a group, and copies of different shapes or dtypes
  tied_parameters(plan_view plan, transport& comm, rank_gradients& gradients) : plan_(plan), gradients_(&gradients) {
    agreement mine;
    for (std::size_t s = 0; s < gradients_->stages(); ++s) {
      if ((*gradients_)[s] == nullptr) continue;
      auto const& trained = (*gradients_)[s]->trained();
      for (std::size_t i = 0; i < trained.size(); ++i) add_row(mine, s, i, trained[i]);
      for (parameter const& p : (*gradients_)[s]->frozen()) add_row(mine, s, 0, p);
    }
    for (agreement_row const& row : mine.gather(comm)) read(row, comm.topology());
    check();
    find_peers(comm.topology());
    if (!groups_.empty()) {
      comm.connect(edges());
      comm.open(slots());
      exchange(comm, {0, 0, 0}, [&](member const& m) { return parameter_of(m).value.detach(); });
    }
    begin_equal(comm.topology().pipeline_rank());
    for (tie_group const& w : groups_) {
      for (std::size_t k = 1; k < w.members.size(); ++k) {
        member const& m = w.members[k];
        if ((*gradients_)[m.stage] == nullptr) continue;
        (*gradients_)[m.stage]->counts_elsewhere(m.index);
        for (std::size_t j = 0; j < k; ++j) {
          member const& before = w.members[j];
          if ((*gradients_)[before.stage] == nullptr || !parameter_of(before).value.is_same(parameter_of(m).value)) continue;
          (*gradients_)[before.stage]->shares(before.index);
          (*gradients_)[m.stage]->shares(m.index);
        }
      }
    }
  }

  /// Whether no parameter of this replica is tied.
  bool empty() const { return groups_.empty(); }
  /// The counts of slots that the exchange needs in addition to a program's.
  slot_counts slots() const { return {0, static_cast<int>(peers_.size()), static_cast<int>(peers_.size())}; }

  /// The pairs of pipeline ranks, sender first, that exchange gradients.
  std::vector<edge> edges() const {
    std::vector<edge> out;
    for (int a = 0; a < plan_.size.ranks; ++a) {
      for (int b = 0; b < plan_.size.ranks; ++b) {
        if (exchanges(a, b)) out.push_back({a, b});
      }
    }
    return out;
  }

  /// Calls `see(group, pipeline rank, stage, index among the stage's trained parameters)` for each tied parameter of a
  /// pipeline, in the order of groups and stages, equally on every rank.
  template <class See>
  void each(See const& see) const {
    for (tie_group const& w : groups_) {
      for (member const& m : w.members) see(w.text, m.rank, m.stage, m.index);
    }
  }

  /// Sums the gradients of all copies. Collective; called after the sums over the replicas, with no message under way.
  /// \param program counts of the program's slots; the exchange uses the slots after these
  void sum(transport& comm, slot_counts program) {
    at::NoGradGuard const off;
    exchange(comm, program, [&](member const& m) { return gradient_of(m); });
    int const me = comm.topology().pipeline_rank();
    for (tie_group const& w : groups_) {
      if (!held(w, me)) continue;
      at::Tensor total;
      for (member const& m : w.members) {
        at::Tensor const& part = m.rank == me ? gradient_of(m) : came(m);
        if (!total.defined()) {
          total = part.clone();
        } else {
          total.add_(part);
        }
      }
      for (member const& m : w.members) {
        if (m.rank == me) gradient_of(m).copy_(total);
      }
    }
    received_.clear();
  }

 private:
  struct member {
    std::size_t stage, index;  // index: among the stage's trained parameters
    int rank;
    std::string name, shape;
  };
  struct tie_group {
    std::string text;
    std::vector<member> members;  // by stage
  };
  struct received_gradient {
    std::size_t stage, index;
    at::Tensor value;
  };

  parameter const& parameter_of(member const& m) const { return (*gradients_)[m.stage]->trained()[m.index]; }
  at::Tensor gradient_of(member const& m) const { return (*gradients_)[m.stage]->views()[m.index]; }

  static constexpr char const* frozen = ", frozen";

  /// Adds the row by which ranks learn of a tied parameter: stage, index, name, shape, group.
  static void add_row(agreement& to, std::size_t s, std::size_t index, parameter const& p) {
    if (p.tied_as.empty()) return;
    std::string shape(c10::toString(p.value.scalar_type()));
    for (std::int64_t const size : p.value.sizes()) shape += " " + std::to_string(size);
    if (!p.value.requires_grad()) shape += frozen;
    to.add({std::to_string(s), std::to_string(index), p.name, shape, p.tied_as});
  }

  void read(agreement_row const& row, topology const& where) {
    if (where.replica_of(row.rank) != where.replica() || where.shard_of(row.rank) != where.shard()) return;
    auto found = std::find_if(groups_.begin(), groups_.end(), [&](tie_group const& w) { return w.text == row[4]; });
    if (found == groups_.end()) found = groups_.insert(groups_.end(), {row[4], {}});
    found->members.push_back({std::stoul(row[0]), std::stoul(row[1]), where.pipeline_rank_of(row.rank), row[2], row[3]});
  }

  void check() {
    std::sort(groups_.begin(), groups_.end(), [](tie_group const& a, tie_group const& b) { return a.text < b.text; });
    for (tie_group& w : groups_) {
      auto const called = [](member const& m) { return "stage " + std::to_string(m.stage) + "'s " + m.name; };
      std::sort(w.members.begin(), w.members.end(), [](member const& a, member const& b) { return a.stage < b.stage; });
      if (w.members.size() == 1) {
        throw usage_error("of all parameters only " + called(w.members[0]) + " is tied as `" + w.text +
                          "`. Remedy: tie the other stage's parameter as `" + w.text + "`, too");
      }
      for (std::size_t k = 1; k < w.members.size(); ++k) {
        member const &a = w.members[0], &b = w.members[k];
        for (member const& m : {a, b}) {
          if (!m.shape.ends_with(frozen)) continue;
          throw usage_error(
              called(m) + " is tied as `" + w.text +
              "`, but needs no gradient. Remedy: train this parameter, or give each stage its values without a tie");
        }
        if (w.members[k - 1].stage == b.stage) {
          throw usage_error(called(b) + " and " + w.members[k - 1].name + " are both tied as `" + w.text +
                            "`: within a stage, use one parameter twice instead");
        }
        if (a.shape != b.shape) {
          throw usage_error(called(a) + " (" + a.shape + ") and " + called(b) + " (" + b.shape + ") are tied as `" + w.text +
                            "`, but differ in shape or dtype");
        }
      }
    }
  }

  static bool held(tie_group const& w, int rank) {
    return std::any_of(w.members.begin(), w.members.end(), [&](member const& m) { return m.rank == rank; });
  }

  /// Whether two pipeline ranks have copies of one parameter.
  bool exchanges(int a, int b) const {
    return a != b && std::any_of(groups_.begin(), groups_.end(), [&](tie_group const& w) { return held(w, a) && held(w, b); });
  }

  void find_peers(topology const& where) {
    for (int r = 0; r < where.pipeline_ranks; ++r) {
      if (exchanges(r, where.pipeline_rank())) peers_.push_back(r);
    }
  }

  /// Sends `value(member)` of this rank's members to the peers, and receives the peers' values. Posts do not block, so ranks
  /// cannot hang, whatever their order of posts.
  template <class Value>
  void exchange(transport& comm, slot_counts program, Value value) {
    int const me = comm.topology().pipeline_rank();
    auto const between = [&](int owner, int other, auto visit) {
      for (tie_group const& w : groups_) {
        if (!held(w, other)) continue;
        for (member const& m : w.members) {
          if (m.rank == owner) visit(m);
        }
      }
    };
    // These messages have microbatch numbers past the last microbatch, one number per receiver, since a rank sends to several
    // ranks with one stage number.
    auto const label = [&](kind what, int sender, int receiver) {
      return make_action(what, sender + (what == kind::receive_forward ? 1 : 0), plan_.size.units() + receiver);
    };
    auto const slot = [&](int first, std::size_t k) { return static_cast<std::uint16_t>(first + static_cast<int>(k)); };
    for (std::size_t k = 0; k < peers_.size(); ++k) {
      comm.post_receive(peers_[k], label(kind::receive_forward, peers_[k], me), slot(program.receive, k));
    }
    for (std::size_t k = 0; k < peers_.size(); ++k) {
      tensors mine;
      between(me, peers_[k], [&](member const& m) { mine.push_back(value(m).clone()); });
      comm.post_send(peers_[k], label(kind::send_forward, me, peers_[k]), slot(program.send, k), mine);
    }
    received_.clear();
    for (std::size_t k = 0; k < peers_.size(); ++k) {
      std::span<at::Tensor> const theirs = comm.receive(slot(program.receive, k));
      std::size_t next = 0;
      between(peers_[k], me, [&](member const& m) { received_.push_back({m.stage, m.index, std::move(theirs[next++])}); });
    }
    for (std::size_t k = 0; k < peers_.size(); ++k) comm.wait_send(slot(program.send, k));
  }

  at::Tensor const& came(member const& m) const {
    return std::find_if(received_.begin(), received_.end(),
                        [&](received_gradient const& a) { return a.stage == m.stage && a.index == m.index; })
        ->value;
  }

  void begin_equal(int me) {
    at::NoGradGuard const off;
    for (tie_group const& w : groups_) {
      for (member const& m : w.members) {
        if (m.rank != me) continue;
        at::Tensor const first = w.members[0].rank == me ? parameter_of(w.members[0]).value : came(w.members[0]);
        if (!first.is_same(parameter_of(m).value)) parameter_of(m).value.detach().copy_(first);
      }
    }
    received_.clear();
  }

  plan_view plan_;
  rank_gradients* gradients_ = nullptr;
  std::vector<tie_group> groups_;            // sorted by name of the group
  std::vector<int> peers_;                   // other pipeline ranks with a copy of this rank's parameters
  std::vector<received_gradient> received_;  // the peers' values, during an exchange
};

/// Sums the gradients of tied parameters in each step. Made only if a parameter is tied.
class tied_sums final : public step_part {
 public:
  /// \param tied must outlive this object
  tied_sums(record&, tied_parameters& tied) : tied_(&tied) {}

  void sum(transport& comm, slot_counts program, error_context const&) override { tied_->sum(comm, program); }

 private:
  tied_parameters* tied_;
};

}  // namespace chevron::detail
