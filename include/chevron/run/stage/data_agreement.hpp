#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <vector>

#include <unistd.h>

#include <ATen/core/Tensor.h>

#include <chevron/lower/program.hpp>
#include <chevron/run/comm/agreement.hpp>
#include <chevron/run/comm/message_signature.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/fingerprint.hpp>
#include <chevron/run/core/host_copy.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/stage/split_batch.hpp>

/// \file
/// Compares the batches that the ranks of a pipeline were given, by fingerprints.

namespace chevron {

/// The steps in which the ranks of a pipeline compare the batches that they were given. An evaluator counts its losses as steps.
enum class data_check {
  /// The first step and every 100th compare all values. The other steps compare 16 elements, evenly spaced, of each tensor of
  /// each microbatch, if the tensors are on the CPU.
  sampled,
  first_step,  ///< the first step alone
  every_step,  ///< every step compares all values
  never        ///< no step
};

/// The handling of two replicas that were given the same batch in a trainer's first step: a sampler that ignores the replica's
/// number, or one batch that a model is meant to learn by heart.
enum class same_batch {
  warn,  ///< print a warning on rank 0
  stop,  ///< throw `preflight_error` on every rank; no parameter was changed
  allow  ///< no comparison
};

namespace detail {

/// A random number of this process, which together with an address identifies memory within the job.
inline std::uint64_t process_number() {
  static std::uint64_t const drawn = [] {
    std::random_device device;
    return static_cast<std::uint64_t>(device()) << 32 | device();
  }();
  return drawn ^ static_cast<std::uint64_t>(::getpid());  // a forked process inherits `drawn`
}

/// Two fingerprints of a list of tensors: of dtypes, shapes and values; of dtypes, shapes, strides and addresses.
class tensor_marks {
 public:
  static constexpr std::size_t numbers = 4;
  /// The number of elements of a tensor that `add_sample` reads.
  static constexpr std::int64_t sample = 16;

  void clear() { *this = {}; }
  /// Adds all values of a tensor.
  void add(at::Tensor const& t) {
    if (!add_form(t)) return;
    at::Tensor const dense = host_copy(materialized(t)).contiguous();
    content_.add(dense.const_data_ptr(), dense.nbytes());
  }
  /// Adds a few values of a tensor, evenly spaced in the order of its elements, however it lies in memory. A list with a tensor
  /// whose values the host cannot read at once, or that is a conjugate or negative view, is not compared.
  void add_sample(at::Tensor const& t) {
    if (t.defined() && (!t.is_cpu() || t.is_conj() || t.is_neg())) unread_ = true;
    if (unread_ || !add_form(t)) return;
    auto const* const bytes = static_cast<char const*>(t.const_data_ptr());
    std::int64_t const count = std::min(t.numel(), sample), size = t.element_size();
    for (std::int64_t k = 0; k < count; ++k) {
      std::int64_t rest = k * t.numel() / count, offset = 0;
      for (std::int64_t d = t.dim() - 1; d >= 0; --d) {
        offset += rest % t.size(d) * t.stride(d);
        rest /= t.size(d);
      }
      content_.add(bytes + offset * size, static_cast<std::size_t>(size));
    }
  }

  /// Writes each fingerprint as two halves of 32 bits, which a double represents exactly, plus 1 each. If no tensor was added,
  /// all numbers are 0.
  void write(double* to) const {
    if (!given_ || unread_) {
      std::fill_n(to, numbers, 0.0);
      return;
    }
    for (std::uint64_t const value : {content_.value(), memory_.value()}) {
      *to++ = static_cast<double>(value >> 32) + 1;
      *to++ = static_cast<double>(value & 0xffffffffu) + 1;
    }
  }
  static bool given(double const* marks) { return marks[0] != 0; }
  /// Whether `a` and `b` have equal fingerprints of values, or of addresses. Equal addresses suffice: ranks that are threads
  /// may share a tensor, and a stage of one rank may change the tensor while another rank computes the fingerprint.
  static bool same(double const* a, double const* b) { return (a[0] == b[0] && a[1] == b[1]) || (a[2] == b[2] && a[3] == b[3]); }

 private:
  void word(std::int64_t value) {
    content_.add(&value, sizeof value);
    memory_.add(&value, sizeof value);
  }

  /// Adds dtype, shape, strides and address. \returns whether the tensor has values to be added
  bool add_form(at::Tensor const& t) {
    given_ = true;
    word(t.defined() ? static_cast<std::int64_t>(t.scalar_type()) : -1);
    if (!t.defined()) return false;
    word(t.dim());
    for (std::int64_t const size : t.sizes()) word(size);
    if (t.layout() != at::kStrided || t.is_meta()) return false;  // dtype and shape alone are compared
    for (std::int64_t const stride : t.strides()) memory_.add(&stride, sizeof stride);
    std::uint64_t const where[] = {process_number(), reinterpret_cast<std::uintptr_t>(t.const_data_ptr())};
    memory_.add(where, sizeof where);
    return true;
  }

  byte_fingerprint content_, memory_;
  bool given_ = false;
  bool unread_ = false;  // of a sample
};

/// In a list of the side inputs that a rank's stages read, this name means the targets. No side input has an empty name.
inline constexpr char const* targets_taken = "";

/// Compares fingerprints of batches over the ranks of each pipeline: inputs and targets on the ranks of the first and the last
/// stage, targets also on ranks whose stages read targets, each side input on the ranks whose stages read it. Tensors that a
/// rank was not given are not compared: if the first stage's rank has only inputs and the last stage's rank only targets, a
/// mismatch of inputs and targets is not found.
///
/// Ranks exchange fingerprints in the gather of a step or an evaluation; 0 stands for tensors that are not compared. Replicas
/// compare theirs in a trainer's first step (`equal_replicas`).
class data_agreement {
 public:
  data_agreement() = default;
  /// \param taken for each pipeline rank: names of side inputs that its stages read; `targets_taken` if they read targets
  data_agreement(plan_view plan, topology const& where, std::vector<std::vector<std::string>> const& taken, data_check when)
      : when_(when), where_(where) {
    for (auto const& of_rank : taken) taken_.insert(taken_.end(), of_rank.begin(), of_rank.end());
    std::sort(taken_.begin(), taken_.end());
    taken_.erase(std::unique(taken_.begin(), taken_.end()), taken_.end());
    std::vector<std::string> names = taken_;
    bool const targets_elsewhere = std::erase(names, targets_taken) > 0;
    std::erase(taken_, targets_taken);
    if (when == data_check::never) return;
    int const first = plan.rank_of_stage(0), last = plan.rank_of_stage(plan.stages - 1), me = where.pipeline_rank();
    auto const takes = [&](std::size_t rank, std::string const& name) {
      return std::find(taken[rank].begin(), taken[rank].end(), name) != taken[rank].end();
    };
    if (first != last || targets_elsewhere || where.shards > 1 || where.replicas > 1) {
      bool const at_end = me == first || me == last;
      parts_.push_back({"inputs", at_end, {}});
      parts_.push_back({"targets", at_end || takes(static_cast<std::size_t>(me), targets_taken), {}});
    }
    before_extras_ = parts_.size();
    for (std::string const& name : names) {
      int takers = 0;
      for (std::size_t r = 0; r < taken.size(); ++r) takers += takes(r, name) ? 1 : 0;
      if (takers * where.shards * where.replicas > 1) parts_.push_back({name, takes(static_cast<std::size_t>(me), name), {}});
    }
    numbers_.resize(parts_.size() * tensor_marks::numbers);
  }

  /// Gathers all ranks' names, and creates the comparison. Collective.
  /// \param mine names of the side inputs that this rank's stages read; `targets_taken` if the stages read targets
  static data_agreement gathered(plan_view plan, transport& comm, std::vector<std::string> const& mine, data_check when) {
    topology const& where = comm.topology();
    agreement names;
    names.add(mine);
    std::vector<std::vector<std::string>> taken;
    std::vector<agreement_row> const all = names.gather(comm);
    for (int p = 0; p < plan.size.ranks; ++p) taken.push_back(all[static_cast<std::size_t>(where.rank_at(0, p, 0))].fields);
    return {plan, where, taken, when};
  }

  /// The count of numbers that each rank contributes to the gather, equal on all ranks.
  std::size_t width() const { return numbers_.size(); }

  /// Clears the fingerprints. Called as a step or an evaluation begins.
  void begin() {
    for (part& p : parts_) p.marks.clear();
  }
  /// Checks the names of a batch's side inputs, until the first comparison.
  /// \throws usage_error for a side input that no stage and no loss of any rank takes
  void check_taken(split_batch const& cut) const {
    if (compared_ > 0) return;
    std::vector<std::string> unknown;
    for (int m = 0; m < cut.count(); ++m) {
      for (side_input const& e : cut.side_inputs(m)) {
        bool const known = std::binary_search(taken_.begin(), taken_.end(), e.name) ||
                           std::find(unknown.begin(), unknown.end(), e.name) != unknown.end();
        if (!known) unknown.push_back(e.name);
      }
    }
    if (unknown.empty()) return;
    throw usage_error("no stage and no loss takes the side input" + std::string(unknown.size() > 1 ? "s " : " ") +
                      listed(unknown) + " of the batch; " +
                      (taken_.empty() ? "none takes any" : "those that are taken are " + listed(taken_)) +
                      ". Remedy: the name in stage.side_inputs or loss_function::side_inputs, or a batch without the tensor");
  }

  /// Adds a batch to the step's fingerprints; a step may accumulate several batches. Reads only tensors that will be compared.
  void add(split_batch const& cut) {
    if (!due()) return;
    bool const whole = compares_all();
    auto const put = [whole](part& into, at::Tensor const& t) { whole ? into.marks.add(t) : into.marks.add_sample(t); };
    for (int m = 0; m < cut.count(); ++m) {
      for (std::size_t i = 0; i < parts_.size(); ++i) {
        part& p = parts_[i];
        if (!p.used_here) continue;
        if (i >= before_extras_) {
          for (side_input const& e : cut.side_inputs(m)) {
            if (e.name == p.name) put(p, e.value);
          }
        } else {
          for (at::Tensor const& t : i == 0 ? cut.inputs(m) : cut.targets(m)) put(p, t);
        }
      }
    }
  }
  /// This rank's fingerprints for the gather; empty (on all ranks) in a step that compares no data.
  std::span<double const> numbers() {
    if (!due()) return {};
    for (std::size_t i = 0; i < parts_.size(); ++i) parts_[i].marks.write(numbers_.data() + i * tensor_marks::numbers);
    return numbers_;
  }
  /// Over shards, compares the first batch before its run: shards with different batches compute different gradients, which the
  /// comparison of shards (shard_agreement.hpp) would take for a fault of the stage. Collective in the first run of a step.
  /// \throws preflight_error as `check`
  void check_shards(transport& comm, error_context const& here) {
    if (where_.shards == 1 || compared_ > 0 || !due()) return;
    std::span<double const> const mine = numbers();
    std::vector<double> all(mine.size() * static_cast<std::size_t>(where_.world()));
    comm.all_gather(mine, all);
    check([&](int rank) { return all.data() + static_cast<std::size_t>(rank) * mine.size(); }, here);
  }
  /// Counts a step, after its gather: with `data_check::first_step`, later steps compare no data.
  void was_compared() { ++compared_; }

  /// Compares the gathered fingerprints.
  /// \param of_rank returns a pointer to the gathered numbers of a global rank
  /// \throws preflight_error, the same on every rank, where two ranks of a pipeline were given different data
  template <class OfRank>
  void check(OfRank const& of_rank, error_context const& here) const {
    auto const differs = [&](int a, int b, std::size_t i) {
      double const* const x = of_rank(a) + i * tensor_marks::numbers;
      double const* const y = of_rank(b) + i * tensor_marks::numbers;
      return tensor_marks::given(x) && tensor_marks::given(y) && !tensor_marks::same(x, y);
    };
    int const of_replica = where_.ranks_of_replica();
    for (int first = 0; first < where_.world(); first += of_replica) {
      if (alike(first, differs, of_rank)) continue;
      for (int a = first; a < first + of_replica; ++a) {
        for (int b = a + 1; b < first + of_replica; ++b) {
          std::string what;
          for (std::size_t i = 0; i < parts_.size(); ++i) {
            if (differs(a, b, i)) what += (what.empty() ? "" : " and ") + in_words(i);
          }
          if (!what.empty()) refuse(a, b, what, here);
        }
      }
    }
  }

  /// Compares the first step's fingerprints over the replicas. Two replicas have the same batch if all data that both gathered
  /// are equal, inputs or targets among them.
  /// \param of_rank as for `check`
  /// \returns a warning about the first two replicas with the same batch; empty if no two replicas have the same
  template <class OfRank>
  std::string equal_replicas(OfRank const& of_rank) const {
    for (int b = 1; b < where_.replicas; ++b) {
      for (int a = 0; a < b; ++a) {
        if (!same_in_replicas(a, b, of_rank)) continue;
        return "replicas " + std::to_string(a) + " and " + std::to_string(b) +
               " were given the same batch, so the step's gradient is that of fewer samples than the step counts. Remedy: "
               "chevron::distributed_sampler, or samples by topology::replica(); if one batch is meant, "
               "trainer_options::when_same_batch = same_batch::allow";
      }
    }
    return "";
  }

 private:
  struct part {
    std::string name;
    bool used_here;
    tensor_marks marks;
  };

  static constexpr long period = 100;  // of `data_check::sampled`

  bool due() const { return !parts_.empty() && (when_ != data_check::first_step || compared_ == 0); }
  bool compares_all() const { return when_ != data_check::sampled || compared_ % period == 0; }

  /// Whether each part of a replica's data is equal on all ranks that gathered it. \param first the replica's first rank
  template <class Differs, class OfRank>
  bool alike(int first, Differs const& differs, OfRank const& of_rank) const {
    for (std::size_t i = 0; i < parts_.size(); ++i) {
      int known = -1;
      for (int r = first; r < first + where_.ranks_of_replica(); ++r) {
        if (known >= 0 && differs(known, r, i)) return false;
        if (known < 0 && tensor_marks::given(of_rank(r) + i * tensor_marks::numbers)) known = r;
      }
    }
    return true;
  }

  template <class OfRank>
  bool same_in_replicas(int a, int b, OfRank const& of_rank) const {
    bool same = false;
    for (int k = 0; k < where_.ranks_of_replica(); ++k) {
      for (std::size_t i = 0; i < parts_.size(); ++i) {
        double const* const x = of_rank(a * where_.ranks_of_replica() + k) + i * tensor_marks::numbers;
        double const* const y = of_rank(b * where_.ranks_of_replica() + k) + i * tensor_marks::numbers;
        if (!tensor_marks::given(x) || !tensor_marks::given(y)) continue;
        if (!tensor_marks::same(x, y)) return false;
        same = same || i < before_extras_;
      }
    }
    return same;
  }

  static std::string listed(std::vector<std::string> const& names) {
    std::string out;
    for (std::string const& name : names) out += (out.empty() ? "`" : ", `") + name + "`";
    return out;
  }
  std::string in_words(std::size_t i) const { return i < before_extras_ ? parts_[i].name : "`" + parts_[i].name + "`"; }

  [[noreturn]] static void refuse(int a, int b, std::string const& what, error_context const& here) {
    throw preflight_error(
        "ranks " + std::to_string(a) + " and " + std::to_string(b) + " were given different " + what +
            ": all ranks of a pipeline take the same batch, samples in one order. No parameter was changed. Remedy: "
            "chevron::distributed_sampler, or one seed on all ranks for shuffling and augmentation (in threads chevron::seeded, "
            "as threads share a generator); if different data are meant, give each rank only its stages' tensors, or set "
            "trainer_options::check_data to data_check::never",
        naming(here, {a, b}));
  }

  data_check when_ = data_check::never;
  topology where_;
  std::vector<part> parts_;        // data that several ranks of a pipeline read: inputs, targets, side inputs by name
  std::size_t before_extras_ = 0;  // number of parts before side inputs
  std::vector<double> numbers_;
  std::vector<std::string> taken_;  // side inputs that any rank's stages or loss take, sorted
  long compared_ = 0;               // number of steps so far
};

}  // namespace detail
}  // namespace chevron
