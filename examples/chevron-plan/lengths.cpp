#include <numeric>
#include <utility>
#include <vector>

#include <chevron/plan/lengths.hpp>
#include <chevron/show/format.hpp>

#include "request.hpp"
#include "value_list.hpp"

namespace plan_program {
namespace {

double length_number(std::string const& value, std::string const& flag) {
  double const out = cost_number(value, flag);
  if (!(out > 0)) throw usage(flag + " " + quoted(value) + " is not usable: a microbatch has tokens; give numbers above 0");
  return out;
}

}  // namespace

void apply_lengths(request const& asked, int micro_batches, owned_costs& costs) {
  if (asked.lengths.empty()) {
    if (!asked.measured_length.empty()) throw usage("--measured-length says nothing without --lengths: give that, too");
    if (!asked.attention.empty()) throw usage("--attention says nothing without --lengths: give that, too");
    return;
  }
  std::vector<double> const lengths = value_list(asked.lengths, "--lengths", micro_batches, "microbatches", length_number);
  double const mean = std::accumulate(lengths.begin(), lengths.end(), 0.0) / static_cast<double>(lengths.size());
  double const measured = asked.measured_length.empty() ? mean : length_number(asked.measured_length, "--measured-length");
  double const attention = asked.attention.empty() ? 0 : share_number(asked.attention, "--attention");
  chevron::length_factors made = chevron::factors_of(lengths, measured, attention);
  costs.computation_factors = std::move(made.computation);
  costs.transfer_factors = std::move(made.transfer);
}

std::string length_words(request const& asked) {
  if (asked.lengths.empty()) return {};
  return "Microbatches have " + asked.lengths + " tokens; the costs are those of " +
         (asked.measured_length.empty() ? "the mean" : asked.measured_length) +
         (asked.attention.empty() ? "" : ", of which " + asked.attention + " goes with the square") + ".\n";
}

}  // namespace plan_program
