#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

/// \file
/// A training program as text, which is drawn from a seed, run in two ways, made smaller, and printed.
///
///     seed=5 steps=3 plan=ZB-H1,2,4 line=threads in=seq:3:6 n=9 opt=adamw clip=0.05 :: mod lin:8 lstm:8:1 | call+rc lin:4
///     bn+eval
///
/// Before `::` stand options, after it stages, each with its form and its blocks. An option that is not there has its default.

namespace differential {

/// A program that means nothing: blocks that do not fit each other, a plan that does not exist.
struct meaningless : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// `conv1:8:3+frozen`: a name, numbers, flags.
struct block {
  std::string name;
  std::vector<int> numbers = {};
  std::set<std::string> flags = {};

  int number(std::size_t i, int otherwise) const { return i < numbers.size() ? numbers[i] : otherwise; }
  bool has(std::string const& flag) const { return flags.contains(flag); }
};

/// How a stage is given: `mod` (one module), `seq` (a Sequential), `call` (a callable with parameters), `both` (a module and a
/// callable), `parts` (in_sequence, a part for each block).
struct stage_text {
  block form;
  std::vector<block> blocks;
};

struct program {
  std::map<std::string, std::string> options;
  std::vector<stage_text> stages;

  bool has(std::string const& key) const { return options.contains(key); }
  std::string get(std::string const& key, std::string const& otherwise = "") const;
  long number(std::string const& key, long otherwise = 0) const;
  double real(std::string const& key, double otherwise = 0) const;
  std::uint64_t seed() const { return static_cast<std::uint64_t>(number("seed", 1)); }
  int steps() const { return static_cast<int>(number("steps", 2)); }
  int replicas() const { return static_cast<int>(number("rep", 1)); }
  /// Ranks of each stage: with `tp` they cut the layers of blocks `tp`, with `shards` each holds and computes whole stages.
  int shards() const { return static_cast<int>(number("tp", number("shards", 1))); }
  /// The step before which a run with `resume` saves, ends, and goes on from the files; otherwise the end.
  int saved_after() const { return static_cast<int>(std::min(number("resume", steps()), static_cast<long>(steps()))); }
  /// Neighbouring replicas over which the experts of blocks `moe` are divided.
  int expert_replicas() const { return static_cast<int>(number("exp", 1)); }
  int world() const { return ranks() * replicas() * shards(); }
  /// Whether the loop runs whole sequences where the schedule has slices.
  bool by_sequences() const { return has("whole"); }
  /// Whether Chevron adds in another order than the loop: losses and norms alone are compared, within a tolerance.
  bool rounds() const { return has("tp") || by_sequences(); }
  /// Whether shares are gathered while the next step begins.
  bool gathers_late() const { return has("shard") && has("late"); }
  /// Whether parameters are final only once a trainer was synchronized.
  bool ends_late() const { return has("pv") || gathers_late(); }
  int passes() const { return static_cast<int>(number("acc", 1)); }

  std::string schedule() const;  ///< of `plan=name,P,M`
  int ranks() const;
  int micro_batches() const;
  int slices() const { return static_cast<int>(number("slices", 1)); }
  int units() const { return micro_batches() * slices(); }
};

/// Stages with a tied parameter, ascending.
std::vector<int> tied_stages(program const& p);

/// Does this block give a loss of its stage: by `aux`, which counts as the model's, or `own`, with a weight of its own?
bool gives_loss(block const& b);
/// Does any block?
bool gives_losses(program const& p);

/// How many carries has this block? `att` keys and values, `mem` a state and a number.
int carries_of(block const& b);

/// Declarations and collectives of blocks `tp` that are wrong, as flags.
std::vector<std::string> planted_faults(program const& p);

/// Has this block parameters?
bool learns(block const& b);

std::string text_of(block const& b);
std::string text_of(program const& p);
/// \throws meaningless
program program_of(std::string const& text);

std::vector<std::string> split(std::string const& text, char at);

/// Numbers that are the same on every machine.
class dice {
 public:
  explicit dice(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next();
  int below(int count) { return static_cast<int>(next() % static_cast<std::uint64_t>(count)); }
  int between(int least, int most) { return least + below(most - least + 1); }
  bool one_in(int count) { return below(count) == 0; }
  double real() { return static_cast<double>(next() >> 11) * 0x1p-53; }
  template <class Item>
  Item const& of(std::vector<Item> const& items) {
    return items[static_cast<std::size_t>(below(static_cast<int>(items.size())))];
  }

 private:
  std::uint64_t state_;
};

}  // namespace differential
