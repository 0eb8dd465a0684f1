#include "train.hpp"

#include <algorithm>
#include <map>
#include <memory>
#include <numbers>
#include <optional>
#include <random>
#include <thread>

#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <ATen/ops/softmax.h>
#include <chevron/base/format.hpp>
#include <chevron/checkpoint/checkpoint.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/prove/timeline.hpp>
#include <chevron/run/train/evaluator.hpp>
#include <chevron/run/train/fused_optimizers.hpp>
#include <chevron/run/train/preflight.hpp>
#include <chevron/run/train/trainer.hpp>
#include <chevron/tools/replan/auto_schedule.hpp>
#include <chevron/tools/search/layer_costs.hpp>

#include "common/console.hpp"
#include "common/programs.hpp"
#include "common/step_teller.hpp"
#include "common/trainer_flags.hpp"
#include "gpt.hpp"
#include "measure.hpp"
#include "pictures.hpp"
#include "planned.hpp"

namespace chevron::train {
namespace {

/// Windows of a text at places that depend on seed, step and sample only: the bytes, and for each the byte that follows.
struct windows {
  at::Tensor bytes, following;

  windows(std::string const& text, int count, int context, std::uint64_t seed, std::uint64_t step, std::uint64_t first_sample)
      : bytes(at::empty({count, context}, at::kLong)), following(at::empty({count, context}, at::kLong)) {
    auto* x = bytes.data_ptr<std::int64_t>();
    auto* y = following.data_ptr<std::int64_t>();
    std::uint64_t const places = text.size() - static_cast<std::size_t>(context);
    for (int i = 0; i < count; ++i) {
      char const* const at = text.data() + mixed(seed, step, first_sample + static_cast<std::uint64_t>(i)) % places;
      for (int j = 0; j < context; ++j) {
        *x++ = static_cast<unsigned char>(at[j]);
        *y++ = static_cast<unsigned char>(at[j + 1]);
      }
    }
  }
};

stage make_stage(task const& what, transport& comm, c10::Device device, int stages, int number) {
  options const& o = what.options;
  layer_cut const cut = cut_of(o.model.layers, stages, number, o.cut);
  bool const sliced = o.slices > 1;
  shard_layout const layout{shard_group(comm), o.sequence_parallel ? o.context : 0};
  gpt_stage made(o.model, cut, layout, o.seed, sliced);
  if (o.precision == precision::bfloat16) made->to(at::kBFloat16);
  made->to(device);
  stage out(made, [made](std::span<at::Tensor const> given) mutable { return made->forward(given); });
  declare_shards(out, *made, layout.group);
  if (sliced && cut.embeds) out.side_inputs({slice_start});
  out.carries(slice_cache::names(cut.last - cut.first, o.slices));
  // Switch Transformers' factor, for each block.
  if (o.model.experts > 1 && cut.last > cut.first) out.losses({{.name = "balance", .factor = 0.01}});
  return out.recompute(o.recompute);
}

void print_header(task const& what, rank_place const& where) {
  options const& o = what.options;
  plan_view const plan = what.programs->training.view().plan;
  costs const equal{};
  double const share = bubble_makespan(plan, equal);
  std::string const sentence = "no rank can wait for ever, each gradient is computed once, sends and receives match";
  std::string peaks;
  for (int r = 0; r < plan.size.ranks; ++r) peaks += (r == 0 ? "" : ", ") + std::to_string(peak_in_flight(plan, r));
  std::string cut;
  for (int s = 0; s < plan.stages; ++s) {
    cut += (s == 0 ? "" : " | ") + words_for(cut_of(o.model.layers, plan.stages, s, o.cut));
  }
  auto const samples = static_cast<std::int64_t>(o.micro_batches) * o.micro_batch_size * o.replicas;
  print_facts({
      {"model", "byte-level GPT, " + grouped(o.model.parameters()) + " parameters: " + some(o.model.layers, "layer") +
                    ", width " + std::to_string(o.model.width) + ", " + some(o.model.heads, "head") +
                    (o.model.experts > 1 ? ", " + some(o.model.experts, "expert") + " a block" : "") + ", context " +
                    std::to_string(o.model.context)},
      {"data", what.text.source},
      {"ranks",
       some(o.ranks, "pipeline rank") + " × " + some(o.replicas, "replica") + words_for_shards(o) + ", " + where.launcher},
      {"schedule",
       (o.automatic ? "auto, beginning with " : "") + std::string(plan.name) + ", " + some(plan.stages, "stage") + ": " + cut},
      {"step", grouped(o.micro_batches) + (o.micro_batches == 1 ? " microbatch" : " microbatches") +
                   (o.slices > 1 ? " in " + some(o.slices, "slice") : "") + " of " + some(o.micro_batch_size, "sample") +
                   " for each replica, " + grouped(samples * o.model.context) + " bytes in all"},
      {"proved", (what.programs->proved_while_compiling ? "while this program was compiled: "
                                                        : "just now, by the laws the compiler uses: ") +
                     sentence},
      {"predicted", "bubble " + show::percent(share) +
                        " if forward, input gradient and weight gradient cost the same; chunks in flight by rank: " + peaks},
  });
  if (!o.slices_why.empty()) print_facts({{"slices", o.slices_why}});
  if (auto const own = facts_of_own_actions(plan); !own.empty()) print_facts(own);
  std::printf("\n");
  std::fflush(stdout);
}

/// How many layers each stage holds.
std::vector<int> layers_of(options const& o, int stages) {
  std::vector<int> out;
  for (int s = 0; s < stages; ++s) {
    layer_cut const cut = cut_of(o.model.layers, stages, s, o.cut);
    out.push_back(cut.last - cut.first);
  }
  return out;
}

/// Where timings of several ranks are no fair test of a schedule, says why; else nothing.
std::string shared_cores(int ranks) {
  auto const cores = static_cast<int>(std::thread::hardware_concurrency());
  if (cores == 0 || cores >= ranks) return {};
  return "Note: " + std::to_string(ranks) + " ranks share " + std::to_string(cores) + (cores == 1 ? " core" : " cores") +
         ". They take turns, so an action's time varies with what else runs just then;\n  a fair test of a schedule needs "
         "a core for each rank.";
}

/// Mean loss on text never shown in training.
double held_out_loss(task const& what, trainer& train) {
  options const& o = what.options;
  evaluator evaluate(what.programs->evaluation, train);
  int const mine = o.micro_batches * o.micro_batch_size;
  constexpr int batches = 8;
  double sum = 0;
  for (int b = 0; b < batches; ++b) {
    auto const first = static_cast<std::uint64_t>(train.comm().topology().replica()) * static_cast<std::uint64_t>(mine);
    // Windows of training have numbers of steps that count from 1, so that these places are others.
    windows const batch(what.text.held_out, mine, o.model.context, o.seed + 1, static_cast<std::uint64_t>(b), first);
    sum += evaluate.loss({batch.bytes}, {batch.following});
  }
  return sum / batches;
}

/// What the model writes after a piece of the held-out text, byte by byte, each drawn from the last stage's outputs. The first
/// replica writes, and of its ranks that of the last stage and the first shard draws; ranks of other replicas take part in the
/// calls, which are collective, with the shortest window they can. Collective.
/// \returns at most `options::longest_sample` bytes, and fewer where these take longer than `options::sample_seconds`; or as many
/// as `--sample` says
std::string sample_text(task const& what, trainer& train, std::string const& prompt) {
  options const& o = what.options;
  int const length = o.sample.value_or(o.longest_sample);
  if (length == 0) return {};
  constexpr double temperature = 0.8;
  evaluator forward(what.programs->sampling, train);
  transport& comm = train.comm();
  topology const& here = comm.topology();
  plan_view const plan = what.programs->sampling.view().plan;
  auto const source = static_cast<std::size_t>(here.rank_at(0, plan.rank_of_stage(plan.stages - 1), 0));
  shard_group const group(comm);
  std::mt19937_64 random(o.seed);
  constexpr double ends = vocabulary;  // added to the last byte, where time is over
  std::vector<double> said(static_cast<std::size_t>(here.world()));
  bool const writes = here.replica() == 0;
  // A whole window for each byte, so that all messages have one shape; what stands behind the last byte is not seen by it.
  int const window_length = writes || o.sequence_parallel || o.slices > 1 ? o.model.context : 1;
  std::int64_t const over = now_ns() + o.sample_seconds * std::int64_t{1'000'000'000};

  std::string text = prompt;
  for (int i = 0; i < length; ++i) {
    auto const seen = std::min(text.size(), static_cast<std::size_t>(window_length));
    at::Tensor window = at::full({1, window_length}, 0, at::kLong);
    for (std::size_t j = 0; j < seen; ++j)
      window.data_ptr<std::int64_t>()[j] = static_cast<unsigned char>(text[text.size() - seen + j]);
    tensors logits = forward.outputs({window});
    double drawn = 0;
    if (writes && !logits.empty()) {
      if (group.shards() > 1) logits[0] = group.gathered(logits[0], 2, vocabulary);
      at::Tensor const share =
          at::softmax(logits[0].select(0, 0).select(0, static_cast<std::int64_t>(seen) - 1).to(at::kFloat) / temperature, 0)
              .cpu()
              .contiguous();
      double left = std::uniform_real_distribution<double>(0, 1)(random);
      int byte = 0;
      for (; byte < vocabulary - 1; ++byte) {
        left -= static_cast<double>(share.data_ptr<float>()[byte]);
        if (left < 0) break;
      }
      drawn = byte + (!o.sample && now_ns() > over ? ends : 0);
    }
    comm.all_gather(std::span<double const>(&drawn, 1), said);
    auto const byte = static_cast<int>(said[source]);
    text += static_cast<char>(byte % vocabulary);
    if (byte >= vocabulary) break;
  }
  return text.substr(prompt.size());
}

/// The beginning of a line of the held-out text, to be continued.
std::string prompt_from(std::string const& text, std::uint64_t seed, int context) {
  auto const length = static_cast<std::size_t>(std::min(context, 48));
  auto at = static_cast<std::size_t>(mixed(seed, 0, 1) % (text.size() - length));
  auto const line = text.find('\n', at);
  if (line != std::string::npos && line + 1 + length <= text.size()) at = line + 1;
  return text.substr(at, length);
}

/// \param texts by global rank: in how many steps its computations were launched as graphs, and why not in the last
std::string told_of_graphs(std::vector<std::string> const& texts, long steps) {
  std::map<std::string, std::string> ranks;  // that say the same
  for (std::size_t r = 0; r < texts.size(); ++r) ranks[texts[r]] += (ranks[texts[r]].empty() ? "" : ", ") + std::to_string(r);
  std::string out = "computations launched as CUDA graphs ";
  for (auto const& [text, who] : ranks) {
    auto const space = text.find(' ');
    std::string const why = text.substr(space + 1);
    out += (who == ranks.begin()->second ? "" : "; ") + std::string("in ") + text.substr(0, space) + " of " +
           some(steps, "step") + (ranks.size() == 1 ? "" : " on rank " + who) + (why.empty() ? "" : ", in the end not: " + why);
  }
  return out;
}

std::string told_of_text(task const& what) {
  std::string const& text = what.text.training;
  auto const length = static_cast<std::int64_t>(text.size());
  return grouped(length) + " bytes to learn from, fingerprint " +
         std::to_string(fingerprint(at::from_blob(const_cast<char*>(text.data()), {length}, at::kByte)));
}

/// Processes have flags and files of their own. The trainer compares what it is given; this is what it does not see: other data,
/// or one step more, would train nonsense or wait in vain.
void compare_jobs(task const& what, transport& comm) {
  options const& o = what.options;
  named_values lines = common_values(comm);
  lines.add("--layers", search::layers_text(layers_of(o, what.programs->training.view().plan.stages)));
  lines.add("--width", std::to_string(o.model.width));
  lines.add("--heads", std::to_string(o.model.heads));
  add_values(lines, o);
  lines.add("--sample", o.sample ? std::to_string(*o.sample) : "at most " + std::to_string(o.longest_sample));
  lines.add("--data", told_of_text(what));
  check_consistency(comm, lines);
}

/// What must be the same for a resumed run to be the run that was interrupted.
std::map<std::string, std::string> words_of(task const& what) {
  options const& o = what.options;
  std::map<std::string, std::string> out{{"seed", std::to_string(o.seed)},
                                         {"samples a step", std::to_string(o.micro_batches * o.micro_batch_size * o.replicas)},
                                         {"context", std::to_string(o.model.context)},
                                         {"layers", std::to_string(o.model.layers)},
                                         {"width", std::to_string(o.model.width)},
                                         {"heads", std::to_string(o.model.heads)},
                                         {"dtype", name_of(o.precision)},
                                         {"data", told_of_text(what)}};
  if (o.model.experts > 1) out["experts"] = std::to_string(o.model.experts);
  return out;
}

}  // namespace

void train_on_rank(task const& what, rank_place const& where) {
  transport& comm = where.comm;
  options const& o = what.options;
  plan_view const plan = what.programs->training.view().plan;
  topology const& here = comm.topology();
  bool const speaks = here.global_rank == 0;
  if (o.backend != backend::threads) compare_jobs(what, comm);

  int const mine = o.micro_batches * o.micro_batch_size;
  step_teller teller(o, here, o.model.flops_per_token());
  trainer_options flags = trainer_options_of(o, where, o.model.attention_share());
  flags.on_report = [&](step_report const& report) { teller.tell(report); };
  trainer train({.program = what.programs->training,
                 .transport = comm,
                 .stages = [&](int s) { return make_stage(what, comm, where.device, plan.stages, s); },
                 .loss =
                     [group = shard_group(comm)](at::Tensor const& logits, at::Tensor const& following) {
                       return vocabulary_cross_entropy(group, logits.flatten(0, 1).to(at::kFloat), following.flatten(),
                                                       vocabulary);
                     },
                 .optimizer = optimizer<fused_adamw>(adamw_options_of(o, 0.1)),
                 .options = flags});
  auto const words = words_of(what);
  std::optional<std::string> const resumed = begin_from_checkpoint(o, words, train);
  long const first_step = train.next_step() + 1;  // steps that people read count from 1

  if (speaks) print_header(what, where);
  if (speaks && o.resume) {
    print_facts(
        {{"resumed", resumed.value_or("nothing: " + o.checkpoint + " holds no checkpoint yet, so training begins anew") + "\n"}});
  }
  teller.open(first_step);

  std::optional<auto_schedule> planner;
  if (o.automatic) {
    planner.emplace(train, auto_options{.memory = {static_cast<double>(chunk_limit(o))}, .costs = [&](profile measured) {
                                          measured.layers = layers_of(o, plan.stages);
                                          return measured;
                                        }});
  }
  if (!o.profile.empty()) train.measure_bytes();
  trace_window records;
  long measured_after = first_step;  // the first step under a program is left out
  std::int64_t const begin = now_ns();
  for (long step = first_step; step <= o.steps; ++step) {
    std::int64_t const loading_begin = now_ns();
    auto const first = static_cast<std::uint64_t>(here.replica()) * static_cast<std::uint64_t>(mine);
    windows const batch(what.text.training, mine, o.model.context, o.seed, static_cast<std::uint64_t>(step), first);
    std::int64_t const step_begin = now_ns();
    teller.loaded(step, static_cast<double>(step_begin - loading_begin) * 1e-9);
    step_report const report = train.step({batch.bytes}, {batch.following});
    if (step > o.steps - static_cast<long>(trace_window::kept) && (step > measured_after || o.steps == measured_after))
      records.keep(train.last_trace(), static_cast<double>(now_ns() - step_begin) * 1e-9);
    save_where_due(o, words, train, step);
    if (step < o.steps && train.should_stop()) {
      teller.close();
      if (speaks) {
        print_facts({{"stopped", "after step " + std::to_string(step) + " of " + std::to_string(o.steps) + ", since " +
                                     train.stop_reason() + "; saved in " + o.checkpoint + ": --resume goes on"}});
        std::fflush(stdout);
      }
      return;
    }
    if (!planner || step == o.steps) continue;
    std::optional<replan_report> const news = planner->after_step(report);
    if (!news) continue;
    if (news->what == schedule_event::changed || news->what == schedule_event::went_back) {
      records = {};
      measured_after = step + 1;
    }
    if (!speaks) continue;
    teller.make_room();
    print_facts({{"planned", words_for(*news)}});
    if (std::string const other = words_for_layers(o, *news); !other.empty()) print_facts({{"layers", other}});
    std::fflush(stdout);
  }
  train.check_copies();
  double const spent = static_cast<double>(now_ns() - begin) * 1e-9;
  teller.close();

  double const held_out = held_out_loss(what, train);
  auto const texts = comm.all_gather_text(records.text());
  auto const bytes = comm.all_gather_text(text_of(train.bytes_by_stage()));
  std::vector<std::string> of_graphs;
  if (o.cuda_graph) of_graphs = comm.all_gather_text(std::to_string(teller.launched()) + " " + train.graph_fallback_reason());
  std::string const prompt = prompt_from(what.text.held_out, o.seed, o.model.context);
  if (speaks) {
    print_facts({{"trained", some(o.steps + 1 - first_step, "step") + " in " + duration(spent) + ": loss " +
                                 show::fixed(teller.first_loss(), 3) + " → " + show::fixed(teller.last_loss(), 3) +
                                 " nats a byte; on text it never saw " + show::fixed(held_out, 3) + " (" +
                                 show::fixed(held_out / std::numbers::ln2, 2) + " bits)"}});
    if (o.cuda_graph) print_facts({{"graphs", told_of_graphs(of_graphs, o.steps + 1 - first_step)}});
    comparison outcome = compared(train.program(), texts, here.shards, o.post_validation);
    outcome.for_file.layers = layers_of(o, plan.stages);
    if (!o.profile.empty()) add_bytes(outcome.for_file, bytes);
    outcome.for_file.shard = o.shard ? o.replicas : 1;
    std::printf("\n%s\n", table_of(outcome, where.device.is_cpu() ? shared_cores(here.world()) : "").c_str());
    write_files(o, outcome);
    std::fflush(stdout);
  }
  std::string const written = sample_text(what, train, prompt);
  if (speaks && !written.empty()) {
    std::printf("\n%s\n%s%s\n", bold("The model goes on from a line it never saw:").c_str(), faint(shown(prompt)).c_str(),
                shown(written).c_str());
    if (!o.sample && written.size() < static_cast<std::size_t>(o.longest_sample)) {
      std::printf("%s\n", faint("(" + some(static_cast<std::int64_t>(written.size()), "byte") + " in " +
                                std::to_string(o.sample_seconds) + " s; --sample " + std::to_string(o.longest_sample) +
                                " waits for more)")
                              .c_str());
    }
    std::fflush(stdout);
  }
}

}  // namespace chevron::train
