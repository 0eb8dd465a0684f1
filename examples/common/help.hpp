#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include <CLI/CLI.hpp>

/// \file
/// Help of a program's flags in words: the first column has a flag and the name of its value, and the description ends with the
/// value that holds without the flag, or says that the flag must be given.

namespace help {

/// Writes an option's line of `--help`. The default is the option's own (`capture_default_str`), so that no description repeats it.
struct formatter : CLI::Formatter {
  std::string make_option_opts(CLI::Option const* option) const override {
    std::string const value = option->get_type_size() == 0 ? "" : option->get_type_name();
    if (value.empty()) return "";
    bool const several = option->get_expected_max() >= CLI::detail::expected_max_vector_size;
    return " " + value + (several ? " ..." : "");
  }

  std::string make_option_desc(CLI::Option const* option) const override {
    std::string const words = option->get_description(), fallback = option->get_type_size() == 0 ? "" : option->get_default_str();
    if (option->get_required()) return words + "; must be given";
    return fallback.empty() ? words : words + "; without this flag, " + fallback;
  }

  /// The description of a value with and without a flag stands once, beside the value without.
  std::string make_option(CLI::Option const* option, bool positional) const override {
    std::string line = CLI::Formatter::make_option(option, positional);
    std::size_t const at = line.rfind(make_option_desc(option));
    if (positional || !option->get_positional() || at == std::string::npos) return line;
    return line.replace(at, std::string::npos, "the same, as a flag\n");
  }
};

/// Makes a program and the commands that are added to it later write their help in these words.
inline void add_to(CLI::App& app) {
  app.formatter(std::make_shared<formatter>());
  app.set_help_flag("-h,--help", "print this help, and end");
}

}  // namespace help
