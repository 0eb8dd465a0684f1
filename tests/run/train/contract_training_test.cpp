// timeout: 300
#include "support/contract_subjects.hpp"
#include "support/transport_contract.hpp"

TEST_CASE("every transport trains bit for bit as threads do: every schedule, remainders, replicas") {
  transport_contract::for_each_transport([](transport_contract::subject const& over) {
    transport_contract::compare([&](int ranks, int replicas, transport_contract::body const& body) {
      for (auto const& each : over.run(ranks, replicas, body)) CHECK(each.text == "");
    });
  });
}
