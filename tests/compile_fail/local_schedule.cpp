// A schedule inside a function has no address that the compiler could know: it must be static.
// expect: error: the address of .mine. is not a valid template argument because it does not have static storage duration
// expect-clang: error: non-type template argument is not a constant expression
// expect-clang: note: .*add 'static' to give it a constant address
#include <chevron/schedule.hpp>

using namespace chevron;
using namespace chevron::letters;

int main() {
#ifdef LEGAL
  static constexpr auto mine = schedule(placement::linear, steady(F) | cooldown(B));
#else
  constexpr auto mine = schedule(placement::linear, steady(F) | cooldown(B));
#endif
  return checked<mine, shape{.ranks = 4, .micro_batches = 8}>.view().total() == 64 ? 0 : 1;
}
