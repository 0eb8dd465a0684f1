#include <numeric>
#include <utility>
#include <vector>

#include <chevron/base/format.hpp>
#include <chevron/plan/lengths.hpp>
#include <chevron/plan/slices.hpp>

#include "../common/nearest.hpp"
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

bool chooses_slices(request const& asked) { return unknown::lower_case(asked.slices) == "auto"; }

std::vector<int> slice_counts(request const& asked) {
  int const micro_batches = whole_shape_of(asked).micro_batches;
  auto const count = [&](auto&& word) {
    return whole_number(word | ranges::to<std::string>(), "--slices", 1, chevron::max_micro_batches / micro_batches);
  };
  if (chooses_slices(asked)) {
    std::vector<int> out{1, 2, 4, 8};
    std::erase_if(out, [&](int slices) { return slices > chevron::max_micro_batches / micro_batches; });
    return out;
  }
  std::string const ended = asked.slices + ",";
  return ended | ranges::views::split(',') | ranges::views::transform(count) | ranges::to<std::vector>();
}

chevron::shape whole_shape_of(request const& asked) {
  request whole = asked;
  whole.slices = "1";
  return shape_of(whole);
}

std::vector<double> slice_ends_of(request const& asked, int slices) {
  double const attention = asked.attention.empty() ? 0 : share_number(asked.attention, "--attention");
  if (asked.slice_ends.empty()) return chevron::slice_ends(slices, attention);
  if (unknown::lower_case(asked.slice_ends) == "equal") return chevron::slice_ends(slices, 0);
  std::vector<double> ends =
      value_list(asked.slice_ends, "--slice-ends", slices, "slices",
                 [](std::string const& value, std::string const& flag) { return share_number(value, flag); });
  double before = 0;
  for (double const end : ends) {
    if (end <= before) throw usage("--slice-ends " + quoted(asked.slice_ends) + " do not rise: each slice has tokens");
    before = end;
  }
  if (ends.back() != 1) throw usage("--slice-ends " + quoted(asked.slice_ends) + " do not end at 1, the end of the sequence");
  return ends;
}

void apply_lengths(request const& asked, chevron::shape size, owned_costs& costs) {
  if (!asked.slice_ends.empty() && asked.slices == "1" && size.slices == 1)
    throw usage("--slice-ends has no effect without --slices: add --slices");
  if (asked.lengths.empty()) {
    if (!asked.measured_length.empty()) throw usage("--measured-length has no effect without --lengths: add --lengths");
    if (!asked.attention.empty() && asked.slices == "1" && size.slices == 1)
      throw usage("--attention has no effect without --lengths or --slices: add one of these flags");
    if (size.slices == 1) return;
  }
  double const attention = asked.attention.empty() ? 0 : share_number(asked.attention, "--attention");
  std::vector<double> lengths{1};
  double measured = 1;
  if (!asked.lengths.empty()) {
    lengths = value_list(asked.lengths, "--lengths", size.micro_batches, "microbatches", length_number);
    double const mean = std::accumulate(lengths.begin(), lengths.end(), 0.0) / static_cast<double>(lengths.size());
    measured = asked.measured_length.empty() ? mean : length_number(asked.measured_length, "--measured-length");
  }
  for (double& length : lengths) length /= measured;
  costs.lengths = size.slices == 1 ? chevron::factors_of(lengths, 1, attention)
                                   : chevron::factors_of_slices(slice_ends_of(asked, size.slices), attention, lengths);
}

std::string slice_words(request const& asked, std::vector<int> const& counts) {
  std::string out;
  for (int const slices : counts) {
    if (slices == 1) continue;
    out += std::to_string(slices) + " slices end at";
    for (double const end : slice_ends_of(asked, slices)) out += " " + chevron::show::number(end);
    out += " of a sequence's tokens" + std::string(asked.slice_ends.empty() ? " and take equal time" : "") + ".\n";
  }
  return out;
}

std::string length_words(request const& asked) {
  if (asked.lengths.empty()) return {};
  return "Microbatches have " + asked.lengths + " tokens; the costs are those of " +
         (asked.measured_length.empty() ? "the mean" : asked.measured_length) +
         (asked.attention.empty() ? "" : ", of which " + asked.attention + " goes with the square") + ".\n";
}

}  // namespace plan_program
