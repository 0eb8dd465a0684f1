// computes: cuts and timelines of ways to divide a model over machines
#include <algorithm>
#include <cmath>
#include <tuple>

#include <chevron/plan/slices.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/prove/slice_times.hpp>
#include <chevron/prove/timeline.hpp>
#include <chevron/tools/search/plan_cut.hpp>

#include "cluster.hpp"
#include "cluster_rates.hpp"
#include "table.hpp"

namespace plan_program {

costs_key costs_key_of(way const& of, cluster const& on) {
  // A group of experts has all shards of neighbouring replicas, of one pipeline rank.
  costs_key out{.shards = of.shards,
                .samples = of.samples,
                .expert_ranks = of.expert_ranks,
                .slices = of.slices,
                .together = of.expert_ranks};
  std::map<std::pair<int, int>, int> sending;  // by machine and pipeline rank
  for (int first = 0; of.expert_ranks > 1 && first < of.replicas; first += of.expert_replicas()) {
    for (int p = 0; p < of.ranks; ++p) {
      std::map<int, int> members;  // by machine
      for (int r = first; r < first + of.expert_replicas(); ++r) members[on.node_of((r * of.ranks + p) * of.shards)] += of.shards;
      for (auto const& [node, count] : members) {
        out.together = std::min(out.together, count);
        if (count < of.expert_ranks) sending[{node, p}] += count;
      }
    }
  }
  if (on.cards > 0) {
    for (auto const& [where, count] : sending) out.sending = std::max(out.sending, count);
  }
  return out;
}

namespace {

/// What a rank of a key's ways computes, stores and sends of one slice, or of a whole microbatch.
struct slice_figures {
  chevron::search::layer_costs costs;
  slice_sizes sizes;
  std::vector<piece_figures> pieces;
  std::vector<double> collective, backward_collective, routing;  ///< by piece

  /// Milliseconds of all layers.
  double of_layers() const {
    double sum = 0;
    for (chevron::search::piece_costs const& one : costs.layers) sum += one.forward + one.backward_input + one.backward_weight;
    return sum;
  }
};

slice_figures figures_of(described_model const& model, cluster const& on, costs_key const& key) {
  training_setup const& setup = model.setup;
  slice_figures out;
  double const stream = static_cast<double>(message_bytes(model.size, setup));
  // Shards that do not cut sequences have the whole stream, and each sends it to its own successor.
  out.sizes.message = setup.cuts_sequence ? stream / key.shards : stream;
  chevron::profile made = profile_of_model(model);
  out.pieces = decoder_pieces(model.size, setup);
  // A ring of T ranks sends 2 (T - 1) / T of the bytes that it sums (Patarasuk and Yuan, 2009).
  double const ring = 2 * (key.shards - 1) * (stream / key.shards / on.inside + on.latency_inside);
  // An all-to-all exchanges rows with one rank after another (Thakur, Rabenseifner and Gropp, 2005).
  auto const exchange = [&](double bytes) {
    double const each = bytes / key.expert_ranks;
    return (key.together - 1) * (each / on.inside + on.latency_inside) +
           (key.expert_ranks - key.together) * (each / rate_between(on, key.sending) + on.latency_between);
  };
  for (std::size_t i = 0; i < out.pieces.size(); ++i) {
    piece_figures const& piece = out.pieces[i];
    double const time = piece.collectives * ring, back = piece.backward_collectives * ring;
    // F sends rows to their experts and the results back, I the gradients of both.
    double const routing = piece.routed > 0 ? 2 * exchange(piece.routed) : 0;
    out.collective.push_back(time);
    out.backward_collective.push_back(back);
    out.routing.push_back(routing);
    made.forward[i] += time + routing;
    // The embedding has no input gradient: its W gathers the gradient of its outputs.
    (i > 0 ? made.backward_input : made.backward_weight)[i] += back + routing;
  }
  out.costs = chevron::search::layer_costs_of(made, true);
  // On a first stage the I of a later slice computes the gradients of earlier slices' keys and values.
  if (setup.slice_begin > 0) out.costs.first_input = -1;
  out.sizes.bytes = chevron::search::layer_bytes_of(made);
  for (std::size_t i = 0; i < out.sizes.bytes.layers.size(); ++i) out.sizes.bytes.layers[i].carried = out.pieces[i + 1].carried;
  return out;
}

/// The share of attention, in 10^-4, of a time that has a part in proportion to the tokens, a part in proportion to their square,
/// and a part that each slice takes anew: from the times of a sequence and of its halves.
double attention_share(double whole, double first_half, double second_half) {
  double const square = 2 * (second_half - first_half), both = 2 * whole - first_half - second_half;
  return both > 0 ? std::round(std::clamp(square / both, 0.0, 1.0) * 1e4) / 1e4 : 0;
}

}  // namespace

sharded_costs costs_on(described_model model, cluster const& on, costs_key const& key) {
  training_setup& setup = model.setup;
  setup.shards = key.shards;
  // Pieces of a sequence over shards do not go with slices, as in chevron-finetune.
  setup.cuts_sequence = key.shards > 1 && key.slices == 1;
  setup.samples = key.samples;
  setup.expert_ranks = key.expert_ranks;
  auto const of_tokens = [&](std::int64_t begin, std::int64_t end) {
    setup.slice_begin = begin;
    setup.slice_end = end;
    return figures_of(model, on, key);
  };
  sharded_costs out;
  out.copied = copied_item(setup);
  std::vector<std::int64_t> ends{0};  // whole sequences
  if (key.slices > 1) {
    std::int64_t const half = setup.tokens / 2;
    out.attention =
        attention_share(of_tokens(0, 0).of_layers(), of_tokens(0, half).of_layers(), of_tokens(half, setup.tokens).of_layers());
    ends = chevron::cuts_of_equal_time(setup.tokens, key.slices, out.attention);
    ends.push_back(setup.tokens);
    out.slice_ends = ends;
  }
  std::vector<std::int64_t> carried_gradient(static_cast<std::size_t>(model.size.layers));
  std::int64_t begin = 0;
  for (std::int64_t const end : ends) {
    slice_figures one = of_tokens(begin, end);
    std::size_t const pieces = one.pieces.size();
    for (auto* list : {&out.collective, &out.backward_collective, &out.routing}) list->resize(pieces);
    for (std::size_t i = 0; i < pieces; ++i) {
      out.collective[i] += one.collective[i];
      out.backward_collective[i] += one.backward_collective[i];
      out.routing[i] += one.routing[i];
      if (begin == 0) out.parameters.push_back(one.pieces[i].parameters);
      if (begin == 0) out.of_experts.push_back(one.pieces[i].expert_parameters);
      if (i > 0 && i + 1 < pieces) carried_gradient[i - 1] += one.pieces[i].carried_gradient;
    }
    out.costs.slices.push_back(std::move(one.costs));
    out.slices.push_back(std::move(one.sizes));
    begin = end;
  }
  // The gradients of one microbatch's keys and values.
  for (std::size_t i = 0; i < carried_gradient.size(); ++i) out.slices.front().bytes.layers[i].fixed += carried_gradient[i];
  out.work = out.costs.whole();
  return out;
}

std::optional<made_plan> plan_of(way const& of) {
  chevron::plan made = plan_named(of.schedule.name, {of.ranks, of.micro_batches, of.schedule.chunks, of.slices});
  made.in_flight_limit = 0;
  if (made.problem || check(made)) return std::nullopt;
  chevron::search::held_sets held(made);
  return made_plan{std::move(made), std::move(held)};
}

namespace {

/// Costs of layers with the times of messages and of recomputation.
chevron::search::sliced_layer_costs costs_of(way const& of, cluster const& on, sharded_costs const& given,
                                             chevron::plan_view const& plan) {
  chevron::search::sliced_layer_costs out = given.costs;
  for (std::size_t i = 0; i < out.slices.size(); ++i) {
    chevron::search::layer_costs& costs = out.slices[i];
    costs.transfers.assign(static_cast<std::size_t>(std::max(plan.stages - 1, 1)), 0);
    for (int s = 0; s + 1 < plan.stages; ++s)
      costs.transfers[static_cast<std::size_t>(s)] =
          message_time(of, on, given.slices[i].message, plan.rank_of[s], plan.rank_of[s + 1]);
    if (on.latency_inside > 0 || on.latency_between > 0) {
      for (int s = 0; s + 1 < plan.stages; ++s)
        costs.latency.push_back(message_latency(of, on, plan.rank_of[s], plan.rank_of[s + 1]));
    }
    costs.communication_occupies = chevron::occupies::wire;
  }
  if (of.recompute) out.recompute();
  return out;
}

/// What ranks do between their last actions and the next step, where steps overlap: sums over replicas, each behind the last
/// action of its stage and the sum before, then the optimizer.
struct step_ending {
  struct stage_sum {
    int last;      ///< the stage's last action, in the plan
    double takes;  ///< milliseconds
  };
  struct rank_ending {
    std::vector<stage_sum> sums;  ///< in the order of their last actions
    double step = 0;              ///< milliseconds of the optimizer
  };
  std::vector<rank_ending> ranks;
  int first = 0, last = 0;  ///< ranks that sum the gradient of a tied weight: each waits for the other's; equal: none waits

  void operator()(double const* end, double* clock) const {
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      double wire = 0;
      for (stage_sum const& one : ranks[r].sums) wire = std::max(wire, end[one.last]) + one.takes;
      clock[r] = std::max(clock[r], wire);
    }
    clock[first] = clock[last] = std::max(clock[first], clock[last]);
    for (std::size_t r = 0; r < ranks.size(); ++r) clock[r] += ranks[r].step;
  }
  double most() const {
    double sum = 0;
    for (rank_ending const& one : ranks) {
      sum += one.step;
      for (stage_sum const& stage : one.sums) sum += stage.takes;
    }
    return sum;
  }
};

/// Sets the time of a way whose steps overlap, and its parts: the pipeline alone, by how much the optimizer makes the step
/// longer, and by how much sums and gathers do. \param gathers milliseconds by stage; empty: parameters are not gathered
void set_overlapping_times(way& of, chevron::sliced_costs by_stage, chevron::plan_view const& plan, step_ending const& ending,
                           std::vector<double> const& gathers) {
  step_ending part = ending;
  for (step_ending::rank_ending& one : part.ranks) {
    one.step = 0;
    for (step_ending::stage_sum& stage : one.sums) stage.takes = 0;
  }
  of.pipeline = steady_step_time(plan, by_stage, part).most;
  for (std::size_t r = 0; r < part.ranks.size(); ++r) part.ranks[r].step = ending.ranks[r].step;
  double const stepped = steady_step_time(plan, by_stage, part).most;
  of.optimizer = stepped - of.pipeline;
  of.time = stepped;
  if (of.replicas > 1) {
    // Gathers run beside the next step, each until its stage's first action.
    by_stage.slices.front().unshard = chevron::buffer<double>(gathers);
    of.time = steady_step_time(plan, by_stage, ending).most;
  }
  of.sums = of.time - stepped;
}

/// Sets the times of a way whose layers are known. \param drawn null, or a picture without boxes behind the pipeline
void set_times(way& of, described_model const& model, cluster const& on, sharded_costs const& given,
               chevron::sliced_costs const& by_stage, chevron::plan_view const& plan, chevron::timeline const& played,
               chevron::show::picture* drawn) {
  using namespace chevron;
  of.pipeline = makespan(plan, played);
  of.time = of.sums = of.optimizer = of.collectives = of.routing = of.again = 0;
  // Pieces of each stage: sums; parameters for the optimizer and gathers; collectives and recomputation of a microbatch.
  parameter_times const each = parameter_times_of(of, model, on);
  std::vector<double> parameters(of.layers.size()), sum = parameters, collective = parameters, routing = parameters,
                                                    again = parameters;
  std::size_t next = 1;
  for (std::size_t s = 0; s < of.layers.size(); ++s) {
    auto const add = [&](std::size_t piece) {
      parameters[s] += static_cast<double>(given.parameters[piece]);
      sum[s] += each.sum_of(given, piece);
      collective[s] += (of.recompute ? 2 : 1) * given.collective[piece] + given.backward_collective[piece];
      routing[s] += (of.recompute ? 3 : 2) * given.routing[piece];
    };
    if (s == 0) add(0);
    for (int i = 0; i < of.layers[s]; ++i) add(next++);
    if (s + 1 == of.layers.size()) add(next);
    for (owned_costs const& slice : by_stage.slices) again[s] += of.recompute ? slice.forward[s] : 0;
  }
  // No rank steps before all have the norm of the whole gradient: optimizers start behind the last sum of all ranks.
  std::vector<double> sums_end;  // by rank
  double behind = 0;             // of the rank whose optimizer and gathers take longest
  step_ending ending;
  if (model.size.tied) ending.first = plan.rank_of[0], ending.last = plan.rank_of[plan.stages - 1];
  for (int r = 0; r < of.ranks; ++r) {
    // Each stage's sum starts when the stage's last gradient is there and the sum before it has ended.
    double wire = 0, gathers = 0, stepped = 0, over_shards = 0, to_experts = 0, recomputing = 0;
    std::vector<std::tuple<double, int, int>> ends;  // with the stage and its last action
    for (int s = 0; s < plan.stages; ++s) {
      if (plan.rank_of[s] != r) continue;
      int last = -1;
      for (int i = plan.begin[r]; i < plan.begin[r + 1]; ++i) {
        if (static_cast<int>(plan.actions[i].stage) == s) last = i;
      }
      ends.emplace_back(played.end.data[last], s, last);
    }
    std::sort(ends.begin(), ends.end());
    step_ending::rank_ending& ending_of_rank = ending.ranks.emplace_back();
    for (auto const& [last, stage, last_action] : ends) {
      auto const s = static_cast<std::size_t>(stage);
      double const begin = std::max(wire, last);
      wire = begin + sum[s] + each.sum_latency;
      ending_of_rank.sums.push_back({last_action, sum[s] + each.sum_latency});
      gathers += parameters[s] * each.gather + each.gather_latency;
      stepped += parameters[s] * each.step;
      over_shards += collective[s] * of.micro_batches;
      to_experts += routing[s] * of.micro_batches;
      recomputing += again[s] * of.micro_batches;
      if (drawn != nullptr && wire > begin)
        drawn->boxes.push_back({r, begin, wire, make_action(kind::reduce_gradients, stage, 0), plan.chunk_of(stage)});
    }
    ending_of_rank.step = stepped;
    sums_end.push_back(wire);
    if (drawn != nullptr) {
      drawn->boxes.push_back({r, wire, wire + stepped, make_action(kind::optimizer_step, 0, 0)});
      double from = wire + stepped;
      for (auto const& [last, stage, last_action] : ends) {
        double const to = from + parameters[static_cast<std::size_t>(stage)] * each.gather + each.gather_latency;
        if (to > from) drawn->boxes.push_back({r, from, to, make_action(kind::unshard, stage, 0), plan.chunk_of(stage)});
        from = to;
      }
    }
    if (stepped + gathers > behind) {
      behind = stepped + gathers;
      of.optimizer = stepped;
    }
    of.collectives = std::max(of.collectives, over_shards);
    of.routing = std::max(of.routing, to_experts);
    of.again = std::max(of.again, recomputing);
  }
  double const summed = std::max(of.pipeline, *std::max_element(sums_end.begin(), sums_end.end()));
  if (of.post_validated) {
    std::vector<double> gathers;
    for (double const one : parameters) {
      if (of.sharded) gathers.push_back(one * each.gather + each.gather_latency);
    }
    set_overlapping_times(of, by_stage, plan, ending, gathers);
  } else {
    of.time = summed + behind;
    of.sums = of.time - of.optimizer - of.pipeline;
  }
  double busy_time = 0;
  for (int r = 0; r < of.ranks; ++r) busy_time += busy(plan, by_stage, r);
  of.bubble = 1 - busy_time / of.ranks / of.pipeline;
  if (drawn != nullptr && !of.post_validated) {
    for (auto& box : drawn->boxes) {
      if (box.op.kind != kind::optimizer_step && box.op.kind != kind::unshard) continue;
      double const later = summed - sums_end[static_cast<std::size_t>(box.rank)];
      box.start += later;
      box.end += later;
    }
  }
  std::pair<double, char const*> const parts[] = {{of.bubble * of.pipeline, "waits of the pipeline"},
                                                  {of.sums, "sums over replicas"},
                                                  {of.collectives, "sums over shards"},
                                                  {of.routing, "all-to-all of experts"},
                                                  {of.again, "recomputation"},
                                                  {of.optimizer, "the optimizer"}};
  auto const most =
      *std::max_element(std::begin(parts), std::end(parts), [](auto const& a, auto const& b) { return a.first < b.first; });
  of.limit = std::string(most.second) + ", " + percent(most.first / of.time);
}

/// Adds the bytes of post-validation's copies to stages of so many layers. \param owners replicas that share the copies
void add_copies(chevron::stage_bytes& to, sharded_costs const& given, std::vector<int> const& layers, int owners) {
  auto next = given.parameters.begin() + 1;
  for (std::size_t s = 0; s < layers.size(); ++s) {
    std::int64_t parameters = s == 0 ? given.parameters.front() : 0;
    for (int i = 0; i < layers[s]; ++i) parameters += *next++;
    if (s + 1 == layers.size()) parameters += given.parameters.back();
    to.fixed[s] += (parameters * given.copied + owners - 1) / owners;
  }
}

}  // namespace

bool judge(way& of, described_model const& model, cluster const& on, sharded_costs const& given, made_plan const& made,
           bool& excess_seen) {
  using namespace chevron;
  search::sliced_layer_costs const costs = costs_of(of, on, given, made.plan);
  buffer<bool> recomputed(made.plan.stages);
  for (bool& one : recomputed) one = of.recompute;
  int const sharing = of.sharded ? of.replicas : 1;
  auto const fullest = [&](std::vector<int> const& cut) {
    std::vector<stage_bytes> bytes;
    std::vector<footprint_view> views;
    for (slice_sizes const& one : given.slices) bytes.push_back(one.bytes.of(cut, sharing));
    if (of.post_validated) add_copies(bytes.front(), given, cut, sharing);
    for (stage_bytes const& one : bytes) views.push_back(one.view(recomputed.data));
    std::int64_t most = 0;
    for (int r = 0; r < of.ranks; ++r) most = std::max(most, made.held.peak_memory(views, r));
    return most;
  };
  auto const excess = [&](std::vector<int> const& cut) {
    std::int64_t const over = std::max<std::int64_t>(fullest(cut) - on.memory, 0);
    excess_seen = excess_seen || over > 0;
    return over;
  };
  auto const goal = of.post_validated ? search::objective::span : search::objective::makespan;
  if (of.layers.empty()) of.layers = search::cut_for(made.plan, costs, excess, 2'000'000, goal).layers;
  if (of.layers.empty()) return false;
  of.bytes = fullest(of.layers);
  of.attention = given.attention;
  of.slice_ends = given.slice_ends;
  sliced_costs const by_stage = costs.of(of.layers);
  set_times(of, model, on, given, by_stage, made.plan, simulate(made.plan, by_stage), nullptr);
  return true;
}

chevron::show::picture timeline_of(way& of, described_model const& model, cluster const& on, sharded_costs const& given,
                                   chevron::plan_view const& plan) {
  using namespace chevron;
  sliced_costs const by_stage = costs_of(of, on, given, plan).of(of.layers);
  timeline const played = simulate(plan, by_stage);
  // The critical path is found for whole microbatches alone.
  show::picture out = of.slices == 1 ? show::picture_of(plan, by_stage.slices.front().view()) : show::picture_of(plan, played);
  out.unit = "ms";
  set_times(of, model, on, given, by_stage, plan, played, &out);
  return out;
}

}  // namespace plan_program
