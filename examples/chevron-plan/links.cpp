#include "links.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>
#include <utility>
#include <vector>

#include "value_list.hpp"

namespace plan_program {
namespace {

/// A number and what follows it; negative where there is none that is usable.
std::pair<double, std::string> number_and_unit(std::string const& value) {
  double number = -1;
  auto const [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  bool const good = error == std::errc{} && std::isfinite(number) && number >= 0 && number <= 1e18;
  return {good ? number : -1, std::string(end, value.data() + value.size())};
}

/// One `--link`.
struct link {
  int ranks[2];
  double latency;
  std::optional<double> bandwidth;
};

link link_of(std::string const& typed) {
  auto const wrong = [&](std::string const& why) {
    return usage("--link " + quoted(typed) + " is not usable: " + why +
                 "; give ranks and a latency, such as 3-4=1.5, or a bandwidth, too: 3-4=20us:1.25GB/s");
  };
  std::size_t const dash = typed.find('-'), equals = typed.find('=');
  if (dash == std::string::npos || equals == std::string::npos || dash > equals) throw wrong("it is not RANK-RANK=LATENCY");
  link out{};
  out.ranks[0] = whole_number(typed.substr(0, dash), "--link " + typed + ": rank", 0, 1023);
  out.ranks[1] = whole_number(typed.substr(dash + 1, equals - dash - 1), "--link " + typed + ": rank", 0, 1023);
  if (out.ranks[0] == out.ranks[1]) throw wrong("a link joins two ranks");
  std::size_t const colon = typed.find(':', equals);
  out.latency = time_number(typed.substr(equals + 1, colon - equals - 1), "--link " + typed + ": latency");
  if (colon != std::string::npos) out.bandwidth = bandwidth_number(typed.substr(colon + 1), "--link " + typed + ": bandwidth");
  return out;
}

}  // namespace

double time_number(std::string const& value, std::string const& flag) {
  auto const [number, unit] = number_and_unit(value);
  double const scale = unit.empty() ? 1 : unit == "s" ? 1e3 : unit == "ms" ? 1 : unit == "us" ? 1e-3 : unit == "ns" ? 1e-6 : -1;
  if (number < 0 || scale < 0 || number * scale > 1e12) {
    throw usage(
        flag + " " + quoted(value) +
        " is not a time: give a number in the costs' unit, such as 0.5, or one with ns, us, ms or s, such as 20us, for costs "
        "in milliseconds");
  }
  return number * scale;
}

double bandwidth_number(std::string const& value, std::string const& flag) {
  auto [number, unit] = number_and_unit(value);
  bool const per_second = unit.ends_with("/s");
  if (per_second) unit.resize(unit.size() - 2);
  double scale = per_second ? 1e-3 : 1;
  if (unit.ends_with("bit")) {
    scale /= 8;
    unit.resize(unit.size() - 3);
  } else if (unit.ends_with("B")) {
    unit.pop_back();
  } else if (per_second) {
    number = -1;  // a rate of what?
  }
  bool const binary = unit.ends_with("i");
  if (binary) unit.pop_back();
  std::size_t const power = unit.empty() ? 0 : std::string("kMGT").find(unit == "K" ? "k" : unit) + 1;
  for (std::size_t i = 0; i < power; ++i) scale *= binary ? 1024 : 1000;
  if (!(number > 0) || unit.size() > 1 || (unit.empty() ? binary : power == 0)) {
    throw usage(
        flag + " " + quoted(value) +
        " is not a bandwidth: give bytes in the costs' unit of time, such as 1.5e9, or a rate a second, such as 12.5GB/s or "
        "100Gbit/s, for costs in milliseconds");
  }
  return number * scale;
}

bool has_bandwidth(request const& asked) {
  return !asked.bandwidth.empty() || std::any_of(asked.links.begin(), asked.links.end(),
                                                 [](std::string const& typed) { return typed.find(':') != std::string::npos; });
}

bool speaks_of_links(request const& asked) { return asked.latency != "0" || !asked.bandwidth.empty() || !asked.links.empty(); }

void apply_links(request const& asked, std::span<std::int16_t const> rank_of, owned_costs& costs) {
  if (!speaks_of_links(asked)) return;
  int const boundaries = static_cast<int>(rank_of.size()) - 1;
  if (!asked.bandwidth.empty() && asked.communication_given)
    throw usage("--bandwidth and --communication both say how long a transfer takes: give one of them");
  if (has_bandwidth(asked) && asked.message_bytes.empty())
    throw usage("a bandwidth alone does not say how long a transfer takes: add --message-bytes");
  costs.latency = value_list(asked.latency, "--latency", boundaries, between_stages, time_number);
  std::vector<std::int64_t> bytes;
  if (has_bandwidth(asked)) bytes = value_list(asked.message_bytes, "--message-bytes", boundaries, between_stages, byte_number);
  auto const transfer = [&](std::size_t boundary, double rate) { return static_cast<double>(bytes[boundary]) / rate; };
  if (!asked.bandwidth.empty()) {
    auto const all = value_list(asked.bandwidth, "--bandwidth", boundaries, between_stages, bandwidth_number);
    costs.communication = all;
    for (std::size_t s = 0; s < all.size(); ++s) costs.communication[s] = transfer(s, all[s]);
  }
  int const ranks = rank_of.empty() ? 0 : *std::max_element(rank_of.begin(), rank_of.end()) + 1;
  for (std::string const& typed : asked.links) {
    link const one = link_of(typed);
    if (std::max(one.ranks[0], one.ranks[1]) >= ranks) {
      throw usage("--link " + quoted(typed) + " joins a rank that is not there: there are " + std::to_string(ranks) +
                  ", counted from 0");
    }
    for (std::size_t s = 0; s + 1 < rank_of.size(); ++s) {
      int const low = std::min(rank_of[s], rank_of[s + 1]), high = std::max(rank_of[s], rank_of[s + 1]);
      if (low != std::min(one.ranks[0], one.ranks[1]) || high != std::max(one.ranks[0], one.ranks[1])) continue;
      costs.latency[s] = one.latency;
      if (one.bandwidth) costs.communication[s] = transfer(s, *one.bandwidth);
    }
  }
}

std::string link_words(request const& asked) {
  std::string out;
  if (asked.latency != "0") out += "; latency " + asked.latency;
  if (!asked.bandwidth.empty()) out += "; bandwidth " + asked.bandwidth + ", " + asked.message_bytes + " a message";
  for (std::string const& typed : asked.links) {
    link const one = link_of(typed);
    std::size_t const equals = typed.find('='), colon = typed.find(':');
    out += "; between ranks " + std::to_string(one.ranks[0]) + " and " + std::to_string(one.ranks[1]) + " latency " +
           typed.substr(equals + 1, colon - equals - 1);
    if (colon != std::string::npos) out += ", bandwidth " + typed.substr(colon + 1);
  }
  return out;
}

}  // namespace plan_program
