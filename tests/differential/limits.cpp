#include "limits.hpp"

#include <algorithm>
#include <array>
#include <functional>

namespace differential {

namespace {

bool any_block(program const& p, std::function<bool(stage_text const&, block const&)> const& holds) {
  for (stage_text const& s : p.stages) {
    for (block const& b : s.blocks) {
      if (holds(s, b)) return true;
    }
  }
  return false;
}

bool in_place(block const& b) { return b.name.ends_with("_"); }

/// Is a tensor changed in place that shares its memory with another one, after both have crossed a cut? In the next stage they
/// may share it or not.
bool changes_what_two_share(program const& p) {
  bool shared = false, crossed = false;
  for (stage_text const& s : p.stages) {
    crossed = crossed || shared;
    for (block const& b : s.blocks) {
      if (in_place(b) && shared && crossed) return true;
      // A conversion to the dtype that a tensor has returns that tensor.
      bool const converts_nothing = b.name == "dbl" && p.get("dtype") == "f64";
      bool const shares = b.name == "push" || b.name == "pushv" || b.name == "pushn" || b.name == "split" || converts_nothing;
      bool keeps = in_place(b);
      for (char const* name : {"tr",    "last",  "flat", "half", "cl",  "cont", "rep",   "viewt", "drop", "del", "int",  "bool",
                               "undef", "empty", "expd", "cx",   "dbl", "det",  "pushc", "max",   "pop",  "aux", "tally"}) {
        keeps = keeps || b.name == name;
      }
      if (shares) {
        shared = true;
      } else if (!keeps) {
        shared = crossed = false;
      }
      if (s.form.name == "parts") crossed = crossed || shared;
    }
  }
  return false;
}

bool makes_a_view(block const& b) {
  return std::ranges::count(std::array{"tr", "last", "flat", "half", "split", "rep", "gaps", "cols", "viewt", "img", "mha", "enc",
                                       "lstm", "gru", "in"},
                            b.name) > 0;
}

/// Whether a stage changes one of its own views in place. Autograd makes a new node for a changed view at the view's next use,
/// which may be behind a cut.
bool changes_its_own_view(program const& p) {
  for (stage_text const& s : p.stages) {
    bool view = false;
    for (block const& b : s.blocks) {
      if (in_place(b) && view) return true;
      view = view || makes_a_view(b);
    }
  }
  return false;
}

/// Whether a view that has crossed a cut is changed in place. Within one graph autograd records the change at the view's base,
/// and passes the gradient on with the base's strides.
bool changes_a_view_behind_its_cut(program const& p) {
  bool view = false, crossed = false;
  for (stage_text const& s : p.stages) {
    crossed = view;
    for (block const& b : s.blocks) {
      if (s.form.name == "parts") crossed = crossed || view;
      if (in_place(b) && crossed) return true;
      bool const keeps = in_place(b) || b.name == "drop" || b.name == "del" || b.name == "int" || b.name == "bool" ||
                         b.name == "undef" || b.name == "det" || b.name == "cont" || b.name == "cl" || b.name == "aux" ||
                         b.name == "tally";
      if (!keeps) crossed = false;
      view = makes_a_view(b) || (keeps && view);
    }
  }
  return false;
}

/// Does the first tensor cross a cut in memory that it does not begin? In threads it stays there; elsewhere it arrives in memory
/// of its own, and matrix products round by where their operands begin.
bool crosses_with_an_offset(program const& p) {
  bool offset = true;  // a microbatch is a view of its batch
  for (std::size_t s = 0; s + 1 < p.stages.size(); ++s) {
    for (block const& b : p.stages[s].blocks) {
      bool keeps = in_place(b);
      for (char const* name :
           {"tr", "half", "flat", "cl",   "cont",  "rep",   "drop",  "del", "int",   "bool", "undef", "empty", "expd",
            "cx", "dbl",  "det",  "push", "pushc", "pushv", "pushn", "max", "split", "pop",  "aux",   "tally"}) {
        keeps = keeps || b.name == name;
      }
      if (b.name == "last" || b.name == "pushn" || b.name == "split")
        offset = true;
      else if (!keeps)
        offset = false;
    }
    if (offset) return true;
  }
  return false;
}

/// Is an expanded tensor made before the last stage?
bool may_send_an_expanded_tensor(program const& p) {
  for (std::size_t s = 0; s + 1 < p.stages.size(); ++s) {
    for (block const& b : p.stages[s].blocks) {
      if (b.name == "rep" || b.name == "expd") return true;
    }
  }
  return false;
}

/// Whether a block's backward does more than compute gradients: draws, or has an effect.
bool draws_in_backward(block const& b) { return b.name == "noise" || b.name == "hook"; }

bool recomputes(stage_text const& s, block const& b) { return s.form.has("rc") || (s.form.name == "parts" && b.has("rc")); }

}  // namespace

bool recomputes(stage_text const& s) {
  for (block const& b : s.blocks) {
    if (recomputes(s, b)) return true;
  }
  return s.form.has("rc");
}

namespace {

/// Does a stage below all trained ones make a graph of its own? The loop's backward goes through it.
bool makes_a_graph_below_all_trained(program const& p) {
  for (auto const& s : p.stages) {
    bool const trains =
        std::any_of(s.blocks.begin(), s.blocks.end(), [](block const& b) { return learns(b) && !b.has("frozen"); });
    if (trains) return false;
    if (std::any_of(s.blocks.begin(), s.blocks.end(), [](block const& b) { return b.name == "pen"; })) return true;
  }
  return false;
}

}  // namespace

std::string not_promised(program const& p) {
  // On the CPU LibTorch has other kernels for an LSTM without a graph (the first forward of a recomputed part) than with one.
  if (any_block(p, [](auto const& s, block const& b) { return b.name == "lstm" && recomputes(s, b); }))
    return "an LSTM that is recomputed";
  // A slice has other statistics than its sequences; of other inputs dimension 1 is no time, and shares of other lengths are no
  // sums of halves.
  if (p.slices() > 1) {
    auto const words = split(p.get("in"), ':');
    if (any_block(p, [](auto const&, block const& b) { return b.name == "bn"; })) return "BatchNorm over slices";
    if ((words[0] != "seq" && words[0] != "tok") || words.size() < 2 || (words[1] != "4" && words[1] != "8"))
      return "slices of inputs without 4 or 8 tokens";
    if (p.has("side") || p.has("odd") || p.has("long")) return "slices with side inputs, odd targets, or long parts";
  }
  // Files contain the registered parameters and buffers, in dtypes of safetensors.
  if (p.saved_after() < p.steps()) {
    if (any_block(p, [](auto const&, block const& b) { return b.name == "cplx"; })) return "complex parameters in files";
    if (any_block(p, [](auto const& s, block const& b) {
          return s.form.name == "call" && (b.name == "eff" || b.name == "hook" || b.name == "bn" || b.name == "in");
        }))
      return "buffers that a callable without its module hides, in files";
  }
  // A node of a graph draws by its number, and shards' collectives are nodes.
  if (p.has("tp") && any_block(p, [](auto const&, block const& b) { return draws_in_backward(b); }))
    return "draws in the backward beside shards' collectives";
  // Of two samples it divides their difference by itself, where shards round in another order.
  if (p.has("tp") && p.number("n", 0) <= 2 * p.micro_batches() &&
      any_block(p, [](auto const&, block const& b) { return b.name == "bn"; }))
    return "a BatchNorm of two samples beside shards";
  // A step of plain SGD has no state, and is found by single elements of single and double precision.
  if (p.get("act") == "again" && p.get("opt") == "sgd" && p.get("dtype") == "bf16")
    return "a step of plain SGD by the caller, in half precision";
  // Draws go by slice, and these weights by slices' targets; a state of slices is none of tokens; a mixture of several experts
  // routes a row by its number in a call.
  if (p.by_sequences() && any_block(p, [&p](auto const&, block const& b) {
        return b.name == "drop" || (b.name == "enc" && b.number(1, 0) > 0) || draws_in_backward(b) || b.has("own") ||
               b.name == "buf" || (b.name == "moe" && p.number("exp", 1) > 1) || (b.name == "in" && b.has("track")) ||
               (carries_of(b) > 0 && b.has("det"));
      }))
    return "draws, losses with weights of their own, running means, statistics of training mode alone, routes by row, and "
           "detached carries, of slices beside whole sequences";
  // A recomputed forward must compute the same results as the first forward.
  if (any_block(p, [](auto const& s, block const& b) { return b.name == "buf" && b.has("felt") && recomputes(s, b); }))
    return "a forward that depends on what earlier forwards left in its buffers, recomputed";
  // A stage's unused outputs get gradients of contiguous zeros: added to other gradients of the same tensor, they decide the
  // strides of the sum.
  bool const lies_otherwise =
      p.has("cl") || any_block(p, [](auto const&, block const& b) { return b.name == "cl" || b.has("cl"); });
  if (lies_otherwise && any_block(p, [](auto const&, block const& b) { return b.name == "del"; }))
    return "an output that no later stage uses, beside tensors in channels_last";
  // The stages before the last get gradients of zeros for a microbatch that counts nothing.
  if (p.has("weigh") && any_block(p, [](auto const&, block const& b) { return b.name == "eff" || draws_in_backward(b); }))
    return "what a backward does besides computing gradients, in a microbatch that counts nothing";
  // Then zeros are added to the gradients of a stage's own loss, and may decide how the sum lies.
  if (p.has("weigh") && any_block(p, [](auto const&, block const& b) { return b.name == "aux" && b.has("own"); }))
    return "a microbatch that counts nothing in the model's loss, and something in a stage's";
  // Gradients of carries meet the same zeros.
  if (p.has("weigh") && p.slices() > 1 && any_block(p, [](auto const&, block const& b) { return carries_of(b) > 0; }) &&
      any_block(p, [](auto const&, block const& b) {
        return std::ranges::count(std::array{"tr", "flat", "cols", "gaps", "viewt", "mha", "enc"}, b.name) > 0;
      }))
    return "a slice that counts nothing and whose carries do, beside tensors that lie transposed";
  // The effects of its backward, and the numbers by which later nodes draw, differ.
  if (makes_a_graph_below_all_trained(p) &&
      any_block(p, [](auto const&, block const& b) { return b.name == "eff" || draws_in_backward(b); }))
    return "a stage below all trained ones that asks for gradients in its own forward";
  if (changes_what_two_share(p)) return "a change in place of memory that two tensors shared before a cut";
  // A callable without a module is not told of evaluation, and its buffers are unknown: only buffers that LibTorch's
  // operators change are refused.
  if (any_block(p, [](auto const& s, block const& b) {
        return s.form.name == "call" && (b.name == "buf" || b.name == "tally" || b.has("count"));
      }))
    return "a callable without its module that keeps buffers of its own";
  // Recomputed parts are cuts, too, and the loop that cuts its graph does so between stages only.
  if (rounds_as_cut(p) && any_block(p, [](auto const& s, block const& b) { return s.form.name == "parts" && recomputes(s, b); }))
    return "a value that crosses the cut between two parts more than once";
  bool const in_threads = p.get("line", "threads") == "threads" || p.get("line") == "rendezvous" || p.get("line") == "delays";
  if (!in_threads && crosses_with_an_offset(p)) return "a view that does not begin its memory crosses to another process";
  // Over streams it arrives with memory for each element; kernels choose their ways by strides.
  if (p.get("line") == "streams" && may_send_an_expanded_tensor(p)) return "an expanded tensor over streams";
  // Zeros, where a microbatch counts nothing, lie otherwise than gradients of other steps; over streams strides are the first
  // step's.
  if (p.get("line") == "streams" && p.has("weigh")) return "strides that change from step to step, over streams";
  // Gloo's ring adds three summands in an order of its own.
  if (p.get("line") == "far" && p.replicas() > 2) return "three replicas that are summed over by Gloo's ring";
  return "";
}

std::string must_refuse(program const& p) {
  // In the order of a job: tied copies in groups of different options, before the first step; targets that cannot be cut, as the
  // step begins; sparse gradients, in the first F; a call that one rank refuses and others take, at the step's end.
  if (p.get("groups") == "part" && tied_stages(p).size() > 1) return "would not stay equal";
  if (p.has("label")) return "has a dimension of tokens";
  if (any_block(p, [](auto const&, block const& b) { return b.has("sparse") && !b.has("frozen"); })) return "sparse";
  if (p.get("slip") == "one" && p.world() > 1) return "has called step() and accumulate()";
  // A change of parameters that may yet be overwritten, or undone. A step of another trainer ends the gathers.
  if (p.get("act") == "rush" && p.gathers_late() && !p.has("turn") && p.steps() > 1) return "synchronize()";
  return "";
}

/// The words that name a planted fault and its remedy.
std::vector<std::string> words_for(std::string const& fault) {
  if (fault == "nocopy") return {"shard_group::copy"};
  if (fault == "nocut") return {"stage.cut"};
  if (fault == "nowhole") return {"declared cut"};
  if (fault == "wrongdim") return {"dimension", "blocks of one size"};
  if (fault == "wrongtwice") return {"declared"};
  return {};
}

bool may_refuse(program const& p, std::string const& message) {
  // The inputs of a recomputed part, and with post-validation the batch, must not be changed in place.
  bool const recomputed = any_block(p, [](auto const& s, block const& b) { return recomputes(s, b); });
  bool const changes = any_block(p, [](auto const&, block const& b) { return in_place(b); });
  if (message.find("in place") != std::string::npos && changes && (recomputed || p.has("pv"))) return true;
  auto const by_callable = [&](std::string const& words, std::function<bool(block const&)> const& holds) {
    return message.find(words) != std::string::npos &&
           any_block(p, [&](auto const& s, block const& b) { return s.form.name == "call" && holds(b); });
  };
  if (by_callable("running statistics", [](block const& b) { return b.name == "bn" || (b.name == "in" && b.has("track")); }))
    return true;
  if (by_callable("drops units in evaluation", [](block const& b) { return b.name == "drop" || b.name == "enc"; })) return true;
  // A part of an expanded tensor, changed behind the cut: its gradient would get the tensor's strides.
  if (message.find("refers to a single memory location") != std::string::npos && changes && may_send_an_expanded_tensor(p))
    return true;
  // With post-validation a change is refused where the last step may still be undone.
  if (p.get("act") == "rush" && p.has("pv") && message.find("synchronize()") != std::string::npos) return true;
  // A step of the optimizer by the caller; one that changes nothing need not be found.
  if (p.get("act") == "again" && message.find("the optimizer was stepped by a call of optimizer()->step()") != std::string::npos)
    return true;
  // Slices through blocks that need whole sequences.
  if (p.by_sequences() && message.find("computes another result for a sequence in slices") != std::string::npos) return true;
  if (p.by_sequences() && message.find("outputs without a token") != std::string::npos) return true;
  // Faults of shards: each is refused, or has no effect on this program.
  for (std::string const& fault : planted_faults(p)) {
    for (std::string const& words : words_for(fault)) {
      if (message.find(words) != std::string::npos) return true;
    }
  }
  // An unused output has a gradient of zeros: autograd then refuses changes in place that it accepts within one graph. The
  // same holds after a stage that only its own loss trains.
  return message.find("inplace") != std::string::npos && changes && (rounds_as_cut(p) || gives_losses(p));
}

bool rounds_as_cut(program const& p) {
  if (changes_a_view_behind_its_cut(p)) return true;
  // A node draws by its number in its part. Behind a cut a tensor without a gradient (detached, or of a stage that only its own
  // loss trains) is followed, too: operations on it have nodes, and their backwards run.
  if (any_block(p, [](auto const&, block const& b) { return b.name == "det" || gives_loss(b); }) &&
      any_block(p, [](auto const&, block const& b) { return b.name == "eff" || draws_in_backward(b); }))
    return true;
  if (changes_its_own_view(p) && any_block(p, [](auto const&, block const& b) { return draws_in_backward(b); })) return true;
  return any_block(p, [](auto const&, block const& b) {
    for (char const* name : {"push", "pushc", "pushv", "pushn", "max", "empty", "expd", "cx", "dbl", "split"}) {
      if (b.name == name) return true;
    }
    return false;
  });
}

}  // namespace differential
