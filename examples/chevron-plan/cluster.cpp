// computes: a plan and a climb over cuts for each way to divide a cluster
#include <algorithm>
#include <cmath>
#include <iostream>
#include <map>
#include <optional>
#include <tuple>

#include <nlohmann/json.hpp>

#include <chevron/base/format.hpp>
#include <chevron/prove/check.hpp>
#include <chevron/prove/footprint.hpp>
#include <chevron/prove/timeline.hpp>
#include <chevron/tools/search/layer_bytes.hpp>
#include <chevron/tools/search/plan_cut.hpp>

#include "links.hpp"
#include "memory.hpp"
#include "model.hpp"
#include "table.hpp"
#include "value_list.hpp"

namespace plan_program {
namespace {

/// The machines, and the tokens of a step.
struct cluster {
  int nodes = 1, gpus = 8;
  std::int64_t memory = 0;
  double inside = 0, between = 0;  ///< bytes a millisecond that one device sends, in each direction
  std::int64_t sequences = 0;      ///< of a step

  int devices() const { return nodes * gpus; }
  int node_of(int global_rank) const { return global_rank / gpus; }
};

/// A schedule, and how many chunks each rank has.
struct named_schedule {
  char const* name;
  int chunks;
};
constexpr named_schedule schedules[] = {{"1F1B", 1},          {"Interleaved1F1B", 2}, {"Interleaved1F1B", 4}, {"ZB-H1", 1},
                                        {"ZBVZeroBubble", 2}, {"DualPipeV", 2},       {"V-Half", 2},          {"V-Min", 2}};

/// One way to train on the cluster, with its times in milliseconds.
struct way {
  int ranks = 1, shards = 1, replicas = 1, samples = 1, micro_batches = 1;
  named_schedule schedule{};
  bool recompute = false, sharded = false;
  std::vector<int> layers{};
  double time = 0;       ///< of a step
  double pipeline = 0;   ///< of this, from the first F to the last B or W
  double bubble = 0;     ///< share of the pipeline's time in which ranks wait
  double sums = 0;       ///< by which sums over replicas and gathers make the step longer
  double optimizer = 0;
  double collectives = 0;  ///< over shards, on the fullest rank; a part of `pipeline`
  double again = 0;        ///< of recomputation, a part of `pipeline`
  std::int64_t bytes = 0;  ///< of the fullest rank
  std::string limit{};     ///< the part that takes most, besides the model's own computations
};

/// What one microbatch of so many samples costs on so many shards.
struct sharded_costs {
  chevron::search::layer_costs costs;
  chevron::search::layer_bytes bytes;
  std::vector<std::int64_t> parameters;  ///< by piece
  std::vector<double> collective;        ///< by piece: sums over shards in F, as many in I
  double message = 0;                    ///< bytes of a message between ranks
};

sharded_costs costs_on(described_model model, cluster const& on, int shards, int samples) {
  model.setup.shards = shards;
  model.setup.cuts_sequence = shards > 1;
  model.setup.samples = samples;
  sharded_costs out;
  out.message = static_cast<double>(message_bytes(model.size, model.setup)) / shards;
  chevron::profile made = profile_of_model(model);
  std::vector<piece_figures> const pieces = decoder_pieces(model.size, model.setup);
  // A ring of T ranks sends 2 (T - 1) / T of the bytes that it sums (Patarasuk and Yuan, 2009).
  double const ring = 2 * out.message * (shards - 1) / on.inside;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    double const time = pieces[i].collectives * ring;
    out.collective.push_back(time);
    out.parameters.push_back(pieces[i].parameters);
    made.forward[i] += time;
    if (i > 0) made.backward_input[i] += time;
  }
  out.costs = chevron::search::layer_costs_of(made, true);
  out.bytes = chevron::search::layer_bytes_of(made);
  return out;
}

/// Whether a message between two pipeline ranks leaves its machine, in any replica.
bool crosses(way const& of, cluster const& on, int a, int b) {
  for (int r = 0; r < of.replicas; ++r) {
    if (on.node_of((r * of.ranks + a) * of.shards) != on.node_of((r * of.ranks + b) * of.shards)) return true;
  }
  return false;
}

/// Times and bytes of a way whose `layers` are to be found. \returns whether the schedule exists and layers suffice
bool judge(way& of, described_model const& model, cluster const& on, sharded_costs const& given) {
  using namespace chevron;
  plan made = plan_named(of.schedule.name, {of.ranks, of.micro_batches, of.schedule.chunks});
  made.in_flight_limit = 0;
  if (made.problem || check(made)) return false;
  search::layer_costs costs = given.costs;
  costs.transfers.assign(static_cast<std::size_t>(std::max(made.stages - 1, 1)), 0);
  for (int s = 0; s + 1 < made.stages; ++s) {
    int const a = made.rank_of.data[s], b = made.rank_of.data[s + 1];
    if (a != b) costs.transfers[static_cast<std::size_t>(s)] = given.message / (crosses(of, on, a, b) ? on.between : on.inside);
  }
  costs.communication_occupies = occupies::wire;
  buffer<bool> recomputed(made.stages);
  for (bool& one : recomputed) one = of.recompute;
  if (of.recompute) costs.recompute();
  int const sharing = of.sharded ? of.replicas : 1;
  auto const fullest = [&](std::vector<int> const& cut) {
    stage_bytes const bytes = given.bytes.of(cut, sharing);
    std::int64_t most = 0;
    for (int r = 0; r < made.size.ranks; ++r) most = std::max(most, peak_memory(made, bytes.view(recomputed.data), r));
    return most;
  };
  auto const excess = [&](std::vector<int> const& cut) { return std::max<std::int64_t>(fullest(cut) - on.memory, 0); };
  search::plan_cut const cut = search::cut_for(made, costs, excess, 2'000'000);
  if (cut.layers.empty()) return false;
  of.layers = cut.layers;
  of.bytes = fullest(cut.layers);
  owned_costs const by_stage = costs.of(cut.layers);
  timeline const played = simulate(made, by_stage.view());
  of.pipeline = makespan(made, played);
  double busy_time = 0;
  for (int r = 0; r < of.ranks; ++r) busy_time += busy(made, by_stage.view(), r);
  of.bubble = 1 - busy_time / of.ranks / of.pipeline;

  // Pieces of each stage: parameters for the sums, the optimizer and gathers; collectives and recomputation of a microbatch.
  std::vector<double> parameters(cut.layers.size()), collective = parameters, again = parameters;
  std::size_t next = 1;
  for (std::size_t s = 0; s < cut.layers.size(); ++s) {
    auto const add = [&](std::size_t piece) {
      parameters[s] += static_cast<double>(given.parameters[piece]);
      collective[s] += (of.recompute ? 3 : 2) * given.collective[piece];
    };
    if (s == 0) add(0);
    for (int i = 0; i < cut.layers[s]; ++i) add(next++);
    if (s + 1 == cut.layers.size()) add(next);
    if (of.recompute) again[s] = by_stage.forward[s];
  }
  // The group of a stage's replicas leaves a machine unless all ranks are in one.
  double const rate = on.nodes > 1 && of.replicas > 1 ? on.between : on.inside;
  auto const part = static_cast<double>(of.replicas - 1) / of.replicas;
  for (int r = 0; r < of.ranks; ++r) {
    // Each stage's sum starts when the stage's last gradient is there and the sum before it has ended.
    double wire = 0, gathers = 0, stepped = 0, over_shards = 0, recomputing = 0, work_end = 0;
    std::vector<std::pair<double, std::size_t>> ends;
    for (std::size_t s = 0; s < cut.layers.size(); ++s) {
      if (made.rank_of.data[s] != r) continue;
      double last = 0;
      for (int i = made.begin.data[r]; i < made.begin.data[r + 1]; ++i) {
        if (made.actions.data[i].stage == s) last = std::max(last, played.end.data[i]);
      }
      ends.emplace_back(last, s);
    }
    std::sort(ends.begin(), ends.end());
    for (auto const& [last, s] : ends) {
      double const sent = parameters[s] * static_cast<double>(model.setup.gradient_item()) * part / rate;
      wire = std::max(wire, last) + (of.sharded ? 1 : 2) * sent;
      work_end = std::max(work_end, last);
      if (of.sharded) gathers += parameters[s] * static_cast<double>(model.setup.item) * part / rate;
      // The optimizer reads gradients, reads and writes its state and the parameters.
      auto const moved = static_cast<double>(model.setup.gradient_item() + 2 * model.setup.state_item() + 2 * model.setup.item);
      stepped += parameters[s] / sharing * moved / model.device.memory * 1e3;
      over_shards += collective[s] * of.micro_batches;
      recomputing += again[s] * of.micro_batches;
    }
    double const end = wire + stepped + gathers;
    if (end > of.time) {
      of.time = end;
      of.optimizer = stepped;
      of.sums = end - stepped - of.pipeline;
    }
    of.collectives = std::max(of.collectives, over_shards);
    of.again = std::max(of.again, recomputing);
  }
  // A rank that ended early and then sums may end before the pipeline does.
  if (of.time < of.pipeline) of.time = of.pipeline;
  of.sums = std::max(of.sums, 0.0);
  std::pair<double, char const*> const parts[] = {{of.bubble * of.pipeline, "waits of the pipeline"},
                                                  {of.sums, "sums over replicas"},
                                                  {of.collectives, "sums over shards"},
                                                  {of.again, "recomputation"},
                                                  {of.optimizer, "the optimizer"}};
  auto const most = *std::max_element(std::begin(parts), std::end(parts), [](auto const& a, auto const& b) { return a.first < b.first; });
  of.limit = std::string(most.second) + ", " + percent(most.first / of.time);
  return true;
}

/// Milliseconds that no way takes less than: all work of a step, the optimizer's included, divided evenly, without waits,
/// messages, sums and recomputation. Microbatches of any of these sizes count.
double bound_of(described_model const& model, cluster const& on, std::vector<int> const& sizes) {
  double least = 0, parameters = 0;
  for (int const samples : sizes) {
    described_model one = model;
    one.setup.samples = samples;
    chevron::profile const made = profile_of_model(one);
    double work = 0;
    for (std::size_t i = 0; i < made.forward.size(); ++i)
      work += made.forward[i] + made.backward_input[i] + made.backward_weight[i];
    work *= static_cast<double>(on.sequences) / samples;
    if (least == 0 || work < least) least = work;
  }
  for (piece_figures const& piece : decoder_pieces(model.size, model.setup)) parameters += static_cast<double>(piece.parameters);
  auto const moved = static_cast<double>(model.setup.gradient_item() + 2 * model.setup.state_item() + 2 * model.setup.item);
  // Where replicas share the optimizer's state, the optimizer's work is divided among all, too.
  return (least + parameters * moved / model.device.memory * 1e3) / on.devices();
}

/// Tokens: a number, perhaps with k or M, which are 2^10 and 2^20.
std::int64_t tokens_number(std::string const& typed, std::string const& flag) {
  std::string number = typed;
  std::int64_t scale = 1;
  if (!number.empty() && (number.back() == 'k' || number.back() == 'M')) {
    scale = number.back() == 'k' ? 1 << 10 : 1 << 20;
    number.pop_back();
  }
  auto const value = number_in(number);
  if (!value || !(*value > 0) || *value * static_cast<double>(scale) > 1e12)
    throw usage(flag + " " + quoted(typed) + " is no number of tokens: give one such as 524288, 512k or 4M");
  return std::llround(*value * static_cast<double>(scale));
}

cluster cluster_of(cluster_request const& typed, described_model const& model) {
  cluster out;
  out.nodes = whole_number(typed.nodes, "--nodes", 1, 4096);
  out.gpus = whole_number(typed.gpus, "--gpus", 1, 1024);
  if (typed.memory.empty()) throw usage("--memory is not given: give the memory of a GPU, such as --memory 80GiB");
  out.memory = bytes_up_to(std::int64_t{1} << 50, typed.memory, "--memory");
  for (auto const& [value, flag] : {std::pair{&typed.inside, "--link-inside"}, std::pair{&typed.between, "--link-between"}}) {
    bool const needed = flag[7] == 'i' ? out.gpus > 1 : out.nodes > 1;
    if (needed && value->empty())
      throw usage(std::string(flag) + " is not given: give the rate at which one GPU sends, such as " + flag + " 50GB/s");
  }
  out.inside = typed.inside.empty() ? 1 : bandwidth_number(typed.inside, "--link-inside");
  out.between = typed.between.empty() ? out.inside : bandwidth_number(typed.between, "--link-between");
  if (typed.batch_tokens.empty()) throw usage("--batch-tokens is not given: give the tokens of a step, such as --batch-tokens 4M");
  std::int64_t const tokens = tokens_number(typed.batch_tokens, "--batch-tokens");
  out.sequences = tokens / model.setup.tokens;
  if (out.sequences * model.setup.tokens != tokens || out.sequences < 1) {
    throw usage("--batch-tokens " + typed.batch_tokens + " is no multiple of the " + std::to_string(model.setup.tokens) +
                " tokens of a sequence: give " + std::to_string(std::max<std::int64_t>(out.sequences, 1) * model.setup.tokens));
  }
  return out;
}

/// The command that trains so, for a folder that chevron-finetune reads.
std::string training_command(way const& of, described_model const& model, cluster const& on) {
  auto const text = [](auto n) { return std::to_string(n); };
  return "torchrun --nnodes " + text(on.nodes) + " --nproc-per-node " + text(on.gpus) +
         " --no-python chevron-finetune --backend nccl --model FOLDER --data TOKENS --schedule " + of.schedule.name +
         (of.schedule.chunks > 1 && std::string(of.schedule.name) == "Interleaved1F1B" ? " --chunks " + text(of.schedule.chunks) : "") +
         " --ranks " + text(of.ranks) + " --replicas " + text(of.replicas) +
         (of.shards > 1 ? " --shards " + text(of.shards) + " --sequence-parallel" : "") + " --microbatches " + text(of.micro_batches) +
         " --microbatch-size " + text(of.samples) + " --context " + text(model.setup.tokens) + (of.recompute ? " --recompute" : "") +
         (of.sharded ? " --shard optimizer" : "") + (model.setup.item < 4 ? " --dtype bfloat16" : "") +
         (model.setup.masters ? " --master-parameters" : "");
}

}  // namespace

int run_cluster(request const& asked) {
  std::string const format = format_of(asked, cluster_formats);
  if (asked.profile.empty()) throw usage("no profile is given: give a file that chevron-plan model wrote");
  std::string const name = "--profile " + quoted(asked.profile);
  chevron::profile const read = *profile_of(asked);
  if (read.model.empty()) {
    throw usage(name + " has no 'model', from which the costs on shards and for other microbatches follow: write it by chevron-plan "
                "model, with --calibrate for measured times");
  }
  described_model const model = described_model_of(read.model, name);
  cluster const on = cluster_of(asked.cluster, model);

  std::vector<int> sizes;
  for (int const samples : {1, 2, 4, 8}) {
    if (on.sequences % samples == 0) sizes.push_back(samples);
  }
  std::vector<way> fit;
  std::optional<way> smallest;  // of those that do not fit
  std::int64_t looked_at = 0, skipped = 0;
  std::map<std::pair<int, int>, sharded_costs> known;
  auto const order = [](way const& a, way const& b) { return a.time < b.time; };
  constexpr std::size_t most = 10;
  for (int shards = 1; shards <= on.gpus; ++shards) {
    if (on.gpus % shards != 0 || model.size.heads % shards != 0 || model.size.key_heads % shards != 0) continue;
    for (int ranks = 1; ranks <= on.devices() / shards; ++ranks) {
      if (on.devices() % (ranks * shards) != 0 || ranks > model.size.layers + 2) continue;
      int const replicas = on.devices() / (ranks * shards);
      for (int const samples : sizes) {
        if (on.sequences % (static_cast<std::int64_t>(replicas) * samples) != 0) continue;
        std::int64_t const count = on.sequences / replicas / samples;
        if (count > 4096) continue;
        auto const key = std::pair{shards, samples};
        if (!known.contains(key)) known.emplace(key, costs_on(model, on, shards, samples));
        sharded_costs const& given = known.at(key);
        double work = 0, once = 0;
        for (auto const* piece : {&given.costs.embedding, &given.costs.head}) {
          work += piece->forward + piece->backward_input + piece->backward_weight;
          once += piece->forward;
        }
        for (auto const& piece : given.costs.layers) {
          work += piece.forward + piece.backward_input + piece.backward_weight;
          once += piece.forward;
        }
        for (named_schedule const& schedule : schedules) {
          if (ranks == 1 && schedule.name != schedules[0].name) continue;
          if (ranks * schedule.chunks > model.size.layers + 2) continue;
          for (bool const recompute : {false, true}) {
            for (bool const sharded : {false, true}) {
              if (sharded && (replicas == 1 || model.setup.state_item() == 0)) continue;
              ++looked_at;
              // A rank has the mean of the work, or more.
              double const least = (work + (recompute ? once : 0)) * static_cast<double>(count) / ranks;
              if (fit.size() == most && least >= fit.back().time) {
                ++skipped;
                continue;
              }
              way one{.ranks = ranks, .shards = shards, .replicas = replicas, .samples = samples, .micro_batches = static_cast<int>(count),
                      .schedule = schedule, .recompute = recompute, .sharded = sharded};
              if (!judge(one, model, on, given)) continue;
              if (one.bytes > on.memory) {
                if (!smallest || one.bytes < smallest->bytes) smallest = one;
                continue;
              }
              fit.insert(std::upper_bound(fit.begin(), fit.end(), one, order), one);
              if (fit.size() > most) fit.pop_back();
            }
          }
        }
      }
    }
  }
  double const bound = bound_of(model, on, sizes);
  auto const utilization = [&](way const& of) {
    training_setup one = model.setup;
    one.samples = 1;
    double const operations = model_operations(model.size, one) * static_cast<double>(on.sequences);
    double const peak = model.device.peak > 0 ? model.device.peak : model.device.matrix;
    return operations / (of.time / 1e3) / (peak * on.devices());
  };
  if (fit.empty()) {
    std::string words = "Nothing of " + std::to_string(looked_at) + " ways fits in " + bytes(on.memory) + ".";
    if (smallest) words += " The least that is needed is " + bytes(smallest->bytes) + ", with " + std::to_string(smallest->ranks) + " pipeline ranks and " + std::to_string(smallest->shards) + " shards.";
    throw too_little_memory(words + " Remedy: more GPUs, a larger --memory, or fewer tokens of a sequence");
  }
  nlohmann::ordered_json all = nlohmann::ordered_json::array();
  std::vector<table_row> rows{{"ms", "P", "T", "R", "M", "samples", "schedule", "recomputed", "sharded", "bubble", "MFU", "fullest rank", "takes most"}};
  for (way const& of : fit) {
    std::string const schedule = of.schedule.name + std::string(of.schedule.chunks > 2 ? ", " + std::to_string(of.schedule.chunks) + " chunks" : "");
    rows.push_back({number(of.time), std::to_string(of.ranks), std::to_string(of.shards), std::to_string(of.replicas),
                    std::to_string(of.micro_batches), std::to_string(of.samples), schedule, of.recompute ? "all" : "-",
                    of.sharded ? "optimizer" : "-", percent(of.bubble), percent(utilization(of)), bytes(of.bytes), of.limit});
    all.push_back({{"time", of.time}, {"pipeline_ranks", of.ranks}, {"shards", of.shards}, {"replicas", of.replicas},
                   {"micro_batches", of.micro_batches}, {"samples", of.samples}, {"schedule", of.schedule.name},
                   {"chunks", of.schedule.chunks}, {"recompute", of.recompute}, {"sharded_optimizer", of.sharded}, {"layers", of.layers},
                   {"pipeline", of.pipeline}, {"bubble", of.bubble}, {"sums", of.sums}, {"optimizer", of.optimizer},
                   {"shard_collectives", of.collectives}, {"recomputation", of.again}, {"mfu", utilization(of)}, {"bytes", of.bytes},
                   {"limit", of.limit}, {"command", training_command(of, model, on)}});
  }
  way const& best = fit.front();
  std::string words = std::to_string(on.nodes) + (on.nodes == 1 ? " node of " : " nodes of ") + std::to_string(on.gpus) + " GPUs with " +
                      bytes(on.memory) + "; a step has " + std::to_string(on.sequences) + " sequences of " +
                      std::to_string(model.setup.tokens) + " tokens. " + std::to_string(looked_at) + " ways, of which " +
                      std::to_string(skipped) + " were skipped because their work alone takes longer than the tenth.\n\n" +
                      table_text(rows, {align::right, align::right, align::right, align::right, align::right, align::right, align::left,
                                        align::left, align::left, align::right, align::right, align::right, align::left}) +
                      "\nP pipeline ranks, T shards, R replicas, M microbatches of so many samples; MFU: the share of " +
                      (model.device.peak > 0 ? "the peak" : "--tflops") + " that the model's own operations reach\n" +
                      "No way takes less than " + number(bound) + " ms, the work of a step divided evenly; the first takes " +
                      percent(best.time / bound - 1) + " more.\n" + "Layers of its stages: " +
                      chevron::search::layers_text(best.layers) + "; chevron-finetune divides layers itself.\n" +
                      "Train: " + training_command(best, model, on) + "\n";
  nlohmann::ordered_json const out{{"bound", bound}, {"ways", looked_at}, {"best", all}};
  write(asked, format == "json" ? out.dump(1) + "\n" : words);
  if (!asked.output.empty()) std::cout << words;
  return exit_ok;
}

}  // namespace plan_program
