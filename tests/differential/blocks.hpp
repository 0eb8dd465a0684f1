#pragma once

#include <memory>

#include "model.hpp"

namespace differential {

/// The module of a block behind tensors that flow so.
std::shared_ptr<block_module> make_block(block const& b, flow before, rank_groups groups = {});

}  // namespace differential
