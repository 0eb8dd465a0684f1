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
#include <chevron/run/comm/message_signature.hpp>
#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/fingerprint.hpp>
#include <chevron/run/core/host_copy.hpp>
#include <chevron/run/core/tensors.hpp>
#include <chevron/run/core/text_parts.hpp>
#include <chevron/run/data/split_batch.hpp>

/// \file
/// Compares the batches that the ranks of a pipeline were given, by fingerprints.

namespace chevron {

/// The steps in which the ranks of a pipeline compare the batches that they were given.
enum class data_check {
  first_step,  ///< the first step of a trainer, and the first loss of an evaluator
  every_step,  ///< every step, and every loss of an evaluator
  never        ///< no step
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

  void clear() { *this = {}; }
  void add(at::Tensor const& t) {
    given_ = true;
    word(t.defined() ? static_cast<std::int64_t>(t.scalar_type()) : -1);
    if (!t.defined()) return;
    word(t.dim());
    for (std::int64_t const size : t.sizes()) word(size);
    if (t.layout() != at::kStrided || t.is_meta()) return;  // dtype and shape alone are compared
    for (std::int64_t const stride : t.strides()) memory_.add(&stride, sizeof stride);
    std::uint64_t const where[] = {process_number(), reinterpret_cast<std::uintptr_t>(t.const_data_ptr())};
    memory_.add(where, sizeof where);
    at::Tensor const dense = host_copy(materialized(t)).contiguous();
    content_.add(dense.const_data_ptr(), dense.nbytes());
  }

  /// Writes each fingerprint as two halves of 32 bits, which a double represents exactly, plus 1 each. If no tensor was added,
  /// all numbers are 0.
  void write(double* to) const {
    if (!given_) {
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

  byte_fingerprint content_, memory_;
  bool given_ = false;
};

/// In a list of the side inputs that a rank's stages read, this name means the targets. No side input has an empty name.
inline constexpr char const* targets_taken = "";

/// Compares fingerprints of batches over the ranks of each pipeline: inputs and targets on the ranks of the first and the last
/// stage, targets also on ranks whose stages read targets, each side input on the ranks whose stages read it. Tensors that a
/// rank was not given are not compared: if the first stage's rank has only inputs and the last stage's rank only targets, a
/// mismatch of inputs and targets is not found.
///
/// Ranks exchange fingerprints in the gather of a step or an evaluation; 0 stands for tensors that are not compared.
class data_agreement {
 public:
  data_agreement() = default;
  /// \param taken for each pipeline rank: names of side inputs that its stages read; `targets_taken` if they read targets
  data_agreement(plan_view plan, topology const& where, std::vector<std::vector<std::string>> const& taken, data_check when)
      : when_(when), where_(where) {
    if (when == data_check::never) return;
    int const first = plan.rank_of_stage(0), last = plan.rank_of_stage(plan.stages - 1), me = where.pipeline_rank();
    auto const takes = [&](std::size_t rank, std::string const& name) {
      return std::find(taken[rank].begin(), taken[rank].end(), name) != taken[rank].end();
    };
    std::vector<std::string> names;
    for (auto const& of_rank : taken) names.insert(names.end(), of_rank.begin(), of_rank.end());
    std::sort(names.begin(), names.end());
    names.erase(std::unique(names.begin(), names.end()), names.end());
    bool const targets_elsewhere = std::erase(names, targets_taken) > 0;
    if (first != last || targets_elsewhere || where.shards > 1) {
      bool const at_end = me == first || me == last;
      parts_.push_back({"inputs", at_end, {}});
      parts_.push_back({"targets", at_end || takes(static_cast<std::size_t>(me), targets_taken), {}});
    }
    before_extras_ = parts_.size();
    for (std::string const& name : names) {
      int takers = 0;
      for (std::size_t r = 0; r < taken.size(); ++r) takers += takes(r, name) ? 1 : 0;
      if (takers * where.shards > 1) parts_.push_back({name, takes(static_cast<std::size_t>(me), name), {}});
    }
    numbers_.resize(parts_.size() * tensor_marks::numbers);
  }

  /// Gathers all ranks' names, and creates the comparison. Collective.
  /// \param mine names of the side inputs that this rank's stages read; `targets_taken` if the stages read targets
  static data_agreement gathered(plan_view plan, transport& comm, std::vector<std::string> const& mine, data_check when) {
    std::string text;
    for (std::string const& name : mine) text += name + "\n";
    std::vector<std::vector<std::string>> taken;
    auto const all = comm.all_gather_text(text);
    for (int p = 0; p < plan.size.ranks; ++p)
      taken.push_back(parts_of(all[static_cast<std::size_t>(comm.topology().rank_at(0, p, 0))], '\n'));
    return {plan, comm.topology(), taken, when};
  }

  /// The count of numbers that each rank contributes to the gather, equal on all ranks.
  std::size_t width() const { return numbers_.size(); }

  /// Clears the fingerprints. Called as a step or an evaluation begins.
  void begin() {
    for (part& p : parts_) p.marks.clear();
  }
  /// Adds a batch to the step's fingerprints; a step may accumulate several batches. Reads only tensors that will be compared.
  void add(split_batch const& cut) {
    if (!due()) return;
    for (int m = 0; m < cut.count(); ++m) {
      for (std::size_t i = 0; i < parts_.size(); ++i) {
        part& p = parts_[i];
        if (!p.used_here) continue;
        if (i >= before_extras_) {
          for (side_input const& e : cut.side_inputs(m)) {
            if (e.name == p.name) p.marks.add(e.value);
          }
        } else {
          for (at::Tensor const& t : i == 0 ? cut.inputs(m) : cut.targets(m)) p.marks.add(t);
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
  /// Records that a step's fingerprints were gathered: with `data_check::first_step`, later steps compare no data.
  void was_compared() { compared_ = true; }

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

 private:
  struct part {
    std::string name;
    bool used_here;
    tensor_marks marks;
  };

  bool due() const { return !parts_.empty() && (when_ == data_check::every_step || !compared_); }
  std::string in_words(std::size_t i) const { return i < before_extras_ ? parts_[i].name : "`" + parts_[i].name + "`"; }

  [[noreturn]] static void refuse(int a, int b, std::string const& what, error_context const& here) {
    throw preflight_error(
        "ranks " + std::to_string(a) + " and " + std::to_string(b) + " were given different " + what +
            ": all ranks of a pipeline take the same batch, samples in one order. No parameter was changed. Remedy: "
            "chevron::distributed_sampler, or one seed on all ranks for what shuffles and augments (in threads chevron::seeded, "
            "as they share a generator); if it is meant so, give a rank only what its stages use, or set "
            "trainer_options::check_data to data_check::never",
        here);
  }

  data_check when_ = data_check::never;
  topology where_;
  std::vector<part> parts_;        // data that several ranks of a pipeline read: inputs, targets, side inputs by name
  std::size_t before_extras_ = 0;  // number of parts before side inputs
  std::vector<double> numbers_;
  bool compared_ = false;
};

}  // namespace detail
}  // namespace chevron
