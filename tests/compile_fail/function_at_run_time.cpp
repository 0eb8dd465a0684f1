// A schedule as a function that the compiler cannot call.
// expect: error: call to non-.constexpr. function .chevron::plan mine\(chevron::shape\)
// expect-clang: note: non-constexpr function 'mine' cannot be used in a constant expression
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
constexpr plan mine(shape size) { return expand(catalogue::gpipe, size); }
#else
plan mine(shape size) { return expand(catalogue::gpipe, size); }
#endif
constexpr auto const& plan_of_mine = checked<mine, shape{.ranks = 4, .micro_batches = 8}>;
