#pragma once

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <chevron/run/core/rank_trace.hpp>

#include "event_file.hpp"

/// \file
/// What a person sees while a model trains. Only global rank 0 has one.

namespace chevron::train {

/// `1,234,567`
std::string grouped(std::int64_t number);
/// `1 step`, `1,234 steps`
std::string some(std::int64_t count, std::string const& one);
/// Seconds for people: `4.2 ms`, `1.3 s`, `2 min 5 s`.
std::string duration(double seconds);

/// Lines of a name and words, words broken at spaces to the width of the terminal and aligned.
void print_facts(std::vector<std::pair<std::string, std::string>> const& facts);

/// Text that a model wrote, as a terminal can show it: no control characters, no broken UTF-8.
std::string shown(std::string const& bytes);

bool colour_wanted();
std::string bold(std::string const& words);
std::string faint(std::string const& words);

/// Before anything is trained: can this file be written to? A `usage_error` names the flag and the file if not.
void check_file(char const* flag, std::string const& path);
/// Before anything is trained: creates the folder if it is missing. A `usage_error` names flag and folder if no file can be
/// written into it.
void check_folder(char const* flag, std::string const& path);
/// A new event file in the folder of `--tensorboard`; null if the flag is not given. A `usage_error`, as `check_folder`.
/// \param first_step with which the run begins or goes on
std::unique_ptr<event_file> events_in(std::string const& folder, long first_step);
/// Writes a new file under a flag's path (chevron/base/new_file.hpp). A `usage_error`, as `check_file`, if that fails.
void write_file(char const* flag, std::string const& path, std::string const& content);

/// A step as it is told.
struct told_step {
  long step = 0;  ///< from 1
  double loss = 0;
  std::vector<std::pair<std::string, double>> losses{};  ///< of stages, by name: means
  double grad_norm = 0;
  double learning_rate = 0;
  double seconds = 0;          ///< with the loading of its data
  double loading_seconds = 0;  ///< of these
  double tokens = 0;           ///< of all ranks
  double tokens_seen = 0;      ///< since the beginning of training
  int ranks = 1;
  double flops_per_token = 0;
  double bubble = 0;              ///< a share
  allocator_use device_memory{};  ///< of rank 0's GPU; 0 without one

  /// By each rank, as torchtitan counts.
  double tokens_per_second() const { return tokens / seconds / ranks; }
};

/// The figures of a step under the names that torchtitan gives them in TensorBoard, and `bubble`: those of all files of metrics.
named_figures figures_of(told_step const& step);

/// Memory, and that as a share of all there is.
struct memory_use {
  double gibibytes = 0;
  double share = 0;
};
/// The most that this process has had: of its GPU in the step, or without one from the operating system since it began.
memory_use peak_memory(told_step const& step);

/// Steps as they come: one line that is rewritten where a person looks at a terminal, else a plain line now and then.
class step_lines {
 public:
  explicit step_lines(long steps);
  ~step_lines();
  step_lines(step_lines const&) = delete;
  step_lines& operator=(step_lines const&) = delete;

  void show(told_step const& step);
  /// Whether plain lines were printed.
  bool plain() const { return plain_; }
  /// Takes the progress line away, so that other text can follow.
  void clear();

 private:
  using clock = std::chrono::steady_clock;
  std::string line(told_step const& step) const;
  void add(told_step const& step);
  void draw(told_step const& step);

  long steps_;
  bool progress_;
  bool plain_;
  bool drawn_ = false;
  // Single steps scatter: speed and bubble are shown as means, since the last plain line, or fading on the progress line.
  double tokens_ = 0, seconds_ = 0, bubble_seconds_ = 0;
  double fading_seconds_ = 0, fading_tokens_ = 0, fading_bubble_ = 0;
  clock::time_point begin_, last_drawn_;
};

/// One JSON object a step, its keys `step` and the names of `figures_of`. The file is a new one, which gets its name before the
/// first line. A run that goes on copies the lines that are there, less those of steps that it does again and a last line of
/// which a part is missing.
class metrics_file {
 public:
  /// \param go_on_at the step to go on with; nullopt: the file begins anew
  metrics_file(std::string const& path, std::optional<long> go_on_at);
  ~metrics_file();
  metrics_file(metrics_file const&) = delete;
  metrics_file& operator=(metrics_file const&) = delete;
  /// \param step from 1
  void write(long step, named_figures const& figures);

 private:
  std::string path_;
  std::FILE* file_ = nullptr;
};

}  // namespace chevron::train
