#pragma once

#include "outcome.hpp"
#include "program.hpp"

namespace differential {

enum class graph {
  whole,  ///< one graph for the whole model, as a training loop has it
  cut  ///< a graph for each stage, by autograd alone: a value that crosses a cut twice has its gradients added in another order
};

/// The program by LibTorch alone.
outcome run_plain(program const& p, graph how);

}  // namespace differential
