#include "options.hpp"

#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <new>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/show/csv/csv_check.hpp>

namespace chevron::train {
namespace {

std::string schedule_names() {
  std::string out;
  catalogue::for_each([&](auto const& one) { out += (out.empty() ? "" : ", ") + std::string(one.name); });
  return out;
}

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

struct plan_size {
  int ranks, micro_batches;
};

/// Reads `o.schedule` as a file, into `o.schedule_text`.
plan_size read_schedule_file(options& o) try {
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
  return {read.plan.size.ranks, read.plan.size.micro_batches};
} catch (std::bad_alloc const&) {
  throw error(
      exit_code::other,
      "--schedule " + o.schedule + " needs more memory than there is. Remedy: a smaller file, or a higher limit (ulimit -v)", {});
}

/// The file says how many; a flag may only say the same.
void take_size(char const* flag, bool given, int of_file, int& value) {
  if (given && value != of_file) {
    throw usage_error(std::string(flag) + " " + std::to_string(value) + " is not what the schedule's file has, " +
                      std::to_string(of_file) + ". Remedy: leave the flag out");
  }
  value = of_file;
}

}  // namespace

options read_options(int argc, char** argv) {
  options o;
  CLI::App app("Trains a byte-level GPT on any text, on one or several ranks, under a pipeline schedule that was proved first.",
               "chevron-train");
  app.footer(
      "With no flags: 2 pipeline ranks x 2 replicas as threads, 1F1B, LibTorch's own C++ headers as text, a minute or two.\n"
      "Exit codes: 0 ok, 2 usage, 3 a rank was lost, 4 timeout, 5 ranks disagree, 6 loss not finite, 7 checkpoint.\n"
      "With CHEVRON_RINGS=FOLDER in the environment ranks of a run that fails leave what they did last there, for chevron-plan "
      "explain.");
  app.get_formatter()->column_width(34);
  app.option_defaults()->always_capture_default()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  std::string backend_name = "threads";
  std::string precision_name = "float32";

  app.add_option("--schedule", o.schedule, "a FILE.csv, or one of " + schedule_names())->type_name("NAME")->group("Pipeline");
  auto* const ranks =
      app.add_option("--ranks", o.ranks, "pipeline ranks")->check(whole(1, 1024))->type_name("P")->group("Pipeline");
  auto* const chunks = app.add_option("--chunks", o.chunks, "stages on a rank; 0: as the schedule has")
                           ->check(whole(0, 64))
                           ->type_name("V")
                           ->group("Pipeline");
  auto* const micro_batches = app.add_option("--microbatches", o.micro_batches, "microbatches in a step, for each replica")
                                  ->check(whole(1, 4096))
                                  ->type_name("M")
                                  ->group("Pipeline");
  app.add_option("--replicas", o.replicas, "copies of the pipeline, each on its own data")
      ->check(whole(1, 1024))
      ->type_name("R")
      ->group("Pipeline");

  auto* const backend = app.add_option("--backend", backend_name,
                                       "threads: all ranks in this process; gloo: a process each; nccl: a process and a GPU each")
                            ->check(one_of({"threads", "gloo", "nccl"}))
                            ->type_name("threads|gloo|nccl")
                            ->group("Ranks");
  app.add_option("--nproc", o.nproc, "with gloo and nccl: processes to start here; 0: P x R, or a launcher has started them")
      ->check(whole(0, 1024))
      ->type_name("N")
      ->group("Ranks");
  app.add_flag("--share-gpus", o.share_gpus, "with nccl: more ranks than GPUs, which is slow, to try things out")->group("Ranks");
  app.add_flag("--cuda-graph", o.cuda_graph, "with nccl: once steps repeat themselves, launch each computation as one CUDA graph")
      ->group("Ranks");
  app.add_option("--timeout", o.timeout, "longest wait for another rank")
      ->check(positive(false))
      ->type_name("SECONDS")
      ->group("Ranks");

  app.add_option("--layers", o.model.layers, "transformer blocks")->check(whole(1, 1000))->type_name("N")->group("Model");
  app.add_option("--width", o.model.width, "numbers for each position")->check(whole(1, 65536))->type_name("N")->group("Model");
  app.add_option("--heads", o.model.heads, "attention heads; must divide the width")
      ->check(whole(1, 1024))
      ->type_name("N")
      ->group("Model");
  app.add_option("--context", o.model.context, "bytes the model sees at once")
      ->check(whole(2, 65536))
      ->type_name("N")
      ->group("Model");

  app.add_option("--data", o.data, "text files and folders; without it LibTorch's C++ headers")
      ->type_name("PATH")
      ->expected(1, -1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->default_str("")
      ->group("Training");
  app.add_option("--steps", o.steps, "optimizer steps")->check(whole(1, 1'000'000'000))->type_name("K")->group("Training");
  app.add_option("--microbatch-size", o.micro_batch_size, "samples in a microbatch, each of --context bytes")
      ->check(whole(1, 65536))
      ->type_name("N")
      ->group("Training");
  app.add_option("--learning-rate", o.learning_rate, "highest, after a twentieth of the steps; then down a cosine to a tenth")
      ->check(positive(false))
      ->type_name("X")
      ->group("Training");
  app.add_option("--clip-grad-norm", o.clip_grad_norm, "largest norm of the whole gradient; 0: no limit")
      ->check(positive(true))
      ->type_name("X")
      ->group("Training");
  app.add_flag("--recompute", o.recompute, "keep only each stage's input until its backward, and compute the rest again")
      ->group("Training");
  app.add_option("--dtype", precision_name, "of parameters and activations; autocast: parameters float32, products bfloat16")
      ->check(one_of({"float32", "bfloat16", "autocast"}))
      ->type_name("float32|bfloat16|autocast")
      ->group("Training");
  app.add_flag("--post-validation", o.post_validation, "step without waiting for the whole norm, and put it right if need be")
      ->group("Training");
  app.add_option("--seed", o.seed, "of weights, batches and sample")
      ->check(whole(0, 9'000'000'000'000'000))
      ->type_name("N")
      ->group("Training");

  auto* const checkpoint =
      app.add_option("--checkpoint", o.checkpoint, "save what training needs to go on, in a folder for each time")
          ->type_name("DIR")
          ->default_str("")
          ->group("Files");
  app.add_option("--save-every", o.save_every, "steps between checkpoints; 0: one after the last step")
      ->check(whole(0, 1'000'000'000))
      ->type_name("K")
      ->needs(checkpoint)
      ->group("Files");
  app.add_option("--keep-checkpoints", o.keep_checkpoints, "so many stay, the last ones; 0: all")
      ->check(whole(0, 1'000'000'000))
      ->type_name("N")
      ->needs(checkpoint)
      ->group("Files");
  app.add_flag("--resume", o.resume,
               "go on from the last checkpoint in DIR, saved under any layout or schedule; begin anew if there is none")
      ->needs(checkpoint)
      ->group("Files");
  app.add_option("--stop-after", o.stop_after, "save and end after the step in which so much time has passed: 90s, 55m, 2h")
      ->transform(CLI::AsNumberWithUnit(std::map<std::string, double>{{"s", 1}, {"m", 60}, {"h", 3600}}))
      ->check(positive(false))
      ->type_name("TIME")
      ->needs(checkpoint)
      ->default_str("")
      ->group("Files");
  app.add_option("--metrics", o.metrics, "one JSON object a step")->type_name("FILE.jsonl")->default_str("")->group("Files");
  auto* const trace = app.add_option("--trace", o.trace, "a late step for Perfetto or chrome://tracing; none: no file")
                          ->type_name("FILE.json")
                          ->default_str("")
                          ->group("Files");
  auto* const timeline = app.add_option("--timeline", o.timeline, "a late step drawn, predicted above measured; none: no file")
                             ->type_name("FILE.svg")
                             ->default_str("")
                             ->group("Files");
  app.add_option("--report", o.report, "that step as a page to pan, zoom and point at, predicted above measured")
      ->type_name("FILE.html")
      ->default_str("")
      ->group("Files");
  app.add_option("--profile", o.profile, "what F, B, I, W of each stage and each message cost, for chevron-plan")
      ->type_name("FILE.json")
      ->default_str("")
      ->group("Files");

  try {
    app.parse(argc, argv);
  } catch (CLI::Success const& asked) {
    std::exit(app.exit(asked));
  } catch (CLI::ParseError const& wrong) {
    throw usage_error(std::string(wrong.what()) + ". Remedy: chevron-train --help lists every flag");
  }

  o.backend_given = backend->count() > 0;
  if (backend_name == "gloo") o.backend = train::backend::gloo;
  if (backend_name == "nccl") o.backend = train::backend::nccl;
  if (o.share_gpus && o.backend != train::backend::nccl)
    throw usage_error("--share-gpus is about ranks on GPUs. Remedy: --backend nccl, or leave it away");
  if (o.cuda_graph && o.backend != train::backend::nccl)
    throw usage_error("--cuda-graph is about ranks on GPUs. Remedy: --backend nccl, or leave it away");
  if (precision_name == "bfloat16") o.precision = precision::bfloat16;
  if (precision_name == "autocast") o.precision = precision::autocast;
  if (o.schedule.ends_with(".csv") || o.schedule.find('/') != std::string::npos) {
    plan_size const size = read_schedule_file(o);
    take_size("--ranks", ranks->count() > 0, size.ranks, o.ranks);
    take_size("--microbatches", micro_batches->count() > 0, size.micro_batches, o.micro_batches);
    if (chunks->count() > 0 && o.chunks != 0)
      throw usage_error("--chunks cannot be chosen: --schedule " + o.schedule +
                        " places its stages itself. Remedy: leave the flag out");
  } else if (!catalogue::contains(o.schedule)) {
    throw usage_error("--schedule " + o.schedule +
                      " is not in the catalogue. Remedy: a file's name that ends in .csv, or one of " + schedule_names());
  } else if (!catalogue::trains(o.schedule)) {
    throw usage_error("--schedule " + o.schedule + " runs forwards alone: it evaluates and cannot train. Remedy: one of " +
                      schedule_names());
  }
  if (o.model.width % o.model.heads != 0) {
    throw usage_error("--width " + std::to_string(o.model.width) + " cannot be shared by --heads " +
                      std::to_string(o.model.heads) + ". Remedy: a width that is a multiple of the number of heads");
  }
  if (o.nproc > 0) {
    if (o.backend_given && o.backend == train::backend::threads) {
      throw usage_error(
          "--nproc starts processes, but --backend threads has none. Remedy: --backend gloo, or leave --nproc away");
    }
    if (!o.backend_given) o.backend = train::backend::gloo;
    if (o.nproc != o.world()) {
      throw usage_error("--nproc " + std::to_string(o.nproc) + " is not --ranks " + std::to_string(o.ranks) + " × --replicas " +
                        std::to_string(o.replicas) + ". Remedy: --nproc " + std::to_string(o.world()) + ", or leave it away");
    }
  }
  if (!o.profile.empty() && o.steps < 2)
    throw usage_error("--profile measures what comes after the first step, and --steps is 1. Remedy: --steps 10 or more");
  // Unasked, files go where build results go.
  std::error_code ignored;
  std::string const folder = std::filesystem::is_directory("build", ignored) ? "build/" : "";
  if (timeline->count() == 0) o.timeline = folder + "chevron-timeline.svg";
  if (trace->count() == 0) o.trace = folder + "chevron-trace.json";
  for (std::string* const file : {&o.timeline, &o.trace, &o.report, &o.metrics, &o.profile}) {
    if (*file == "none") file->clear();
  }
  return o;
}

}  // namespace chevron::train
