// timeout: 300
#include "same_as_threads.hpp"

#include <memory>

#include <chevron/run/gloo.hpp>

TEST_CASE("Gloo trains bit for bit as threads do: every schedule, remainders, replicas") {
  same_as_threads::compare([](chevron::layout const& where, auto const& store, auto const& watch) {
    return std::make_unique<chevron::gloo_transport>(where, store, watch);
  });
}
