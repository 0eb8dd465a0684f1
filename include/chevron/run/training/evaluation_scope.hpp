#pragma once

#include <cstddef>
#include <vector>

#include <chevron/run/model/stage.hpp>

/// \file
/// Evaluation mode of a model's stages for a scope.

namespace chevron {

/// Puts all modules of some stages into evaluation mode while this object lives, and then restores each module's mode.
class evaluation_scope {
 public:
  /// \param stages must outlive this object
  explicit evaluation_scope(std::vector<stage>& stages) : stages_(stages) {
    for (stage& s : stages_) {
      before_.push_back(s.modes());
      s.training(false);
    }
  }
  ~evaluation_scope() {
    for (std::size_t s = 0; s < stages_.size(); ++s) stages_[s].set_modes(before_[s]);
  }
  evaluation_scope(evaluation_scope const&) = delete;
  evaluation_scope& operator=(evaluation_scope const&) = delete;

 private:
  std::vector<stage>& stages_;
  std::vector<std::vector<std::vector<bool>>> before_;
};

}  // namespace chevron
