#pragma once

#include <memory>
#include <utility>
#include <vector>

#include <chevron/run/comm/transport.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/rank_trace.hpp>
#include <chevron/run/core/scalar_reader.hpp>
#include <chevron/run/execute/executor.hpp>
#include <chevron/run/train/record.hpp>
#include <chevron/run/train/step_part.hpp>
#include <chevron/run/train/step_report.hpp>

/// \file
/// The list of a step's parts, with the record that they write and the one gather of a step.

namespace chevron::detail {

/// The parts of a trainer's step, in the order in which they judge. All ranks make the same parts with fields, in the same order.
class step_parts {
 public:
  /// Makes a part, and appends it to the list. \param given arguments of the constructor, after the record
  template <class Part, class... Given>
  Part& make(Given&&... given) {
    auto made = std::make_unique<Part>(mine_, std::forward<Given>(given)...);
    Part& out = *made;
    parts_.push_back(std::move(made));
    return out;
  }

  /// Runs the parts' own collectives once. Collective.
  void connect(transport& comm) {
    for (auto const& part : parts_) part->connect(comm);
  }
  /// Begins a step, before its first forward. \param pending whether the verdict on the step before is still to come
  void begin(bool pending) {
    for (auto const& part : parts_) part->begin(pending);
  }
  /// Takes the batch of a run, before its first forward. Collective. \param step the step's number
  void take(transport& comm, split_batch const& batch, long step) {
    for (auto const& part : parts_) part->take(comm, batch, step);
  }
  /// Begins the step's forwards again. \param skipped whether the step before, which was undone, is skipped
  void begin_again(bool skipped) {
    for (auto const& part : parts_) part->begin_again(skipped);
  }
  /// Starts the parts' own collectives. Collective.
  void start(transport& comm) {
    for (auto const& part : parts_) part->start(comm);
  }
  /// Ends the parts' own collectives. Collective.
  void finish(transport& comm) {
    for (auto const& part : parts_) part->finish(comm);
  }
  /// Restores what a skipped step changed.
  void skip() {
    for (auto const& part : parts_) part->skip();
  }
  /// Drops the runs of the step so far.
  void drop() {
    for (auto const& part : parts_) part->drop();
  }
  /// Sums or compares gradients over ranks of a pipeline or a stage. Collective. \param program counts of its slots
  void sum(transport& comm, slot_counts program, error_context const& here) {
    for (auto const& part : parts_) part->sum(comm, program, here);
  }
  /// Clears the record, and collects numbers of the complete gradients. \param numbers receives requests
  void complete(scalar_reader& numbers) {
    mine_.clear();
    for (auto const& part : parts_) part->complete(mine_, numbers);
  }
  /// Adds a run. The host waits until an accelerator has computed the losses.
  /// \param ran the run's executor, which has the accelerator's times
  /// \param numbers further requests, which are read together with those of the parts
  void add(step_pass const& pass, executor& ran, scalar_reader numbers = {}) {
    for (auto const& part : parts_) part->ask(pass, numbers);
    numbers.start();
    // The host reads the times of earlier computations while the accelerator runs the last ones, and the norms.
    rank_trace const& trace = ran.synchronize_trace();
    numbers.read();
    for (auto const& part : parts_) part->add(pass, trace);
  }
  /// Writes this rank's numbers of the step.
  void write() {
    for (auto const& part : parts_) part->write(mine_);
  }
  /// This rank's numbers.
  record const& mine() const { return mine_; }

  /// Gathers the numbers of all ranks. Collective.
  void gather(transport& comm) { all_.gather(comm, mine_); }
  /// Starts the gather, which `finish_gather` ends. Collective.
  void start_gather(transport& comm) { all_.start(comm, mine_); }
  /// Ends the gather that `start_gather` began. Collective.
  void finish_gather(transport& comm) { all_.finish(comm); }
  /// Runs the gathers of a step once, with zeros. Collective. \param split whether steps call `start_gather`, too
  void gather_once(transport& comm, bool split) {
    mine_.clear();
    gather(comm);
    if (!split) return;
    start_gather(comm);
    finish_gather(comm);
  }

  /// Lets each part judge the gathered numbers. \param act called with the findings after each part's judgement
  template <class Act>
  decision judge(step_report& report, error_context const& here, Act const& act) const {
    decision found;
    for (auto const& part : parts_) {
      part->judge(all_, found, report, here);
      act(found);
    }
    return found;
  }

 private:
  record mine_;
  records_of_ranks all_;
  std::vector<std::unique_ptr<step_part>> parts_;
};

}  // namespace chevron::detail
