#pragma once

#include <cstddef>
#include <vector>

#include <chevron/run/model/stage.hpp>

/// \file
/// Puts stages into evaluation for a while.

namespace chevron {

/// While it lives, all modules of these stages are in evaluation; then each is again in the mode it was in.
class evaluation_scope {
 public:
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
