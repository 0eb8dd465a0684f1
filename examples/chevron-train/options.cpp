#include "options.hpp"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <filesystem>
#include <string>
#include <system_error>

#include <CLI/CLI.hpp>

#include <chevron/run/core/error.hpp>

namespace chevron::train {
namespace {

/// `12`, or `4,4,3,1`.
void read_layers(std::string const& text, options& o) {
  bool const each = text.find(',') != std::string::npos;
  int sum = 0;
  for (std::size_t at = 0; at <= text.size();) {
    std::size_t const end = std::min(text.find(',', at), text.size());
    int count = -1;
    auto const [stop, fault] = std::from_chars(text.data() + at, text.data() + end, count);
    if (fault != std::errc() || stop != text.data() + end || count < (each ? 0 : 1) || count > 1000) {
      throw usage_error("--layers " + text +
                        " is not usable. Remedy: a whole number from 1 to 1000, such as 12, or one for each " +
                        "stage, such as 4,4,3,1");
    }
    if (each) o.cut.push_back(count);
    sum += count;
    at = end + 1;
  }
  if (sum < 1 || sum > 1000)
    throw usage_error("--layers " + text + " makes " + std::to_string(sum) + " layers. Remedy: 1 to 1000");
  o.model.layers = sum;
}

}  // namespace

options read_options(int argc, char** argv) {
  options o;
  CLI::App app("Trains a byte-level GPT on any text, on one or several ranks, under a pipeline schedule that was proved first.",
               "chevron-train");
  app.footer(
      "With no flags: 2 pipeline ranks x 2 replicas as threads, 1F1B, LibTorch's own C++ headers as text, a minute or two.\n"
      "Exit codes: 0 ok, 2 usage, 3 a rank was lost, 4 timeout, 5 ranks disagree, 6 loss not finite, 7 checkpoint, 8 a\n"
      "message changed on its way.\n"
      "With CHEVRON_FLIGHT_LOGS=FOLDER in the environment the ranks of a run that fails write their last actions into FOLDER,\n"
      "for chevron-plan explain.");
  job_flags flags(app, o);
  flags.pipeline(/*automatic=*/true);
  flags.ranks();
  app.option_defaults()->group("Model");
  std::string layers = std::to_string(o.model.layers);
  app.add_option("--layers", layers, "transformer blocks: their number, or with commas between the number on each stage")
      ->type_name("N|N,N...");
  app.add_option("--width", o.model.width, "numbers for each position")->check(whole(1, 65536))->type_name("N");
  app.add_option("--heads", o.model.heads, "attention heads; must divide the width")->check(whole(1, 1024))->type_name("N");
  app.add_option("--experts", o.model.experts, "experts of each block, of which a gate chooses one for each byte; 1: no gate")
      ->check(whole(1, 1024))
      ->type_name("N");
  app.add_option("--context", o.context, "bytes of a sample, which the model sees at once")
      ->check(whole(2, 65536))
      ->type_name("N");

  app.option_defaults()->group("Training");
  app.add_option("--data", o.data, "text files and folders; without it LibTorch's C++ headers")
      ->type_name("PATH")
      ->expected(1, -1)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->default_str("");
  flags.training();
  app.add_option(
         "--sample", o.sample,
         "bytes that the trained model writes at the end, each computed by all ranks in turn; 0: none. Without it at most " +
             std::to_string(o.longest_sample) + ", in " + std::to_string(o.sample_seconds) + " s")
      ->check(whole(0, 1'000'000))
      ->type_name("BYTES")
      ->default_str("");
  flags.files();
  auto* const trace =
      app.add_option("--trace", o.trace, "timeline of a late step, for Perfetto or chrome://tracing; none: no file")
          ->type_name("FILE.json")
          ->default_str("");
  auto* const timeline =
      app.add_option("--timeline", o.timeline, "picture of a late step, predicted above measured; none: no file")
          ->type_name("FILE.svg")
          ->default_str("");
  app.add_option("--report", o.report, "the step of --timeline as a page to pan, zoom and point at, predicted above measured")
      ->type_name("FILE.html")
      ->default_str("");
  app.add_option("--profile", o.profile, "times of F, B, I, W and messages, and bytes, of each stage, for chevron-plan")
      ->type_name("FILE.json")
      ->default_str("");

  flags.read(argc, argv);

  read_layers(layers, o);
  o.model.context = o.context;
  if (o.model.width % o.model.heads != 0) {
    throw usage_error("--width " + std::to_string(o.model.width) + " cannot be shared by --heads " +
                      std::to_string(o.model.heads) + ". Remedy: a width that is a multiple of the number of heads");
  }
  check_shards(o, o.model.heads, "--heads " + std::to_string(o.model.heads));
  if (!o.profile.empty() && o.steps < 2)
    throw usage_error("--profile measures the steps after the first, and --steps is 1. Remedy: --steps 10 or more");
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
