// A program from a file or a mutation cannot run: only `lower` and `lowered<>` return programs that can.
// expect: constexpr chevron::proved_program::proved_program\(chevron::owned_program\).* is private
// expect: constexpr chevron::proved_program::proved_program\(chevron::program_view\).* is private
// expect-clang: calling a private constructor of class 'chevron::proved_program'
#include <chevron/schedule.hpp>

using namespace chevron;

proved_program const lawful = lower(prove(expand(catalogue::gpipe, shape{.ranks = 2, .micro_batches = 2})));
owned_program const changed = lawful.copy();
#ifdef LEGAL
proved_program const runs = lawful;
proved_program const constant = lowered<catalogue::gpipe, shape{.ranks = 2, .micro_batches = 2}>;
#else
proved_program const runs(changed);
proved_program const of_a_view(changed.view());
#endif
