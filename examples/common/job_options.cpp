#include "job_options.hpp"

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <new>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <torch/version.h>
#include <CLI/CLI.hpp>

#include <chevron/base/format.hpp>
#include <chevron/catalogue/catalogue.hpp>
#include <chevron/csv/csv_check.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/core/topology.hpp>
#include <chevron/version.hpp>

#include "completion.hpp"
#include "flag_words.hpp"
#include "help.hpp"
#include "nearest.hpp"
#include "placements.hpp"

namespace chevron::train {

/// A whole number in a range, with the range in the error.
CLI::Validator whole(std::int64_t least, std::int64_t most) {
  return CLI::Validator(
      [=](std::string& given) -> std::string {
        std::int64_t value = 0;
        auto const [end, fault] = std::from_chars(given.data(), given.data() + given.size(), value);
        if (fault != std::errc() || end != given.data() + given.size() || value < least || value > most)
          return given + " is not a whole number from " + std::to_string(least) + " to " + std::to_string(most);
        return {};
      },
      "");
}

CLI::Validator positive(bool zero_too) {
  return CLI::Validator(
      [=](std::string& given) -> std::string {
        double value = -1;
        auto const [end, fault] = std::from_chars(given.data(), given.data() + given.size(), value);
        if (fault != std::errc() || end != given.data() + given.size() || !(zero_too ? value >= 0 : value > 0) || value > 1e9)
          return given + " is not a number " + (zero_too ? "from 0" : "above 0") + ", at most 1e9";
        return {};
      },
      "");
}

/// A number from 0 to below 1.
CLI::Validator share() {
  return CLI::Validator(
      [](std::string& given) -> std::string {
        double value = -1;
        auto const [end, fault] = std::from_chars(given.data(), given.data() + given.size(), value);
        if (fault != std::errc() || end != given.data() + given.size() || !(value >= 0 && value < 1))
          return given + " is not a number from 0 to below 1";
        return {};
      },
      "");
}

CLI::Validator one_of(std::vector<std::string> words) {
  return CLI::Validator(
      [words = std::move(words)](std::string& given) -> std::string {
        std::string all;
        for (auto const& word : words) {
          if (given == word) return {};
          all += (all.empty() ? "" : ", ") + word;
        }
        return given + " is none of " + all;
      },
      "");
}

namespace {

std::vector<std::string> names_of_schedules() {
  std::vector<std::string> out;
  catalogue::for_each([&](auto const& one) { out.emplace_back(one.name); });
  hana::for_each(catalogue::sliced, [&](auto const* one) { out.emplace_back(one->name); });
  return out;
}

std::string schedule_names() {
  std::string out;
  for (std::string const& name : names_of_schedules()) out += (out.empty() ? "" : ", ") + name;
  return out;
}

struct plan_size {
  int ranks, micro_batches, slices;
};

/// Reads `o.schedule` as a file, into `o.schedule_text`.
plan_size read_schedule_file(job_options& o) try {
  std::error_code ignored;
  // A pipe would be waited for without an end, and a device has none.
  if (auto const there = std::filesystem::status(o.schedule, ignored);
      std::filesystem::exists(there) && !std::filesystem::is_regular_file(there)) {
    throw usage_error("--schedule " + o.schedule + " is not a file. Remedy: a CSV file with a line of actions for each rank");
  }
  std::ifstream in(o.schedule, std::ios::binary);
  o.schedule_text.assign(std::istreambuf_iterator<char>(in), {});
  if (!in) {
    throw usage_error("--schedule " + o.schedule + " cannot be read: " + std::strerror(errno) +
                      ". Remedy: a file that chevron-plan or PyTorch wrote, or one of " + schedule_names());
  }
  csv_schedule const read = read_csv(o.schedule_text);
  if (finding const found = check(read, o.schedule_text)) {
    throw usage_error("--schedule " + o.schedule + ": " + describe(found, read, o.schedule_text) +
                      ". Remedy: chevron-plan check " + o.schedule);
  }
  if (read.plan.forward_only)
    throw usage_error("--schedule " + o.schedule +
                      " runs forwards alone: it evaluates and cannot train. Remedy: a schedule with backwards");
  return {read.plan.size.ranks, read.plan.size.micro_batches, read.plan.size.slices};
} catch (std::bad_alloc const&) {
  throw error(
      exit_code::other,
      "--schedule " + o.schedule + " needs more memory than there is. Remedy: a smaller file, or a higher limit (ulimit -v)", {});
}

/// The file says how many; a flag may only say the same.
void take_size(char const* flag, bool given, int of_file, int& value) {
  if (given && value != of_file) {
    throw usage_error(std::string(flag) + " " + std::to_string(value) + " differs from the schedule's file, which has " +
                      std::to_string(of_file) + ". Remedy: leave the flag out");
  }
  value = of_file;
}

}  // namespace

char const* name_of(precision p) {
  constexpr char const* names[] = {"float32", "bfloat16", "autocast"};
  return names[static_cast<int>(p)];
}

void add_values(named_values& to, job_options const& o) {
  to.add("--context", std::to_string(o.context));
  to.add("--microbatch-size", std::to_string(o.micro_batch_size));
  to.add("--dtype", name_of(o.precision));
  to.add("--master-parameters", o.master_parameters ? "yes" : "no");
  if (o.attention >= 0) to.add("--attention", show::exact(o.attention));
  if (o.sequence_parallel) to.add("--sequence-parallel", "yes");
  to.add("--recompute", o.recompute ? "yes" : "no");
  to.add("--steps", std::to_string(o.steps));
  to.add("--seed", std::to_string(o.seed));
  to.add("--learning-rate", show::exact(o.learning_rate));
  to.add("--warm-up", o.warm_up ? show::exact(*o.warm_up) : "not given");
  to.add("--lowest-learning-rate", o.lowest_rate ? show::exact(*o.lowest_rate) : "not given");
  to.add("--decay", o.decay);
  to.add("--betas", words_for_betas(o));
  to.add("--checkpoint", o.checkpoint);
  to.add("--save-every", std::to_string(o.save_every));
  to.add("--keep-checkpoints", std::to_string(o.keep_checkpoints));
  to.add("--resume", o.resume ? "yes" : "no");
  to.add("--cuda-graph", o.cuda_graph ? "yes" : "no");
  to.add("--schedule", o.automatic ? "auto" : "given");
  to.add("--memory-limit", show::exact(o.memory_limit));
}

std::string words_for_betas(job_options const& o) { return show::exact(o.betas[0]) + "," + show::exact(o.betas[1]); }

std::string words_for_world(job_options const& o) {
  return "--ranks " + std::to_string(o.ranks) + " × --replicas " + std::to_string(o.replicas) +
         (o.shards > 1 ? " × --shards " + std::to_string(o.shards) : "");
}

void check_shards(job_options const& o, int heads, std::string const& of_heads) {
  if (heads % o.shards != 0) {
    std::string fitting;
    for (int t = 1; t <= heads; ++t) fitting += heads % t != 0 ? "" : (fitting.empty() ? "" : ", ") + std::to_string(t);
    throw usage_error("--shards " + std::to_string(o.shards) + " cannot share " + of_heads +
                      ". Remedy: a number of shards that "
                      "divides the heads: " +
                      fitting);
  }
  if (!o.sequence_parallel) return;
  if (o.slices > 1)
    throw usage_error(
        "--sequence-parallel does not go with --slices, whose pieces of a sequence have lengths of their own. Remedy: "
        "leave one of them away");
  if (o.context < o.shards)
    throw usage_error("--sequence-parallel cannot cut --context " + std::to_string(o.context) + " over --shards " +
                      std::to_string(o.shards) + ". Remedy: a longer context, or leave the flag away");
}

std::string words_for_shards(job_options const& o) { return o.shards == 1 ? "" : " × " + std::to_string(o.shards) + " shards"; }

std::string groups_of(job_options const& o) {
  chevron::topology const grid{.pipeline_ranks = o.ranks, .replicas = o.replicas, .shards = o.shards};
  // Groups of ranks that are equal in what `other` tells of them.
  auto const line = [&](char const* name, auto const& other) {
    std::vector<std::string> groups;
    std::map<int, std::size_t> number;
    for (int rank = 0; rank < grid.world(); ++rank) {
      auto const [at, is_new] = number.emplace(other(rank), groups.size());
      if (is_new) groups.emplace_back();
      groups[at->second] += (is_new ? "" : ", ") + std::to_string(rank);
    }
    std::string out = name;
    for (std::string const& group : groups) out += " {" + group + "}";
    return out + "\n";
  };
  int const first_of_replica = grid.rank_at(1, 0, 0);
  return "global rank = (replica × " + std::to_string(o.ranks) + " + pipeline rank) × " + std::to_string(o.shards) +
         " + shard, of " + std::to_string(o.world()) + "\n" +
         line("pipelines", [&](int r) { return grid.rank_at(grid.replica_of(r), 0, grid.shard_of(r)); }) +
         line("replicas ", [&](int r) { return r % first_of_replica; }) + line("shards   ", [&](int r) { return r / o.shards; });
}

job_flags::job_flags(CLI::App& app, job_options& to) : app_(app), o_(to) {
  error_wording = in_flags;
  help::add_to(app_);
  app_.set_version_flag("--version", app_.get_name() + " " + version + "\nLibTorch " + TORCH_VERSION, "print versions, and end");
  completion::add_to(app_, {{"NAME", names_of_schedules()}});
  app_.get_formatter()->column_width(34);
  app_.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
}

void job_flags::pipeline(bool automatic) {
  app_.option_defaults()->group("Pipeline");
  app_.add_option(
          "--schedule", o_.schedule,
          (automatic ? "auto: planned from the costs of the first steps; a FILE.csv; or one of " : "a FILE.csv, or one of ") +
              schedule_names())
      ->type_name(automatic ? "NAME|FILE.csv|auto" : "NAME|FILE.csv");
  ranks_ = app_.add_option("--ranks", o_.ranks, "pipeline ranks")->check(whole(1, 1024))->type_name("P");
  chunks_ = app_.add_option("--chunks", o_.chunks, "stages on a rank; 0: the schedule's")->check(whole(0, 64))->type_name("V");
  micro_batches_ = app_.add_option("--microbatches", o_.micro_batches, "microbatches in a step, for each replica")
                       ->check(whole(1, 4096))
                       ->type_name("M");
  slices_ =
      app_.add_option("--slices", slices_name_,
                      "slices of each sequence, for a schedule that takes them: Seq1F1B, SeqZB-H1, SeqInterleaved1F1B, GPipe; "
                      "auto: 1, 2, 4 or 8, the least number with nearly the shortest predicted step")
          ->check(CLI::Validator([](std::string& given) { return given == "auto" ? std::string() : whole(1, 1024)(given); }, ""))
          ->type_name("K|auto");
  attention_ = app_.add_option("--attention", o_.attention,
                               "share of causal attention in a sequence's time, by which slices are cut into equal times; 0: "
                               "equal lengths. Without this flag, the model's share of operations")
                   ->check(CLI::Range(0.0, 1.0).description(""))
                   ->type_name("SHARE")
                   ->default_str("");
  app_.add_option("--replicas", o_.replicas, "copies of the pipeline, each on its own data")
      ->check(whole(1, 1024))
      ->type_name("R");
  app_.add_option("--shards", o_.shards, "ranks that share each pipeline rank's stages: heads, inner widths and vocabulary")
      ->check(whole(1, 256))
      ->type_name("T");
  sequence_parallel_ = app_.add_flag("--sequence-parallel", o_.sequence_parallel,
                                     "with --shards: between blocks each shard holds its piece of the sequence");
  if (!automatic) return;
  placement_ =
      app_.add_option(
              "--placement", o_.placement,
              "with auto: placement of the stages; without this flag, by --chunks: linear for 1, vee for 2, loop for more")
          ->check(one_of({"linear", "loop", "vee", "wave"}))
          ->type_name("linear|loop|vee|wave")
          ->default_str("");
  memory_limit_ = app_.add_option("--memory-limit", o_.memory_limit,
                                  "with auto: most activations held on a rank, in microbatches of its whole share; 0: P, as 1F1B")
                      ->check(positive(true))
                      ->type_name("COUNT");
}

void job_flags::ranks() {
  app_.option_defaults()->group("Ranks");
  backend_ =
      app_.add_option("--backend", backend_name_,
                      "threads: all ranks in this process; gloo: a process each; nccl: a process and a GPU each; copies: as "
                      "nccl, on one machine, without NCCL")
          ->check(one_of({"threads", "gloo", "nccl", "copies"}))
          ->type_name("threads|gloo|nccl|copies");
  app_.add_option("--nproc", o_.nproc, "with processes: number to start here; 0: P x R x T, unless a launcher has started them")
      ->check(whole(0, 1024))
      ->type_name("N");
  app_.add_flag("--print-groups", o_.print_groups, "print the ranks of each pipeline, of replicas and of shards, and end");
  app_.add_flag("--share-gpus", o_.share_gpus, "with nccl and copies: allow more ranks than GPUs, for trials; slow over NCCL");
  app_.add_flag("--cuda-graph", o_.cuda_graph,
                "with nccl and copies: once steps repeat themselves, launch each computation as one CUDA graph");
  app_.add_option("--timeout", o_.timeout, "longest wait for another rank")->check(positive(false))->type_name("SECONDS");
}

void job_flags::training() {
  app_.option_defaults()->group("Training");
  app_.add_option("--steps", o_.steps, "optimizer steps")->check(whole(1, 1'000'000'000))->type_name("K");
  app_.add_option("--microbatch-size", o_.micro_batch_size, "samples in a microbatch, each of --context tokens")
      ->check(whole(1, 65536))
      ->type_name("N");
  app_.add_option("--learning-rate", o_.learning_rate, "highest, at the end of --warm-up")
      ->check(positive(false))
      ->type_name("X");
  app_.add_option("--warm-up", o_.warm_up,
                  "steps in which the rate rises in a straight line; without this flag, a twentieth of all steps")
      ->check(positive(true))
      ->type_name("K")
      ->default_str("");
  app_.add_option("--lowest-learning-rate", o_.lowest_rate,
                  "to which the rate falls until the last step; without this flag, a tenth of --learning-rate")
      ->check(positive(true))
      ->type_name("X")
      ->default_str("");
  app_.add_option("--decay", o_.decay, "along which the rate falls: half a cosine, or a straight line")
      ->check(one_of({"cosine", "linear"}))
      ->type_name("cosine|linear");
  app_.add_option("--betas", o_.betas, "AdamW's: shares that its means of gradients and of their squares keep in a step")
      ->check(share())
      ->delimiter(',')
      ->expected(2)
      ->type_name("B1,B2")
      ->default_str("0.9,0.95");
  app_.add_option("--clip-grad-norm", o_.clip_grad_norm, "largest norm of the whole gradient; 0: no limit")
      ->check(positive(true))
      ->type_name("X");
  app_.add_flag("--recompute", o_.recompute, "keep only each stage's input until its backward, and compute the rest again");
  app_.add_option("--dtype", precision_name_, "of parameters and activations; autocast: parameters float32, products bfloat16")
      ->check(one_of({"float32", "bfloat16", "autocast"}))
      ->type_name("float32|bfloat16|autocast");
  app_.add_flag("--master-parameters", o_.master_parameters,
                "step float32 masters of bfloat16 parameters; the optimizer's state is float32, too");
  app_.add_flag("--post-validation", o_.post_validation,
                "step without waiting for the whole norm; undo and redo a step that should have been clipped or skipped");
  CLI::Validator const known = one_of({"optimizer", "gradients"});
  shard_ = app_.add_option("--shard", shard_name_,
                           "each replica keeps the optimizer's state for its share of the parameters only; gradients: also only "
                           "its share of summed gradients, until the stage's next backward; without a value: optimizer")
               ->expected(0, 1)
               ->default_str("")
               ->check([known](std::string const& given) { return given.empty() ? std::string() : known(given); })
               ->type_name("optimizer|gradients");
  app_.add_flag("--overlap-gather", o_.overlap_gather,
                "with --shard: the next step waits for a stage's parameters where the stage begins");
  app_.add_option("--seed", o_.seed, "seed of random draws: batches and, where weights are initialized, weights")
      ->check(whole(0, 9'000'000'000'000'000))
      ->type_name("N");
}

void job_flags::files() {
  app_.option_defaults()->group("Files");
  auto* const checkpoint = app_.add_option("--checkpoint", o_.checkpoint,
                                           "folder of checkpoints, from which training can go on; each in a folder of its own")
                               ->type_name("DIR")
                               ->default_str("");
  app_.add_option("--save-every", o_.save_every,
                  "with --checkpoint: steps between two checkpoints; 0: one checkpoint, after the last step")
      ->check(whole(0, 1'000'000'000))
      ->type_name("K")
      ->needs(checkpoint);
  app_.add_option("--keep-checkpoints", o_.keep_checkpoints, "with --checkpoint: number of the last checkpoints to keep; 0: all")
      ->check(whole(0, 1'000'000'000))
      ->type_name("N")
      ->needs(checkpoint);
  app_.add_flag("--resume", o_.resume,
                "with --checkpoint: go on from the folder's last checkpoint, saved under any layout or schedule; begin anew if "
                "the folder has no checkpoint")
      ->needs(checkpoint);
  app_.add_option("--stop-after", o_.stop_after,
                  "with --checkpoint: save and end after the step in which this time has passed: 90s, 55m, 2h")
      ->transform(CLI::AsNumberWithUnit(std::map<std::string, double>{{"s", 1}, {"m", 60}, {"h", 3600}}).description(""))
      ->check(positive(false))
      ->type_name("TIME")
      ->needs(checkpoint)
      ->default_str("");
  app_.add_option("--metrics", o_.metrics, "one JSON object a step, for chevron-plan plot")
      ->type_name("FILE.jsonl")
      ->default_str("");
  app_.add_option("--tensorboard", o_.tensorboard, "the figures of --metrics as an event file in this folder, for TensorBoard")
      ->type_name("DIR")
      ->default_str("");
}

/// Where stages stand, and how many on each rank, where the schedule is made here.
void job_flags::read_automatic() {
  o_.automatic = true;
  bool const one = o_.placement == "linear" || (o_.placement.empty() && (o_.chunks == 1 || o_.ranks == 1));
  if (o_.chunks == 0) o_.chunks = one ? 1 : 2;
  if (o_.placement.empty()) o_.placement = o_.chunks == 1 ? "linear" : o_.chunks == 2 ? "vee" : "loop";
  if (!placements::exist(o_.placement, o_.chunks)) {
    throw usage_error("--placement " + o_.placement + " does not exist with --chunks " + std::to_string(o_.chunks) +
                      ". Remedy: linear with 1, vee with 2, wave with an even number, loop with any");
  }
  if (o_.memory_limit > 0 && o_.memory_limit < 1) {
    throw usage_error(
        "--memory-limit " + show::number(o_.memory_limit) +
        " is below the smallest possible: a microbatch on its way holds a chunk with each stage of a rank. Remedy: 1 or more");
  }
}

void job_flags::read(int argc, char** argv) {
  try {
    app_.parse(argc, argv);
  } catch (CLI::Success const& asked) {
    int const code = app_.exit(asked);
    if (!std::cout.flush())
      throw usage_error(std::string("standard output cannot be written: ") + std::strerror(errno) + ". Remedy: free space there");
    std::exit(code);
  } catch (CLI::ExtrasError const&) {
    throw usage_error(unknown::not_expected(app_, app_.remaining()) + " Remedy: " + app_.get_name() + " --help lists every flag");
  } catch (CLI::ParseError const& wrong) {
    throw usage_error(std::string(wrong.what()) + ". Remedy: " + app_.get_name() + " --help lists every flag");
  }

  o_.backend_given = backend_->count() > 0;
  if (backend_name_ == "gloo") o_.backend = train::backend::gloo;
  if (backend_name_ == "nccl") o_.backend = train::backend::nccl;
  if (backend_name_ == "copies") o_.backend = train::backend::copies;
  if (o_.share_gpus && !train::is_on_gpus(o_.backend))
    throw usage_error("--share-gpus is about ranks on GPUs. Remedy: --backend nccl, or leave it away");
  if (o_.cuda_graph && !train::is_on_gpus(o_.backend))
    throw usage_error("--cuda-graph is about ranks on GPUs. Remedy: --backend nccl, or leave it away");
  if (o_.cuda_graph && o_.shards > 1)
    throw usage_error("--cuda-graph does not go with --shards " + std::to_string(o_.shards) +
                      ", whose collectives the host calls in order. Remedy: leave --cuda-graph away");
  o_.shard = shard_->count() > 0;
  o_.shard_gradients = shard_name_ == "gradients";
  if (o_.overlap_gather && !o_.shard)
    throw usage_error("--overlap-gather is about parameters that replicas gather. Remedy: --shard, or leave it away");
  if (o_.shard_gradients && o_.cuda_graph) {
    throw usage_error("--shard gradients does not go with --cuda-graph, whose gradients stay where they are. Remedy: --shard");
  }
  if (double const lowest = o_.lowest_rate.value_or(0); lowest > o_.learning_rate) {
    throw usage_error("--lowest-learning-rate " + show::exact(lowest) + " is above --learning-rate " +
                      show::exact(o_.learning_rate) + ", from which the rate falls to it. Remedy: at most that");
  }
  if (precision_name_ == "bfloat16") o_.precision = precision::bfloat16;
  if (precision_name_ == "autocast") o_.precision = precision::autocast;
  if (o_.master_parameters && o_.precision != precision::bfloat16) {
    throw usage_error("--master-parameters is about bfloat16 parameters, and --dtype " + precision_name_ +
                      " has float32 ones. Remedy: --dtype bfloat16, or leave it away");
  }
  o_.choose_slices = slices_name_ == "auto";
  if (!o_.choose_slices) o_.slices = std::stoi(slices_name_);
  bool const makes = placement_ != nullptr && o_.schedule == "auto";
  for (CLI::Option const* const flag : {placement_, memory_limit_}) {
    if (flag != nullptr && flag->count() > 0 && !makes)
      throw usage_error(flag->get_name() +
                        " is about a schedule that is made while training. Remedy: --schedule auto, or leave it away");
  }
  if (o_.sequence_parallel && o_.shards == 1)
    throw usage_error(
        "--sequence-parallel cuts sequences over shards, and --shards is 1. Remedy: --shards 2 or more, or leave it away");
  if (attention_->count() > 0 && o_.slices == 1 && !o_.choose_slices && !o_.schedule.ends_with(".csv"))
    throw usage_error("--attention says where slices end. Remedy: --slices 2 or more, or leave it away");
  if (makes) {
    if (o_.slices > 1 || o_.choose_slices)
      throw usage_error(
          "--slices does not go with --schedule auto, which measures whole microbatches. Remedy: --schedule Seq1F1B, or a "
          "file that chevron-plan search --slices finds");
    read_automatic();
  } else if (o_.schedule.ends_with(".csv") || o_.schedule.find('/') != std::string::npos) {
    plan_size const size = read_schedule_file(o_);
    if (o_.choose_slices)
      throw usage_error("--slices auto cannot choose: --schedule " + o_.schedule + " has " + std::to_string(size.slices) +
                        (size.slices == 1 ? " slice" : " slices") + " of each sequence. Remedy: leave the flag out");
    take_size("--ranks", ranks_->count() > 0, size.ranks, o_.ranks);
    take_size("--microbatches", micro_batches_->count() > 0, size.micro_batches, o_.micro_batches);
    take_size("--slices", slices_->count() > 0, size.slices, o_.slices);
    if (chunks_->count() > 0 && o_.chunks != 0)
      throw usage_error("--chunks cannot be chosen: --schedule " + o_.schedule +
                        " places its stages itself. Remedy: leave the flag out");
  } else if (!catalogue::contains(o_.schedule)) {
    throw usage_error("--schedule " + o_.schedule + " is not in the catalogue. Remedy: a file's name that ends in .csv, " +
                      (placement_ != nullptr ? "auto, " : "") + "or one of " + schedule_names());
  } else if (!catalogue::trains(o_.schedule)) {
    throw usage_error("--schedule " + o_.schedule + " runs forwards alone: it evaluates and cannot train. Remedy: one of " +
                      schedule_names());
  }
  if (o_.nproc > 0) {
    if (o_.backend_given && o_.backend == train::backend::threads) {
      throw usage_error(
          "--nproc starts processes, but --backend threads has none. Remedy: --backend gloo, or leave --nproc away");
    }
    if (!o_.backend_given) o_.backend = train::backend::gloo;
    if (o_.nproc != o_.world()) {
      throw usage_error("--nproc " + std::to_string(o_.nproc) + " is not " + words_for_world(o_) + ". Remedy: --nproc " +
                        std::to_string(o_.world()) + ", or leave it away");
    }
  }
}

}  // namespace chevron::train
