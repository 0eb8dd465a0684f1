#include <algorithm>
#include <cmath>
#include <iostream>
#include <thread>

#include <nlohmann/json.hpp>

#include <chevron/tools/show/html.hpp>
#include <chevron/tools/show/svg.hpp>

#include "cluster.hpp"
#include "layers.hpp"
#include "links.hpp"
#include "table.hpp"
#include "value_list.hpp"

namespace plan_program {
namespace {

using json = nlohmann::ordered_json;

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
  if (!typed.nics.empty()) {
    out.cards = whole_number(typed.nics, "--nics", 1, 1024);
    if (out.nodes == 1)
      throw usage("--nics " + typed.nics + " has no effect on one machine. Remedy: leave it out, or give --nodes");
  }
  out.latency_inside = time_number(typed.latency_inside, "--latency-inside");
  out.latency_between = time_number(typed.latency_between, "--latency-between");
  if (typed.batch_tokens.empty())
    throw usage("--batch-tokens is not given: give the tokens of a step, such as --batch-tokens 4M");
  std::int64_t const tokens = tokens_number(typed.batch_tokens, "--batch-tokens");
  out.sequences = tokens / model.setup.tokens;
  if (out.sequences * model.setup.tokens != tokens || out.sequences < 1) {
    throw usage("--batch-tokens " + typed.batch_tokens + " is no multiple of the " + std::to_string(model.setup.tokens) +
                " tokens of a sequence: give " + std::to_string(std::max<std::int64_t>(out.sequences, 1) * model.setup.tokens));
  }
  return out;
}

/// One of two words. \returns whether it is the second; nothing for an empty one
std::optional<bool> second_of(std::string const& typed, std::string const& flag, char const* first, char const* second) {
  if (typed.empty()) return std::nullopt;
  if (typed != first && typed != second)
    throw usage(flag + " " + quoted(typed) + " is not known: choose one of " + first + ", " + second);
  return typed == second;
}

/// All choices but `layers`, which depend on the model.
fixed_choices choices_of(request const& asked) {
  cluster_request const& typed = asked.cluster;
  fixed_choices out;
  auto const number = [](std::string const& value, char const* flag, int most) {
    return value.empty() ? std::nullopt : std::optional(whole_number(value, flag, 1, most));
  };
  out.ranks = number(typed.ranks, "--ranks", 1 << 22);
  out.shards = number(typed.shards, "--shards", 1024);
  out.replicas = number(typed.replicas, "--replicas", 1 << 22);
  out.samples = number(typed.samples, "--samples", 1 << 16);
  out.slices = number(typed.slices, "--slices", 4096);
  out.chunks = number(typed.chunks, "--chunks", 1 << 16);
  out.recompute = second_of(typed.recompute, "--recompute", "none", "all");
  out.sharded = second_of(typed.shard, "--shard", "nothing", "optimizer");
  if (typed.post_validation == "both")
    out.post_validated = std::nullopt;
  else if (typed.post_validation == "yes" || typed.post_validation == "no")
    out.post_validated = typed.post_validation == "yes";
  else
    throw usage("--post-validation " + quoted(typed.post_validation) + " is not known: choose one of no, yes, both");
  out.schedule = asked.schedule;
  std::vector<std::string> const names = searched_schedules();
  if (!out.schedule.empty() && std::find(names.begin(), names.end(), out.schedule) == names.end()) {
    std::string known;
    for (std::string const& name : names) known += (known.empty() ? "" : ", ") + name;
    throw usage("--schedule " + quoted(asked.schedule) + " is not known: choose one of " + known);
  }
  return out;
}

/// The numbers of `--layers`; empty without the flag.
std::vector<int> layers_of(request const& asked, described_model const& model) {
  if (asked.layers.empty()) return {};
  std::vector<int> out = layers_given(asked.layers, static_cast<int>(model.size.layers));
  for (std::size_t i = 1; i + 1 < out.size(); ++i) {
    if (out[i] == 0) {
      throw usage("--layers " + quoted(asked.layers) + ": stage " + std::to_string(i) +
                  " has no layer, and neither the embedding nor the head. Remedy: 1 layer or more between the first stage and "
                  "the last");
    }
  }
  return out;
}

/// The error where no way has the choices.
usage no_way(request const& asked, described_model const& model, cluster const& on) {
  cluster_request const& typed = asked.cluster;
  std::string flags;
  for (auto const& [flag, value] :
       {std::pair{"--ranks", &typed.ranks}, std::pair{"--shards", &typed.shards}, std::pair{"--replicas", &typed.replicas},
        std::pair{"--samples", &typed.samples}, std::pair{"--slices", &typed.slices}, std::pair{"--schedule", &asked.schedule},
        std::pair{"--chunks", &typed.chunks}, std::pair{"--layers", &asked.layers}, std::pair{"--recompute", &typed.recompute},
        std::pair{"--shard", &typed.shard}}) {
    if (!value->empty()) flags += (flags.empty() ? "" : " ") + std::string(flag) + " " + *value;
  }
  if (typed.post_validation == "yes") flags += (flags.empty() ? "" : " ") + std::string("--post-validation yes");
  return usage(
      "no way on " + std::to_string(on.devices()) + " GPUs has " + (flags.empty() ? "a plan" : flags) +
      ": ranks, shards and replicas multiply to the GPUs; shards divide the " + std::to_string(on.gpus) +
      " GPUs of a machine and the " + std::to_string(model.size.heads) + " heads; replicas and samples divide the " +
      std::to_string(on.sequences) + " sequences of a step; ranks and chunks multiply to at most " +
      std::to_string(model.size.layers + 2) +
      " stages, of which --layers numbers each; one rank has the schedule 1F1B and no --post-validation yes, one "
      "replica no --shard optimizer; schedules of slices have 2 slices or more, the others 1; microbatches times slices are "
      "at most " +
      std::to_string(most_units) + ". Remedy: leave out one of the flags");
}

/// The ending of a further output's file. \throws usage for another than `first` or `second`
std::string ending_of(std::string const& file, std::string const& flag, std::string const& first, std::string const& second) {
  for (std::string const& one : {first, second}) {
    if (file.ends_with("." + one)) return one;
  }
  throw usage(flag + " " + quoted(file) + ": the file's ending says no format. Remedy: a name that ends in ." + first + " or ." +
              second);
}

json json_of(way const& of) {
  json out{{"pipeline_ranks", of.ranks},
           {"shards", of.shards},
           {"replicas", of.replicas},
           {"micro_batches", of.micro_batches},
           {"samples", of.samples},
           {"expert_ranks", of.expert_ranks},
           {"slices", of.slices},
           {"schedule", of.schedule.name},
           {"chunks", of.schedule.chunks},
           {"recompute", of.recompute},
           {"sharded_optimizer", of.sharded},
           {"layers", of.layers},
           {"time", of.time},
           {"lower_bound", of.bound},
           {"bytes", of.bytes}};
  if (of.post_validated) out["post_validation"] = true;
  if (of.slices > 1) out.update({{"slice_ends", of.slice_ends}, {"attention", of.attention}});
  return out;
}

std::string as_json(cluster_search const& found, described_model const& model, cluster const& on, double bound) {
  json best = json::array(), judged = json::array();
  for (way const& of : found.best) {
    json one = json_of(of);
    one.update({{"pipeline", of.pipeline},
                {"bubble", of.bubble},
                {"sums", of.sums},
                {"optimizer", of.optimizer},
                {"shard_collectives", of.collectives},
                {"expert_routing", of.routing},
                {"recomputation", of.again},
                {"mfu", utilization(of, model, on)},
                {"limit", of.limit},
                {"command", not_run_by_finetune(model).empty() ? json(torchrun_command(of, model, on)) : json(nullptr)}});
    best.push_back(std::move(one));
  }
  for (way const& of : found.judged) judged.push_back(json_of(of));
  return json{{"bound", bound}, {"ways", found.ways}, {"longer", found.longer}, {"best", best}, {"judged", judged}}.dump(1) +
         "\n";
}

/// How a program trains so that has stages of its own.
std::string grid_words(way const& of) {
  std::string const grid = "{.replicas = " + std::to_string(of.replicas) + ", .shards = " + std::to_string(of.shards) +
                           (of.expert_replicas() > 1 ? ", .expert_replicas = " + std::to_string(of.expert_replicas()) : "") + "}";
  return "Stages of a program's own train so with " + grid +
         (of.expert_ranks > 1 ? ", and route tokens to experts by all_to_all." : ".");
}

std::string as_text(cluster_search const& found, described_model const& model, cluster const& on, double bound) {
  std::vector<table_row> rows{
      {"ms", "P", "T", "R", "M", "samples", "schedule", "recomputed", "sharded", "bubble", "MFU", "fullest rank", "takes most"}};
  for (way const& of : found.best) {
    rows.push_back({number(of.time), std::to_string(of.ranks), std::to_string(of.shards), std::to_string(of.replicas),
                    std::to_string(of.micro_batches), std::to_string(of.samples), schedule_words(of), of.recompute ? "all" : "-",
                    of.sharded ? "optimizer" : "-", percent(of.bubble), percent(utilization(of, model, on)), bytes(of.bytes),
                    of.limit});
  }
  std::vector<align> sides{align::right, align::right, align::right, align::right, align::right, align::right, align::left,
                           align::left,  align::left,  align::right, align::right, align::right, align::left};
  bool const experts = model.size.experts > 0;
  if (experts) {
    sides.insert(sides.begin(), align::right);
    for (std::size_t i = 0; i < rows.size(); ++i)
      rows[i].insert(rows[i].begin() + 4, i == 0 ? "E" : std::to_string(found.best[i - 1].expert_ranks));
  }
  bool const sliced = std::any_of(found.best.begin(), found.best.end(), [](way const& of) { return of.slices > 1; });
  if (sliced) {
    auto const at = std::find(rows.front().begin(), rows.front().end(), "schedule") - rows.front().begin();
    sides.insert(sides.begin() + at, align::right);
    for (std::size_t i = 0; i < rows.size(); ++i)
      rows[i].insert(rows[i].begin() + at, i == 0 ? "slices" : std::to_string(found.best[i - 1].slices));
  }
  bool const overlapping = std::any_of(found.best.begin(), found.best.end(), [](way const& of) { return of.post_validated; });
  if (overlapping) {
    auto const at = std::find(rows.front().begin(), rows.front().end(), "bubble") - rows.front().begin();
    sides.insert(sides.begin() + at, align::left);
    for (std::size_t i = 0; i < rows.size(); ++i)
      rows[i].insert(rows[i].begin() + at, i == 0 ? "post-validated" : found.best[i - 1].post_validated ? "yes" : "-");
  }
  way const& best = found.best.front();
  std::string const reason = not_run_by_finetune(model);
  return std::to_string(on.nodes) + (on.nodes == 1 ? " node of " : " nodes of ") + std::to_string(on.gpus) + " GPUs with " +
         bytes(on.memory) + "; a step has " + std::to_string(on.sequences) + " sequences of " +
         std::to_string(model.setup.tokens) + " tokens. " + std::to_string(found.ways) +
         (found.ways == 1 ? " way, of which " : " ways, of which ") + std::to_string(found.longer) +
         " take longer than the tenth by their lower bound.\n\n" + table_text(rows, sides) +
         "\nP pipeline ranks, T shards, R replicas, " + (experts ? "E ranks over which each layer's experts are divided, " : "") +
         "M microbatches of so many samples" + (sliced ? ", each sequence in so many slices" : "") +
         (overlapping ? "; post-validated: ranks begin the next step before they know the norm of the whole gradient" : "") +
         "; MFU: the share of " + (model.device.peak > 0 ? "the peak" : "--tflops") + " that the model's own operations reach\n" +
         "No way takes less than " + number(bound) + " ms, the work of a step divided evenly; the first takes " +
         percent(best.time / bound - 1) + " more.\n" + "Layers of its stages: " + chevron::search::layers_text(best.layers) +
         (reason.empty() ? "; chevron-finetune divides layers itself.\nTrain: " + torchrun_command(best, model, on)
                         : ".\nNot run by chevron-finetune: " + reason + ". " + grid_words(best)) +
         "\n";
}

/// The first way's step, drawn as `show` draws it.
std::string timeline_file(way of, described_model const& model, cluster const& on, std::string const& format) {
  sharded_costs const given = costs_on(model, on, costs_key_of(of, on));
  std::optional<made_plan> const made = plan_of(of);
  chevron::show::picture const drawn = timeline_of(of, model, on, given, made->plan);
  return format == "html" ? chevron::show::html(drawn) : chevron::show::svg(drawn);
}

}  // namespace

double utilization(way const& of, described_model const& model, cluster const& on) {
  training_setup one = model.setup;
  one.samples = 1;
  double const operations = model_operations(model.size, one) * static_cast<double>(on.sequences);
  double const peak = model.device.peak > 0 ? model.device.peak : model.device.matrix;
  return operations / (of.time / 1e3) / (peak * on.devices());
}

std::string schedule_words(way const& of) {
  return of.schedule.name + std::string(of.schedule.chunks > 2 ? ", " + std::to_string(of.schedule.chunks) + " chunks" : "");
}

int run_cluster(request const& asked) {
  std::string const format = format_of(asked, cluster_formats);
  cluster_request const& typed = asked.cluster;
  std::string const timeline = typed.timeline.empty() ? "" : ending_of(typed.timeline, "--timeline", "svg", "html");
  check_output(typed.timeline, "--timeline");
  check_output(typed.slurm, "--slurm");
  fixed_choices fixed = choices_of(asked);
  if (asked.profile.empty()) throw usage("no profile is given: give a file that chevron-plan model wrote");
  std::string const name = "--profile " + quoted(asked.profile);
  chevron::profile const read = *profile_of(asked);
  if (read.model.empty()) {
    throw usage(name +
                " has no 'model', from which the costs on shards and for other microbatches follow: write it by chevron-plan "
                "model, with --calibrate for measured times");
  }
  described_model const model = described_model_of(read.model, name);
  if (std::string const reason = not_run_by_finetune(model); !typed.slurm.empty() && !reason.empty()) {
    throw usage("--slurm " + quoted(typed.slurm) +
                ": the script starts chevron-finetune, which does not train the profile's model: " + reason +
                ". Remedy: leave out --slurm");
  }
  cluster const on = cluster_of(typed, model);
  int const threads = typed.threads.empty() ? static_cast<int>(std::clamp(std::thread::hardware_concurrency(), 1U, 64U))
                                            : whole_number(typed.threads, "--threads", 1, 1024);
  // A picture shows all ways of its part of the plane.
  bool const drawn = format == "svg" || format == "html";
  search_window const window{.times = drawn ? map_times : 1, .memory = drawn ? map_memory : 1, .all = typed.exhaustive};
  fixed.layers = layers_of(asked, model);
  cluster_search const found = search_ways(model, on, fixed, window, threads);
  if (found.best.empty() && !found.least) throw no_way(asked, model, on);
  if (found.best.empty()) {
    std::string words = "Nothing of " + std::to_string(found.ways) + " ways fits in " + bytes(on.memory) + ".";
    if (found.least)
      words += " The least that is needed is " + bytes(found.least->bytes) + ", with " + std::to_string(found.least->ranks) +
               " pipeline ranks and " + std::to_string(found.least->shards) + " shards.";
    throw too_little_memory(words + " Remedy: more GPUs, a larger --memory, or fewer tokens of a sequence");
  }
  double const bound = bound_of(model, on, sample_sizes(on, fixed), slice_counts(model, fixed));
  if (!timeline.empty()) write_to(typed.timeline, "--timeline", timeline_file(found.best.front(), model, on, timeline));
  if (!typed.slurm.empty()) write_to(typed.slurm, "--slurm", slurm_script(found.best.front(), model, on));
  std::string const words = as_text(found, model, on, bound);
  write(asked, format == "json" ? as_json(found, model, on, bound)
               : drawn          ? cluster_picture(found, model, on, bound, format == "html")
                                : words);
  if (!asked.output.empty()) std::cout << words;
  return exit_ok;
}

}  // namespace plan_program
