#pragma once

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <chevron/run/train/evaluator.hpp>
#include <chevron/run/train/trainer.hpp>
#include <chevron/tools/profile/trace_window.hpp>

#include "job.hpp"
#include "loss.hpp"
#include "module.hpp"
#include "optimizer.hpp"
#include "program.hpp"

/// \file
/// A rank's trainer and evaluator, for stages of Python.

namespace chevron_pipelining {

/// The arguments of a `pipeline`.
struct pipeline_setup {
  chevron::proved_program program;
  std::map<int, python_stage> stages;  ///< of this rank, by number
  object loss;                         ///< None: the pipeline only runs forwards
  bool weighed = true;                 ///< as of `loss_of`
  object optimizer;                    ///< None: the caller steps
  chevron::trainer_options options;
};

/// The stages of one rank, which train and compute outputs. Arguments of a call: inputs and targets of each microbatch.
class pipeline {
 public:
  using arguments = std::vector<std::pair<chevron::tensors, chevron::tensors>>;

  pipeline(std::shared_ptr<job> of, pipeline_setup setup) : job_(std::move(of)), program_(setup.program) {
    job_->check_owner();
    auto const build = [stages = std::move(setup.stages)](int number) { return stages.at(number).make(); };
    if (setup.loss.get() == Py_None) {
      evaluator_ = std::make_unique<chevron::evaluator>(chevron::evaluator_setup{.program = std::move(setup.program),
                                                                                 .transport = job_->transport(),
                                                                                 .stages = build,
                                                                                 .options = std::move(setup.options)});
      return;
    }
    trainer_ = std::make_unique<chevron::trainer>(chevron::trainer_setup{.program = std::move(setup.program),
                                                                         .transport = job_->transport(),
                                                                         .stages = build,
                                                                         .loss = loss_of(setup.loss, setup.weighed),
                                                                         .optimizer = factory_of(setup.optimizer),
                                                                         .options = std::move(setup.options)});
    evaluator_ = std::make_unique<chevron::evaluator>(*trainer_);
  }
  ~pipeline() {
    without_gil const free;
    auto const here = job_->on_device();
    if (job_->forked()) {
      static_cast<void>(evaluator_.release());
      static_cast<void>(trainer_.release());
      return;
    }
    evaluator_.reset();
    trainer_.reset();
  }
  pipeline(pipeline const&) = delete;
  pipeline& operator=(pipeline const&) = delete;

  chevron::step_report step(arguments const& given) {
    job_->check_owner();
    return trained().step(batches(given));
  }
  /// Runs the forwards; the stages' functions have kept the outputs.
  void forward(arguments const& given) {
    job_->check_owner();
    evaluator_->outputs(batches(given));
  }
  /// The mean loss over all samples, on every rank.
  double evaluate(arguments const& given) {
    job_->check_owner();
    return evaluator_->loss(batches(given));
  }

  long next_step() const { return trained().next_step(); }
  void next_step(long step) { trained().next_step(step); }
  job& of() { return *job_; }
  chevron::plan_view plan() const { return program_.view().plan; }

  /// Whether a step has run, whose trace is there.
  bool has_trace() const { return trainer_ && trainer_->last_trace().step() >= 0; }

  /// The actions of this rank's last step: name, and begin and end in seconds from the first action.
  std::vector<std::tuple<std::string, double, double>> trace() const {
    std::vector<std::tuple<std::string, double, double>> out;
    auto const& entries = trained().last_trace().entries();
    for (auto const& e : entries) {
      double const zero = static_cast<double>(entries.front().start);
      out.emplace_back(chevron::to_text(e.op).str(), (static_cast<double>(e.start) - zero) * 1e-9,
                       (static_cast<double>(e.end) - zero) * 1e-9);
    }
    return out;
  }
  /// This rank's last step, as `chevron::steps_of` reads it. \throws chevron::usage_error before the first step
  std::string trace_text() const {
    static_cast<void>(trained());
    if (!has_trace()) throw chevron::usage_error("no step has run. Remedy: a step, then its timeline");
    chevron::trace_window one;
    one.keep(trainer_->last_trace(), trainer_->last_trace().span_seconds());
    return one.text();
  }

 private:
  /// \throws chevron::usage_error without a loss
  chevron::trainer& trained() const {
    if (trainer_) return *trainer_;
    throw chevron::usage_error("these stages have no loss_fn, and only run forwards. Remedy: a loss_fn");
  }
  std::vector<chevron::batch> batches(arguments const& given) {
    for (std::size_t m = numbers_.size(); m < given.size(); ++m) numbers_.push_back(numbered(m));
    std::vector<chevron::batch> out;
    out.reserve(given.size());
    for (auto const& [inputs, targets] : given) {
      out.push_back({inputs, targets, {{micro_batch_number, numbers_[out.size()], true}}});
    }
    return out;
  }

  std::shared_ptr<job> job_;
  chevron::proved_program program_;
  chevron::tensors numbers_;  // `numbered` by microbatch
  std::unique_ptr<chevron::trainer> trainer_;
  std::unique_ptr<chevron::evaluator> evaluator_;
};

}  // namespace chevron_pipelining
