#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include <CLI/CLI.hpp>

/// What was meant by a word that is not known.
namespace unknown {

inline std::string lower_case(std::string s) {
  for (char& c : s) c = c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  return s;
}

/// Insertions, deletions and replacements that lead from one word to the other.
inline int edits(std::string const& a, std::string const& b) {
  std::vector<int> row(b.size() + 1);
  for (std::size_t j = 0; j < row.size(); ++j) row[j] = static_cast<int>(j);
  for (std::size_t i = 1; i <= a.size(); ++i) {
    int diagonal = row[0];
    row[0] = static_cast<int>(i);
    for (std::size_t j = 1; j <= b.size(); ++j) {
      int const replaced = diagonal + (a[i - 1] == b[j - 1] ? 0 : 1);
      diagonal = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, replaced});
    }
  }
  return row.back();
}

/// The first letters of a name's parts: lr of learning-rate.
inline std::string initials(std::string const& name) {
  std::string out;
  for (std::size_t i = 0; i < name.size(); ++i) {
    if (i == 0 || name[i - 1] == '-') out += name[i];
  }
  return out;
}

/// The name most like the one typed, or nothing when none is.
inline std::string nearest(std::string const& typed, std::vector<std::string> const& names) {
  std::string const wanted = lower_case(typed);
  std::string best;
  int fewest = 1000;
  for (std::string const& name : names) {
    std::string const candidate = lower_case(name);
    bool const part = wanted.size() >= 2 && (candidate.find(wanted) != std::string::npos || initials(candidate) == wanted);
    int const distance = part ? 0 : edits(wanted, candidate);
    if (distance <= std::max<int>(2, static_cast<int>(wanted.size()) / 2) && distance < fewest) {
      fewest = distance;
      best = name;
    }
  }
  return best;
}

/// What to say of the first word that a command line has too much: a flag that is not known, or a word that belongs to none.
/// \param left what CLI11 could not place, in its order
inline std::string not_expected(CLI::App const& app, std::vector<std::string> const& left) {
  auto const flag = std::find_if(left.begin(), left.end(), [](std::string const& word) { return word.starts_with("-"); });
  if (flag == left.end()) {
    return "'" + (left.empty() ? std::string() : left.front()) + "' was not expected: it belongs to no flag.";
  }
  std::string const typed = flag->substr(0, flag->find('='));
  std::size_t const begin = typed.find_first_not_of('-');
  std::vector<std::string> names;
  for (CLI::Option const* option : app.get_options()) {
    names.insert(names.end(), option->get_lnames().begin(), option->get_lnames().end());
  }
  std::string const like = nearest(begin == typed.npos ? typed : typed.substr(begin), names);
  return typed + " was not expected: there is no such flag" + (like.empty() ? "." : "; did you mean --" + like + "?");
}

}  // namespace unknown
