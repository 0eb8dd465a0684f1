#include "grid.hpp"

using namespace chevron;
using namespace chevron::tests;
using catalogue::interleaved_1f1b;

static_assert(over_grid(interleaved_1f1b, lawful, {.last_ranks = 6, .first_chunks = 3}).holds());
static_assert(over_grid(interleaved_1f1b, lawful, {.first_ranks = 7, .first_chunks = 3}).holds());
