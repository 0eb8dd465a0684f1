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

/// \file
/// Profiles as files: JSON with one list for each kind of cost. Not part of <chevron/show.hpp>, since it needs nlohmann-json.

namespace chevron {

/// The most bytes of a profile's text: a longer one would have more stages than any schedule.
inline constexpr std::size_t largest_profile = std::size_t{1} << 20;

/// The most bytes that a profile may give for a stage.
inline constexpr std::int64_t most_stage_bytes = std::int64_t{1} << 50;

/// A profile that was read, or the reason why it could not be read.
struct read_profile_result {
  profile value;
  std::string problem;  ///< names the key at fault; empty: none
};

namespace detail {

/// Keys of lists with one entry for each stage.
inline constexpr std::pair<char const*, std::vector<double> profile::*> profile_times[] = {
    {"forward", &profile::forward},
    {"backward", &profile::backward},
    {"backward_input", &profile::backward_input},
    {"backward_weight", &profile::backward_weight}};
inline constexpr std::pair<char const*, std::vector<std::int64_t> profile::*> profile_bytes[] = {
    {"static_bytes", &profile::static_bytes}, {"activation_bytes", &profile::activation_bytes},
    {"kept_bytes", &profile::kept_bytes},     {"input_bytes", &profile::input_bytes},
    {"state_bytes", &profile::state_bytes},   {"gradient_bytes", &profile::gradient_bytes}};
/// Keys of the lists of each slice.
inline constexpr std::pair<char const*, std::vector<std::int64_t> slice_bytes::*> profile_slice_bytes[] = {
    {"activation_bytes", &slice_bytes::activation}, {"kept_bytes", &slice_bytes::kept}, {"input_bytes", &slice_bytes::input}};

/// Reads a profile key by key, and stores the first fault.
class profile_reader {
 public:
  read_profile_result read(std::string_view text) {
    if (parse(text)) {
      read_format();
      read_circumstances();
      read_times();
      read_layers();
      for (auto const& [key, list] : profile_bytes) read_bytes(key, take_known(key), p_.*list);
      read_slices();
      p_.shard = std::max(whole_known("shard", 1 << 12), 1);
      if (json const* const model = take_known("model"); model != nullptr) {
        if (model->is_object())
          p_.model = model->dump();
        else
          fault("'model' is " + shown(*model) + ", no object with a model's sizes");
      }
      check_inputs("", p_.activation_bytes, p_.input_bytes);
      for (std::size_t i = 0; i < p_.slices.size(); ++i)
        check_inputs("slices[" + std::to_string(i) + "].", p_.slices[i].activation, p_.slices[i].input);
      check_parts();
      if (!unread_.empty()) fault("'" + *unread_.begin() + "' is no key of a profile");
    }
    return std::move(out_);
  }

 private:
  using json = nlohmann::json;

  void fault(std::string words) {
    if (out_.problem.empty()) out_.problem = std::move(words);
  }
  static std::string shown(json const& value) {
    std::string const all_of_it = value.dump();
    std::size_t const most = 80;
    return all_of_it.size() <= most ? all_of_it : all_of_it.substr(0, most) + "…";
  }
  static bool is_time(json const& value) {
    return value.is_number() && std::isfinite(value.get<double>()) && value.get<double>() >= 0 && value.get<double>() <= 1e12;
  }
  static std::string for_each_of(int count, char const* things) {
    return "one entry for each of " + std::to_string(count) + " " + things;
  }

  bool parse(std::string_view text) {
    if (text.size() > largest_profile) {
      fault("it has " + std::to_string(text.size()) + " bytes, and no profile has more than " + std::to_string(largest_profile));
      return false;
    }
    std::string twice;
    auto const watch = [&](int depth, json::parse_event_t event, json& at) {
      if (event == json::parse_event_t::key && depth == 1 && !unread_.insert(at.get<std::string>()).second)
        twice = at.get<std::string>();
      return true;
    };
    all_ = json::parse(text, watch, false);
    if (all_.is_discarded())
      fault("it is no JSON");
    else if (!all_.is_object())
      fault("it is no JSON object");
    else if (!twice.empty())
      fault("'" + twice + "' is there twice");
    return out_.problem.empty();
  }

  /// Finds a key's value. \returns null if the text has no such key
  json const* find(char const* key) {
    unread_.erase(key);
    auto const found = all_.find(key);
    return found == all_.end() ? nullptr : &*found;
  }
  /// Finds the value of a required key.
  json const* take(char const* key) {
    json const* const value = find(key);
    if (value == nullptr) fault(std::string("'") + key + "' is missing");
    return value;
  }
  /// Finds the value of an optional key. \returns null if it is missing or null
  json const* take_known(char const* key) {
    json const* const value = find(key);
    return value == nullptr || value->is_null() ? nullptr : value;
  }

  int whole_of(char const* key, json const* value, int most) {
    if (value == nullptr) return 0;
    if (value->is_number_integer() && *value >= 1 && *value <= most) return value->get<int>();
    fault(std::string("'") + key + "' is " + shown(*value) + ", not a whole number from 1 to " + std::to_string(most));
    return 0;
  }
  int whole_known(char const* key, int most) { return whole_of(key, take_known(key), most); }
  double time_known(char const* key) {
    json const* const value = take_known(key);
    if (value == nullptr) return 0;
    if (is_time(*value)) return value->get<double>();
    fault(std::string("'") + key + "' is " + shown(*value) + ", no time from 0 up");
    return 0;
  }
  std::vector<double> times(char const* key, int count, char const* things = "stages") {
    std::vector<double> out;
    json const* const value = take(key);
    if (value == nullptr || !out_.problem.empty()) return out;
    if (!value->is_array() || value->size() != static_cast<std::size_t>(count)) {
      fault(std::string("'") + key + "' is no list with " + for_each_of(count, things));
      return out;
    }
    for (json const& one : *value) {
      if (!one.is_null() && !is_time(one)) {
        fault(std::string("'") + key + "', entry " + std::to_string(out.size()) + ", is " + shown(one) +
              ", neither null nor a time from 0 up");
        return out;
      }
      out.push_back(one.is_null() ? profile::not_measured : one.get<double>());
    }
    return out;
  }

  void read_format() {
    if (json const* const format = find("chevron_profile"); format == nullptr)
      fault("'chevron_profile' is missing: no profile of chevron-train begins without it");
    else if (*format != 1)
      fault("'chevron_profile' is " + shown(*format) + ", and this version reads 1");
    if (json const* const unit = take("unit"); unit != nullptr && *unit != "ms")
      fault("'unit' is " + shown(*unit) + ", not \"ms\"");
  }
  /// Reads the conditions under which costs were measured.
  void read_circumstances() {
    if (json const* const schedule = take_known("schedule"); schedule != nullptr) {
      if (schedule->is_string())
        p_.schedule = schedule->get<std::string>();
      else
        fault("'schedule' is " + shown(*schedule) + ", no name");
    }
    p_.size.ranks = whole_known("ranks", max_stages);
    p_.size.chunks = whole_known("chunks", max_stages);
    p_.stages = whole_of("stages", take("stages"), max_stages);
    p_.size.micro_batches = whole_known("micro_batches", max_micro_batches);
    p_.replicas = std::max(whole_known("replicas", 1 << 20), 1);
    p_.steps = whole_known("steps", 1 << 30);
  }
  void read_times() {
    p_.pipeline = time_known("pipeline");
    p_.step = time_known("step");
    for (auto const& [key, list] : profile_times) p_.*list = times(key, p_.stages);
    if (all_.contains("recompute")) p_.recompute = times("recompute", p_.stages);
    p_.communication = times("communication", p_.stages - 1, "boundaries between stages");
    if (json const* const hidden = take_known("hidden"); hidden != nullptr) {
      if (is_time(*hidden) && hidden->get<double>() <= 1)
        p_.hidden = hidden->get<double>();
      else
        fault("'hidden' is " + shown(*hidden) + ", neither null nor a share from 0 to 1");
    }
  }
  void read_layers() {
    json const* const value = take_known("layers");
    if (value == nullptr || !out_.problem.empty()) return;
    auto const fits = [](json const& one) { return one.is_number_integer() && one >= 0 && one <= 1 << 20; };
    if (value->is_array() && value->size() == static_cast<std::size_t>(p_.stages) &&
        std::all_of(value->begin(), value->end(), fits))
      p_.layers = value->get<std::vector<int>>();
    else
      fault("'layers' is " + shown(*value) + ", no list of whole numbers from 0 with " + for_each_of(p_.stages, "stages"));
  }
  /// Checks that a stage's input is no more than its activations, of which it is a part.
  void check_inputs(std::string const& at, std::vector<std::int64_t> const& activation, std::vector<std::int64_t> const& input) {
    for (std::size_t s = 0; s < activation.size() && s < input.size(); ++s) {
      if (input[s] > activation[s])
        fault("'" + at + "input_bytes' of stage " + std::to_string(s) + " is more than its 'activation_bytes'");
    }
  }
  /// Checks that state and gradients are no more than a stage's static bytes.
  void check_parts() {
    for (auto const& [key, list] : {std::pair{"state_bytes", &p_.state_bytes}, std::pair{"gradient_bytes", &p_.gradient_bytes}}) {
      if (!list->empty() && p_.static_bytes.empty()) fault(std::string("'") + key + "' is there without 'static_bytes'");
    }
    for (std::size_t s = 0; out_.problem.empty() && s < p_.state_bytes.size(); ++s) {
      if (p_.state_bytes[s] > p_.static_bytes[s]) {
        fault("'state_bytes' of stage " + std::to_string(s) + " is " + std::to_string(p_.state_bytes[s]) +
              ", more than its 'static_bytes', of which it is a part");
      } else if (p_.state_bytes[s] > most_stage_bytes / p_.shard) {
        fault("'state_bytes' of stage " + std::to_string(s) + " is " + std::to_string(p_.state_bytes[s]) + ", a share of " +
              std::to_string(p_.shard) + ", and no stage has more than " + std::to_string(most_stage_bytes));
      }
    }
    for (std::size_t s = 0; out_.problem.empty() && s < p_.gradient_bytes.size(); ++s) {
      std::int64_t const state = p_.state_bytes.empty() ? 0 : p_.state_bytes[s];
      if (p_.gradient_bytes[s] > p_.static_bytes[s] - state) {
        fault("'gradient_bytes' of stage " + std::to_string(s) + " is " + std::to_string(p_.gradient_bytes[s]) +
              ", more than its 'static_bytes' without its 'state_bytes', of which it is a part");
      }
    }
  }
  void read_bytes(std::string const& key, json const* value, std::vector<std::int64_t>& bytes) {
    if (value == nullptr || !out_.problem.empty()) return;
    if (!value->is_array() || value->size() != static_cast<std::size_t>(p_.stages))
      return fault("'" + key + "' is no list with " + for_each_of(p_.stages, "stages"));
    for (json const& one : *value) {
      if (!one.is_number_integer() || one < 0 || one > most_stage_bytes)
        return fault("'" + key + "', entry " + std::to_string(bytes.size()) + ", is " + shown(one) +
                     ", no whole number of bytes from 0 to " + std::to_string(most_stage_bytes));
      bytes.push_back(one.get<std::int64_t>());
    }
  }
  void read_slices() {
    json const* const value = take_known("slices");
    if (value == nullptr || !out_.problem.empty()) return;
    if (!value->is_array() || value->size() < 2 || value->size() > static_cast<std::size_t>(max_micro_batches))
      return fault("'slices' is " + shown(*value) + ", no list with an object for each of 2 slices or more");
    for (json const& one : *value) {
      std::string const at = "slices[" + std::to_string(p_.slices.size()) + "]";
      slice_bytes& of = p_.slices.emplace_back();
      if (!one.is_object()) return fault("'" + at + "' is " + shown(one) + ", no object with lists of bytes");
      std::size_t known = 0;
      for (auto const& [key, list] : profile_slice_bytes) {
        auto const found = one.find(key);
        if (found != one.end()) {
          ++known;
          read_bytes(at + "." + key, &*found, of.*list);
        } else if (list != &slice_bytes::kept) {
          return fault("'" + at + "." + key + "' is missing");
        }
      }
      if (known < one.size()) return fault("'" + at + "' has another key than activation_bytes, kept_bytes and input_bytes");
    }
  }

  read_profile_result out_;
  profile& p_ = out_.value;
  json all_;
  std::set<std::string> unread_;
};

}  // namespace detail

/// Reads a profile strictly: version, unit, number of stages and lists of costs are required, and no key may occur twice or be
/// unknown; lists must have one entry for each stage or boundary. The conditions of the measurement, `layers` and bytes may be
/// missing or null, since a profile may be written by hand.
/// \param text the content of a profile's file
inline read_profile_result read_profile(std::string_view text) { return detail::profile_reader().read(text); }

/// A profile as the JSON text that `read_profile` reads, one line for each key; every number is read back as it was. Later
/// versions keep these keys: `chevron_profile` (1, the version), `unit` ("ms"), `schedule ranks chunks stages micro_batches
/// replicas steps`, `pipeline step` (measured), `forward backward backward_input backward_weight` by stage, `recompute` by stage
/// if an R ran, `communication` by boundary, all of whole microbatches, `hidden` (a share); null stands for a value that was not
/// measured. Where known: `layers`, the number of layers of each stage; `static_bytes activation_bytes kept_bytes input_bytes`,
/// whole numbers, the memory that each stage needs; `state_bytes` and `gradient_bytes`, the parts of `static_bytes` for the
/// optimizer's state, sharded over `shard` replicas, and for gradients; `slices`, an object for each slice of a microbatch with
/// its parts of `activation_bytes`, `kept_bytes` and `input_bytes`; `model`, an object with the model's sizes.
inline std::string write_profile(profile const& p) {
  using json = nlohmann::ordered_json;
  auto const time = [](double ms) { return ms < 0 ? json() : json(ms); };
  auto const times = [&](std::vector<double> const& list) {
    json out = json::array();
    for (double const ms : list) out.push_back(time(ms));
    return out;
  };
  auto const count = [](int number) { return number > 0 ? json(number) : json(); };
  json all = {{"chevron_profile", 1},
              {"unit", "ms"},
              {"schedule", p.schedule},
              {"ranks", count(p.size.ranks)},
              {"chunks", count(p.size.chunks)},
              {"stages", p.stages},
              {"micro_batches", count(p.size.micro_batches)},
              {"replicas", p.replicas},
              {"steps", count(p.steps)},
              {"pipeline", time(p.pipeline)},
              {"step", time(p.step)}};
  for (auto const& [key, list] : detail::profile_times) all[key] = times(p.*list);
  if (!p.recompute.empty()) all["recompute"] = times(p.recompute);
  all["communication"] = times(p.communication);
  all["hidden"] = time(p.hidden);
  if (!p.layers.empty()) all["layers"] = p.layers;
  for (auto const& [key, list] : detail::profile_bytes) {
    if (!(p.*list).empty()) all[key] = p.*list;
  }
  if (!p.state_bytes.empty()) all["shard"] = p.shard;
  for (slice_bytes const& one : p.slices) {
    json& of = all["slices"].emplace_back(json::object());
    for (auto const& [key, list] : detail::profile_slice_bytes) {
      if (!(one.*list).empty()) of[key] = one.*list;
    }
  }
  if (!p.model.empty()) all["model"] = json::parse(p.model);
  std::string out;
  for (auto const& [key, value] : all.items()) {
    // Bytes of a name that are not UTF-8 become the replacement character.
    out += (out.empty() ? "{\n  \"" : ",\n  \"") + key + "\": " + value.dump(-1, ' ', false, json::error_handler_t::replace);
  }
  return out + "\n}\n";
}

}  // namespace chevron
