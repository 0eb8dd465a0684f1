#include "options.hpp"

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

#include <chevron/base/format.hpp>
#include <chevron/run/core/error.hpp>

namespace chevron::finetune {
namespace {

/// The flags of memory: `--dry-run` and `--memory`.
/// \param memory receives the bytes of `--memory`
std::pair<CLI::Option*, CLI::Option*> memory_flags(CLI::App& app, options& o, double& memory) {
  CLI::Validator const known = train::one_of({"text", "json"});
  CLI::Option* const dry_run =
      app.add_option(
             "--dry-run", o.dry_run,
             "print the bytes that each rank needs, and end: no tensor is read, and config.json alone suffices; without a "
             "value: text")
          ->expected(0, 1)
          ->default_str("")
          ->check([known](std::string const& given) { return given.empty() ? std::string() : known(given); })
          ->type_name("text|json");
  std::map<std::string, double> units{{"b", 1}};
  double decimal = 1, binary = 1;
  for (char const* const prefix : {"k", "m", "g", "t"}) {
    units[prefix + std::string("b")] = decimal *= 1000;
    units[prefix + std::string("ib")] = binary *= 1024;
  }
  CLI::Option* const limit =
      app.add_option("--memory", memory,
                     "bytes that each rank has, such as 80GiB: a job that needs more is refused before it loads")
          ->transform(CLI::AsNumberWithUnit(units, CLI::AsNumberWithUnit::CASE_INSENSITIVE).description(""))
          ->type_name("BYTES")
          ->default_str("");
  return {dry_run, limit};
}

void read_memory_flags(options& o, CLI::Option const& dry_run, CLI::Option const& limit, double memory) {
  if (dry_run.count() > 0 && o.dry_run.empty()) o.dry_run = "text";
  if (limit.count() > 0 && !(memory >= 1 && memory <= 1e18))
    throw usage_error("--memory " + show::number(memory) + " is not a number of bytes from 1 to 10^18. Remedy: such as 80GiB");
  o.memory = static_cast<std::int64_t>(memory);
}

/// The flags of LoRA.
/// \param targets receives the values of `--lora-targets`
void adapter_flags(CLI::App& app, options& o, std::vector<std::string>& targets) {
  app.option_defaults()->group("LoRA");
  app.add_option("--lora-rank", o.adapters.rank,
                 "rank of adapters beside projections of all layers: they alone are trained, and --out receives "
                 "them in peft's layout; 0: no adapters, the model is trained")
      ->check(train::whole(0, 65536))
      ->type_name("R");
  app.add_option("--lora-alpha", o.adapters.alpha, "peft's lora_alpha: adapters are multiplied by alpha / R")
      ->check(train::positive(false))
      ->type_name("X");
  std::vector<std::string> words{"attention", "all"};
  for (auto const& one : projections::attention) words.emplace_back(one);
  for (auto const& one : projections::maps) words.emplace_back(one);
  app.add_option("--lora-targets", targets,
                 "projections with an adapter, such as q_proj,v_proj; attention: its four; all: all seven of a "
                 "layer")
      ->check(train::one_of(words))
      ->delimiter(',')
      ->expected(1, -1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->type_name("LIST")
      ->default_str("attention");
}

/// Completes `o.adapters`. \throws usage_error for flags that need adapters
void read_adapter_flags(CLI::App const& app, options& o, std::vector<std::string> const& targets) {
  if (o.adapters.rank == 0) {
    for (char const* const flag : {"--lora-alpha", "--lora-targets"}) {
      if (app.count(flag) > 0 && app.count("--lora-rank") == 0)
        throw usage_error(std::string(flag) + " is about adapters, and --lora-rank is not given. Remedy: --lora-rank 8");
    }
    return;
  }
  o.adapters.targets = targets_of(targets);
}

}  // namespace

options read_options(int argc, char** argv) {
  options o;
  o.replicas = 1;
  o.context = 0;  // as the model has it
  o.micro_batch_size = 1;
  o.steps = 100;
  o.learning_rate = 2e-5;
  CLI::App app(
      "Trains a decoder of Llama's kind further: a Hugging Face folder and files of tokens in, a Hugging Face folder out.",
      "chevron-finetune");
  app.footer(
      "Files of tokens: FILE.bin as nanoGPT writes them (16-bit numbers), or with FILE.idx beside it as Megatron-LM does;\n"
      "with FILE.mask beside it, the loss is the mean over the tokens that the mask marks. tokenise.py, in\n"
      "examples/chevron-finetune, makes such files of text and of conversations.\n"
      "Exit codes: 0 ok, 2 usage, 3 a rank was lost, 4 timeout, 5 ranks disagree, 6 loss not finite, 7 checkpoint or weights,\n"
      "8 a message changed on its way.");
  train::job_flags flags(app, o);
  app.option_defaults()->group("Model and data");
  auto const files = [&](char const* flag, std::vector<std::string>& to, char const* what) {
    return app.add_option(flag, to, what)
        ->type_name("FILE.bin")
        ->expected(1, -1)
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
        ->default_str("");
  };
  app.add_option("--model", o.model, "folder with config.json and safetensors")->type_name("DIR")->required()->default_str("");
  files("--data", o.data, "tokens to learn from; may be left out with --dry-run alone");
  auto* const validation = files("--validation", o.validation, "tokens whose loss is printed before and after training");
  app.add_option("--validate-every", o.validate_every, "with --validation: steps between two validations; 0: none while training")
      ->check(train::whole(0, 1'000'000'000))
      ->type_name("K")
      ->needs(validation);
  app.add_option("--validation-batches", o.validation_batches,
                 "with --validation: number of its first batches, each as large as a step's, that are evaluated; 0: all")
      ->check(train::whole(0, 1'000'000'000))
      ->type_name("N")
      ->needs(validation);
  app.add_option("--windows", o.windows,
                 "stream: samples are cut from the tokens one after another; packed: whole documents of FILE.idx, each of which "
                 "sees itself alone. Without this flag, packed if a file of --data has a mask")
      ->check(train::one_of({"stream", "packed"}))
      ->type_name("stream|packed")
      ->default_str("");
  app.add_option("--out", o.out,
                 "folder to be written at the end: weights, and the model folder's other files; with --lora-rank: adapters; may "
                 "be left out "
                 "with --dry-run alone")
      ->type_name("DIR")
      ->default_str("");
  app.add_option("--out-dtype", o.out_dtype,
                 "of the saved tensors; without this flag, as in the model's config.json, or float32 with --lora-rank")
      ->check(train::one_of({"float32", "bfloat16", "float16"}))
      ->type_name("float32|bfloat16|float16")
      ->default_str("");
  app.add_option("--context", o.context,
                 "tokens of a sample, which the model sees at once; without this flag, 512, or the model's positions if fewer")
      ->check(train::whole(1, 1 << 24))
      ->type_name("N")
      ->default_str("");
  flags.pipeline();
  flags.ranks();
  double memory = 0;
  auto const [dry_run, limit] = memory_flags(app, o, memory);
  flags.training();
  auto* const epochs = app.add_option("--epochs", o.epochs, "instead of --steps: as many steps as take all windows so many times")
                           ->check(train::positive(false))
                           ->type_name("X")
                           ->default_str("");
  app.add_option("--weight-decay", o.weight_decay, "AdamW's, of all parameters")->check(train::positive(true))->type_name("X");
  std::vector<std::string> targets{"attention"};
  adapter_flags(app, o, targets);
  flags.files();
  app.add_option("--logits", o.logits, "before training: logits of the first windows of --data, to compare with another program")
      ->type_name("FILE.safetensors")
      ->default_str("");
  app.add_option("--profile", o.profile, "measured times of F, B, I, W and messages, and bytes, of each stage, for chevron-plan")
      ->type_name("FILE.json")
      ->default_str("");
  flags.read(argc, argv);

  if (epochs->count() > 0 && app.count("--steps") > 0)
    throw usage_error("--epochs and --steps both say how long to train. Remedy: leave one of them away");
  read_adapter_flags(app, o, targets);
  read_memory_flags(o, *dry_run, *limit, memory);
  for (auto const& [flag, missing] : {std::pair{"--data", o.data.empty()}, std::pair{"--out", o.out.empty()}}) {
    if (missing && o.dry_run.empty())
      throw usage_error(std::string(flag) + " is required. Remedy: chevron-finetune --help lists every flag");
  }
  if (!o.profile.empty() && o.steps < 2)
    throw usage_error("--profile measures the steps after the first, and --steps is 1. Remedy: --steps 10 or more");
  if (o.metrics == "none") o.metrics.clear();
  std::error_code ignored;
  if (std::filesystem::equivalent(o.model, o.out, ignored))
    throw usage_error("--out " + o.out + " is the --model, whose weights would be lost. Remedy: another folder");
  return o;
}

}  // namespace chevron::finetune
