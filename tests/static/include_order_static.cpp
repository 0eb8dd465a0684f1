// The gate finds a schedule's functions, whichever header is included first.
#include <chevron/prove/gate.hpp>

#include <chevron/catalogue/catalogue.hpp>

static_assert(chevron::checked<chevron::catalogue::zb_v, chevron::shape{2, 4}>.view().total() == 3 * 4 * 4);
