// The schedule side compiled without exceptions and RTTI: a plan that `prove` refuses ends the program, with the same message.
#include <utility>

#include <chevron/csv.hpp>
#include <chevron/schedule.hpp>
#include <chevron/search.hpp>
#include <chevron/show.hpp>

int main() {
  auto plan = chevron::catalogue::make_plan("1F1B", {.ranks = 2, .micro_batches = 4});
  std::swap(plan.actions.data[0], plan.actions.data[2]);  // rank 0: F0 F1 B0 becomes B0 F1 F0
  static_cast<void>(chevron::prove(std::move(plan)));
}
