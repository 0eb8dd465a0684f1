#include "memory.hpp"

#include <algorithm>
#include <utility>

#include <chevron/base/format.hpp>

#include "value_list.hpp"

namespace plan_program {
namespace {

using chevron::show::bytes;

constexpr std::int64_t most_bytes = std::int64_t{1} << 50;

/// One cost, or each of a list, as a share of it.
std::string divided(std::string const& typed, std::string const& flag, int by) {
  std::string out;
  for (std::size_t from = 0; from <= typed.size();) {
    std::size_t const comma = std::min(typed.find(',', from), typed.size());
    double const cost = cost_number(typed.substr(from, comma - from), flag);
    out += (out.empty() ? "" : ",") + chevron::show::exact(cost / by);
    from = comma + 1;
  }
  return out;
}

}  // namespace

memory_model::memory_model(request const& asked, std::optional<chevron::profile> const& measured) {
  memory_request const& typed = asked.bytes;
  if (typed.memory.empty()) throw usage("--memory is not given: give the memory of a rank, such as --memory 80GiB");
  memory = bytes_up_to(most_bytes, typed.memory, "--memory");
  if (!typed.shard.empty()) shard_ = whole_number(typed.shard, "--shard", 1, 4096);
  frees_ = typed.shard_gradients;
  if (frees_ && typed.shard.empty())
    throw usage("--shard-gradients has no effect without --shard: add --shard, the number of replicas that share gradients");
  if (!typed.gradient.empty() && !frees_) {
    throw usage("--gradient-bytes " + typed.gradient +
                " has no effect without --shard-gradients: add --shard-gradients and --shard, or leave the flag out");
  }
  if (asked.activation_bytes.empty()) {
    for (auto const& [value, flag] : {std::pair{&typed.fixed, "--static-bytes"}, std::pair{&typed.kept, "--kept-bytes"},
                                      std::pair{&typed.input, "--input-bytes"}, std::pair{&typed.state, "--state-bytes"},
                                      std::pair{&typed.gradient, "--gradient-bytes"}}) {
      if (!value->empty()) throw usage(std::string(flag) + " " + *value + " does not stand alone: add --activation-bytes");
    }
    if (!measured) {
      throw usage(
          "the memory of a microbatch is unknown: add --activation-bytes and --static-bytes, of a rank's whole share of the "
          "model, or a --profile with bytes");
    }
    std::string const problem = chevron::bytes_of(*measured, measured->stages, shard_).problem;
    if (!problem.empty())
      throw usage("--profile '" + asked.profile + "': " + problem + "; or add --activation-bytes and --static-bytes");
    if (frees_ && measured->gradient_bytes.empty()) {
      throw usage(
          "--profile '" + asked.profile +
          "': 'gradient_bytes' is missing, so that a share of the gradients is unknown: write the gradients' bytes, one entry "
          "for each stage, or leave --shard-gradients out");
    }
    profile_ = measured;
    by_layer_ = chevron::search::layer_bytes_of(*measured);
    return;
  }
  if (typed.fixed.empty()) {
    throw usage(
        "--static-bytes is not given: give the bytes of a rank's parameters, gradients and optimizer state, such as 20GiB");
  }
  activation_ = bytes_up_to(most_bytes, asked.activation_bytes, "--activation-bytes");
  fixed_ = bytes_up_to(most_bytes, typed.fixed, "--static-bytes");
  if (typed.state.empty() != typed.shard.empty()) {
    throw usage(typed.state.empty()
                    ? "--shard " + typed.shard +
                          ": how much of --static-bytes is the optimizer's state is not known: add "
                          "--state-bytes"
                    : "--state-bytes " + typed.state +
                          " has no effect without --shard: add --shard, the number of replicas that share the state");
  }
  if (!typed.state.empty()) {
    std::int64_t const state = bytes_up_to(most_bytes, typed.state, "--state-bytes");
    if (state > fixed_)
      throw usage("--state-bytes " + bytes(state) + " is more than --static-bytes " + bytes(fixed_) + ", of which it is a part");
    fixed_ += (state + shard_ - 1) / shard_ - state;
  }
  if (frees_) {
    if (typed.gradient.empty())
      throw usage("--shard-gradients: how much of --static-bytes are gradients is not known: add --gradient-bytes");
    gradient_ = bytes_up_to(most_bytes, typed.gradient, "--gradient-bytes");
    if (gradient_ > fixed_) {
      throw usage("--gradient-bytes " + bytes(gradient_) + " is more than --static-bytes without the optimizer's state, " +
                  bytes(fixed_));
    }
  }
  kept_ = typed.kept.empty() ? activation_ : bytes_up_to(most_bytes, typed.kept, "--kept-bytes");
  if (!typed.input.empty()) input_ = bytes_up_to(most_bytes, typed.input, "--input-bytes");
  if (input_ > activation_)
    throw usage("--input-bytes " + bytes(input_) + " is more than --activation-bytes, of which it is a part");
}

chevron::stage_bytes memory_model::of_stages(int stages, int chunks) const {
  if (profile_) return chevron::bytes_of(*profile_, stages, shard_);
  chevron::stage_bytes out;
  auto const all = [&](std::int64_t one) { return std::vector<std::int64_t>(static_cast<std::size_t>(stages), one); };
  // A chunk's part is rounded up: what is said to fit does.
  auto const part = [&](std::int64_t whole) { return (whole + chunks - 1) / chunks; };
  out.fixed = all(part(fixed_));
  out.gradient = all(part(gradient_));
  out.activation = all(part(activation_));
  out.kept = all(part(kept_));
  out.input = all(std::min(std::max<std::int64_t>(input_, 0), part(activation_)));
  return out;
}

chevron::stage_bytes memory_model::of_layers(std::vector<int> const& layers) const {
  if (!profile_) {
    chevron::stage_bytes out;
    out.problem = "bytes of layers are not known: give a --profile with bytes, and leave --activation-bytes out";
    return out;
  }
  if (by_layer_.problem.empty()) return by_layer_.of(layers, shard_);
  chevron::stage_bytes out;
  out.problem = by_layer_.problem;
  return out;
}

std::vector<chevron::stage_bytes> memory_model::of_slices(int slices, int stages, std::vector<int> const& layers) const {
  std::vector<chevron::stage_bytes> out;
  if (!profile_ || slices < 2 || profile_->slices.size() != static_cast<std::size_t>(slices)) return out;
  for (std::size_t i = 0; i < profile_->slices.size(); ++i) {
    chevron::profile const one = chevron::of_slice(*profile_, i);
    out.push_back(layers.empty() ? chevron::bytes_of(one, stages, shard_)
                                 : chevron::search::layer_bytes_of(one).of(layers, shard_));
  }
  return out;
}

std::string shell_word(std::string const& word) {
  bool plain = !word.empty();
  for (char const c : word) {
    bool const letter = (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
    plain = plain && (letter || std::string("_-+=.,:/%@").find(c) != std::string::npos);
  }
  if (plain) return word;
  std::string out = "'";
  for (char const c : word) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

std::string command_text(request const& asked, std::string const& command, chevron::shape size, int chunks) {
  std::string out = "chevron-plan " + command + " --ranks " + std::to_string(size.ranks) + " --microbatches " +
                    std::to_string(size.micro_batches);
  auto const add = [&](std::string const& flag, std::string const& value) { out += " " + flag + " " + shell_word(value); };
  auto const if_typed = [&](std::string const& flag, std::string const& value, std::string const& usual) {
    if (value != usual) add(flag, value);
  };
  if (asked.profile.empty()) {
    for (auto const& [flag, value] :
         {std::pair{"--forward", &asked.forward}, std::pair{"--backward-input", &asked.backward_input},
          std::pair{"--backward-weight", &asked.backward_weight}}) {
      if (chunks > 1 || *value != "1") add(flag, divided(*value, flag, chunks));
    }
  } else {
    add("--profile", asked.profile);
  }
  if_typed("--layers", asked.layers, "");
  if (asked.communication_given) add("--communication", asked.communication);
  if (asked.occupies_given) add("--communication-occupies", asked.communication_occupies);
  if (asked.hidden_given) add("--hidden", asked.hidden);
  if_typed("--latency", asked.latency, "0");
  if_typed("--bandwidth", asked.bandwidth, "");
  if_typed("--message-bytes", asked.message_bytes, "");
  for (std::string const& link : asked.links) add("--link", link);
  if (asked.no_first_input_gradient) out += " --no-first-input-gradient";
  if_typed("--lengths", asked.lengths, "");
  if_typed("--measured-length", asked.measured_length, "");
  if (!asked.lengths.empty()) if_typed("--attention", asked.attention, "");
  if (!asked.bytes.memory.empty()) {
    add("--memory", asked.bytes.memory);
    if_typed("--static-bytes", asked.bytes.fixed, "");
    if_typed("--activation-bytes", asked.activation_bytes, "");
    if_typed("--kept-bytes", asked.bytes.kept, "");
    if_typed("--input-bytes", asked.bytes.input, "");
    if_typed("--state-bytes", asked.bytes.state, "");
    if_typed("--shard", asked.bytes.shard, "");
  }
  if_typed("--trials", asked.search.trials, "");
  if_typed("--seed", asked.search.seed, "1");
  return out;
}

}  // namespace plan_program
