#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/util/Exception.h>

#include <chevron/run/core/error.hpp>
#include <chevron/run/stage/autocast.hpp>
#include <chevron/run/stage/backward_scope.hpp>
#include <chevron/run/stage/buffers.hpp>
#include <chevron/run/stage/companions.hpp>
#include <chevron/run/stage/declared_losses.hpp>
#include <chevron/run/stage/graph/stage_graph.hpp>
#include <chevron/run/stage/loss.hpp>
#include <chevron/run/stage/own_versions.hpp>
#include <chevron/run/stage/random_scope.hpp>
#include <chevron/run/stage/stage.hpp>
#include <chevron/run/stage/storage_set.hpp>
#include <chevron/run/stage/summed_parameters.hpp>
#include <chevron/run/stage/unlisted_leaves.hpp>

/// \file
/// Executes one stage on one microbatch, from F to B or W.

namespace chevron::detail {

/// Runs a stage's sections. A *section* is a sequence of parts that are computed and differentiated together, with one graph:
/// each part that recomputes, and each sequence of parts that do not. Gradients pass between sections as between stages.
///
/// From F on, a section that does not recompute stores its graph, and a section that recomputes stores its inputs. A section
/// that recomputes builds its graph in R or, without R, in B or I; from then on both kinds of sections are treated alike, so I
/// and W together run the forward once more. If neither gradients of the section's inputs nor of its carries are needed, I
/// computes nothing, and W builds the graph.
///
/// For parts below the lowest parameter that needs a gradient, F stores nothing, and no gradients of inputs are computed.
///
/// Tensors beside inputs and outputs (of skip connections, declared losses, carries) are those of the stage's companions
/// (companion.hpp), which a plain stage does not have.
class stage_execution {
 public:
  /// F: consumes `inputs`, writes detached `outputs`. \returns the last stage's loss, in place of outputs; else undefined
  at::Tensor forward(stage_call const& task, tensors& inputs, tensors& outputs) {
    lay_out(task);
    companions_ = detail::companions_of(*task.owner);
    for (auto const& c : companions_) c->begin_forward(task, inputs);
    if (task.seen != nullptr) {
      task.seen->clear();
      for (at::Tensor const& t : inputs) task.seen->push_back(t.defined() ? t.detach().clone() : t);
    }
    tensors& values = outputs;
    values.clear();
    std::swap(values, inputs);
    at::Tensor loss;
    for (section& s : sections_) {
      for (auto const& c : companions_) c->arrive(task, s.parts);
      if (s.recomputes) {
        s.inputs.keep(values);
        for (auto const& c : companions_) c->keep(s.parts);
        at::AutoGradMode const without(false);
        std::vector<std::uint32_t> const side_inputs = detail::versions_of(task.around.side_inputs);
        loss = run(task, s, values);
        s.inputs.check("the stage changes its");
        for (auto const& c : companions_) c->check_kept(s.parts, "the stage changes its");
        if (side_inputs != detail::versions_of(task.around.side_inputs)) {
          throw usage_error(
              "the stage changes a side input of the batch in place, from which recompute() computes the stage again. "
              "Remedy: change a clone, or no recompute()");
        }
      } else {
        loss = compute(task, s, values);
      }
      for (auto const& c : companions_) c->settle(s.parts);
    }
    if (task.training) versions_.note(*task.owner);
    if (task.loss != nullptr) values.clear();
    for (at::Tensor& t : values) t = detail::apart(*task.owner, t);
    for (auto const& c : companions_) c->end_forward(task, values);
    return task.loss != nullptr ? loss.detach() : loss;
  }

  /// B: consumes the gradients of the floating-point outputs, or of the loss; writes the gradients of the inputs.
  void backward(stage_call const& task, tensors& output_gradients, tensors& input_gradients) {
    through(task, output_gradients, input_gradients, [&](section& s) {
      compute_again(task, s);
      differentiate(task, s, random_use::backward, output_gradients,
                    [&] { s.graph.backward(output_gradients, input_gradients); });
    });
  }

  /// I: as B, but leaves the gradients of parameters to W.
  void backward_input(stage_call const& task, tensors& output_gradients, tensors& input_gradients) {
    through(task, output_gradients, input_gradients, [&](section& s) {
      if (s.recomputes && !gives_gradients(s)) {
        s.postponed = output_gradients;
        input_gradients.clear();
      } else {
        compute_again(task, s);
        differentiate(task, s, random_use::backward, output_gradients,
                      [&] { s.graph.backward_input(output_gradients, input_gradients); });
      }
    });
  }

  /// W: adds to the gradients of parameters. \param task as for F
  void backward_weight(stage_call const& task) {
    for (std::size_t i = sections_.size(); i-- > 0;) {
      section& s = sections_[i];
      if (s.recomputes && !gives_gradients(s)) {
        compute_again(task, s);
        differentiate(task, s, random_use::backward, s.postponed, [&] { s.graph.backward(s.postponed, scratch_); });
        s.postponed.clear();
      } else {
        tensors near;
        if (!task.owner->parameters().empty()) near.push_back(task.owner->parameters().front().value);
        // If I computed nothing, W is the whole backward.
        random_use const use = gives_gradients(s) ? random_use::backward_weight : random_use::backward;
        differentiate(task, s, use, near, [&] { s.graph.backward_weight(); });
      }
    }
  }

  /// R: runs the forward of each section that recomputes, so that graphs exist before gradients arrive. \param task as for F
  void recompute(stage_call const& task) {
    for (section& s : sections_) compute_again(task, s);
  }

  /// Calls `see` for each gradient that is stored from I to W.
  template <class See>
  void each_kept_gradient(See const& see) const {
    for (section const& s : sections_) {
      for (at::Tensor const& gradient : s.postponed) see(gradient);
      s.graph.each_kept_gradient(see);
    }
  }

 private:
  struct section {
    section_parts parts;
    bool recomputes = false;
    bool computed_again = false;
    bool differentiable = false;
    stage_graph graph;
    node_places places;          // where nodes of `graph` were made, for random numbers
    detail::kept_inputs inputs;  // if the section recomputes: stored from F until the graph is built
    tensors postponed;           // output gradients, stored from I to W
    detail::unlisted_leaves unlisted;
  };

  /// Whether the previous section or stage, or a companion, gets gradients from a section.
  bool gives_gradients(section const& s) const {
    auto const gives = [&](auto const& c) { return c->gives_gradients(s.parts); };
    return s.differentiable || std::any_of(companions_.begin(), companions_.end(), gives);
  }

  /// Divides the stage into sections.
  void lay_out(stage_call const& task) {
    std::size_t count = 0;
    std::size_t const lowest = task.differentiable ? 0 : task.owner->lowest_trained_part();
    for (std::size_t p = 0; p < task.owner->parts(); ++p) {
      bool const recomputes = task.training && !task.untrained && p >= lowest && task.owner->recomputes(p);
      if (count > 0 && !recomputes && !sections_[count - 1].recomputes) {
        sections_[count - 1].parts.last = p + 1;
        continue;
      }
      if (sections_.size() == count) sections_.emplace_back();
      section& s = sections_[count];
      s.parts = {count++, p, p + 1};
      s.recomputes = recomputes;
      s.computed_again = false;
      s.graph.always_runs_custom_functions(task.joint);
      s.differentiable = task.training && (p > lowest || task.differentiable);
    }
    sections_.resize(count);
  }

  /// Runs a section's forward, which replaces `values`. \returns the loss, for the last section of a stage with a loss
  at::Tensor run(stage_call const& task, section& s, tensors& values) {
    autocast_scope const cast(task.autocast, values);
    forward_context around = task.around;
    std::vector<collected_losses::given> given;
    around.places = &s.places;
    around.losses = &given;
    s.places.clear();
    for (auto const& c : companions_) c->before(s.parts, around);
    task.owner->forward_parts(s.parts.first, s.parts.last, values, around);
    for (auto const& one : given) detail::check_declared(*task.owner, one.name);  // a plain stage has no companion that does
    for (auto const& c : companions_) c->after(task, s.parts, given);
    if (task.loss == nullptr || &s != &sections_.back()) return {};
    std::optional<random_scope> scope;
    if (task.around.draws) {
      rng_key place = *task.around.draws;
      place.part = static_cast<int>(s.parts.last);
      scope.emplace(place, values, &s.places);
    }
    at::Tensor loss = (*task.loss)(values, *task.targets, task.around.side_inputs);
    if (scope && task.around.drew != nullptr && scope->drew()) *task.around.drew = true;
    if (loss.defined() && loss.is_complex()) {
      throw usage_error("the loss is " + std::string(c10::toString(loss.scalar_type())) +
                        ", and only a real number can be minimized. Remedy: at::real, or the absolute value");
    }
    return loss;
  }

  /// Runs `work`, a section's B, I or W, in which nodes and hooks may draw random numbers.
  template <class Work>
  void differentiate(stage_call const& task, section const& s, random_use use, std::span<at::Tensor const> near,
                     Work const& work) const {
    std::optional<backward_scope> scope;
    if (task.around.draws) scope.emplace(s.places, near, use);
    try {
      work();
    } catch (c10::Error& e) {
      if (std::string const more = versions_.why(*task.owner, e.what_without_backtrace()); !more.empty()) e.add_context(more);
      throw;
    }
    if (scope && task.around.drew != nullptr && scope->drew()) *task.around.drew = true;
  }

  /// Runs a section's forward, which replaces `values`; in training, builds the graph.
  at::Tensor compute(stage_call const& task, section& s, tensors& values) {
    at::AutoGradMode const follow(task.training);
    s.graph.enter(values, s.differentiable, scratch_);
    for (auto const& c : companions_) c->enter(s.parts, s.graph);
    values.clear();
    std::swap(values, scratch_);
    at::Tensor loss = run(task, s, values);
    if (loss.defined() && task.training) {
      if (!loss.requires_grad()) throw usage_error("the loss depends on no parameter: nothing would be learned");
      s.graph.leave(std::span(&loss, 1));
      values.clear();
    } else if (task.training) {
      s.graph.leave(values);
    }
    if (task.training)
      for (auto const& c : companions_) c->leave(task, s.parts, s.graph);
    if (task.training && s.unlisted.is_due()) s.unlisted.examine(*task.owner, s.graph);
    if (task.training && task.watch != nullptr) watch_summed_parameters(*task.owner, s.graph, *task.watch);
    if (task.untrained) s.graph.clear();
    return loss;
  }

  /// Builds the graph of a section that recomputes, by running the forward again, once for R, B, I and W together. Buffers keep
  /// the values that they had before; outputs and loss are dropped.
  void compute_again(stage_call const& task, section& s) {
    if (!s.recomputes || std::exchange(s.computed_again, true)) return;
    s.inputs.check("a later part or stage changes this stage's");
    for (auto const& c : companions_) c->check_kept(s.parts, "a later slice, part or stage changes this stage's");
    buffer_snapshot before(std::span(task.owner, 1));
    before.take();
    {
      std::optional<storage_recorder> seen;
      if (task.built != nullptr) seen.emplace(*task.built);
      tensors inputs = s.inputs.take();
      for (auto const& c : companions_) c->begin_again(s.parts);
      compute(task, s, inputs);
      for (auto const& c : companions_) c->end_again(s.parts);
    }
    if (task.built != nullptr) task.built->drop_gone();
    before.put_back();
  }

  /// Calls `step` for each section, from the last to the lowest trained section: the gradients of a section's inputs are the
  /// gradients of the previous section's outputs.
  template <class Step>
  void through(stage_call const& task, tensors& output_gradients, tensors& input_gradients, Step step) {
    input_gradients.clear();
    if (task.untrained) return output_gradients.clear();
    for (auto const& c : companions_) c->begin_backward(task, output_gradients);
    for (std::size_t i = sections_.size(); i-- > 0;) {
      section& s = sections_[i];
      for (auto const& c : companions_) c->append_gradients(task, s.parts, output_gradients);
      step(s);
      for (auto const& c : companions_) c->take_gradients(s.parts, input_gradients);
      output_gradients.clear();
      if (!s.differentiable) break;
      if (i > 0) std::swap(output_gradients, input_gradients);
    }
    for (auto const& c : companions_) c->end_backward(task, input_gradients);
  }

  std::vector<section> sections_;
  std::vector<std::unique_ptr<companion>> companions_;  // of F's stage
  own_versions versions_;                               // at the end of F
  tensors scratch_;
};

}  // namespace chevron::detail
