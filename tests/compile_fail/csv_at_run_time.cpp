// Text that is known only at run time cannot be proved by the compiler.
// expect: static assertion failed.*from_csv takes a literal.*text that is known only at run time is for read_csv
#include <chevron/csv.hpp>
#include <chevron/schedule.hpp>
#include <string>

using namespace chevron;
using namespace chevron::letters;

#ifdef LEGAL
inline auto const mine = from_csv("0F0,0B0");
#else
inline auto const mine = from_csv(std::string("0F0,0B0"));
#endif
