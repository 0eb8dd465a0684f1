#include "rank_bytes.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <functional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <chevron/base/format.hpp>
#include <chevron/plan/slices.hpp>
#include <chevron/prove/footprint.hpp>
#include <chevron/prove/memory.hpp>
#include <chevron/run/comm/group_collective.hpp>
#include <chevron/run/core/error.hpp>
#include <chevron/run/train/gradient_norm.hpp>

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
  out.joins_slices = train::is_on_gpus(o.backend);
  out.shards = o.shards;
  out.cuts_sequence = o.sequence_parallel;
  return out;
}

/// The part of a number of heads, rows or widths that the first of some shards has.
std::int64_t share(std::int64_t of, int shards) { return (of + shards - 1) / shards; }

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

/// The bytes of a stage for one slice, or for whole microbatches.
struct stage_figures {
  std::int64_t parameters = 0, trained = 0, gradient = 0;
  std::int64_t activation = 0, kept = 0, input = 0;
  std::int64_t carried_gradient = 0;
};

/// \param pieces of the model, of the slice \param setup of the slice
stage_figures figures_of(options const& o, decoder_config const& c, train::training_setup const& setup,
                         std::vector<train::piece_figures> const& pieces, train::layer_cut const& cut) {
  std::vector<train::piece_figures> held(pieces.begin() + 1 + cut.first, pieces.begin() + 1 + cut.last);
  if (cut.embeds) held.insert(held.begin(), pieces.front());
  if (cut.predicts) held.push_back(pieces.back());
  auto const sum = [&](std::int64_t train::piece_figures::*figure) {
    std::int64_t all = 0;
    for (train::piece_figures const& one : held) all += one.*figure;
    return all;
  };
  stage_figures out{.parameters = sum(&train::piece_figures::parameters),
                    .trained = sum(&train::piece_figures::trained),
                    .gradient = sum(&train::piece_figures::gradient),
                    .activation = sum(&train::piece_figures::activation),
                    .kept = sum(&train::piece_figures::kept),
                    .input = held.empty() ? 0 : held.front().input,
                    .carried_gradient = sum(&train::piece_figures::carried_gradient)};
  bool const first_trained = setup.trains_all() ? cut.embeds : cut.first == 0 && cut.last > 0;
  if (out.trained == 0 && cut.embeds) {
    // The first stage without a trained parameter stores nothing, and has nothing to recompute.
    if (o.recompute) out.input = 0;
  } else if (o.recompute) {
    // While a stage is computed again, its input exists beside the stored tensors. The input is one of these if a norm stores
    // its input in the input's own dtype, or a trained embedding its tokens. Later slices have freed the keys and values that
    // they took.
    bool const stored = cut.embeds ? setup.trains_all() : !first_trained && setup.item == 4;
    if (!stored) out.activation += out.input;
    out.activation -= sum(&train::piece_figures::carried_alone);
  }
  out.input += sum(&train::piece_figures::carried);
  out.activation = std::max(out.activation, out.input);  // the input exists while F runs
  // The first stage that is trained has no input gradient: its I computes nothing, and its W needs all activations and its
  // outputs' gradients.
  if (first_trained && (setup.slice_begin == 0 || cut.last == 0)) {
    out.kept = out.activation + (cut.predicts ? 0 : pieces[1].input);
    // Later slices have freed the keys and values that they took, and have returned the gradients.
    if (!o.recompute) out.kept -= sum(&train::piece_figures::carried_alone);
    out.kept += sum(&train::piece_figures::carried_returned);
  } else if (first_trained) {
    out.kept += pieces[1].kept_as_first - pieces[1].kept;
  }
  // A stage with embedding and head has their table once.
  if (c.tied && cut.embeds && cut.predicts) {
    std::int64_t const table = share(c.vocabulary, o.shards) * c.width;
    out.parameters -= table;
    if (setup.trains_all()) out.trained -= table;
  }
  return out;
}

/// Sizes of a stage's trained parameters on a shard, in the order in which decoder.hpp registers them.
std::vector<std::int64_t> trained_sizes(options const& o, decoder_config const& c, train::layer_cut const& cut) {
  std::vector<std::int64_t> out;
  bool const all = o.adapters.rank == 0;
  std::int64_t const h = c.width, q = share(c.heads, o.shards) * c.head_width, k = share(c.key_heads, o.shards) * c.head_width,
                     f = share(c.inner, o.shards), table = share(c.vocabulary, o.shards) * h;
  auto const add = [&](std::int64_t size, bool exists = true) {
    if (all && exists) out.push_back(size);
  };
  auto const add_map = [&](std::string_view name, std::int64_t in, std::int64_t outputs, bool bias) {
    add(in * outputs);
    add(outputs, bias);
    if (o.adapters.on(name)) out.insert(out.end(), {o.adapters.rank * in, o.adapters.rank * outputs});
  };
  add(table, cut.embeds);
  for (int layer = cut.first; layer < cut.last; ++layer) {
    add_map("q_proj", h, q, c.query_bias);
    add_map("k_proj", h, k, c.query_bias);
    add_map("v_proj", h, k, c.query_bias);
    add_map("o_proj", q, h, c.output_bias);
    for (int i = 0; i < 2; ++i) add(c.head_width, c.head_norms);
    add_map("gate_proj", h, f, c.inner_bias);
    add_map("up_proj", h, f, c.inner_bias);
    add_map("down_proj", f, h, c.inner_bias);
    for (int i = 0; i < 2; ++i) add(h);
  }
  add(h, cut.predicts);
  add(table, cut.predicts && !(c.tied && cut.embeds));
  return out;
}

/// Trained numbers of a stage that one replica steps: all, or of a sharded optimizer the largest share.
std::int64_t stepped(options const& o, decoder_config const& c, train::layer_cut const& cut) {
  std::vector<std::int64_t> row = trained_sizes(o, c, cut);
  std::vector<std::vector<std::int64_t>> rows;
  // A table that two stages have is cut apart from the others.
  if (c.tied && o.adapters.rank == 0 && cut.embeds != cut.predicts) {
    rows.push_back({cut.embeds ? row.front() : row.back()});
    row.erase(cut.embeds ? row.begin() : row.end() - 1);
  }
  rows.push_back(row);
  std::vector<std::int64_t> by_replica(static_cast<std::size_t>(o.shard ? o.replicas : 1));
  for (std::vector<std::int64_t> const& sizes : rows) {
    std::vector<std::int64_t> blocks;
    for (std::int64_t const size : sizes) blocks.push_back(norm_block(size));
    auto const at = chevron::detail::cut_into_shares(sizes, blocks, static_cast<int>(by_replica.size()));
    for (std::size_t r = 0; r < by_replica.size(); ++r) by_replica[r] += at[r + 1] - at[r];
  }
  return *std::max_element(by_replica.begin(), by_replica.end());
}

/// The ends of the slices of a sequence, in tokens.
std::vector<std::int64_t> ends_of_slices(options const& o, decoder_config const& c, int slices) {
  if (slices > o.context) {
    throw usage_error("--context " + std::to_string(o.context) + " has too few tokens for " + std::to_string(slices) +
                      " slices. Remedy: a longer --context, or fewer --slices");
  }
  std::vector<std::int64_t> out =
      cuts_of_equal_time(o.context, slices, o.attention >= 0 ? o.attention : c.attention_share(o.context));
  out.push_back(o.context);
  return out;
}

}  // namespace

job_bytes bytes_of(options const& o, decoder_config const& c, plan_view const& plan) {
  train::decoder_size const size = size_of(c);
  int const owners = o.shard ? o.replicas : 1;
  job_bytes out;
  out.slice_ends = ends_of_slices(o, c, plan.size.slices);
  out.carried_gradients.assign(static_cast<std::size_t>(plan.stages), 0);
  train::training_setup setup = setup_of(o);
  for (std::int64_t const end : out.slice_ends) {
    setup.slice_end = plan.size.slices > 1 ? end : 0;
    std::vector<train::piece_figures> const pieces = train::decoder_pieces(size, setup);
    stage_bytes& stages = out.slices.emplace_back();
    bool const first = out.slices.size() == 1;
    for (int s = 0; s < plan.stages; ++s) {
      train::layer_cut const cut = cut_of(c, plan.stages, s);
      stage_figures const one = figures_of(o, c, setup, pieces, cut);
      stages.activation.push_back(one.activation);
      stages.kept.push_back(one.kept);
      stages.input.push_back(one.input);
      out.carried_gradients[static_cast<std::size_t>(s)] += one.carried_gradient;
      std::int64_t state_item = setup.state_item();
      if (o.post_validation) state_item += state_item + (setup.masters ? 0 : setup.item);
      std::int64_t const state = stepped(o, c, cut) * state_item;
      // A sharded optimizer frees its rounded gradients when it has stepped.
      std::int64_t const gradient_item = setup.gradient_item() + (o.shard ? 0 : setup.rounded_item());
      stages.gradient.push_back(one.gradient);
      stages.fixed.push_back(one.parameters * setup.item + one.trained * gradient_item + state);
      if (!first) continue;
      out.parameters.push_back(one.parameters * setup.item);
      out.state.push_back(state);
    }
    setup.slice_begin = end;
  }
  train::freed_gradients freed{.whole = {}, .shard = owners};
  if (o.shard_gradients) freed.whole = out.slices.front().gradient;

  buffer<bool> recomputed(plan.stages);
  for (int s = 0; s < plan.stages; ++s) recomputed.data[s] = o.recompute;
  std::vector<std::int64_t> const none(static_cast<std::size_t>(plan.stages));
  std::vector<footprint_view> takes, in_flight;
  for (stage_bytes const& one : out.slices) {
    takes.push_back(one.view(recomputed.data));
    in_flight.push_back(takes.back());
    in_flight.back().fixed = none.data();
  }
  for (int r = 0; r < plan.size.ranks; ++r) {
    rank_bytes& mine = out.ranks.emplace_back();
    for (int s = 0; s < plan.stages; ++s) {
      if (plan.rank_of[s] != r) continue;
      auto const i = static_cast<std::size_t>(s);
      mine.stages.push_back(s);
      mine.parameters += out.parameters[i];
      mine.state += out.state[i];
      mine.carried_gradients += out.carried_gradients[i];
    }
    mine.activations = train::freed_gradients{}.peak(plan, in_flight, r);
    mine.gradients = freed.peak(plan, takes, r) - mine.parameters - mine.state - mine.activations;
    mine.in_flight = peak_in_flight(plan, r);
  }
  return out;
}

std::string table_of(options const& o, decoder_config const& c, plan_view const& plan, job_bytes const& bytes) {
  constexpr std::array<int, 8> widths{4, 12, 12, 12, 14, 12, 12, 12};
  bool const sliced = bytes.slices.size() > 1;
  std::string out;
  auto const line = [&](std::array<std::string, 8> const& cells, std::string const& words) {
    for (std::size_t k = 0; k < cells.size(); ++k) {
      if (k != 5 || sliced) out += right(cells[k], widths[k]);
    }
    out += "   " + words + "\n";
  };
  line({"rank", "parameters", "gradients", "state", "activations", "carried", "in flight", "sum"}, "stages");
  std::int64_t all = 0;
  for (std::size_t r = 0; r < bytes.ranks.size(); ++r) {
    rank_bytes const& mine = bytes.ranks[r];
    all += mine.sum();
    std::string held;
    for (int const s : mine.stages) held += (held.empty() ? "" : " | ") + words_for(cut_of(c, plan.stages, s));
    line({std::to_string(r), show::bytes(mine.parameters), show::bytes(mine.gradients), show::bytes(mine.state),
          show::bytes(mine.activations), show::bytes(mine.carried_gradients), std::to_string(mine.in_flight),
          show::bytes(mine.sum())},
         held);
  }
  std::size_t const most = fullest(bytes.ranks);
  out += "\nRank " + std::to_string(most) + " needs most, " + show::bytes(bytes.ranks[most].sum()) + "; one pipeline " +
         show::bytes(all) + " in all.";
  if (o.replicas * o.shards > 1)
    out += " Each row is one rank's of " + train::some(o.replicas, "replica") + " and " + train::some(o.shards, "shard") + ".";
  return out + (sliced ? "\nCarried: gradients of keys and values that later slices take, of one microbatch." : "") +
         "\nActivations: those of all microbatches in flight, at the fullest moment of a step. Not counted: buffers of "
         "messages,\n"
         "LibTorch itself, and memory within an operator; the loss of a " +
         (sliced ? "slice" : "microbatch") + " takes " +
         show::bytes(4 * bytes.longest_slice() * o.micro_batch_size * share(c.vocabulary, o.shards)) +
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
                     {"carried_gradients", mine.carried_gradients},
                     {"in_flight", mine.in_flight},
                     {"sum", mine.sum()}});
  }
  for (int s = 0; s < plan.stages; ++s) {
    train::layer_cut const cut = cut_of(c, plan.stages, s);
    layers.push_back(cut.last - cut.first);
    rank_of.push_back(static_cast<int>(plan.rank_of[s]));
  }
  auto const of_microbatch = [&](std::vector<std::int64_t> stage_bytes::*figure) {
    std::vector<std::int64_t> sum(static_cast<std::size_t>(plan.stages));
    for (stage_bytes const& slice : bytes.slices)
      std::transform(sum.begin(), sum.end(), (slice.*figure).begin(), sum.begin(), std::plus<>());
    return sum;
  };
  json out{{"schedule", plan.name},
           {"context", o.context},
           {"replicas", o.replicas},
           {"shards", o.shards},
           {"ranks", ranks},
           {"rank_of", rank_of},
           {"layers", layers},
           {"static_bytes", bytes.slices.front().fixed},
           {"activation_bytes", of_microbatch(&stage_bytes::activation)},
           {"kept_bytes", of_microbatch(&stage_bytes::kept)},
           {"input_bytes", of_microbatch(&stage_bytes::input)},
           {"state_bytes", bytes.state},
           {"gradient_bytes", bytes.slices.front().gradient}};
  if (bytes.slices.size() > 1) {
    out["slice_ends"] = bytes.slice_ends;
    for (stage_bytes const& one : bytes.slices)
      out["slices"].push_back({{"activation_bytes", one.activation}, {"kept_bytes", one.kept}, {"input_bytes", one.input}});
  }
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
      show::bytes(mine.activations) + " activations" +
      (mine.carried_gradients > 0 ? ", " + show::bytes(mine.carried_gradients) + " gradients of carried keys and values" : "") +
      "), and --memory is " + show::bytes(o.memory) + ". Remedy: " +
      (sufficient.empty() ? "more --ranks or --shards, with --recompute; no single flag that was tried suffices" : sufficient));
}

}  // namespace chevron::finetune
