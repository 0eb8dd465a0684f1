// chevron-plan: look at pipeline schedules. No LibTorch; starts in milliseconds.
//
//   chevron-plan list
//   chevron-plan show --schedule ZBVZeroBubble --ranks 4 --microbatches 8
//   chevron-plan show --schedule 1F1B --format svg -o timeline.svg
//   chevron-plan show --schedule ZB-H2 --steps 3 --critical-path -o steps.svg
//   chevron-plan compare --ranks 8 --microbatches 32 --memory-limit 8 --message-bytes 32MiB
//   chevron-plan check --schedule Interleaved1F1B --ranks 4 --chunks 3 --microbatches 12
//   chevron-plan search --ranks 8 --microbatches 32 --forward 3 --backward-input 2 --memory-limit 8 -o mine.csv
//   chevron-plan search --ranks 8 --chunks 2 --microbatches 32 --memory-limit 6 --seconds 60 -o mine.csv
//   chevron-plan search --ranks 4 --microbatches 8 --lengths 512,2048,512,640,4096,256,512,1024 --order -o mine.csv
//   chevron-plan compare --ranks 2 --microbatches 8 --profile measured.json
//   chevron-plan compare mine.csv --jitter 5% --slow-rank 3=1.3
//   chevron-plan fit --ranks 8 --microbatches 32 --memory 80GiB --static-bytes 40GiB --activation-bytes 6GiB --input-bytes 128MiB
//   chevron-plan model config.json --tokens 4096 --gpu h100 --masters -o profile.json
//   chevron-plan cluster profile.json --nodes 2 --gpus 8 --memory 80GiB --link-inside 450GB/s --link-between 50GB/s
//     --batch-tokens 4M -o map.svg --slurm job.sh
//   chevron-plan check mine.csv
//   chevron-plan check mine.csv --channels group
//   chevron-plan lower --schedule ZB-H1 --ranks 2 --microbatches 4
//   chevron-plan lower mine.csv --format csv-comms -o lowered.csv
//   chevron-plan lower ZBVZeroBubble --ranks 4 --microbatches 4 --format promela -o zb-v.pml
//   chevron-plan explain flight logs -o why.svg
//   chevron-plan plot run.jsonl resumed.jsonl --y loss,grad_norm -o loss.svg
//   chevron-plan explain --flight-recorder dumps -o why.svg

#include <CLI/CLI.hpp>
#include <cerrno>
#include <cstring>
#include <iostream>
#include <new>
#include <string>

#include <chevron/version.hpp>

#include "../common/completion.hpp"
#include "../common/help.hpp"
#include "../common/nearest.hpp"
#include "cluster.hpp"
#include "request.hpp"

using namespace plan_program;

namespace {

/// Puts the flags that are added next under a heading of the command's help.
void under(CLI::App& command, char const* heading) { command.option_defaults()->group(heading); }

/// The name of a flag's type: its values with `|` between.
std::string one_of(word_list const& values) {
  std::string out;
  for (std::string const& value : values) out += (out.empty() ? "" : "|") + value;
  return out;
}

/// `--format` and `-o` under the heading of output. \param words on formats, before those on endings
void add_format(CLI::App& command, request& asked, word_list const& formats, std::string const& words = "") {
  under(command, "Output");
  command
      .add_option("--format", asked.format, words + (words.empty() ? "" : "; ") + "without this flag, by the ending of -o's file")
      ->type_name(one_of(formats));
  command.add_option("-o,--output", asked.output, "write to this file")->type_name("FILE");
}

void add_shape(CLI::App& command, request& asked) {
  under(command, "Size");
  command.add_option("--ranks", asked.ranks, "pipeline ranks")->type_name("P")->capture_default_str();
  command.add_option("--chunks", asked.chunks, "stages on each rank, where the schedule leaves that open")->type_name("V");
  command.add_option("--microbatches", asked.micro_batches, "microbatches of a step")->type_name("M")->capture_default_str();
}

void add_costs(CLI::App& command, request& asked, char const* of, char const* of_messages) {
  under(command, "Costs");
  command.add_option("--forward", asked.forward, std::string("cost of F ") + of)->type_name("COST")->capture_default_str();
  command.add_option("--backward-input", asked.backward_input, std::string("cost of I ") + of)
      ->type_name("COST")
      ->capture_default_str();
  command.add_option("--backward-weight", asked.backward_weight, std::string("cost of W ") + of + "; B costs I and W together")
      ->type_name("COST")
      ->capture_default_str();
  under(command, "Links between ranks");
  command.add_option("--communication", asked.communication, std::string("time of a transfer between ranks") + of_messages)
      ->type_name("COST")
      ->capture_default_str();
  command
      .add_option("--communication-occupies", asked.communication_occupies,
                  "busy during a transfer: nobody; the sender, the receiver or both, which then compute nothing; or the "
                  "wire, which carries one transfer at a time; without this flag, the wire with a bandwidth, else nobody")
      ->type_name("nobody|sender|receiver|both|wire");
  command.add_option("--latency", asked.latency, std::string("time from a transfer's end to its arrival") + of_messages)
      ->type_name("TIME")
      ->capture_default_str();
  command
      .add_option("--bandwidth", asked.bandwidth,
                  "of links between ranks, such as 12.5GB/s or 100Gbit/s: with --message-bytes, instead of --communication")
      ->type_name("RATE");
  command
      .add_option(
          "--link", asked.links,
          "latency and bandwidth of the link between two ranks, if other links differ: 3-4=20us:1.25GB/s; may be repeated")
      ->type_name("A-B=TIME[:RATE]")
      ->expected(1);
  under(command, "Costs");
  command
      .add_option("--hidden", asked.hidden, "of a fused pair's shorter half, the share that the longer half hides, from 0 to 1")
      ->type_name("SHARE")
      ->capture_default_str();
  command.add_flag("--no-first-input-gradient", asked.no_first_input_gradient,
                   "stage 0 computes no input gradient, as in a real model: its I costs nothing, its W the whole backward");
  command
      .add_option("--profile", asked.profile,
                  "costs as chevron-train --profile measured them or chevron-plan model computed them, in ms, instead of the "
                  "flags above; --communication, "
                  "--hidden and the flags of links still count")
      ->type_name("FILE.json");
  command
      .add_option("--layers", asked.layers,
                  "number of layers of each stage, with commas between, of a --profile that has 'layers'; without this flag, "
                  "layers are divided as suits each schedule where the profile has them one by one, or its stages do not add up")
      ->type_name("COUNT,...");
  under(command, "Bytes");
  command.add_option("--activation-bytes", asked.activation_bytes, std::string("memory that a microbatch keeps ") + of)
      ->type_name("BYTES");
  command.add_option("--message-bytes", asked.message_bytes, std::string("size of a message between ranks") + of_messages)
      ->type_name("BYTES");
}

void add_slices(CLI::App& command, request& asked, char const* what) {
  under(command, "Size");
  command.add_option("--slices", asked.slices, what)->type_name("K")->capture_default_str();
  command
      .add_option("--slice-ends", asked.slice_ends,
                  "ends of slices, as shares of a sequence's tokens with commas between, the last 1; or equal: slices of equal "
                  "length. Without this flag, slices take equal time, by --attention")
      ->type_name("SHARE,...|equal");
}

void add_memory(CLI::App& command, request& asked) {
  under(command, "Bytes");
  memory_request& typed = asked.bytes;
  command
      .add_option("--memory", typed.memory,
                  "memory of a rank, such as 80GiB; numbers of bytes are those of a rank's whole share of the model")
      ->type_name("BYTES");
  command.add_option("--static-bytes", typed.fixed, "parameters, gradients and the optimizer's state of a rank")
      ->type_name("BYTES");
  command
      .add_option("--kept-bytes", typed.kept,
                  "memory that W needs after I, gradients included; without this flag, as much as --activation-bytes")
      ->type_name("BYTES");
  command.add_option("--input-bytes", typed.input, "input of a stage, which a recomputed stage keeps of a microbatch")
      ->type_name("BYTES");
  command.add_option("--state-bytes", typed.state, "the optimizer's state, a part of --static-bytes; for --shard")
      ->type_name("BYTES");
  command
      .add_option("--shard", typed.shard,
                  "replicas that share the optimizer's state: a rank holds its share; with --state-bytes, or a --profile with "
                  "state_bytes")
      ->type_name("REPLICAS");
}

void add_attention(CLI::App& command, request& asked) {
  under(command, "Lengths");
  command
      .add_option(
          "--attention", asked.attention,
          "share of these costs that grows with the square of a length, from 0 to 1: attention; without this flag, all costs "
          "grow with the length")
      ->type_name("SHARE");
}

void add_lengths(CLI::App& command, request& asked) {
  under(command, "Lengths");
  command
      .add_option("--lengths", asked.lengths,
                  "tokens of each microbatch, with commas between; costs, those of --measured-length tokens, grow with them")
      ->type_name("TOKENS,...");
  command
      .add_option("--measured-length", asked.measured_length,
                  "tokens of the microbatch whose costs are given; without this flag, the mean of --lengths")
      ->type_name("TOKENS");
  add_attention(command, asked);
}

/// \param with the format that the flags are about, and a colon; empty: all \param models which messages share a channel
void add_channels(CLI::App& command, request& asked, std::string const& with, char const* models) {
  under(command, "Channels between ranks");
  command.add_option("--channels", asked.channels.model, with + models)->type_name("edge|pair|group|batched");
  command.add_flag("--hosts-wait", asked.channels.hosts_wait,
                   with +
                       "a rank waits at each message, or batch, until it has ended; without this flag, messages wait on the "
                       "channel's stream");
  command
      .add_option("--buffered-below", asked.channels.buffered_below,
                  with + "sends of fewer bytes end without their receives; with --message-bytes")
      ->type_name("BYTES");
}

void add_jitter(CLI::App& command, request& asked) {
  under(command, "Times that vary");
  command
      .add_option("--jitter", asked.jitter.spread,
                  "standard deviation of a computation's time, such as 5%: schedules are then judged by the 90th percentile "
                  "over drawn times")
      ->type_name("PERCENT");
  command
      .add_option("--slow-rank", asked.jitter.slow_ranks,
                  "a rank, and the factor by which its computations take longer; may be repeated")
      ->type_name("RANK=FACTOR");
  command
      .add_option("--replicas", asked.jitter.replicas,
                  "pipelines side by side, each with its own jitter: a step ends with the slowest")
      ->type_name("N");
  command.add_option("--slow-replica", asked.jitter.slow_replica, "factor by which the computations of one replica take longer")
      ->type_name("FACTOR");
  command.add_option("--draws", asked.jitter.draws, "steps to draw; without this flag, 200")->type_name("COUNT");
}

void add_model(CLI::App& command, request& asked) {
  model_request& typed = asked.model;
  auto const option = [&](char const* flags, std::string& to, char const* type, char const* words) {
    auto* const added = command.add_option(flags, to, words)->type_name(type);
    if (!to.empty()) added->capture_default_str();
  };
  under(command, "Model");
  option("config,--config", typed.config, "CONFIG.json",
         "config.json of a Hugging Face folder of a kind that chevron-finetune reads, or with experts (mixtral, qwen3_moe, "
         "gpt_oss), or the folder; the flags of this group change its sizes, or describe a model without a folder");
  option("--kind", typed.kind, "llama|gpt", "without a folder; llama without this flag");
  option("--layers", typed.layers, "COUNT", "layers");
  option("--width", typed.width, "COUNT", "width of the stream between layers");
  option("--inner", typed.inner, "COUNT",
         "inner width of the maps, or of one expert; without a folder 4 widths of gpt, of llama 8/3 in multiples of 256");
  option("--heads", typed.heads, "COUNT", "heads of attention; without a folder one for each 128 of the width");
  option("--key-heads", typed.key_heads, "COUNT", "heads of keys and values, where several queries share one");
  option("--head-width", typed.head_width, "COUNT", "width of a head, if it is not the width divided by the heads");
  option("--vocabulary", typed.vocabulary, "COUNT", "tokens of the vocabulary; without a folder 32000");
  option("--window", typed.window, "TOKENS", "tokens that attention sees, in all layers");
  option("--experts", typed.experts, "COUNT", "experts of each layer, in place of its maps; with --experts-per-token");
  option("--experts-per-token", typed.experts_per_token, "COUNT", "experts that each token meets");
  command.add_flag("--tied", typed.tied, "embedding and head share their weight");
  under(command, "Training");
  option("--tokens", typed.tokens, "COUNT", "tokens of a sequence");
  option("--samples", typed.samples, "COUNT", "sequences of a microbatch");
  option("--dtype", typed.dtype, "bf16|fp16|fp32", "of parameters and activations");
  option("--optimizer", typed.optimizer, "adamw|momentum|sgd", "whose state a parameter has");
  command.add_flag("--masters", typed.masters, "float32 copies of half-precision parameters, which the optimizer steps");
  option("--attention", typed.attention, "flash|full|selective",
         "flash: computes scores again in the backward; full: stores them; selective: full, but recomputes them");
  option(
      "--kernels", typed.kernels, "finetune|transformers|fused",
      "finetune: operators of chevron-finetune; transformers: keys and values that queries share are stored once; fused: norms "
      "and gates are one kernel each");
  under(command, "Device");
  option("--gpu", typed.gpu, "a100|h100|h200|b200", "rates by the data sheet");
  option("--efficiency", typed.efficiency, "SHARE", "share of the peak of --gpu that matrix products reach");
  option("--tflops", typed.tflops, "RATE", "10^12 operations a second that matrix products reach, instead of --gpu's");
  option("--bandwidth", typed.bandwidth, "RATE", "of the device's memory, that other operators reach, such as 2.7TB/s");
  option("--link", typed.link, "RATE", "of the links between stages, for the times of messages, such as 50GB/s");
  option("--calibrate", typed.calibrate, "FILE.json",
         "a profile that was measured, of this model: the times of F, I and W get a factor each");
  option("--calibrate-model", typed.calibrate_model, "FILE.json",
         "what this command wrote for the model that --calibrate measured, if it is another one");
  add_format(command, asked, model_formats);
}

void add_cluster(CLI::App& command, request& asked) {
  cluster_request& typed = asked.cluster;
  under(command, "Model");
  command.add_option("profile,--profile", asked.profile, "what chevron-plan model wrote")->type_name("FILE.json");
  command.add_option("--batch-tokens", typed.batch_tokens, "tokens of a step, such as 4M, where M is 2^20 and k 2^10")
      ->type_name("TOKENS");
  under(command, "Cluster");
  command.add_option("--nodes", typed.nodes, "machines")->type_name("COUNT")->capture_default_str();
  command.add_option("--gpus", typed.gpus, "GPUs of a machine")->type_name("COUNT")->capture_default_str();
  command.add_option("--memory", typed.memory, "memory of a GPU for training, such as 80GiB")->type_name("BYTES");
  command.add_option("--link-inside", typed.inside, "rate at which a GPU sends to another of its machine, such as 450GB/s")
      ->type_name("RATE");
  command
      .add_option("--link-between", typed.between, "rate at which each GPU sends to another machine, while all others send, too")
      ->type_name("RATE");
  command
      .add_option("--nics", typed.nics,
                  "network cards of a machine, which its GPUs share; --link-between is then the rate of one card")
      ->type_name("COUNT");
  command
      .add_option("--latency-inside", typed.latency_inside,
                  "time from a transfer's end to its arrival at a GPU of the same machine, such as 5us; without a unit in ms")
      ->type_name("TIME")
      ->capture_default_str();
  command.add_option("--latency-between", typed.latency_between, "the same to a GPU of another machine")
      ->type_name("TIME")
      ->capture_default_str();
  under(command, "Choices that the search leaves as they are given");
  auto const choice = [&](char const* flag, std::string& to, std::string const& type, char const* words) {
    command.add_option(flag, to, words)->type_name(type);
  };
  choice("--ranks", typed.ranks, "P", "pipeline ranks");
  choice("--shards", typed.shards, "T", "ranks that share each layer");
  choice("--replicas", typed.replicas, "R", "pipelines side by side");
  choice("--samples", typed.samples, "COUNT", "sequences of a microbatch; without this flag 1, 2, 4 or 8");
  choice("--slices", typed.slices, "COUNT", "slices of each sequence; without this flag 1, 2, 4 or 8");
  choice("--schedule", asked.schedule, one_of(searched_schedules()), "schedule; with one rank there is 1F1B alone");
  choice("--chunks", typed.chunks, "V",
         "stages on each rank; of Interleaved1F1B and SeqInterleaved1F1B without this flag 2 or 4");
  choice("--layers", asked.layers, "COUNT,...", "number of layers of each stage; without this flag, as suits each schedule");
  choice("--recompute", typed.recompute, "none|all", "stages that compute their activations again in the backward");
  choice("--shard", typed.shard, "nothing|optimizer", "what replicas share");
  command
      .add_option("--post-validation", typed.post_validation,
                  "whether ranks begin the next step before they know the norm of the whole gradient; without it ZB-H2 is tried "
                  "only by its name")
      ->type_name("no|yes|both")
      ->capture_default_str();
  under(command, "Search");
  command.add_flag("--exhaustive", typed.exhaustive,
                   "judge every way, also those whose lower bound is above the tenth's time: for the JSON and the map");
  command.add_option("--threads", typed.threads, "threads that judge ways; without this flag, one for each core")
      ->type_name("COUNT");
  under(command, "Output");
  command
      .add_option("--timeline", typed.timeline, "write the timeline of the first way to this file, which ends in .svg or .html")
      ->type_name("FILE");
  command.add_option("--slurm", typed.slurm, "write a batch script for Slurm, which trains the first way, to this file")
      ->type_name("FILE");
  add_format(command, asked, cluster_formats, "svg and html: a map, step time over memory");
}

void add_plot(CLI::App& command, request& asked) {
  plot_request& typed = asked.plot;
  command.add_option("metrics,--metrics", typed.files, "files of metrics, one a run; - for standard input")
      ->type_name("FILE.jsonl");
  under(command, "Figures");
  command
      .add_option(
          "--y", typed.y,
          "figures to draw, one below the other, with commas between: names of the file, such as grad_norm, lr and bubble, "
          "also without the part before / and without the unit; loss is loss_metrics/global_avg_loss")
      ->type_name("FIGURE,...")
      ->capture_default_str();
  command.add_option("--x", typed.x, "seconds: since the first step of the file; tokens: of the whole run")
      ->type_name(one_of(plot_axes))
      ->capture_default_str();
  command.add_flag("--log", typed.logarithmic, "logarithmic axes of figures");
  command
      .add_option("--smooth", typed.smooth,
                  "draw means over so many steps, and the values faintly behind them; without this flag, the values alone")
      ->type_name("STEPS");
  command.add_option("--names", typed.names, "names of the runs, with commas between; without this flag, those of the files")
      ->type_name("WORD,...");
  add_format(
      command, asked, plot_formats,
      "text: least, greatest and last values, which are also printed beside a file; png and pdf need rsvg-convert, inkscape or "
      "chromium");
}

void add_output(CLI::App& command, request& asked, word_list const& formats, std::string const& words = "") {
  add_format(command, asked, formats, words);
  command.add_option("--width", asked.width, "columns of text; without this flag, the terminal's, else 80")->type_name("COLUMNS");
  command.add_option("--colour,--color", asked.colour, "auto honours NO_COLOR")->type_name("auto|always|never");
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app("Look at pipeline schedules: timelines, numbers, laws.", "chevron-plan");
  app.require_subcommand(0, 1);
  app.allow_extras();  // an unknown command gets a sentence of its own
  help::add_to(app);
  app.set_help_all_flag("--help-all", "print the help of all commands, and end");
  app.set_version_flag("--version", std::string("chevron-plan ") + chevron::version, "print the version, and end");
  request asked;
  int (*command)(request const&) = nullptr;
  auto const add = [&](char const* name, char const* what, int (*run)(request const&)) {
    CLI::App* const one = app.add_subcommand(name, what);
    one->allow_extras(false);
    one->callback([&command, &asked, one, run] {
      command = run;
      auto const typed = [&](char const* flag) {
        CLI::Option const* const option = one->get_option_no_throw(flag);
        return option != nullptr && option->count() > 0;
      };
      asked.ranks_given = typed("--ranks");
      asked.micro_batches_given = typed("--microbatches");
      asked.communication_given = typed("--communication");
      asked.hidden_given = typed("--hidden");
      asked.occupies_given = typed("--communication-occupies");
      for (char const* flag : {"--forward", "--backward-input", "--backward-weight", "--no-first-input-gradient"}) {
        if (asked.cost_flag.empty() && typed(flag)) asked.cost_flag = flag;
      }
    });
    return one;
  };
  std::string names;
  for (std::string const& name : all_names()) names += (names.empty() ? "" : " ") + name;
  auto const add_schedule = [&](CLI::App& one) {
    one.add_option("schedule,--schedule", asked.schedule,
                   "a CSV file in PyTorch's notation, - for standard input, or one of: " + names)
        ->type_name("NAME|FILE.csv");
    add_shape(one, asked);
    add_slices(one, asked, "slices of each microbatch's sequences, for a schedule that takes them, such as Seq1F1B");
  };
  char const* const limit_help =
      "most activations held on any rank, in microbatches of a rank's whole share: 4.5 are 9 chunks on a rank that has 2";
  auto const add_program_bytes = [&](CLI::App& one) {
    under(one, "Bytes");
    one.add_option("--message-bytes", asked.message_bytes,
                   "size of a message between ranks (one number, or one for each boundary between stages)")
        ->type_name("BYTES");
    one.add_option("--memory-limit", asked.memory_limit, limit_help)->type_name("COUNT");
  };

  CLI::App& show = *add("show", "Draw a schedule's timeline and give its numbers", run_show);
  add_schedule(show);
  add_costs(show, asked, "(a chunk's; one number, or one a stage with commas between)",
            " (one number, or one for each boundary between stages)");
  add_lengths(show, asked);
  under(show, "Costs");
  show.add_option(
          "--recompute", asked.recompute,
          "cost of an R (0: as much as F) for each backward of all stages but the last, in a wait if the rank has one; I and W "
          "then cost no recomputation")
      ->type_name("COST");
  show.add_option(
          "--unshard", asked.unshard,
          "time of the gather of a stage's parameters over its replicas, before the stage's first computation of a step "
          "(one number, or one a stage with commas between): of a sharded optimizer; with --resident, before every use of "
          "a stage that is not gathered")
      ->type_name("COST");
  show.add_option("--resident", asked.resident,
                  "with --unshard: the most stages of a rank under FSDP whose parameters may be gathered at once; says how many "
                  "gathers that takes at least, and the makespan with them (text)")
      ->type_name("STAGES");
  under(show, "Output");
  show.add_option("--steps", asked.steps, "number of steps to draw, back to back, without a barrier between them")
      ->type_name("K")
      ->capture_default_str();
  show.add_flag("--critical-path", asked.critical_path, "draw a line along the critical path (svg)");
  under(show, "Bytes");
  show.add_option("--memory-limit", asked.memory_limit, limit_help)->type_name("COUNT");
  add_output(show, asked, show_formats, "csv-steps: with an empty cell where a rank waits");

  CLI::App& compare = *add("compare", "Compare all schedules for one shape, the fastest first", run_compare);
  compare.add_option("schedule,--schedule", asked.files, "CSV files in PyTorch's notation to compare with the others")
      ->type_name("FILE.csv");
  add_shape(compare, asked);
  add_slices(compare, asked,
             "slices of each microbatch's sequences, for schedules that take them; several numbers with commas between are "
             "compared; auto: compares 1, 2, 4 and 8, and recommends one");
  add_costs(compare, asked,
            "(of a rank's whole share of the model, of which a chunk costs its part; or, with --chunks, a list with commas "
            "between, one a stage: then all costs are a chunk's)",
            " (or, with --chunks, one for each boundary between stages)");
  add_lengths(compare, asked);
  under(compare, "Bytes");
  compare.add_option("--memory-limit", asked.memory_limit, limit_help)->type_name("COUNT");
  under(compare, "Costs");
  compare
      .add_option(
          "--resident", asked.resident,
          "with --unshard: compare steps of stages under FSDP, waits for gathers included, where so many stages of a rank "
          "may be gathered at once")
      ->type_name("STAGES");
  compare
      .add_option(
          "--unshard", asked.unshard,
          "with --resident: time to gather the parameters of a rank's whole share of the model, of which a stage takes its "
          "part (or, with --chunks, a list with commas between, one a stage)")
      ->type_name("COST");
  add_jitter(compare, asked);
  compare.add_option("--seed", asked.search.seed, "seed of the drawn times")->type_name("NUMBER")->capture_default_str();
  add_output(compare, asked, compare_formats);

  CLI::App& check = *add("check", "Say whether a schedule keeps all laws; exit code 5 when it does not", run_check);
  add_schedule(check);
  under(check, "Channels between ranks");
  add_channels(
      check, asked, "",
      "messages that share a channel, which runs them in the order in which each member enqueues them: edge, those of a "
      "directed pair of ranks (Chevron); pair, of two ranks; group, of all ranks; batched, of all ranks, with successive "
      "messages of a rank, without a computation between, side by side. Without this flag, all four are tried");
  add_program_bytes(check);
  check
      .add_option("--resident", asked.resident,
                  "the most stages of a rank whose parameters may be gathered at once, of a file with UNSHARD and RESHARD")
      ->type_name("STAGES");
  under(check, "Output");
  check.add_option("-o,--output", asked.output, "write to this file")->type_name("FILE");

  CLI::App& lower = *add("lower", "Print each rank's program: with messages, slots, gradient sums and the optimizer", run_lower);
  add_schedule(lower);
  add_program_bytes(lower);
  lower
      .add_option("--resident", asked.resident,
                  "with csv-comms and csv-comms-2.15: gather and free the parameters of stages under FSDP, by the fewest UNSHARD "
                  "with at most so many stages of a rank gathered at once, each UNSHARD as early as that limit allows")
      ->type_name("STAGES");
  add_format(lower, asked, lower_formats,
             "csv-comms: PyTorch's CSV with communication (2.11); csv-comms-2.15: with the waits that 2.15 requires; csv: "
             "computations only; promela: a model for SPIN, which looks at all orders of the ranks");
  add_channels(lower, asked, "with promela: ",
               "messages that share a channel, as of check; without this flag, those of a directed pair of ranks");

  CLI::App& search =
      *add("search", "Look for the shortest schedule with given costs and memory; exit code 6 when none fits", run_search);
  add_shape(search, asked);
  add_slices(search, asked, "slices of each microbatch's sequences");
  add_costs(search, asked, "(a chunk's; one number, or one a stage with commas between)",
            " (one number, or one for each boundary between stages)");
  add_lengths(search, asked);
  under(search, "Search");
  search.add_flag("--order", asked.search.order,
                  "with --lengths: look for the order of the microbatches, too; the data must then be put into that order");
  under(search, "Bytes");
  search.add_option("--memory-limit", asked.memory_limit, limit_help)->type_name("COUNT");
  add_memory(search, asked);
  under(search, "Search");
  search.add_flag("--recompute", asked.search.recompute,
                  "with --memory: every stage keeps its input alone and runs its F again in its backward, which stays whole");
  search
      .add_option("--kept-for-weight", asked.search.kept_for_weight,
                  "share of a chunk's activations that its W still needs after its I, as the memory limit counts")
      ->type_name("SHARE")
      ->capture_default_str();
  search.add_option("--objective", asked.search.objective, "span: where steps overlap")
      ->type_name("makespan|span")
      ->capture_default_str();
  search
      .add_option("--placement", asked.search.placement,
                  "of the stages; without this flag, each placement that has --chunks chunks on a rank")
      ->type_name("linear|loop|vee|wave");
  search
      .add_option("--resident", asked.resident,
                  "with --unshard: look for the shortest step of stages under FSDP, waits for gathers included, where so many "
                  "stages of a rank may be gathered at once; csv-comms then has UNSHARD and RESHARD")
      ->type_name("STAGES");
  search
      .add_option("--unshard", asked.unshard,
                  "with --resident: time of the gather of a stage's parameters, beside computations (one number, or one a stage "
                  "with commas between)")
      ->type_name("COST");
  search.add_flag("--full-backward", asked.search.full_backward, "keep B whole, for stages whose backward cannot be split");
  search.add_flag("--partition", asked.search.partition,
                  "look for the number of layers of each stage, too; with a --profile that has 'layers'");
  search
      .add_option("--trials", asked.search.trials,
                  "changes to try, divided among starts and memory limits on the way; without this flag, as many as take seconds "
                  "at most")
      ->type_name("COUNT");
  search
      .add_option(
          "--seconds", asked.search.seconds,
          "time of the search, in rounds with twice the trials each, of which the best result is printed; with --trials, the "
          "first of both limits ends the search")
      ->type_name("SECONDS");
  search.add_option("--seed", asked.search.seed, "seed of the changes to try, and of the drawn times")
      ->type_name("NUMBER")
      ->capture_default_str();
  add_jitter(search, asked);
  add_output(search, asked, search_formats);

  CLI::App& fit =
      *add("fit", "Say which schedules fit into a rank's memory, and which of them is the fastest; exit code 6 when none does",
           run_fit);
  fit.add_option("schedule,--schedule", asked.schedule, "a CSV file in PyTorch's notation to look at beside the others")
      ->type_name("FILE.csv");
  add_shape(fit, asked);
  add_slices(fit, asked,
             "slices of each microbatch's sequences, for schedules that take them; several numbers with commas between are "
             "tried; auto: 1, 2, 4 and 8");
  add_costs(fit, asked, "(of a rank's whole share of the model)", "");
  add_attention(fit, asked);
  add_memory(fit, asked);
  fit.add_flag(
      "--shard-gradients", asked.bytes.shard_gradients,
      "with --shard: from the sum of a stage's gradients to the stage's next backward a rank holds its share of them; with "
      "--gradient-bytes, or a --profile with gradient_bytes");
  fit.add_option("--gradient-bytes", asked.bytes.gradient, "of --static-bytes, gradients, but of tied parameters")
      ->type_name("BYTES");
  under(fit, "Search");
  fit.add_option("--trials", asked.search.trials, "as of search")->type_name("COUNT");
  fit.add_option("--seed", asked.search.seed, "as of search")->type_name("NUMBER")->capture_default_str();
  add_output(fit, asked, fit_formats, "csv: the fastest schedule that fits");

  CLI::App& list = *add("list", "Name the schedules of the catalogue: on the command line, in C++, and their sources", run_list);
  list.add_option("-o,--output", asked.output, "write to this file")->type_name("FILE");

  CLI::App& explain = *add("explain",
                           "Say for which action of which rank a failed run waited, from its flight logs or from "
                           "dumps of PyTorch's flight recorder",
                           run_explain);
  explain
      .add_option("flight_logs", asked.flight_logs,
                  "the folder that CHEVRON_FLIGHT_LOGS named in the failed run, or files in this folder")
      ->type_name("FOLDER|FILE.json");
  explain
      .add_option(
          "--flight-recorder", asked.flight_recorder,
          "instead of flight logs: a folder with dumps of PyTorch's flight recorder, pickles or JSON, one file a rank, or the "
          "beginning of their paths, such as /tmp/nccl_trace_rank_; names the rank that all others wait for, ranks that "
          "called different operations, and cycles of waits")
      ->type_name("FOLDER");
  explain
      .add_option("--patience", asked.patience,
                  "with --flight-recorder: seconds from which a wait counts as a hang; without this flag, twice the longest time "
                  "between two operations of a rank, at least a second, at most the operation's timeout")
      ->type_name("SECONDS");
  explain
      .add_option("--schedule", asked.schedule,
                  "with --flight-recorder: the schedule of the job, a CSV file in PyTorch's notation or one of: " + names +
                      "; each message is then named by its action")
      ->type_name("NAME|FILE.csv");
  add_shape(explain, asked);
  add_format(explain, asked, recorder_formats,
             "svg: the plan's timeline with the actions that ran; of dumps each rank's last operations; json: of dumps");

  CLI::App& model =
      *add("model", "Compute the profile of a model by layers: times and bytes of each, without running it", run_model);
  add_model(model, asked);

  CLI::App& cluster =
      *add("cluster",
           "Divide a model over machines: pipeline ranks, shards, replicas, microbatches and schedule; exit code 6 when "
           "nothing fits",
           run_cluster);
  add_cluster(cluster, asked);

  CLI::App& plot = *add("plot", "Draw figures of training runs, such as the loss, from files of metrics", run_plot);
  add_plot(plot, asked);
  completion::add_to(app, {{"NAME", all_names()}});

  try {
    app.parse(argc, argv);
    auto const left = app.remaining();
    if (command != nullptr && !left.empty())  // it would be as if it had not been said
      throw usage("'" + left.front() + "' stands before the command: give flags after it, as in chevron-plan show --ranks 4");
    if (command == nullptr) {
      throw usage((left.empty() ? "no command given" : "'" + left.front() + "' is not a command") +
                  ": choose one of show, compare, check, lower, search, fit, model, cluster, explain, plot, list; chevron-plan "
                  "--help-all explains them");
    }
    check_output(asked);
    return command(asked);
  } catch (CLI::ExtrasError const&) {
    CLI::App const& in = app.get_subcommands().empty() ? app : *app.get_subcommands().front();
    std::cerr << "chevron-plan: " << unknown::not_expected(in, app.remaining(true))
              << " chevron-plan --help-all lists every command and flag\n";
    return exit_usage;
  } catch (CLI::ParseError const& stop) {
    if (stop.get_exit_code() == 0) {  // help or the version was asked for
      app.exit(stop);
      if (std::cout.flush()) return exit_ok;
      std::cerr << "chevron-plan: standard output cannot be written (" << std::strerror(errno) << "): is the disk full?\n";
      return exit_usage;
    }
    std::string what = stop.what();
    for (char& c : what) c = c == '\n' ? ' ' : c;
    std::cerr << "chevron-plan: " << what << "; chevron-plan --help-all lists every command and flag\n";
    return exit_usage;
  } catch (too_little_memory const& wrong) {
    std::cerr << "chevron-plan: " << wrong.what() << "\n";
    return exit_nothing_fits;
  } catch (usage const& wrong) {
    std::cerr << "chevron-plan: " << wrong.what() << "\n";
    return exit_usage;
  } catch (std::bad_alloc const&) {
    std::string of;
    if (!asked.schedule.empty()) of += " --schedule " + asked.schedule;
    for (std::string const& file : asked.files) of += " --schedule " + file;
    if (!asked.profile.empty()) of += " --profile " + asked.profile;
    std::cerr << "chevron-plan: there is too little memory for this" << (of.empty() ? "" : ":" + of)
              << "; give smaller sizes or files, or raise the limit (ulimit -v)\n";
    return exit_other;
  }
}
