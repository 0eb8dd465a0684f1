// computes: a climb over cuts for each schedule
#include "layers.hpp"

#include <algorithm>
#include <numeric>

#include <chevron/prove/footprint.hpp>
#include <chevron/tools/search/plan_cut.hpp>

#include "links.hpp"
#include "value_list.hpp"

namespace plan_program {

std::vector<int> layers_given(std::string const& typed, int layers) {
  std::vector<int> out;
  std::int64_t sum = 0;
  for (std::size_t from = 0; from <= typed.size();) {
    std::size_t const comma = std::min(typed.find(',', from), typed.size());
    out.push_back(whole_number(typed.substr(from, comma - from), "--layers", 0, 1 << 20));
    sum += out.back();
    from = comma + 1;
  }
  if (sum != layers) {
    throw usage("--layers " + quoted(typed) + " are " + std::to_string(sum) + " layers, and the profile has " +
                std::to_string(layers) + ": give one number for each stage, which add up to " + std::to_string(layers));
  }
  return out;
}

layered_profile::layered_profile(request const& asked, std::optional<chevron::profile> const& measured)
    : asked_(asked), profile_(measured) {
  if (profile_ && !profile_->layers.empty()) {
    layers_ = std::accumulate(profile_->layers.begin(), profile_->layers.end(), 0);
    of_single_layers_ = *std::max_element(profile_->layers.begin(), profile_->layers.end()) == 1;
  }
  if (asked.layers.empty()) return;
  if (layers_ == 0) {
    throw usage("--layers needs the costs of layers: give --profile, a file with 'layers', as chevron-train --profile and "
                "chevron-plan model write it");
  }
  given_ = layers_given(asked.layers, layers_);
}

bool layered_profile::cuts(int stages) const {
  if (layers_ == 0) return false;
  if (!given_.empty()) return true;
  // The cost of a layer comes from a stage without embedding and head.
  if (profile_->stages == stages || profile_->stages < 3) return false;
  return of_single_layers_ || chevron::united_stages(*profile_, stages).empty();
}

std::string layered_profile::refusal(int stages) const {
  if (!given_.empty() && static_cast<int>(given_.size()) != stages)
    return "it has " + std::to_string(stages) + " stages, and --layers " + std::to_string(given_.size()) + " numbers";
  if (given_.empty() && stages > layers_ + 2) {
    return "its " + std::to_string(stages) + " stages are more than " + std::to_string(layers_) +
           " layers, the embedding and the head can be divided among";
  }
  return {};
}

chevron::search::layer_costs layered_profile::costs(bool split, std::span<std::int16_t const> rank_of) const {
  chevron::search::layer_costs out = chevron::search::layer_costs_of(*profile_, split);
  if (!out.problem.empty()) return out;
  bool const known =
      std::any_of(profile_->communication.begin(), profile_->communication.end(), [](double time) { return time >= 0; });
  if (asked_.communication_given) {
    if (asked_.communication.find(',') != std::string::npos) {
      throw usage("--communication " + quoted(asked_.communication) +
                  " is a list, but boundaries between stages move with the layers: give one number, or --link for a slow link");
    }
    out.communication = cost_number(asked_.communication, "--communication");
  } else if (!known && asked_.bandwidth.empty() && rank_of.size() > 1) {
    out.problem = "'communication' is null for every boundary: give --communication, in milliseconds, or --bandwidth";
    return out;
  }
  if (asked_.hidden_given) out.hidden = share_number(asked_.hidden, "--hidden");
  owned_costs links{.communication =
                        chevron::buffer<double>(std::max(static_cast<int>(rank_of.size()) - 1, 1), out.communication)};
  apply_links(asked_, rank_of, links);
  out.transfers.assign(links.communication.begin(), links.communication.end());
  out.latency.assign(links.latency.begin(), links.latency.end());
  out.communication_occupies = occupies_of(asked_);
  return out;
}

chevron::search::layer_bytes layered_profile::bytes() const { return chevron::search::layer_bytes_of(*profile_); }

cut_model layered_profile::cut_into(std::vector<int> const& layers, std::vector<bool> const& split,
                                    std::span<std::int16_t const> rank_of, memory_model const* memory) const {
  cut_model out;
  out.problem = refusal(static_cast<int>(split.size()));
  if (!out.problem.empty()) return out;
  bool const any = std::find(split.begin(), split.end(), true) != split.end();
  chevron::search::layer_costs const of_layers = costs(any, rank_of);
  out.problem = of_layers.problem;
  if (!out.problem.empty()) return out;
  out.layers = layers;
  out.costs = of_layers.of(layers);
  if (memory != nullptr) {
    out.bytes = memory->of_layers(layers);
    out.problem = out.bytes.problem;
  }
  return out;
}

cut_model layered_profile::cut_for(chevron::plan_view const& plan, memory_model const* memory, bool recompute) const {
  cut_model out;
  std::span<std::int16_t const> const rank_of(plan.rank_of, static_cast<std::size_t>(plan.stages));
  std::vector<bool> const split = chevron::split_stages(plan);
  if (!given_.empty()) return cut_into(given_, split, rank_of, memory);
  out.problem = refusal(plan.stages);
  if (!out.problem.empty()) return out;
  bool const any = std::find(split.begin(), split.end(), true) != split.end();
  chevron::search::layer_costs of_layers = costs(any, rank_of);
  out.problem = of_layers.problem;
  if (!out.problem.empty()) return out;
  if (recompute) of_layers.recompute();
  chevron::buffer<bool> recomputed(plan.stages);
  for (int s = 0; s < plan.stages; ++s) recomputed.data[s] = recompute;
  auto const excess = [&](std::vector<int> const& layers) {
    std::int64_t most = 0;
    if (memory == nullptr) return most;
    chevron::stage_bytes const bytes = memory->of_layers(layers);
    if (!bytes.problem.empty()) return most;
    for (int r = 0; r < plan.size.ranks; ++r)
      most = std::max(most, chevron::peak_memory(plan, bytes.view(recomputed.data), r) - memory->memory);
    return most;
  };
  return cut_into(chevron::search::cut_for(plan, of_layers, excess).layers, split, rank_of, memory);
}

bool find_in_bytes_of_layers::allows(std::vector<int> const& layers) const {
  chevron::stage_bytes const of = bytes.of_layers(layers);
  std::vector<std::int64_t> least(static_cast<std::size_t>(placed.size.ranks)), chunk = least;
  for (std::size_t s = 0; s < layers.size(); ++s) {
    auto const rank = static_cast<std::size_t>(placed.rank_of.data[s]);
    least[rank] += of.fixed[s];
    chunk[rank] = std::max(chunk[rank], of.activation[s]);
  }
  for (std::size_t r = 0; r < least.size(); ++r) {
    if (least[r] + chunk[r] > bytes.memory) return false;
  }
  return true;
}

chevron::search::found find_in_bytes_of_layers::operator()(chevron::search::problem const& of_cut, std::vector<int> const& layers,
                                                           chevron::search::effort const& trying) const {
  chevron::stage_bytes const of = bytes.of_layers(layers);
  chevron::buffer<bool> recomputed(static_cast<int>(layers.size()));
  for (bool& one : recomputed) one = recompute;
  return find_within(of_cut, of.view(recomputed.data), bytes.memory, trying, known_length);
}

}  // namespace plan_program
