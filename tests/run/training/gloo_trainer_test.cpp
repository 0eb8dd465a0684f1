// timeout: 300
#include "support/transport_contract.hpp"

#include <memory>

#include <chevron/run/comm/gloo/gloo_transport.hpp>

TEST_CASE("Gloo trains bit for bit as threads do: every schedule, remainders, replicas") {
  transport_contract::compare([](chevron::topology const& where, auto const& store, auto const& watch) {
    return std::make_unique<chevron::gloo_transport>(where, store, watch);
  });
}
