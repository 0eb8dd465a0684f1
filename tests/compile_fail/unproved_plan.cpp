// A plan does not pass for a proved plan: neither by lowering it, nor by naming the type.
// expect: static assertion failed.*only a proved plan is lowered: lower\(prove\(plan\)\)
// expect: use of deleted function .*lower\(const (chevron::)?plan_view&\)
// expect: constexpr chevron::proved_plan::proved_plan\(chevron::plan\).* is private
// expect: constexpr chevron::proved_plan::proved_plan\(chevron::plan_view\).* is private
// expect-clang: call to deleted function 'lower'
// expect-clang: calling a private constructor of class 'chevron::proved_plan'
#include <chevron/schedule.hpp>

using namespace chevron;

plan const made = expand(catalogue::gpipe, shape{.ranks = 2, .micro_batches = 2});
#ifdef LEGAL
proved_plan const proof = prove(made);
auto const program = lower(proof);
auto const of_a_constant = lower(checked<catalogue::gpipe, shape{.ranks = 2, .micro_batches = 2}>);
#else
auto const program = lower(made);
auto const of_a_view = lower(made.view());
proved_plan const by_hand(made);
proved_plan const by_view(made.view());
#endif
