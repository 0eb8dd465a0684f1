#include "step_teller.hpp"

#include <cstdio>
#include <optional>

#include <chevron/base/format.hpp>
#include <chevron/checkpoint/checkpoint.hpp>
#include <chevron/run/core/error.hpp>

#include "common/trainer_flags.hpp"

namespace chevron::train {

namespace {

constexpr char const *steps_flag = "--steps", *rate_flag = "--learning-rate", *clip_flag = "--clip-grad-norm";

/// Flags that a resumed run may change.
std::map<std::string, std::string> flags_of(job_options const& o) {
  return {{steps_flag, std::to_string(o.steps)},
          {rate_flag, show::exact(o.learning_rate)},
          {clip_flag, show::exact(o.clip_grad_norm)}};
}

/// A sentence for each flag that differs from the saved run's, and for the learning rate that follows.
std::string changed_flags(job_options const& o, std::map<std::string, std::string> const& saved, long done) {
  std::string out;
  for (auto const& [flag, value] : flags_of(o)) {
    auto const before = saved.find(flag);
    if (before == saved.end() || before->second == value) continue;
    out += "; " + flag + " is " + value + ", and was " + before->second + ": it goes on as another run";
  }
  if (!saved.contains(steps_flag) || !saved.contains(rate_flag)) return out;
  double const now = learning_rate_of(static_cast<double>(o.steps), o.learning_rate)(done);
  double const then = learning_rate_of(std::stod(saved.at(steps_flag)), std::stod(saved.at(rate_flag)))(done);
  if (now != then) {
    auto const [follows, saved_one] = detail::texts_apart(now, then);
    out += "; the learning rate of step " + std::to_string(done + 1) + " is " + follows + ", and would have been " + saved_one;
  }
  return out;
}

}  // namespace

std::optional<std::string> begin_from_checkpoint(job_options const& o, std::map<std::string, std::string> const& words,
                                                 trainer& train, nothing_left left) {
  std::optional<checkpoint_note> note;
  // Rates follow from flags, which are compared below.
  if (o.resume) note = resume(train, o.checkpoint, words, {.on_difference = [](std::string const&) {}});
  if (!o.checkpoint.empty()) check_checkpoint_folder(train, o.checkpoint);
  if (!note) return std::nullopt;
  // Earlier programs counted steps from 1 in manifests, and saved no flags.
  long const done = note->metadata.contains(steps_flag) ? note->next_step : note->next_step - 1;
  train.next_step(done);
  if (done + (left == nothing_left::may_be ? 0 : 1) > o.steps) {
    throw checkpoint_error("the checkpoint is at the end of step " + std::to_string(done) + ", and --steps is " +
                           std::to_string(o.steps) + ": nothing is left to train. Remedy: more --steps");
  }
  return "at step " + std::to_string(done + 1) + ", from " + o.checkpoint + changed_flags(o, note->metadata, done);
}

void save_where_due(job_options const& o, std::map<std::string, std::string> const& words, trainer& train, long step) {
  bool const due = step == o.steps || train.should_stop() || (o.save_every > 0 && step % o.save_every == 0);
  if (o.checkpoint.empty() || !due) return;
  auto saved = words;
  saved.merge(flags_of(o));
  save_checkpoint(train, o.checkpoint, saved);
  if (o.keep_checkpoints > 0) remove_old_checkpoints(train, o.checkpoint, o.keep_checkpoints);
}

step_teller::step_teller(job_options const& o, topology const& here, double flops_per_token)
    : options_(o),
      here_(here),
      tokens_(static_cast<double>(o.samples()) * o.replicas * o.context),
      flops_per_token_(flops_per_token) {}

void step_teller::open(long first_step) {
  first_step_ = first_step;
  if (here_.global_rank != 0) return;
  lines_ = std::make_unique<step_lines>(options_.steps);
  metrics_ = std::make_unique<metrics_file>(options_.metrics, options_.resume ? std::optional(first_step) : std::nullopt);
  events_ = events_in(options_.tensorboard, first_step);
}

void step_teller::close() {
  if (lines_ && lines_->plain()) std::printf("\n");
  lines_.reset();
  metrics_.reset();
  events_.reset();
}

void step_teller::make_room() {
  if (lines_) lines_->clear();
}

void step_teller::tell(step_report const& report) {
  if (report.used_graphs) ++launched_;
  long const number = report.step + 1;
  if (number == first_step_) first_loss_ = report.loss;
  last_loss_ = report.loss;
  double const loading = loading_[number];
  loading_.erase(number);
  if (!lines_) return;
  told_step line_of{.step = number,
                    .loss = report.loss,
                    .losses = {},
                    .grad_norm = report.grad_norm,
                    .learning_rate = report.learning_rate,
                    .seconds = report.seconds + loading,
                    .loading_seconds = loading,
                    .tokens = tokens_,
                    .tokens_seen = static_cast<double>(number) * tokens_,
                    .ranks = here_.world(),
                    .flops_per_token = flops_per_token_,
                    .bubble = report.bubble,
                    .device_memory = report.memory};
  for (stage_loss_value const& one : report.losses) line_of.losses.emplace_back(one.name, one.value);
  lines_->show(line_of);
  named_figures const figures = figures_of(line_of);  // once: memory may grow between two calls
  metrics_->write(number, figures);
  if (events_) events_->add(number, figures);
}

}  // namespace chevron::train
