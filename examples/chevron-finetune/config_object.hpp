#pragma once

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <string>
#include <system_error>
#include <utility>

#include <nlohmann/json.hpp>

#include <chevron/checkpoint/strict_json.hpp>
#include <chevron/run/core/error.hpp>

/// \file
/// A configuration file, read key by key, with errors that name file, key and value.

namespace chevron::finetune {

/// An object of a configuration file: the whole file, or one that stands in it. A key that is missing has a default; null is a
/// value, and refused where the key takes none.
class config_object {
 public:
  using json = nlohmann::json;

  /// \throws usage_error for a file that cannot be read, is above 1 MiB, or holds no JSON object
  explicit config_object(std::filesystem::path const& file) : file_(file.string()) {
    std::error_code failed;
    std::uintmax_t const size = std::filesystem::file_size(file, failed);
    if (failed) {
      throw usage_error(file_ + " cannot be read: " + failed.message() +
                        ". Remedy: the folder of a Hugging Face model, with its config.json");
    }
    if (size > (std::uintmax_t{1} << 20))
      throw usage_error(file_ + " has " + std::to_string(size) + " bytes: it is no configuration");
    std::string text(size, ' ');
    std::ifstream in(file, std::ios::binary);
    in.read(text.data(), static_cast<std::streamsize>(size));
    if (!in) throw usage_error(file_ + " cannot be read: " + std::strerror(errno));
    try {
      all_ = detail::parse_strictly(text, 16);
    } catch (std::exception const& e) {
      throw usage_error(file_ + " is no JSON of this kind: " + detail::in_short(e));
    }
    if (!all_.is_object()) throw usage_error(file_ + " is no JSON object");
  }

  /// The object at `key`.
  config_object object(std::string const& key) const {
    if (!has(key) || !all_.at(key).is_object()) refuse(key, "an object");
    return {file_, named(key) + ".", all_.at(key)};
  }

  [[noreturn]] void refuse(std::string const& key, std::string const& remedy) const {
    std::string value = has(key) ? all_.at(key).dump() : "missing";
    if (value.size() > 80) value = value.substr(0, 80) + "…";
    throw usage_error(file_ + ": `" + named(key) + "` is " + value + ". Remedy: " + remedy);
  }

  json const& all() const { return all_; }
  bool has(std::string const& key) const { return all_.contains(key); }
  bool is_null(std::string const& key) const { return has(key) && all_.at(key).is_null(); }
  /// Missing, null, or an object or list of nothing.
  bool is_empty(std::string const& key) const { return !has(key) || all_.at(key).empty(); }

  /// A whole number from `least` to 2^24.
  std::int64_t size(std::string const& key, std::int64_t otherwise, std::int64_t least = 1) const {
    if (!has(key)) return otherwise;
    constexpr std::int64_t most = std::int64_t{1} << 24;
    json const& found = all_.at(key);
    if (!found.is_number_unsigned() || found.get<std::uint64_t>() > static_cast<std::uint64_t>(most) ||
        found.get<std::int64_t>() < least)
      refuse(key, "a whole number from " + std::to_string(least) + " to " + std::to_string(most));
    return found.get<std::int64_t>();
  }
  /// A number above 0, which must be there.
  double number(std::string const& key) const {
    if (!has(key) || !all_.at(key).is_number() || !(all_.at(key).get<double>() > 0) || !(all_.at(key).get<double>() < 1e12))
      refuse(key, "a number above 0");
    return all_.at(key).get<double>();
  }
  double number(std::string const& key, double otherwise) const { return has(key) ? number(key) : otherwise; }
  bool flag(std::string const& key, bool otherwise) const {
    if (!has(key)) return otherwise;
    if (!all_.at(key).is_boolean()) refuse(key, "true or false");
    return all_.at(key).get<bool>();
  }
  std::string word(std::string const& key, std::string const& otherwise) const {
    if (!has(key)) return otherwise;
    if (!all_.at(key).is_string()) refuse(key, "a word");
    return all_.at(key).get<std::string>();
  }

 private:
  config_object(std::string file, std::string prefix, json all)
      : file_(std::move(file)), prefix_(std::move(prefix)), all_(std::move(all)) {}

  std::string named(std::string const& key) const { return prefix_ + key; }

  std::string file_, prefix_;
  json all_;
};

}  // namespace chevron::finetune
