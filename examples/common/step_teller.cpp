#include "step_teller.hpp"

#include <cstdio>
#include <optional>

#include <chevron/run/checkpoint/checkpoint.hpp>
#include <chevron/run/core/error.hpp>

namespace chevron::train {

bool go_on_from_checkpoint(job_options const& o, std::map<std::string, std::string> const& words, trainer& train,
                           nothing_left left) {
  auto const note = resume(train, o.checkpoint, words);
  if (!note) return false;
  if (note->next_step > o.steps + (left == nothing_left::may_be ? 1 : 0)) {
    throw checkpoint_error("the checkpoint is at the end of step " + std::to_string(note->next_step - 1) + ", and --steps is " +
                           std::to_string(o.steps) + ": nothing is left to train. Remedy: more --steps");
  }
  return true;
}

void save_where_due(job_options const& o, std::map<std::string, std::string> const& words, trainer& train, long step) {
  bool const due = step == o.steps || train.should_stop() || (o.save_every > 0 && step % o.save_every == 0);
  if (o.checkpoint.empty() || !due) return;
  save_checkpoint(train, o.checkpoint, words);
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
}

void step_teller::close() {
  if (lines_ && lines_->plain()) std::printf("\n");
  lines_.reset();
  metrics_.reset();
}

void step_teller::make_room() {
  if (lines_) lines_->clear();
}

void step_teller::tell(step_report const& report) {
  if (report.used_graphs) ++launched_;
  if (report.step == first_step_) first_loss_ = report.loss;
  last_loss_ = report.loss;
  double const loading = loading_[report.step];
  loading_.erase(report.step);
  if (!lines_) return;
  told_step line_of{.step = report.step,
                    .loss = report.loss,
                    .losses = {},
                    .grad_norm = report.grad_norm,
                    .learning_rate = report.learning_rate,
                    .seconds = report.seconds + loading,
                    .loading_seconds = loading,
                    .tokens = tokens_,
                    .tokens_seen = static_cast<double>(report.step) * tokens_,
                    .ranks = here_.world(),
                    .flops_per_token = flops_per_token_,
                    .bubble = report.bubble,
                    .device_memory = report.memory};
  for (stage_loss_value const& one : report.losses) line_of.losses.emplace_back(one.name, one.value);
  lines_->show(line_of);
  metrics_->write(line_of);
}

}  // namespace chevron::train
