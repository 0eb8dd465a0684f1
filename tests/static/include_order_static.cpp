// The gate finds what a schedule answers, whichever header came first.
#include <chevron/prove/gate.hpp>

#include <chevron/catalogue/catalogue.hpp>

static_assert(chevron::checked<chevron::catalogue::zb_v, chevron::shape{2, 4}>.view().total() == 3 * 4 * 4);
