#include "adapters.hpp"

#include <algorithm>
#include <map>
#include <utility>

#include <chevron/base/format.hpp>

#include "decoder_config.hpp"

namespace chevron::finetune {

bool adapters::on(std::string_view projection) const {
  return rank > 0 && std::find(targets.begin(), targets.end(), projection) != targets.end();
}

std::int64_t adapters::parameters(decoder_config const& c) const {
  std::int64_t const queries = c.heads * c.head_width, keys = c.key_heads * c.head_width;
  std::map<std::string_view, std::int64_t> const inputs_and_outputs = {
      {"q_proj", c.width + queries},   {"k_proj", c.width + keys},       {"v_proj", c.width + keys},
      {"o_proj", queries + c.width},   {"gate_proj", c.width + c.inner}, {"up_proj", c.width + c.inner},
      {"down_proj", c.inner + c.width}};
  std::int64_t sum = 0;
  for (auto const& [projection, numbers] : inputs_and_outputs) sum += on(projection) ? numbers : 0;
  return c.layers * rank * sum;
}

std::string adapters::words() const {
  std::string all;
  for (std::size_t i = 0; i < targets.size(); ++i) all += (i == 0 ? "" : i + 1 == targets.size() ? " and " : ", ") + targets[i];
  return "rank " + std::to_string(rank) + ", alpha " + show::exact(alpha) + ", on " + all;
}

std::vector<std::string> targets_of(std::vector<std::string> const& named) {
  auto const says = [&](std::string_view word) { return std::find(named.begin(), named.end(), word) != named.end(); };
  std::vector<std::string> out;
  auto const add = [&](auto const& group, bool whole) {
    for (std::string_view const one : group) {
      if (whole || says(one)) out.emplace_back(one);
    }
  };
  add(projections::attention, says("attention") || says("all"));
  add(projections::maps, says("all"));
  return out;
}

bool is_of_adapter(std::string_view name) { return name.ends_with(".lora_A.weight") || name.ends_with(".lora_B.weight"); }

}  // namespace chevron::finetune
