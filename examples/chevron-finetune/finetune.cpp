#include "finetune.hpp"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <map>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <chevron/base/format.hpp>
#include <chevron/checkpoint/checkpoint.hpp>
#include <chevron/checkpoint/load_weights.hpp>
#include <chevron/checkpoint/save_weights.hpp>
#include <chevron/checkpoint/weight_folder.hpp>
#include <chevron/data/sampler.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/plan/forward_part.hpp>
#include <chevron/plan/profile.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/prove/timeline.hpp>
#include <chevron/run/core/measured_bytes.hpp>
#include <chevron/run/core/stop_request.hpp>
#include <chevron/run/stage/random_scope.hpp>
#include <chevron/run/train/evaluator.hpp>
#include <chevron/run/train/fused_optimizers.hpp>
#include <chevron/run/train/preflight.hpp>
#include <chevron/run/train/trainer.hpp>
#include <chevron/tools/profile/trace_window.hpp>
#include <chevron/tools/show/profile_file.hpp>

#include "chevron-finetune/decoder.hpp"
#include "chevron-finetune/folder_out.hpp"
#include "chevron-finetune/rank_bytes.hpp"
#include "common/console.hpp"
#include "common/programs.hpp"
#include "common/step_teller.hpp"
#include "common/trainer_flags.hpp"

namespace chevron::finetune {
namespace {

using train::some;

/// Draws the adapters of a stage, each from a stream of its own, which depends on the seed and on the projection's name alone: so
/// adapters begin alike however the model is cut.
void draw_adapters(decoder_stage& of, std::uint64_t seed) {
  for (auto const& each : of->named_modules()) {
    auto* const one = dynamic_cast<adapted_module*>(each.value().get());
    if (one == nullptr) continue;
    rng_key key{.seed = seed, .step = -1};  // before all steps
    std::uint64_t state = stream_of(key);
    for (char const letter : each.key()) {
      key.seed = state;
      key.part = static_cast<unsigned char>(letter);
      state = stream_of(key);
    }
    one->draw(state);
  }
}

stage make_stage(task const& what, transport& comm, c10::Device device, int stages, int number) {
  train::layer_cut const cut = cut_of(what.model, stages, number);
  train::shard_layout const layout{shard_group(comm), what.options.sequence_parallel ? what.options.context : 0};
  adapters const& with = what.options.adapters;
  decoder_stage made(what.model, cut, layout, what.data.packed(), with);
  {
    at::NoGradGuard const off;
    for (at::Tensor& p : made->parameters()) p.zero_();  // until weights are loaded; replicas must begin alike
  }
  if (with.rank > 0) draw_adapters(made, what.options.seed);
  if (what.options.precision == train::precision::bfloat16) made->to(at::kBFloat16);
  made->to(device);
  stage out(made, [made](std::span<at::Tensor const> given) mutable { return made->forward(given); });
  train::declare_shards(out, *made, layout.group);
  if (what.data.packed()) out.side_inputs({positions_name});
  out.carries(train::slice_cache::names(cut.last - cut.first, what.options.slices));
  // One stage alone has the table once. A frozen table has no gradient to be summed: each of two stages has its copy.
  if (what.model.tied && stages > 1 && with.rank == 0 && !made->tied_name().empty()) out.tie(made->tied_name(), "embedding");
  return out.recompute(what.options.recompute);
}

std::string told_of_model(decoder_config const& c) {
  return c.kind + " of " + train::grouped(c.parameters()) + " parameters: " + some(c.layers, "layer") + ", width " +
         std::to_string(c.width) + " and " + std::to_string(c.inner) + ", " + some(c.heads, "head") + " on " +
         some(c.key_heads, "key head") + ", " + train::grouped(c.vocabulary) + " tokens" + (c.tied ? ", tied" : "");
}

/// The adapters' settings and number of parameters, in words.
std::string told_of_adapters(task const& what) {
  adapters const& with = what.options.adapters;
  return with.words() + ": " + train::grouped(with.parameters(what.model)) + " parameters, beside the frozen model";
}

/// Processes have flags and files of their own. The trainer compares what it is given; this is what it does not see.
void compare_jobs(task const& what, transport& comm) {
  options const& o = what.options;
  named_values lines = common_values(comm);
  train::add_values(lines, o);
  lines.add("--model", told_of_model(what.model));
  lines.add("--data", what.data.settings());
  lines.add("--validation", what.validation == nullptr ? "none" : what.validation->settings());
  lines.add("--validate-every", std::to_string(o.validate_every));
  lines.add("--validation-batches", std::to_string(o.validation_batches));
  if (o.adapters.rank > 0) lines.add("--lora-rank", o.adapters.words());
  lines.add("--out", o.out + " " + name_of_out(o, what.model));
  check_consistency(comm, lines);
}

/// What must be the same for a resumed run to be the run that was interrupted.
std::map<std::string, std::string> words_of(task const& what) {
  options const& o = what.options;
  std::map<std::string, std::string> out = {{"seed", std::to_string(o.seed)},
                                            {"samples a step", std::to_string(o.samples() * o.replicas)},
                                            {"model", told_of_model(what.model)},
                                            {"dtype", name_of(o.precision)},
                                            {"weight decay", show::exact(o.weight_decay)},
                                            {"data", what.data.settings()}};
  if (o.adapters.rank > 0) out["adapters"] = o.adapters.words();
  return out;
}

void print_header(task const& what, train::rank_place const& where) {
  options const& o = what.options;
  plan_view const plan = what.training.view().plan;
  std::string cut, peaks;
  for (int s = 0; s < plan.stages; ++s) cut += (s == 0 ? "" : " | ") + words_for(cut_of(what.model, plan.stages, s));
  for (int r = 0; r < plan.size.ranks; ++r) peaks += (r == 0 ? "" : ", ") + std::to_string(peak_in_flight(plan, r));
  auto const samples = static_cast<std::int64_t>(o.samples()) * o.replicas;
  train::print_facts(
      {{"model", o.model + ", " + told_of_model(what.model)},
       {"data",
        what.data.words() + (what.data.packed() ? "; " : ", of which ") + some(o.steps, "step") +
            (o.steps == 1 ? " takes " : " take ") +
            show::fixed(static_cast<double>(o.steps) * static_cast<double>(samples) / static_cast<double>(what.data.size()), 2) +
            " epochs"},
       {"ranks",
        some(o.ranks, "pipeline rank") + " × " + some(o.replicas, "replica") + words_for_shards(o) + ", " + where.launcher},
       {"schedule", std::string(plan.name) + ", " + some(plan.stages, "stage") + ": " + cut},
       {"step", train::grouped(o.micro_batches) + (o.micro_batches == 1 ? " microbatch" : " microbatches") +
                    (o.slices > 1 ? " in " + some(o.slices, "slice") : "") + " of " + some(o.micro_batch_size, "sample") +
                    " for each replica, " + train::grouped(samples * o.context) + " tokens in all"},
       {"predicted", "bubble " + show::percent(bubble_makespan(plan, costs{})) +
                         " if forward, input gradient and weight gradient cost the same; chunks in flight by rank: " + peaks}});
  if (o.adapters.rank > 0) train::print_facts({{"adapters", told_of_adapters(what)}});
  if (!o.slices_why.empty()) train::print_facts({{"slices", o.slices_why}});
  if (auto const own = train::facts_of_own_actions(plan); !own.empty()) train::print_facts(own);
  std::printf("\n");
  std::fflush(stdout);
}

/// Windows that all replicas take in a step, or in a batch of a validation.
std::size_t windows_of_step(options const& o) {
  return static_cast<std::size_t>(o.samples()) * static_cast<std::size_t>(o.replicas);
}

/// Batches of one validation.
std::size_t batches_of_validation(options const& o, samples const& validation) {
  std::size_t const all = validation.size() / windows_of_step(o);
  return o.validation_batches == 0 ? all : std::min(static_cast<std::size_t>(o.validation_batches), all);
}

/// Mean loss over the labels of the first windows of the validation files, the same ones for any number of ranks.
double validation_loss(task const& what, trainer& train) {
  options const& o = what.options;
  evaluator evaluate(what.evaluation, train);
  auto const mine = static_cast<std::size_t>(o.samples());
  std::size_t const together = windows_of_step(o), batches = batches_of_validation(o, *what.validation);
  double sum = 0, labels = 0;
  for (std::size_t b = 0; b < batches; ++b) {
    double const counted = what.validation->labels(b * together, together);
    if (counted == 0) continue;
    std::vector<std::size_t> windows(mine);
    std::iota(windows.begin(), windows.end(), b * together + mine * static_cast<std::size_t>(train.comm().topology().replica()));
    sum += counted * evaluate.loss(what.validation->batch(windows));
    labels += counted;
  }
  return sum / labels;
}

/// Logits of the first windows of the data, in their order, by the rank of the last stage, its first shard.
void write_logits(task const& what, trainer& train) {
  evaluator forward(what.evaluation, train);
  std::vector<std::size_t> windows(static_cast<std::size_t>(what.options.samples()));
  std::iota(windows.begin(), windows.end(), std::size_t{0});
  batch const first = what.data.batch(windows);
  tensors logits = forward.outputs(batch{first.inputs, {}, first.side_inputs});
  shard_group const group(train.comm());
  if (!logits.empty() && group.shards() > 1) logits[0] = group.gathered(logits[0], 2, what.model.vocabulary);
  detail::together(train.comm(), [&] {
    if (logits.empty() || train.comm().topology().replica() != 0 || group.shard() != 0) return;
    named_tensors out{{"tokens", first.inputs[0]}, {"labels", first.targets[0]}, {"logits", logits[0]}};
    for (side_input const& each : first.side_inputs) out.emplace_back(each.name, each.value);
    write_safetensors(what.options.logits, out);
  });
}

/// Loads the model's folder. With adapters a tied table that is in two stages is two parameters, which the folder may hold under
/// one of their names. Collective.
void load_model(task const& what, trainer& train) {
  options const& o = what.options;
  // Frequencies of rotary embedding, which older folders hold, are computed here.
  load_weights_options const how{.may_stay = {"*.rotary_emb.inv_freq"}};
  if (o.adapters.rank == 0) return load_weights(train, o.model, {}, how);
  std::string const embedding = "model.embed_tokens.weight", head = "lm_head.weight";
  std::string held;  // the only name of the table; empty: the folder has both
  detail::together(train.comm(), [&] {
    if (!what.model.tied) return;
    detail::weight_folder folder(o.model);
    if (!folder.holds(embedding) || !folder.holds(head)) {
      held = folder.holds(head) ? head : embedding;
    } else if (!folder.equal(embedding, head)) {
      throw checkpoint_error(o.model + ": " + embedding + " differs from " + head +
                             ", and config.json ties them (tie_word_embeddings). Remedy: the folder as it was saved");
    }
  });
  load_weights(
      train, o.model,
      [&](std::string const& name) {
        if (is_of_adapter(name)) return std::string();
        return !held.empty() && (name == embedding || name == head) ? held : name;
      },
      how);
}

/// Writes the adapters as peft does: each rank its own, into a folder of their own, which the first rank makes one file of.
void write_adapters(task const& what, trainer& train) {
  options const& o = what.options;
  save_weights(train, adapter_parts(o),
               [](std::string const& name) { return is_of_adapter(name) ? "base_model.model." + name : std::string(); },
               {.dtype = dtype_of_out(o, what.model)});
  detail::together(train.comm(), [&] {
    if (train.comm().topology().global_rank == 0) write_adapter_files(o);
  });
}

void write_out(task const& what, trainer& train) {
  options const& o = what.options;
  if (o.adapters.rank > 0)
    write_adapters(what, train);
  else
    save_weights(train, o.out, {}, {.dtype = dtype_of_out(o, what.model)});
  detail::together(train.comm(), [&] {
    if (train.comm().topology().global_rank == 0) write_other_files(o, what.model);
  });
}

/// The steps of so many passes over the data, of which each takes as many batches.
long steps_of_epochs(double epochs, std::size_t batches) {
  double const steps = std::ceil(epochs * static_cast<double>(batches));
  if (steps > 1e9) {
    throw usage_error("--epochs " + show::number(epochs) + ", each of " + std::to_string(batches) +
                      " batches, make more than 1e9 steps. Remedy: fewer epochs");
  }
  return static_cast<long>(steps);
}

/// What `--dry-run` prints, as text under the facts of the job, or as JSON.
void print_bytes(options const& o, decoder_config const& c, plan_view const& plan, job_bytes const& bytes) {
  if (o.dry_run == "json") {
    std::printf("%s", json_of(o, c, plan, bytes).c_str());
  } else {
    train::print_facts(
        {{"model", o.model + ", " + told_of_model(c)},
         {"ranks", some(o.ranks, "pipeline rank") + " × " + some(o.replicas, "replica") + words_for_shards(o)},
         {"schedule", std::string(plan.name) + ", " + some(plan.stages, "stage")},
         {"step", train::grouped(o.micro_batches) + (o.micro_batches == 1 ? " microbatch of " : " microbatches of ") +
                      some(o.micro_batch_size, "sample") + " of " + train::grouped(o.context) + " tokens, " +
                      name_of(o.precision) + (o.recompute ? ", recomputed" : "")}});
    std::printf("\n%s", table_of(o, c, plan, bytes).c_str());
  }
  std::fflush(stdout);
}

/// Floating-point operations that training spends on a token. Frozen weights have no gradient: a third of their products is left
/// out.
double flops_per_token(task const& what) {
  adapters const& with = what.options.adapters;
  double const whole = what.model.flops_per_token(what.options.context);
  if (with.rank == 0) return whole;
  return whole - what.model.flops_per_token(0) / 3 + 6 * static_cast<double>(with.parameters(what.model));
}

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Writes measured times and bytes of stages. Collective.
/// \param records of this rank's steps
void write_profile(task const& what, trainer& train, trace_window const& records) {
  options const& o = what.options;
  topology const& here = train.comm().topology();
  auto const traces = train.comm().all_gather_text(records.text());
  auto const bytes = train.comm().all_gather_text(text_of(train.bytes_by_stage()));
  detail::together(train.comm(), [&] {
    if (here.global_rank != 0) return;
    plan_view const plan = what.training.view().plan;
    profile measured = profile_of(plan, steps_of(traces, here.shards), profiled_times::microbatches);
    for (int s = 0; s < plan.stages; ++s) {
      train::layer_cut const cut = cut_of(what.model, plan.stages, s);
      measured.layers.push_back(cut.last - cut.first);
    }
    add_bytes(measured, bytes);
    measured.shard = o.shard ? o.replicas : 1;
    train::write_file("--profile", o.profile, write_profile(measured));
  });
}

}  // namespace

void finetune_on_rank(task const& what, train::rank_place const& where) {
  using clock = std::chrono::steady_clock;
  options const& o = what.options;
  transport& comm = where.comm;
  plan_view const plan = what.training.view().plan;
  topology const& here = comm.topology();
  bool const speaks = here.global_rank == 0;
  if (o.backend != train::backend::threads) compare_jobs(what, comm);

  train::step_teller teller(o, here, flops_per_token(what));
  trainer_options flags = train::trainer_options_of(o, where, what.model.attention_share(o.context));
  if (what.data.counts_labels() || (what.validation != nullptr && what.validation->counts_labels()))
    flags.loss_weight = labels_of;
  flags.on_report = [&](step_report const& report) { teller.tell(report); };
  trainer trained({.program = what.training,
                   .transport = comm,
                   .stages = [&](int s) { return make_stage(what, comm, where.device, plan.stages, s); },
                   .loss =
                       [&, group = shard_group(comm)](at::Tensor const& logits, at::Tensor const& following) {
                         return train::vocabulary_cross_entropy(group, logits.flatten(0, 1).to(at::kFloat), following.flatten(),
                                                                what.model.vocabulary);
                       },
                   .optimizer = optimizer<fused_adamw>(train::adamw_options_of(o, o.weight_decay)),
                   .options = flags});
  auto const words = words_of(what);
  double spent_loading = 0;
  auto const load = [&] {
    clock::time_point const loading = clock::now();
    load_model(what, trained);
    spent_loading = seconds_since(loading);
  };
  // Checkpoints of adapters have a fingerprint of the frozen model alone.
  if (o.adapters.rank > 0) load();
  // A run that ended after its last checkpoint and before --out was written has that left to do.
  std::optional<std::string> const resumed = train::begin_from_checkpoint(o, words, trained, train::nothing_left::may_be);
  if (!resumed && o.adapters.rank == 0) load();
  long const first_step = trained.next_step() + 1;  // steps that people read count from 1

  if (speaks) {
    print_header(what, where);
    train::print_facts({resumed
                            ? std::pair<std::string, std::string>{"resumed", *resumed}
                            : std::pair<std::string, std::string>{"loaded", o.model + " in " + train::duration(spent_loading)}});
  }
  if (!o.logits.empty()) write_logits(what, trained);
  double before = 0, after = 0;
  if (what.validation != nullptr) before = validation_loss(what, trained);
  if (speaks) std::printf("\n");
  teller.open(first_step);

  distributed_sampler sampler(what.data.size(), here, {.batch_size = static_cast<std::size_t>(o.samples()), .seed = o.seed});
  sampler.start_at(trained.next_step());
  if (!o.profile.empty()) trained.measure_bytes();
  trace_window records;
  clock::time_point const begin = clock::now();
  for (long step = first_step; step <= o.steps; ++step) {
    clock::time_point const fetching = clock::now();
    auto windows = sampler.next(static_cast<std::size_t>(o.samples()));
    if (!windows) {
      sampler.reset();  // the next epoch
      windows = sampler.next(static_cast<std::size_t>(o.samples()));
    }
    batch const drawn = what.data.batch(*windows);
    teller.loaded(step, seconds_since(fetching));
    bool const validates = o.validate_every > 0 && step % o.validate_every == 0;
    if (validates) teller.will_validate(step);
    clock::time_point const step_begin = clock::now();
    trained.step(drawn);
    if (!o.profile.empty() && (step > first_step || o.steps == first_step))
      records.keep(trained.last_trace(), seconds_since(step_begin));
    if (validates) teller.validated(after = validation_loss(what, trained));
    train::save_where_due(o, words, trained, step, {.trained_only = o.adapters.rank > 0});
    if (step < o.steps && trained.should_stop()) {
      teller.close();
      if (speaks) {
        train::print_facts({{"stopped", "after step " + std::to_string(step) + " of " + std::to_string(o.steps) + ", since " +
                                            trained.stop_reason() + "; saved in " + o.checkpoint + ": --resume goes on"}});
        std::fflush(stdout);
      }
      return;
    }
  }
  trained.check_copies();
  double const spent = seconds_since(begin);
  teller.close();
  bool const just_now = o.validate_every > 0 && o.steps % o.validate_every == 0 && first_step <= o.steps;
  if (what.validation != nullptr && !just_now) after = validation_loss(what, trained);
  write_out(what, trained);
  if (!o.profile.empty()) write_profile(what, trained, records);
  if (!speaks) return;
  long const taken = o.steps + 1 - first_step;
  std::vector<std::pair<std::string, std::string>> facts = {
      {"trained", taken == 0
                      ? "nothing: the checkpoint is at the end of step " + std::to_string(o.steps) + ", which is --steps"
                      : some(taken, "step") + " in " + train::duration(spent) + ": loss " + show::fixed(teller.first_loss(), 4) +
                            " → " + show::fixed(teller.last_loss(), 4) + " nats a token"}};
  if (what.validation != nullptr)
    facts.emplace_back("validation", "loss " + show::fixed(before, 4) + " → " + show::fixed(after, 4));
  facts.emplace_back("written", o.out + ", " + (o.adapters.rank > 0 ? "adapters in " : "") + name_of_out(o, what.model));
  if (!o.profile.empty()) facts.emplace_back("profile", o.profile + ", for chevron-plan model --calibrate and --profile");
  train::print_facts(facts);
  std::fflush(stdout);
}

int start(int argc, char** argv, train::gpu_side const* gpus) {
  options o = read_options(argc, argv);
  launch_environment const told =
      o.dry_run.empty() ? train::look_for_launcher(o, argv, gpus) : launch_environment{};  // a dry run takes no GPU
  decoder_config const model = read_decoder_config(o.model);
  if (o.context == 0) o.context = static_cast<int>(std::min<std::int64_t>(512, model.most_positions));
  if (o.context > model.most_positions) {
    throw usage_error("--context " + std::to_string(o.context) + " is more than the model's positions, " +
                      std::to_string(model.most_positions) + " (" + model.positions_key +
                      " of its config.json). Remedy: a shorter one");
  }
  train::choose_slices(o, o.attention >= 0 ? o.attention : model.attention_share(o.context));
  train::check_shards(o, static_cast<int>(model.key_heads),
                      "the " + some(model.key_heads, "head") + " of keys that " + o.model + " has (num_key_value_heads)");
  if (o.print_groups) {
    if (told.rank == 0) std::printf("%s", groups_of(o).c_str());
    return 0;
  }
  proved_plan const plan = train::proved_by_options(o);
  (void)cut_of(model, plan.view().stages, 0);  // throws if there are too many stages
  if (!o.dry_run.empty() || o.memory > 0) {
    job_bytes const bytes = bytes_of(o, model, plan.view());
    if (!o.dry_run.empty()) print_bytes(o, model, plan.view(), bytes);
    check_memory(o, model, bytes);
    if (!o.dry_run.empty()) return 0;
  }
  window_kind const windows = kind_of_windows(o.windows, o.data);
  samples const data(windows, o.data, o.context, model.vocabulary);
  std::optional<samples> validation;
  if (!o.validation.empty()) validation.emplace(windows, o.validation, o.context, model.vocabulary);
  std::size_t const together = windows_of_step(o);
  std::map<std::string, samples const*> const sets = {{"--data", &data}, {"--validation", validation ? &*validation : nullptr}};
  for (auto const& [flag, set] : sets) {
    if (set == nullptr || set->size() >= together) continue;
    throw usage_error(flag + " has " + some(static_cast<std::int64_t>(set->size()), "window") + " of " +
                      std::to_string(o.context) + " tokens, and a step takes " + std::to_string(together) +
                      ". Remedy: more tokens, a shorter --context or smaller steps");
  }
  std::map<std::string, double> labels = {{"--data", data.counts_labels() ? data.labels(0, data.size()) : 1}};
  if (validation) labels["--validation"] = validation->labels(0, together * batches_of_validation(o, *validation));
  for (auto const& [flag, count] : labels) {
    if (count > 0) continue;
    throw usage_error(flag + " has no label in its windows: their masks mark no token. Remedy: a mask that marks what the " +
                      "model shall learn" + (flag == "--data" ? "" : ", or more --validation-batches"));
  }
  if (o.epochs) o.steps = steps_of_epochs(*o.epochs, data.size() / together);
  if (told.rank == 0) {
    // Other ranks wait meanwhile; of larger sets each token is looked at when it is drawn.
    constexpr std::size_t quickly_read = 1'000'000'000;
    for (auto const& [flag, set] : sets) {
      if (set != nullptr && set->tokens() <= quickly_read) set->check_vocabulary();
    }
    check_out(o, model);
    train::check_file("--metrics", o.metrics);
    train::check_folder("--tensorboard", o.tensorboard);
    train::check_file("--logits", o.logits);
    train::check_file("--profile", o.profile);
  }
  // Without a folder to save into, a signal ends the program as it ends others.
  std::optional<stop_signals> stop;
  if (!o.checkpoint.empty()) stop.emplace();
  if (o.stop_after > 0) request_stop_after(std::chrono::milliseconds(static_cast<long>(o.stop_after * 1000)));
  task const what{.options = o,
                  .model = model,
                  .training = train::lower_and_check(plan),
                  .evaluation = train::lower_and_check(prove(forward_part(plan))),
                  .data = data,
                  .validation = validation ? &*validation : nullptr};
  train::run_ranks(o, told, gpus, [&](train::rank_place const& where) { finetune_on_rank(what, where); });
  return 0;
}

}  // namespace chevron::finetune
