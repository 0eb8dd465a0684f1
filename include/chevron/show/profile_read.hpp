#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include <chevron/plan/action.hpp>
#include <chevron/plan/profile.hpp>
#include <chevron/show/json.hpp>

/// \file
/// Reads the file that `show::json(profile)` writes. Not part of <chevron/show.hpp>, since it needs nlohmann-json.

namespace chevron {

/// No profile has more bytes: it would have more stages than any schedule.
inline constexpr std::size_t largest_profile = std::size_t{1} << 20;

/// No stage takes more.
inline constexpr std::int64_t most_stage_bytes = std::int64_t{1} << 50;

/// A profile that was read, or why it could not be.
struct read_profile_result {
  profile value;
  std::string problem;  ///< names the key at fault; empty: none
};

/// Strict: the version, the unit, the number of stages and the lists of costs must be there, and no key twice or unknown; lists must have
/// one entry a stage or boundary. What costs were measured under, `layers` and bytes may be left out or null: a profile may be written by
/// hand.
inline read_profile_result read_profile(std::string_view text) {
  read_profile_result out;
  auto const fault = [&](std::string words) {
    out.problem = std::move(words);
    return out;
  };
  if (text.size() > largest_profile)
    return fault("it has " + std::to_string(text.size()) + " bytes, and no profile has more than " +
                 std::to_string(largest_profile));
  std::set<std::string> seen;
  std::string twice;
  using json = nlohmann::json;
  auto const watch = [&](int depth, json::parse_event_t event, json& at) {
    if (event == json::parse_event_t::key && depth == 1 && !seen.insert(at.get<std::string>()).second)
      twice = at.get<std::string>();
    return true;
  };
  json const all = json::parse(text, watch, false);
  if (all.is_discarded()) return fault("it is no JSON");
  if (!all.is_object()) return fault("it is no JSON object");
  if (!twice.empty()) return fault("'" + twice + "' is there twice");
  std::set<std::string> unread = seen;
  auto const shown = [](json const& value) {
    std::string const all_of_it = value.dump();
    std::size_t const most = 80;
    return all_of_it.size() <= most ? all_of_it : all_of_it.substr(0, most) + "…";
  };
  // Takes a key's value; null where there is none.
  auto const take = [&](char const* key) -> json const* {
    unread.erase(key);
    auto const found = all.find(key);
    if (found == all.end() && out.problem.empty()) out.problem = std::string("'") + key + "' is missing";
    return found == all.end() ? nullptr : &*found;
  };
  // The same of a key that may be left out, or null.
  auto const take_known = [&](char const* key) -> json const* {
    unread.erase(key);
    auto const found = all.find(key);
    return found == all.end() || found->is_null() ? nullptr : &*found;
  };
  auto const whole_of = [&](char const* key, json const* value, int least, int most) {
    if (value == nullptr) return 0;
    bool const fits = value->is_number_integer() && *value >= least && *value <= most;
    if (!fits && out.problem.empty()) {
      out.problem = std::string("'") + key + "' is " + shown(*value) + ", not a whole number from " + std::to_string(least) +
                    " to " + std::to_string(most);
    }
    return fits ? value->get<int>() : 0;
  };
  auto const is_time = [](json const& value) {
    return value.is_number() && std::isfinite(value.get<double>()) && value.get<double>() >= 0 && value.get<double>() <= 1e12;
  };
  auto const time = [&](char const* key) {
    json const* const value = take_known(key);
    if (value == nullptr) return 0.0;
    if (!is_time(*value) && out.problem.empty())
      out.problem = std::string("'") + key + "' is " + shown(*value) + ", no time from 0 up";
    return is_time(*value) ? value->get<double>() : 0.0;
  };
  auto const list = [&](char const* key, int count, char const* things) {
    std::vector<double> times;
    json const* const value = take(key);
    if (value == nullptr || !out.problem.empty()) return times;
    if (!value->is_array() || value->size() != static_cast<std::size_t>(count)) {
      out.problem = std::string("'") + key + "' is no list with one entry for each of " + std::to_string(count) + " " + things;
      return times;
    }
    for (json const& one : *value) {
      if (!one.is_null() && !is_time(one)) {
        out.problem = std::string("'") + key + "', entry " + std::to_string(times.size()) + ", is " + shown(one) +
                      ", neither null nor a time from 0 up";
        return times;
      }
      times.push_back(one.is_null() ? profile::not_measured : one.get<double>());
    }
    return times;
  };

  if (json const* const format = take("chevron_profile"); format == nullptr || *format != 1) {
    return fault(format == nullptr ? "'chevron_profile' is missing: no profile of chevron-train begins without it"
                                   : "'chevron_profile' is " + shown(*format) + ", and this version reads 1");
  }
  if (json const* const unit = take("unit"); unit != nullptr && *unit != "ms")
    return fault("'unit' is " + shown(*unit) + ", not \"ms\"");
  profile& p = out.value;
  if (json const* const schedule = take_known("schedule"); schedule != nullptr) {
    if (!schedule->is_string()) return fault("'schedule' is " + shown(*schedule) + ", no name");
    p.schedule = schedule->get<std::string>();
  }
  auto const whole_known = [&](char const* key, int most) { return whole_of(key, take_known(key), 1, most); };
  p.size.ranks = whole_known("ranks", max_stages);
  p.size.chunks = whole_known("chunks", max_stages);
  p.stages = whole_of("stages", take("stages"), 1, max_stages);
  p.size.micro_batches = whole_known("micro_batches", max_micro_batches);
  p.replicas = std::max(whole_known("replicas", 1 << 20), 1);
  p.steps = whole_known("steps", 1 << 30);
  p.pipeline = time("pipeline");
  p.step = time("step");
  p.forward = list("forward", p.stages, "stages");
  p.backward = list("backward", p.stages, "stages");
  p.backward_input = list("backward_input", p.stages, "stages");
  p.backward_weight = list("backward_weight", p.stages, "stages");
  if (all.contains("recompute")) p.recompute = list("recompute", p.stages, "stages");
  p.communication = list("communication", p.stages - 1, "boundaries between stages");
  if (json const* const hidden = take_known("hidden"); hidden != nullptr) {
    bool const fits = is_time(*hidden) && hidden->get<double>() <= 1;
    if (!fits && out.problem.empty()) out.problem = "'hidden' is " + shown(*hidden) + ", neither null nor a share from 0 to 1";
    if (fits) p.hidden = hidden->get<double>();
  }
  if (json const* const layers = take_known("layers"); layers != nullptr) {
    json const& value = *layers;
    auto const fits = [](json const& one) { return one.is_number_integer() && one >= 0 && one <= 1 << 20; };
    if (!value.is_array() || value.size() != static_cast<std::size_t>(p.stages) ||
        !std::all_of(value.begin(), value.end(), fits)) {
      if (out.problem.empty())
        out.problem = "'layers' is " + shown(value) + ", no list of whole numbers from 0 with one entry for each of " +
                      std::to_string(p.stages) + " stages";
    } else {
      p.layers = value.get<std::vector<int>>();
    }
  }
  for (auto const& [key, bytes] :
       {std::pair{"static_bytes", &p.static_bytes}, std::pair{"activation_bytes", &p.activation_bytes},
        std::pair{"kept_bytes", &p.kept_bytes}, std::pair{"input_bytes", &p.input_bytes}}) {
    json const* const known = take_known(key);
    if (known == nullptr) continue;
    json const& value = *known;
    if (!out.problem.empty()) return out;
    if (!value.is_array() || value.size() != static_cast<std::size_t>(p.stages))
      return fault(std::string("'") + key + "' is no list with one entry for each of " + std::to_string(p.stages) + " stages");
    for (json const& one : value) {
      if (!one.is_number_integer() || one < 0 || one > most_stage_bytes)
        return fault(std::string("'") + key + "', entry " + std::to_string(bytes->size()) + ", is " + shown(one) +
                     ", no whole number of bytes from 0 to " + std::to_string(most_stage_bytes));
      bytes->push_back(one.get<std::int64_t>());
    }
  }
  for (std::size_t s = 0; s < p.activation_bytes.size(); ++s) {
    if (s < p.input_bytes.size() && p.input_bytes[s] > p.activation_bytes[s])
      return fault("'input_bytes' of stage " + std::to_string(s) + " is more than its 'activation_bytes'");
  }
  if (out.problem.empty() && !unread.empty()) return fault("'" + *unread.begin() + "' is no key of a profile");
  return out;
}

}  // namespace chevron
