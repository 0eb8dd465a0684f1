#pragma once

#include <optional>
#include <string>
#include <vector>

#include <chevron/plan/plan.hpp>
#include <chevron/plan/profile.hpp>
#include <chevron/tools/search/layer_bytes.hpp>
#include <chevron/tools/search/layer_costs.hpp>

#include "memory.hpp"
#include "request.hpp"
#include "within_memory.hpp"

/// \file
/// A profile's layers, which commands divide among the stages of each schedule: as `--layers` says, or as suits the schedule.

namespace plan_program {

/// A model cut into the stages of a plan.
struct cut_model {
  std::vector<int> layers;  ///< by stage; empty: the cut is not known in layers
  owned_costs costs;
  chevron::stage_bytes bytes;  ///< where bytes count
  std::string problem;         ///< why the model cannot be cut so; empty: it can
};

/// The numbers of `--layers`. \param layers of the model \throws usage where they do not add up to `layers`
std::vector<int> layers_given(std::string const& typed, int layers);

/// A profile that is cut by layers.
class layered_profile {
 public:
  /// \param measured the profile that `--profile` names, if any
  /// \throws usage if `--layers` is given, and the profile does not say what layers cost
  layered_profile(request const& asked, std::optional<chevron::profile> const& measured);

  /// Whether the stages of a schedule with so many of them are made of layers: if `--layers` is given, if each stage of the
  /// profile has one layer, or if the profile's stages do not add up to so many. Otherwise costs are sums of the profile's
  /// stages.
  bool cuts(int stages) const;
  /// `--layers`; empty without the flag.
  std::vector<int> const& given() const { return given_; }
  /// Number of layers of the model.
  int layers() const { return layers_; }
  /// Costs of layers, with the links between ranks that the flags name. \param split whether I and W need separate costs
  /// \param rank_of by stage
  chevron::search::layer_costs costs(bool split, std::span<std::int16_t const> rank_of) const;
  /// Bytes of layers. \returns with a `problem` where the profile does not say them
  chevron::search::layer_bytes bytes() const;

  /// Cuts the model for a plan: as `--layers` says, else so that the plan fits into memory and is short.
  /// \param memory null: bytes do not count \param recompute every stage stores its input alone, and runs its F again
  cut_model cut_for(chevron::plan_view const& plan, memory_model const* memory = nullptr, bool recompute = false) const;
  /// The same for given layers. \param split by stage
  cut_model cut_into(std::vector<int> const& layers, std::vector<bool> const& split, std::span<std::int16_t const> rank_of,
                     memory_model const* memory = nullptr) const;

 private:
  std::string refusal(int stages) const;

  request const& asked_;
  std::optional<chevron::profile> profile_;
  int layers_ = 0;
  bool of_single_layers_ = false;
  std::vector<int> given_;
};

/// For `search::find_layers`: orders that keep a rank's bytes, with the bytes of each cut.
struct find_in_bytes_of_layers {
  memory_model const& bytes;
  chevron::plan const& placed;
  bool recompute = false;
  double known_length = 0;  ///< as of `find_within`

  /// Whether each rank has room for its stages' static bytes and for one chunk.
  bool allows(std::vector<int> const& layers) const;
  chevron::search::found operator()(chevron::search::problem const& of_cut, std::vector<int> const& layers,
                                    chevron::search::effort const& trying) const;
};

}  // namespace plan_program
