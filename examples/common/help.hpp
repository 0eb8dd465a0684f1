#pragma once

#include <unistd.h>

#include <CLI/CLI.hpp>
#include <cstddef>
#include <memory>
#include <sstream>
#include <string>

#include <chevron/base/format.hpp>

#include "terminal.hpp"

/// \file
/// Help of a program's flags in words: the first column has a flag and the name of its value, and the description ends with the
/// value that holds without the flag, or says that the flag must be given. On a terminal lines are as long as it is wide;
/// elsewhere a description is one line, so that a search for a word finds all of it.

namespace help {

/// A help text whose longer lines continue below the beginning of their description. \param width columns of a line at most; a
/// longer word is a line of its own
inline std::string wrapped(std::string const& text, int width) {
  std::string out;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line); out += '\n') {
    if (chevron::show::columns_of(line) <= width) {
      out += line;
      continue;
    }
    // Two spaces or more are in front of the description; without any, the whole line is one.
    std::size_t const first = line.find_first_not_of(' ');
    std::size_t const gap = line.find("  ", first);
    std::size_t const indent = gap == std::string::npos ? first : line.find_first_not_of(' ', gap);
    out += line.substr(0, indent);
    int const begin = static_cast<int>(indent);
    int at = begin;
    std::istringstream words(line.substr(indent));
    for (std::string word; words >> word; at += chevron::show::columns_of(word)) {
      if (at > begin && at + 1 + chevron::show::columns_of(word) > width) {
        out += '\n' + std::string(indent, ' ');
        at = begin;
      }
      if (at > begin) out += ' ', ++at;
      out += word;
    }
  }
  return out;
}

/// Writes an option's line of `--help`. The default is the option's own (`capture_default_str`), so that no description repeats
/// it.
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

  std::string make_help(CLI::App const* app, std::string name, CLI::AppFormatMode mode) const override {
    std::string const text = CLI::Formatter::make_help(app, name, mode);
    int const width = terminal::columns(STDOUT_FILENO, 60, 0);
    return mode == CLI::AppFormatMode::Sub || width == 0 ? text : wrapped(text, width);
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
