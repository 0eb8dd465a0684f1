#include "step_teller.hpp"

#include <cstdio>
#include <functional>
#include <optional>
#include <utility>

#include <chevron/base/format.hpp>
#include <chevron/checkpoint/checkpoint.hpp>
#include <chevron/run/core/error.hpp>

#include "common/trainer_flags.hpp"

namespace chevron::train {

namespace {

constexpr char const *steps_flag = "--steps", *rate_flag = "--learning-rate", *clip_flag = "--clip-grad-norm";
constexpr char const *warm_up_flag = "--warm-up", *lowest_flag = "--lowest-learning-rate", *decay_flag = "--decay",
                     *betas_flag = "--betas";
constexpr char const *default_warm_up = "a twentieth of the steps", *default_lowest = "a tenth of --learning-rate";

/// Flags that a resumed run may change.
std::map<std::string, std::string> flags_of(job_options const& o) {
  return {{steps_flag, std::to_string(o.steps)},
          {rate_flag, show::exact(o.learning_rate)},
          {warm_up_flag, o.warm_up ? show::exact(*o.warm_up) : default_warm_up},
          {lowest_flag, o.lowest_rate ? show::exact(*o.lowest_rate) : default_lowest},
          {decay_flag, o.decay},
          {betas_flag, words_for_betas(o)},
          {clip_flag, show::exact(o.clip_grad_norm)}};
}

/// The flags of a saved run. Where a manifest has none, programs without the flag did what its default does.
std::map<std::string, std::string> flags_of_saved(std::map<std::string, std::string> saved) {
  job_options const defaults;
  saved.merge(std::map<std::string, std::string>{{warm_up_flag, default_warm_up},
                                                 {lowest_flag, default_lowest},
                                                 {decay_flag, defaults.decay},
                                                 {betas_flag, words_for_betas(defaults)}});
  return saved;
}

/// The learning rate that a saved run would have had.
std::function<double(long)> saved_learning_rate(std::map<std::string, std::string> const& saved) {
  auto const number_in = [&](char const* flag, char const* unless) -> std::optional<double> {
    std::string const& text = saved.at(flag);
    return text == unless ? std::nullopt : std::optional(std::stod(text));
  };
  job_options o;
  o.steps = std::stol(saved.at(steps_flag));
  o.learning_rate = std::stod(saved.at(rate_flag));
  o.warm_up = number_in(warm_up_flag, default_warm_up);
  o.lowest_rate = number_in(lowest_flag, default_lowest);
  o.decay = saved.at(decay_flag);
  return learning_rate_of(o);
}

/// A sentence for each flag that differs from the saved run's, and for the learning rate that follows.
std::string changed_flags(job_options const& o, std::map<std::string, std::string> const& metadata, long done) {
  std::map<std::string, std::string> const saved = flags_of_saved(metadata);
  std::string out;
  for (auto const& [flag, value] : flags_of(o)) {
    auto const before = saved.find(flag);
    if (before == saved.end() || before->second == value) continue;
    out += "; " + flag + " is " + value + ", and was " + before->second + ": it goes on as another run";
  }
  if (!saved.contains(steps_flag) || !saved.contains(rate_flag)) return out;
  double const now = learning_rate_of(o)(done), then = saved_learning_rate(saved)(done);
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

void save_where_due(job_options const& o, std::map<std::string, std::string> const& words, trainer& train, long step,
                    save_options const& how) {
  bool const due = step == o.steps || train.should_stop() || (o.save_every > 0 && step % o.save_every == 0);
  if (o.checkpoint.empty() || !due) return;
  auto saved = words;
  saved.merge(flags_of(o));
  save_checkpoint(train, o.checkpoint, saved, how);
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
  named_figures figures = figures_of(line_of);  // once: memory may grow between two calls
  if (number != validated_after_) return write(number, figures);
  if (!validation_) {
    waiting_ = std::move(figures);
    return;
  }
  write_validated(std::move(figures));
}

void step_teller::will_validate(long step) {
  validated_after_ = step;
  validation_.reset();
}

void step_teller::validated(double loss) {
  if (!lines_) return;
  make_room();
  std::printf("step: %*ld  validation loss: %8.5f\n", static_cast<int>(std::to_string(options_.steps).size()), validated_after_,
              loss);
  std::fflush(stdout);
  validation_ = loss;
  if (waiting_) write_validated(std::exchange(waiting_, std::nullopt).value());
}

void step_teller::write_validated(named_figures figures) {
  figures.emplace_back("validation_metrics/loss", *validation_);
  write(validated_after_, figures);
  validated_after_ = -1;
}

void step_teller::write(long step, named_figures const& figures) {
  metrics_->write(step, figures);
  if (events_) events_->add(step, figures);
}

}  // namespace chevron::train
