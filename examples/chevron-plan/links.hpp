#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "request.hpp"

/// \file
/// What the flags say of links: `--latency`, `--bandwidth` and `--link`.
///
/// Plain numbers are in the costs' unit, a bandwidth in bytes in that unit of time. With units they count in milliseconds, the
/// unit of a profile.

namespace plan_program {

/// A time: `0.2`, `20us`, `1.5ms`, `1s`.
double time_number(std::string const& value, std::string const& flag);
/// Bytes in a unit of time: `12.5e9`, `12.5GB/s`, `100Gbit/s`.
double bandwidth_number(std::string const& value, std::string const& flag);

/// Whether any flag gives a bandwidth.
bool has_bandwidth(request const& asked);
/// Whether any flag speaks of links.
bool speaks_of_links(request const& asked);
/// Puts latencies, and transfers as message bytes and bandwidth make them, into costs of stages that live on these ranks. What
/// `--link` says of a link stands for both its directions, whatever the other flags say of all.
/// \throws usage where flags do not go together
void apply_links(request const& asked, std::span<std::int16_t const> rank_of, owned_costs& costs);
/// What the flags say, as the end of a sentence on costs; empty where they say nothing.
std::string link_words(request const& asked);

}  // namespace plan_program
