// One published schedule beside the language, without the catalogue and without text for a terminal.
#include <chevron/catalogue/zb_v.hpp>
#include <chevron/language.hpp>

constexpr auto program = chevron::lowered<chevron::catalogue::zb_v, chevron::shape{.ranks = 2, .micro_batches = 4}>;
static_assert(chevron::check(program.view()).broken == chevron::law::none && program.view().plan.stages == 4);

// The catalogue's own names are not there: a second definition of one is no error.
namespace chevron::catalogue {
inline constexpr int all = 0;
inline constexpr int gpipe = 0;
}  // namespace chevron::catalogue
