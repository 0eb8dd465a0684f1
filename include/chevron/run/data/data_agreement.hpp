#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <random>
#include <span>
#include <string>
#include <utility>
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
#include <chevron/run/data/split_batch.hpp>

/// \file
/// Have all ranks of a pipeline been given the same batch?

namespace chevron {

/// When the ranks of a pipeline compare the batches they were given.
enum class data_check {
  first_step,  ///< in the first step of a trainer, and the first loss of an evaluator
  every_step,
  never
};

namespace detail {

/// A number drawn once for this process: with an address it says which memory of the job is meant.
inline std::uint64_t process_number() {
  static std::uint64_t const drawn = [] {
    std::random_device device;
    return static_cast<std::uint64_t>(device()) << 32 | device();
  }();
  return drawn ^ static_cast<std::uint64_t>(::getpid());  // what is forked has another
}

/// Fingerprints of some tensors, of what they hold and of where they are.
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
    if (t.layout() != at::kStrided || t.is_meta()) return;  // its shape must do
    for (std::int64_t const stride : t.strides()) memory_.add(&stride, sizeof stride);
    std::uint64_t const where[] = {process_number(), reinterpret_cast<std::uintptr_t>(t.const_data_ptr())};
    memory_.add(where, sizeof where);
    at::Tensor const dense = host_copy(materialized(t)).contiguous();
    content_.add(dense.const_data_ptr(), dense.nbytes());
  }

  /// Halves of 32 bits, which a double holds exactly, from 1 on; all 0: nothing was given.
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
  /// Ranks that are threads may have one tensor, which a stage may be changing already.
  static bool same(double const* a, double const* b) { return (a[0] == b[0] && a[1] == b[1]) || (a[2] == b[2] && a[3] == b[3]); }

 private:
  void word(std::int64_t value) {
    content_.add(&value, sizeof value);
    memory_.add(&value, sizeof value);
  }

  byte_fingerprint content_, memory_;
  bool given_ = false;
};

/// Among the names of what a rank's stages take: the batch's targets. No side input has it.
inline constexpr char const* targets_taken = "";

/// The comparison. Inputs matter on the rank of stage 0, targets on that of the last stage and of stages that ask for them, and
/// that they belong together is seen only where both ranks have both. Extras matter on each rank that takes them. What a rank
/// does not use, or was not given, is not compared.
///
/// Numbers for it go with a gather that is made anyway. Where nothing is to be compared their room stays 0.
class data_agreement {
 public:
  data_agreement() = default;
  /// \param taken by pipeline rank: the side inputs that its stages take
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

  /// The same, and tells the other ranks what this one takes. Collective.
  static data_agreement gathered(plan_view plan, transport& comm, std::vector<std::string> const& mine, data_check when) {
    std::string text;
    for (std::string const& name : mine) text += name + "\n";
    std::vector<std::vector<std::string>> taken;
    auto const all = comm.all_gather_text(text);
    for (int p = 0; p < plan.size.ranks; ++p) {
      std::string const& of_rank = all[static_cast<std::size_t>(comm.topology().rank_at(0, p, 0))];
      auto& names = taken.emplace_back();
      for (std::size_t at = 0; at < of_rank.size(); at += names.back().size() + 1)
        names.push_back(of_rank.substr(at, of_rank.find('\n', at) - at));
    }
    return {plan, comm.topology(), taken, when};
  }

  /// How many numbers a rank contributes, the same on every rank.
  std::size_t width() const { return numbers_.size(); }

  /// A step, or an evaluation, begins.
  void begin() {
    for (part& p : parts_) p.marks.clear();
  }
  /// One of its batches, of which this may be several. Looks at it only if it is to be compared.
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
  /// What this rank contributes; nothing if nothing is to be compared, as on all ranks.
  std::span<double const> numbers() {
    if (!due()) return {};
    for (std::size_t i = 0; i < parts_.size(); ++i) parts_[i].marks.write(numbers_.data() + i * tensor_marks::numbers);
    return numbers_;
  }
  /// They are on their way to all ranks.
  void was_compared() { compared_ = true; }

  /// \param of_rank gives what a rank contributed, by global rank
  /// \throws preflight_error where two ranks of a pipeline have others: the same on every rank
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
  std::vector<part> parts_;        // what several ranks of a pipeline use: inputs, targets, side inputs by name
  std::size_t before_extras_ = 0;  // parts that are no side inputs
  std::vector<double> numbers_;
  bool compared_ = false;
};

}  // namespace detail

}  // namespace chevron
