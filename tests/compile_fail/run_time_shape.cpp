// A shape that is known only at run time: the gate is for the compiler, check(expand(schedule, shape)) for then.
// expect: error: the value of .size. is not usable in a constant expression
// expect-clang: note: read of non-constexpr variable 'size' is not allowed in a constant expression
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

int main(int count, char**) {
#ifdef LEGAL
  (void)count;
  constexpr shape size{.ranks = 4, .micro_batches = 8};
#else
  shape const size{.ranks = count, .micro_batches = 8};
#endif
  return checked<catalogue::gpipe, size>.view().total() == 64 ? 0 : 1;
}
