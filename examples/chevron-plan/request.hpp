#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include <chevron/csv/csv_check.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/plan/owned_costs.hpp>
#include <chevron/plan/plan.hpp>
#include <chevron/plan/profile.hpp>
#include <chevron/plan/sizes.hpp>
#include <chevron/tools/show/text.hpp>

namespace chevron::search {
struct effort;
}

/// \file
/// What the command line asks for, and the ways from there to a plan, to costs and to an output.

namespace plan_program {

using chevron::owned_costs;

inline constexpr int exit_ok = 0;
inline constexpr int exit_other = 1;
inline constexpr int exit_usage = 2;
inline constexpr int exit_broken_law = 5;
inline constexpr int exit_nothing_fits = 6;
inline constexpr int exit_signal = 128;  ///< and the signal's number

/// Something on the command line cannot be used as given. The sentence names value, flag and remedy; exit code 2.
struct usage : std::runtime_error {
  using std::runtime_error::runtime_error;
};
/// No schedule fits into the memory given; exit code 6.
struct too_little_memory : std::runtime_error {
  using std::runtime_error::runtime_error;
};

/// The flags of `search` alone.
struct search_request {
  std::string placement;  ///< empty: every one with so many chunks
  std::string objective = "makespan";
  std::string kept_for_weight = "1";
  std::string seconds;
  std::string trials;
  std::string seed = "1";
  bool full_backward = false;
  bool recompute = false;  ///< every backward begins with its F again
  bool partition = false;  ///< how many layers each stage holds is looked for, too
  bool order = false;      ///< and in which order microbatches go in
};

/// The flags that say how times vary.
struct jitter_request {
  std::string spread;  ///< empty: not at all
  std::vector<std::string> slow_ranks;
  std::string slow_replica;
  std::string replicas;
  std::string draws;
};

/// The flags that say what a rank has, and what of it a step takes.
struct memory_request {
  std::string memory;  ///< empty: it is not counted in bytes
  std::string fixed;   ///< `--static-bytes`
  std::string kept;
  std::string input;
  std::string state;     ///< `--state-bytes`, a part of `--static-bytes`
  std::string gradient;  ///< `--gradient-bytes`, a part of `--static-bytes`
  bool shard_gradients = false;
  std::string shard;  ///< replicas that share the optimizer's state; empty: as `--static-bytes` or the profile has it
};

/// The flags of `check` about channels between ranks.
struct channel_request {
  std::string model;           ///< `--channels`; empty: all models
  bool hosts_wait = false;
  std::string buffered_below;  ///< bytes; empty: every send may last until its receive
};

/// The flags of `model`: a model's sizes, the way it is trained, and the device.
struct model_request {
  std::string config;  ///< config.json of a Hugging Face folder, or the folder; empty: sizes by flags
  std::string kind, layers, width, inner, heads, key_heads, head_width, vocabulary, window, experts, experts_per_token;
  bool tied = false;
  std::string tokens = "4096", samples = "1";
  std::string dtype = "bf16", optimizer = "adamw", attention = "flash", kernels = "finetune";
  bool masters = false;
  std::string gpu, tflops, bandwidth, efficiency = "0.6";
  std::string link;                       ///< rate of the links between stages; empty: times of messages are not known
  std::string calibrate, calibrate_model;  ///< a measured profile, and the described model that was measured
};

/// The flags of `cluster`. Rates are those at which one GPU sends, in each direction.
struct cluster_request {
  std::string nodes = "1", gpus = "8";
  std::string memory, inside, between, batch_tokens;
  std::string nics;  ///< network cards of a machine; empty: one for each GPU
  std::string latency_inside = "0", latency_between = "0";
  bool exhaustive = false;  ///< judges all ways
  std::string threads;      ///< empty: one for each core
  std::string timeline;     ///< a file for the first way's timeline; empty: none
  std::string slurm;        ///< a file for the first way's batch script; empty: none
  // Choices that the user makes; empty: the search makes them. Layers are request::layers, the schedule request::schedule.
  std::string ranks, shards, replicas, samples, slices, chunks, recompute, shard;
  std::string post_validation = "no";
};

/// The flags of `plot`.
struct plot_request {
  std::vector<std::string> files;  ///< of metrics
  std::string y = "loss";          ///< figures, with commas between
  std::string x = "step";
  std::string smooth;  ///< steps of a mean; empty: none
  std::string names;   ///< of the runs, with commas between; empty: those of the files
  bool logarithmic = false;
};

/// The flags as they were typed. Numbers are read later, so that every complaint can name its flag.
struct request {
  std::vector<std::string> files;  ///< of compare: schedules to compare with the catalogue
  search_request search;
  jitter_request jitter;
  memory_request bytes;
  channel_request channels;
  model_request model;
  cluster_request cluster;
  plot_request plot;
  std::string schedule;
  std::string ranks = "4";
  std::string chunks;
  std::string micro_batches = "8";
  std::string slices = "1";  ///< of each microbatch; `compare` takes several numbers
  std::string slice_ends;    ///< shares of a sequence's tokens, or `equal`; empty: slices that take equal time
  std::string forward = "1";
  std::string backward_input = "1";
  std::string backward_weight = "1";
  std::string communication = "0";
  std::string communication_occupies = "nobody";
  std::string latency = "0";
  std::string bandwidth;
  std::vector<std::string> links;  ///< each as `A-B=LATENCY` or `A-B=LATENCY:BANDWIDTH`
  std::string hidden = "0";
  std::string lengths;          ///< of microbatches; empty: all are alike
  std::string measured_length;  ///< empty: the mean of them
  std::string attention;        ///< share of the costs that goes with the square of a length; empty: none
  bool no_first_input_gradient = false;
  std::string unshard;    ///< time of the gather of a stage's parameters; empty: none
  std::string recompute;  ///< cost of an R, which each backward but the last stage's then has; empty: there are none
  std::string profile;  ///< a file with measured costs, which are then in milliseconds
  std::string layers;   ///< of the stages, with commas between; empty: as suits each schedule
  std::string activation_bytes;
  std::string message_bytes;
  std::string steps = "1";
  bool critical_path = false;
  std::string memory_limit;
  std::string resident;  ///< stages of a rank under FSDP that may be gathered at once; empty: no stage is under FSDP
  std::string format;
  std::string output;
  std::string width;
  std::string colour = "auto";
  std::vector<std::string> flight_logs;  ///< files and folders of `explain`
  std::string flight_recorder;           ///< a folder of dumps of PyTorch's flight recorder
  std::string patience;                  ///< seconds from which a wait in these dumps counts as a hang; empty: by the job's gaps
  bool ranks_given = false;          ///< `--ranks` was typed; for a schedule from a file it then must agree
  bool micro_batches_given = false;  ///< the same of `--microbatches`
  bool communication_given = false;  ///< `--communication` was typed, which then stands instead of a profile's
  bool hidden_given = false;         ///< the same of `--hidden`
  bool occupies_given = false;       ///< `--communication-occupies` was typed; else a bandwidth says that the wire is occupied
  std::string cost_flag;             ///< a flag that was typed and means what a profile says; empty: none
};

/// A schedule that was read from a CSV file.
struct foreign {
  std::string file;
  std::string text;
  chevron::csv_schedule read;
  chevron::finding broken;  ///< the first law that it breaks, its messages included
};

/// Sizes that own their memory, as far as any were given.
struct owned_sizes {
  std::vector<std::int64_t> activation, message;
  chevron::size_view view() const {
    return {activation.empty() ? nullptr : activation.data(), message.empty() ? nullptr : message.data(), 1};
  }
};

/// The number that a text is, all of it; nothing where it is none.
std::optional<double> number_in(std::string const& value);
/// A whole number from `lowest` up to `highest`.
int whole_number(std::string const& value, std::string const& flag, int lowest, int highest);
/// `--trials` and `--seed`.
chevron::search::effort effort_of(request const& asked);
/// `--seconds`; 0 without it.
double seconds_of(request const& asked);
/// A number that is not negative.
double cost_number(std::string const& value, std::string const& flag);

/// A share from 0 to 1.
double share_number(std::string const& value, std::string const& flag);
/// `--memory-limit`, given in microbatches of a rank's whole share, in chunks of 1 / `chunks` of it, rounded down; 0 without the
/// flag.
int chunk_limit(request const& asked, int chunks);
/// Bytes, such as `65536`, `64KiB` or `1.5GB`: up to 16 GiB, or up to `most`.
std::int64_t byte_number(std::string const& value, std::string const& flag);
std::int64_t bytes_up_to(std::int64_t most, std::string const& value, std::string const& flag);
/// What transfers occupy, as `--communication-occupies` says; without it, the wire where there is a bandwidth.
chevron::occupies occupies_of(request const& asked);

/// Names of the catalogue's schedules that train, in its order.
std::vector<std::string> schedule_names();
/// Those, and the schedules that evaluate.
std::vector<std::string> all_names();
/// The shape that `--ranks --chunks --microbatches --slices` ask for.
chevron::shape shape_of(request const& asked);
/// Whether `--schedule` names a file: it ends in `.csv` or holds a `/`.
bool is_file(std::string const& schedule);
/// For a command that looks at the whole catalogue and takes a file beside it.
usage no_csv_file(request const& asked);
/// The file's schedule. Throws `usage` where it cannot be read, is no schedule, or is not of the shape asked for; a broken law is
/// not complained about.
foreign read_file(request const& asked);
/// A finding on the schedule asked for as one line: where in its file it stands, what is broken.
std::string law_words(request const& asked, chevron::finding const& broken);
/// The plan for a name of the catalogue; `--memory-limit` becomes its declared limit. Throws `usage` for a name or a shape
/// that does not exist; or what `read_file` gives. Whether the plan keeps the laws is not looked at.
chevron::plan plan_of(request const& asked);
/// The same for one name and shape, without a complaint: look at `problem`.
chevron::plan plan_named(std::string const& name, chevron::shape size);
/// Gives costs of a plan of this size the factors that `--lengths` asks for, and its slices theirs; none without either.
void apply_lengths(request const& asked, chevron::shape size, owned_costs& costs);
/// Whether the number of slices is to be chosen: `--slices auto`.
bool chooses_slices(request const& asked);
/// The numbers that `--slices` lists, each of which goes with `--microbatches`; with `auto` 1, 2, 4 and 8.
std::vector<int> slice_counts(request const& asked);
/// The shape asked for, without slices.
chevron::shape whole_shape_of(request const& asked);
/// Where the slices of such a plan end.
std::vector<double> slice_ends_of(request const& asked, int slices);
/// Where slices end, a line for each number of them; empty without slices.
std::string slice_words(request const& asked, std::vector<int> const& counts);
/// What `--lengths` asks for, as a sentence; empty without it.
std::string length_words(request const& asked);
/// Costs from the flags, for so many stages as `split` has entries: a number for all, or one a stage; of messages, one a
/// boundary, and one a link. With `--profile`, from there; `split` says which stages take their backward in two, `rank_of`
/// where they live.
owned_costs costs_of(request const& asked, std::vector<bool> const& split, std::span<std::int16_t const> rank_of);
/// The profile that `--profile` names, if it names any.
std::optional<chevron::profile> profile_of(request const& asked);
/// Costs from a profile; `problem` where it does not serve a schedule with these stages.
owned_costs costs_of(request const& asked, chevron::profile const& measured, std::vector<bool> const& split,
                     std::span<std::int16_t const> rank_of, std::string& problem);
/// A line on what a profile's own run took beside what is predicted for it, in milliseconds; empty for another plan than its own.
std::string measured_words(chevron::profile const& measured, chevron::plan_view const& plan, double predicted);
/// Sizes from the flags, for this many stages.
owned_sizes sizes_of(request const& asked, int stages);
/// How many steps `--steps` asks for; they must fit into one plan.
int steps_of(request const& asked, chevron::plan_view const& plan);

/// Values of flags, for the command line's parser and for the code that reads them.
using word_list = std::vector<std::string>;
inline word_list const show_formats{"text", "svg", "html", "csv", "csv-steps", "trace", "json", "steps"};
inline word_list const compare_formats{"text", "csv", "json"};
inline word_list const lower_formats{"text", "csv-comms", "csv-comms-2.15", "csv", "promela"};
inline word_list const search_formats{"text", "svg", "html", "csv", "csv-comms", "csv-comms-2.15", "trace", "json"};
inline word_list const fit_formats{"text", "json", "svg", "html", "csv"};
inline word_list const flight_log_formats{"text", "svg"};
inline word_list const recorder_formats{"text", "json", "svg"};
inline word_list const model_formats{"text", "json"};
inline word_list const cluster_formats{"text", "json", "svg", "html"};
inline word_list const plot_formats{"text", "svg", "png", "pdf"};
inline word_list const plot_axes{"step", "seconds", "tokens"};

/// The format asked for, from `--format`, else from the ending of `-o`'s file, else the first of those possible, which is text.
/// Throws `usage` for an ending that is none of them.
std::string format_of(request const& asked, std::vector<std::string> const& possible);
/// How the output wants its text: terminal width, colour, characters.
chevron::show::text_style style_of(request const& asked);
/// Throws `usage` if the file named by `-o` cannot be written: before anything is computed.
void check_output(request const& asked);
/// The same of a further file, named by another flag.
void check_output(std::string const& file, std::string const& flag);
/// To a new file (chevron/base/new_file.hpp) under the path named by `-o`, or to standard output.
void write(request const& asked, std::string const& content);
/// To a new file, named by another flag than `-o`.
void write_to(std::string const& file, std::string const& flag, std::string const& content);

int run_show(request const& asked);
int run_compare(request const& asked);
int run_check(request const& asked);
int run_lower(request const& asked);
int run_search(request const& asked);
int run_fit(request const& asked);
int run_list(request const& asked);
int run_model(request const& asked);
int run_cluster(request const& asked);
int run_explain(request const& asked);
int run_plot(request const& asked);

}  // namespace plan_program
