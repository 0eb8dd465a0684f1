#pragma once

#include <cstdint>

#include "program.hpp"

namespace differential {

/// The program of a seed. It may mean nothing (a batch norm over one sample, say): then the plain loop says so.
program generate(std::uint64_t seed);

}  // namespace differential
