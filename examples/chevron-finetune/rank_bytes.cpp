#include "rank_bytes.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string>
#include <utility>

#include <nlohmann/json.hpp>

#include <chevron/base/format.hpp>
#include <chevron/plan/slices.hpp>
#include <chevron/prove/footprint.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/run/core/error.hpp>

#include "chevron-finetune/decoder_size.hpp"
#include "common/console.hpp"
#include "common/decoder_costs.hpp"
#include "common/freed_gradients.hpp"
#include "common/programs.hpp"

namespace chevron::finetune {
namespace {

train::training_setup setup_of(options const& o) {
  train::training_setup out;
  out.tokens = o.context;
  out.samples = o.micro_batch_size;
  out.item = o.precision == train::precision::bfloat16 ? 2 : 4;
  out.autocast = o.precision == train::precision::autocast;
  out.slices = o.slices;
  if (o.adapters.rank > 0) {
    out.adapters = {.rank = o.adapters.rank,
                    .queries = o.adapters.on("q_proj"),
                    .keys = o.adapters.on("k_proj"),
                    .values = o.adapters.on("v_proj"),
                    .output = o.adapters.on("o_proj"),
                    .gate = o.adapters.on("gate_proj"),
                    .up = o.adapters.on("up_proj"),
                    .down = o.adapters.on("down_proj")};
  }
  out.optimizer = train::optimizer_kind::adamw;
  out.masters = o.master_parameters;
  out.attention = train::attention_kind::flash;
  out.kernels = train::kernel_kind::finetune;
  out.shards = o.shards;
  out.cuts_sequence = o.sequence_parallel;
  return out;
}

/// The part of a number of bytes that the fullest of some replicas has.
std::int64_t share(std::int64_t of, int replicas) { return (of + replicas - 1) / replicas; }

std::string right(std::string const& text, int width) {
  return std::string(static_cast<std::size_t>(std::max(0, width - show::columns_of(text))), ' ') + text;
}

/// The rank that needs most.
std::size_t fullest(std::vector<rank_bytes> const& ranks) {
  auto const less = [](rank_bytes const& a, rank_bytes const& b) { return a.sum() < b.sum(); };
  return static_cast<std::size_t>(std::max_element(ranks.begin(), ranks.end(), less) - ranks.begin());
}

/// A change of the options that needs less memory, as typed.
struct remedy {
  std::string typed;
  options changed;
};

std::vector<remedy> remedies_for(options const& o) {
  std::vector<remedy> out;
  auto const add = [&](std::string const& typed, auto const& change) { change(out.emplace_back(remedy{typed, o}).changed); };
  if (!o.recompute) add("--recompute", [](options& to) { to.recompute = true; });
  if (o.replicas > 1 && !o.shard) add("--shard", [](options& to) { to.shard = true; });
  if (o.replicas > 1 && !o.shard_gradients) add("--shard gradients", [](options& to) { to.shard = to.shard_gradients = true; });
  if (o.precision != train::precision::bfloat16)
    add("--dtype bfloat16", [](options& to) { to.precision = train::precision::bfloat16; });
  if (o.micro_batch_size > 1) add("--microbatch-size 1", [](options& to) { to.micro_batch_size = 1; });
  if (o.schedule_text.empty()) {
    for (int const more : {2, 4, 8}) add("--ranks " + std::to_string(more * o.ranks), [&](options& to) { to.ranks *= more; });
  }
  if (!o.recompute && o.precision != train::precision::bfloat16) {
    add("--recompute --dtype bfloat16", [](options& to) {
      to.recompute = true;
      to.precision = train::precision::bfloat16;
    });
  }
  return out;
}

}  // namespace

job_bytes bytes_of(options const& o, decoder_config const& c, plan_view const& plan) {
  train::training_setup const setup = setup_of(o);
  train::decoder_size const size = size_of(c);
  std::vector<train::piece_figures> const pieces = train::decoder_pieces(size, setup);
  int const owners = o.shard ? o.replicas : 1;
  job_bytes out;
  train::freed_gradients freed{.whole = {}, .shard = owners};
  for (int s = 0; s < plan.stages; ++s) {
    train::layer_cut const cut = cut_of(c, plan.stages, s);
    std::vector<train::piece_figures> held(pieces.begin() + 1 + cut.first, pieces.begin() + 1 + cut.last);
    if (cut.embeds) held.insert(held.begin(), pieces.front());
    if (cut.predicts) held.push_back(pieces.back());
    auto const sum = [&](std::int64_t train::piece_figures::*figure) {
      std::int64_t all = 0;
      for (train::piece_figures const& one : held) all += one.*figure;
      return all;
    };
    std::int64_t parameters = sum(&train::piece_figures::parameters), trained = sum(&train::piece_figures::trained);
    std::int64_t kept = sum(&train::piece_figures::kept);
    std::int64_t activation = sum(&train::piece_figures::activation), input = held.empty() ? 0 : held.front().input;
    bool const first_trained = setup.trains_all() ? cut.embeds : cut.first == 0 && cut.last > 0;
    if (trained == 0 && cut.embeds) {
      // The first stage without a trained parameter stores nothing, and has nothing to recompute.
      if (o.recompute) input = 0;
    } else if (o.recompute) {
      // While a stage is computed again, its input exists beside the stored tensors. The input is one of these if a norm stores
      // its input in the input's own dtype, or a trained embedding its tokens.
      bool const stored = cut.embeds ? setup.trains_all() : !first_trained && setup.item == 4;
      if (!stored) activation += input;
    }
    activation = std::max(activation, input);  // the input exists while F runs
    // The first stage that is trained has no input gradient: its I computes nothing, and its W needs all activations and its
    // outputs' gradients.
    if (first_trained) kept = activation + (cut.predicts ? 0 : pieces[1].input);
    // A stage with embedding and head has their table once.
    if (c.tied && cut.embeds && cut.predicts) {
      std::int64_t const table = share(c.vocabulary, o.shards) * c.width;
      parameters -= table;
      if (setup.trains_all()) trained -= table;
    }
    std::int64_t state = trained * setup.state_item();
    if (o.post_validation) state += state + (setup.masters ? 0 : trained * setup.item);
    out.parameters.push_back(parameters * setup.item);
    out.state.push_back(share(state, owners));
    // A sharded optimizer frees its rounded gradients when it has stepped.
    std::int64_t const gradient_item = setup.gradient_item() + (o.shard ? 0 : setup.rounded_item());
    out.stages.fixed.push_back(out.parameters.back() + trained * gradient_item + out.state.back());
    out.stages.gradient.push_back(sum(&train::piece_figures::gradient));
    out.stages.activation.push_back(activation);
    out.stages.kept.push_back(kept);
    out.stages.input.push_back(input);
  }
  if (o.shard_gradients) freed.whole = out.stages.gradient;

  buffer<bool> recomputed(plan.stages);
  for (int s = 0; s < plan.stages; ++s) recomputed.data[s] = o.recompute;
  footprint_view const takes = out.stages.view(recomputed.data);
  std::vector<std::int64_t> const none(static_cast<std::size_t>(plan.stages));
  footprint_view in_flight = takes;
  in_flight.fixed = none.data();
  double const attention = o.attention >= 0 ? o.attention : c.attention_share(o.context);
  length_factors const factors = factors_of_slices(slice_ends(plan.size.slices, attention), attention);
  length_view const slices = plan.size.slices > 1 ? factors.view() : length_view{};
  for (int r = 0; r < plan.size.ranks; ++r) {
    rank_bytes& mine = out.ranks.emplace_back();
    for (int s = 0; s < plan.stages; ++s) {
      if (plan.rank_of[s] != r) continue;
      auto const i = static_cast<std::size_t>(s);
      mine.stages.push_back(s);
      mine.parameters += out.parameters[i];
      mine.state += out.state[i];
    }
    mine.activations = peak_memory(plan, in_flight, r, slices);
    mine.gradients = freed.peak(plan, takes, r, slices) - mine.parameters - mine.state - mine.activations;
    mine.in_flight = peak_in_flight(plan, r);
  }
  return out;
}

std::string table_of(options const& o, decoder_config const& c, plan_view const& plan, job_bytes const& bytes) {
  constexpr std::array<int, 7> widths{4, 12, 12, 12, 14, 12, 12};
  std::string out;
  auto const line = [&](std::array<std::string, 7> const& cells, std::string const& words) {
    for (std::size_t k = 0; k < cells.size(); ++k) out += right(cells[k], widths[k]);
    out += "   " + words + "\n";
  };
  line({"rank", "parameters", "gradients", "state", "activations", "in flight", "sum"}, "stages");
  std::int64_t all = 0;
  for (std::size_t r = 0; r < bytes.ranks.size(); ++r) {
    rank_bytes const& mine = bytes.ranks[r];
    all += mine.sum();
    std::string held;
    for (int const s : mine.stages) held += (held.empty() ? "" : " | ") + words_for(cut_of(c, plan.stages, s));
    line({std::to_string(r), show::bytes(mine.parameters), show::bytes(mine.gradients), show::bytes(mine.state),
          show::bytes(mine.activations), std::to_string(mine.in_flight), show::bytes(mine.sum())},
         held);
  }
  std::size_t const most = fullest(bytes.ranks);
  out += "\nRank " + std::to_string(most) + " needs most, " + show::bytes(bytes.ranks[most].sum()) + "; one pipeline " +
         show::bytes(all) + " in all.";
  if (o.replicas * o.shards > 1)
    out += " Each row is one rank's of " + train::some(o.replicas, "replica") + " and " + train::some(o.shards, "shard") + ".";
  return out +
         "\nActivations: those of all microbatches in flight, at the fullest moment of a step. Not counted: buffers of "
         "messages,\n"
         "LibTorch itself, and memory within an operator; the loss of a microbatch takes " +
         show::bytes(4 * std::int64_t{o.context} * o.micro_batch_size * share(c.vocabulary, o.shards)) +
         " for each copy of the logits in float32.\n";
}

std::string json_of(options const& o, decoder_config const& c, plan_view const& plan, job_bytes const& bytes) {
  using json = nlohmann::ordered_json;
  json ranks = json::array(), layers = json::array(), rank_of = json::array();
  for (rank_bytes const& mine : bytes.ranks) {
    ranks.push_back({{"stages", mine.stages},
                     {"parameters", mine.parameters},
                     {"gradients", mine.gradients},
                     {"state", mine.state},
                     {"activations", mine.activations},
                     {"in_flight", mine.in_flight},
                     {"sum", mine.sum()}});
  }
  for (int s = 0; s < plan.stages; ++s) {
    train::layer_cut const cut = cut_of(c, plan.stages, s);
    layers.push_back(cut.last - cut.first);
    rank_of.push_back(static_cast<int>(plan.rank_of[s]));
  }
  json const out{{"schedule", plan.name},
                 {"context", o.context},
                 {"replicas", o.replicas},
                 {"shards", o.shards},
                 {"ranks", ranks},
                 {"rank_of", rank_of},
                 {"layers", layers},
                 {"static_bytes", bytes.stages.fixed},
                 {"activation_bytes", bytes.stages.activation},
                 {"kept_bytes", bytes.stages.kept},
                 {"input_bytes", bytes.stages.input},
                 {"state_bytes", bytes.state},
                 {"gradient_bytes", bytes.stages.gradient}};
  return out.dump(2) + "\n";
}

void check_memory(options const& o, decoder_config const& c, job_bytes const& bytes) {
  if (o.memory == 0) return;
  std::size_t const most = fullest(bytes.ranks);
  rank_bytes const& mine = bytes.ranks[most];
  if (mine.sum() <= o.memory) return;
  std::string sufficient;
  for (remedy const& one : remedies_for(o)) {
    try {
      proved_plan const other = train::proved_by_options(one.changed);
      job_bytes const then = bytes_of(one.changed, c, other.view());
      std::int64_t const needed = then.ranks[fullest(then.ranks)].sum();
      if (needed > o.memory) continue;
      sufficient += (sufficient.empty() ? "" : ", or ") + one.typed + " (" + show::bytes(needed) + ")";
    } catch (usage_error const&) {  // the schedule does not exist at this size, or has more stages than the model pieces
    }
  }
  throw usage_error(
      "rank " + std::to_string(most) + " needs " + show::bytes(mine.sum()) + " (" + show::bytes(mine.parameters) +
      " parameters, " + show::bytes(mine.gradients) + " gradients, " + show::bytes(mine.state) + " state, " +
      show::bytes(mine.activations) + " activations), and --memory is " + show::bytes(o.memory) + ". Remedy: " +
      (sufficient.empty() ? "more --ranks or --shards, with --recompute; no single flag that was tried suffices" : sufficient));
}

}  // namespace chevron::finetune
