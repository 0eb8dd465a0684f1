#pragma once

#include <algorithm>
#include <cstddef>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <CLI/CLI.hpp>

/// \file
/// Completion of commands, flags and values in a shell: a script for bash, zsh or fish, made from a parser's own options.
///
/// The value of a flag is read as its type's name writes it: alternatives with `|` between; words without a capital letter stand
/// for themselves; `FILE`, `FILE.csv`, `CONFIG.json` and `PATH` are files, `DIR` and `FOLDER` folders; each other word in
/// capitals stands for a value that the program's user makes up, or for the words that the program lists for it.

namespace completion {

/// Words for a value in capitals: the names of schedules for `NAME`.
using vocabulary = std::map<std::string, std::vector<std::string>>;

namespace detail {

struct option {
  std::vector<std::string> flags;  ///< with dashes; empty: only an argument without a flag
  bool positional = false;
  bool takes_value = false, several = false;
  std::string value;                 ///< the type's name
  std::vector<std::string> words;    ///< values
  std::vector<std::string> endings;  ///< of files, with the dot
  bool files = false, folders = false;
  std::string help;
};

struct command {
  std::string name, help;
  std::vector<option> options;
};

inline std::vector<std::string> split(std::string const& text, char at) {
  std::vector<std::string> out;
  for (std::size_t begin = 0; begin <= text.size();) {
    std::size_t const end = std::min(text.find(at, begin), text.size());
    if (end > begin) out.push_back(text.substr(begin, end - begin));
    begin = end + 1;
  }
  return out;
}

inline bool has_capital(std::string const& word) {
  return std::any_of(word.begin(), word.end(), [](char c) { return c >= 'A' && c <= 'Z'; });
}

/// What may stand for a value of this type.
inline void read_value(option& to, vocabulary const& known) {
  for (std::string part : split(to.value, '|')) {
    part = part.substr(0, part.find(','));
    if (auto const listed = known.find(part); listed != known.end()) {
      to.words.insert(to.words.end(), listed->second.begin(), listed->second.end());
      continue;
    }
    if (!has_capital(part)) {
      if (!part.empty() && part != "...") to.words.push_back(part);
      continue;
    }
    std::string const name = part.substr(0, part.find('.'));
    if (name == "DIR" || name == "FOLDER") to.folders = true;
    if (name != "FILE" && name != "CONFIG" && name != "PATH") continue;
    to.files = true;
    if (name != part) to.endings.push_back(part.substr(name.size()));
  }
}

/// The first part of a help text, for lists in the shell.
inline std::string brief(std::string text) {
  for (char const* end : {"; ", ": ", ". "}) text = text.substr(0, text.find(end));
  constexpr std::size_t most = 90;
  if (text.size() <= most) return text;
  return text.substr(0, text.rfind(' ', most)) + " …";
}

inline command read(CLI::App const& app, vocabulary const& known) {
  command out{app.get_name(), brief(app.get_description()), {}};
  for (CLI::Option const* const one : app.get_options()) {
    option read;
    for (std::string const& name : one->get_lnames()) read.flags.push_back("--" + name);
    for (std::string const& name : one->get_snames()) read.flags.push_back("-" + name);
    read.positional = one->get_positional();
    read.takes_value = one->get_items_expected_max() > 0;
    read.several = one->get_items_expected_max() > 1;
    read.value = read.takes_value ? one->get_type_name() : "";
    read.help = brief(one->get_description());
    read_value(read, known);
    out.options.push_back(std::move(read));
  }
  return out;
}

/// Commands of a program, the program itself first.
inline std::vector<command> commands_of(CLI::App const& app, vocabulary const& known) {
  std::vector<command> out{read(app, known)};
  for (CLI::App const* const one : app.get_subcommands([](CLI::App const*) { return true; })) out.push_back(read(*one, known));
  return out;
}

inline std::string joined(std::vector<std::string> const& words, char const* between) {
  std::string out;
  for (std::string const& word : words) out += (out.empty() ? "" : between) + word;
  return out;
}

/// A text in single quotes, for any of the shells.
inline std::string quoted(std::string const& text, char const* quote) {
  std::string out = "'";
  for (char const c : text) out += c == '\'' ? std::string(quote) : std::string(1, c);
  return out + "'";
}
inline std::string in_quotes(std::string const& text) { return quoted(text, "'\\''"); }

inline std::string function_name(std::string name) {
  for (char& c : name) c = c == '-' ? '_' : c;
  return "_" + name;
}

/// Names of commands.
inline std::vector<std::string> names(std::vector<command> const& commands) {
  std::vector<std::string> out;
  for (std::size_t i = 1; i < commands.size(); ++i) out.push_back(commands[i].name);
  return out;
}

inline std::string bash(std::vector<command> const& commands) {
  std::string const program = commands.front().name, function = function_name(program);
  std::string flags, several, values, alone;
  for (command const& one : commands) {
    std::string const of = &one == &commands.front() ? "" : one.name;
    std::vector<std::string> all;
    for (option const& o : one.options) {
      all.insert(all.end(), o.flags.begin(), o.flags.end());
      std::vector<std::string> patterns;
      for (std::string const& flag : o.flags) patterns.push_back("\"" + of + " " + flag + "\"");
      if (o.positional) patterns.push_back("\"" + of + " \"");
      if (!o.takes_value || patterns.empty()) continue;
      std::vector<std::string> endings;
      for (std::string const& ending : o.endings) endings.push_back("*" + ending);
      std::string const files = !o.files ? (o.folders ? "folders" : "none") : o.endings.size() == 1 ? endings.front() : "all";
      values += "    " + joined(patterns, " | ") + ") words=" + in_quotes(joined(o.words, " ")) + " files=" + in_quotes(files) +
                " ;;\n";
      for (std::string const& flag : o.flags) {
        if (o.several)
          several += "    \"" + of + " " + flag + "\") return 0 ;;\n";
        else
          alone += "    \"" + of + " " + flag + "\") [ \"$2\" -eq 1 ] && return 0 ;;\n";
      }
    }
    flags += "    \"" + of + "\") flags=" + in_quotes(joined(all, " ")) + " ;;\n";
  }
  return "# Completion of " + program + " in bash: eval \"$(" + program + " --completion bash)\"\n" + function +
         "_takes() {  # <command and flag> <words since the flag>: whether the next word is a value of the flag\n"
         "  case \"$1\" in\n" +
         several + alone + "  esac\n  return 1\n}\n" + function + R"sh(() {
  local cur=${COMP_WORDS[COMP_CWORD]} command="" flag="" words="" files="none" flags="" word i since=0 one commands=)sh" +
         in_quotes(joined(names(commands), " ")) + R"sh(
  COMPREPLY=()
  [ "$cur" = "=" ] && cur=""  # bash takes --flag=value apart
  for ((i = 1; i < COMP_CWORD; ++i)); do
    one=${COMP_WORDS[i]}
    if [ -z "$command" ]; then
      for word in $commands; do [ "$word" = "$one" ] && command=$one; done
    fi
    case "$one" in
      -?*) flag=$one since=0 ;;
      =) continue ;;
    esac
    since=$((since + 1))
  done
  )sh" + function +
         R"sh(_takes "$command $flag" "$since" || flag=""
  [[ "$cur" == -* ]] && [ "$since" -gt 1 ] && flag=""
  if [ -z "$flag" ]; then
    case "$command" in
)sh" + flags +
         R"sh(    esac
    if [[ "$cur" == -* ]]; then
      mapfile -t COMPREPLY < <(compgen -W "$flags" -- "$cur")
      return
    fi
    [ -z "$command" ] && words=$commands
  fi
  case "$command $flag" in
)sh" + values +
         R"sh(  esac
  mapfile -t COMPREPLY < <(
    compgen -W "$words" -- "$cur"
    case "$files" in
      none) ;;
      folders) compgen -d -- "$cur" ;;
      all) compgen -f -- "$cur" ;;
      *)
        compgen -f -X "!$files" -- "$cur"
        compgen -d -- "$cur"
        ;;
    esac
  )
}
complete -o filenames -F )sh" +
         function + " " + program + "\n";
}

/// What zsh shall offer for a value: `:FORMAT:(text svg)`.
inline std::string zsh_value(option const& o) {
  std::vector<std::string> actions;
  if (!o.words.empty()) actions.push_back("compadd -- " + joined(o.words, " "));
  if (o.files && o.endings.size() == 1)
    actions.push_back("_files -g \"*" + o.endings.front() + "\"");
  else if (o.files)
    actions.push_back("_files");
  else if (o.folders)
    actions.push_back("_files -/");
  std::string value = o.value;
  for (char& c : value) c = c == ':' ? ' ' : c;
  std::string const all = actions.empty() ? " " : actions.size() == 1 ? actions.front() : "{ " + joined(actions, "; ") + " }";
  return ":" + value + ":" + (actions.size() == 1 && !o.words.empty() ? "(" + joined(o.words, " ") + ")" : all);
}

inline std::string zsh(std::vector<command> const& commands) {
  std::string const program = commands.front().name, function = function_name(program);
  auto const explained = [](std::string const& help) {
    std::string out;
    for (char const c : help) out += c == '[' || c == ']' || c == '\\' ? std::string("\\") + c : std::string(1, c);
    return out;
  };
  auto const specifications = [&](command const& one, char const* before) {
    std::string out;
    for (option const& o : one.options) {
      for (std::string const& flag : o.flags) {
        std::string const sign = !o.takes_value ? "" : flag.starts_with("--") ? "=" : "+";
        out += before + in_quotes((o.several ? "*" : "") + flag + sign + "[" + explained(o.help) + "]" +
                                  (o.takes_value ? zsh_value(o) : ""));
      }
      if (o.positional) out += before + in_quotes((o.several ? "*" : "") + zsh_value(o));
    }
    return out;
  };
  std::string out = "#compdef " + program + "\n# Completion of " + program + " in zsh: source <(" + program +
                    " --completion zsh)\n" + function + "() {\n  local context state line\n  typeset -A opt_args\n";
  if (commands.size() == 1) {
    out += "  _arguments" + specifications(commands.front(), " \\\n    ") + "\n";
  } else {
    out += "  local -a commands=(\n";
    for (std::size_t i = 1; i < commands.size(); ++i) {
      std::string help = commands[i].help;
      out += "    " + in_quotes(commands[i].name + ":" + help) + "\n";
    }
    out += "  )\n  _arguments -C" + specifications(commands.front(), " \\\n    ") +
           " \\\n    '1: :->command' \\\n    '*:: :->rest'\n  case $state in\n    command) _describe command commands ;;\n    "
           "rest)\n"
           "      case $words[1] in\n";
    for (std::size_t i = 1; i < commands.size(); ++i)
      out += "        " + commands[i].name + ")\n          _arguments" + specifications(commands[i], " \\\n            ") +
             "\n          ;;\n";
    out += "      esac\n      ;;\n  esac\n";
  }
  return out + "}\nif [ \"$funcstack[1]\" = \"" + function + "\" ]; then " + function + " \"$@\"; else compdef " + function +
         " " + program + "; fi\n";
}

inline std::string fish(std::vector<command> const& commands) {
  std::string const program = commands.front().name;
  auto const words = [](std::string const& text) { return quoted(text, "\\'"); };
  std::string const all = joined(names(commands), " ");
  std::string out =
      "# Completion of " + program + " in fish: " + program + " --completion fish | source\ncomplete -c " + program + " -f\n";
  for (std::size_t i = 1; i < commands.size(); ++i)
    out +=
        "complete -c " + program + " -n '__fish_use_subcommand' -a " + commands[i].name + " -d " + words(commands[i].help) + "\n";
  for (command const& one : commands) {
    bool const root = &one == &commands.front();
    std::string const when = commands.size() == 1 ? ""
                             : root               ? " -n '__fish_use_subcommand'"
                                                  : " -n '__fish_seen_subcommand_from " + one.name + "'";
    for (option const& o : one.options) {
      std::string const values =
          (o.words.empty() ? "" : " -a " + words(joined(o.words, " "))) + (o.files     ? " -F"
                                                                           : o.folders ? " -a '(__fish_complete_directories)'"
                                                                                       : "");
      if (!o.flags.empty()) {
        out += "complete -c " + program + when;
        for (std::string const& flag : o.flags) out += flag.starts_with("--") ? " -l " + flag.substr(2) : " -s " + flag.substr(1);
        out += (o.takes_value ? (o.files ? " -r" : " -x") + values : "") + " -d " + words(o.help) + "\n";
      }
      if (o.positional && !values.empty()) out += "complete -c " + program + when + values + "\n";
    }
  }
  return out;
}

}  // namespace detail

/// Adds `--completion bash|zsh|fish`, which prints the script and ends as `--version` does. To be called once all of the
/// program's options are in the parser or will be when it reads the command line.
/// \param known words for values in capitals
inline void add_to(CLI::App& app, vocabulary known) {
  static std::map<std::string, std::string (*)(std::vector<detail::command> const&)> const shells = {
      {"bash", detail::bash}, {"zsh", detail::zsh}, {"fish", detail::fish}};
  auto const print = [&app, known = std::move(known)](std::string const& shell) {
    auto const one = shells.find(shell);
    if (one == shells.end()) throw CLI::ValidationError("--completion " + shell + " is not known: choose one of bash, zsh, fish");
    throw CLI::CallForVersion(one->second(detail::commands_of(app, known)), CLI::ExitCodes::Success);
  };
  app.add_option_function<std::string>("--completion", print,
                                       "print a script with which this shell completes commands, flags and values")
      ->type_name("bash|zsh|fish");
}

}  // namespace completion
