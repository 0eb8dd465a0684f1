#pragma once

#include <cctype>
#include <string>
#include <string_view>
#include <vector>

#include <chevron/catalogue/catalogue.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// Shared by tests of pictures: plans from text, and readers of the output that are independent of the writers.

namespace show_test {

/// A plan from rows of actions such as `{"0F0 0B0", "1F0 1B0"}`, pairs as `(0F1;0B0)`; where stages live is given apart.
inline chevron::plan plan_from(std::vector<std::string> const& rows, std::vector<int> const& rank_of_stage, int micro_batches,
                               char const* name = "by hand") {
  using namespace chevron;
  plan p;
  int total = 0;
  std::vector<std::vector<action>> lists;
  for (std::string const& row : rows) {
    std::vector<action> list;
    std::size_t i = 0;
    auto const digits = [&] {
      int value = 0;
      while (i < row.size() && std::isdigit(static_cast<unsigned char>(row[i])) != 0) value = value * 10 + (row[i++] - '0');
      return value;
    };
    while (i < row.size()) {
      if (std::isdigit(static_cast<unsigned char>(row[i])) == 0) {
        ++i;
        continue;
      }
      bool const fused = i > 0 && row[i - 1] == '(';
      int const stage = digits();
      kind const what = std::string_view("FBIW").find(row[i]) == 0   ? kind::forward
                        : std::string_view("FBIW").find(row[i]) == 1 ? kind::backward
                        : std::string_view("FBIW").find(row[i]) == 2 ? kind::backward_input
                                                                     : kind::backward_weight;
      ++i;
      list.push_back(make_action(what, stage, digits()));
      list.back().fused = fused ? 1 : 0;
    }
    total += static_cast<int>(list.size());
    lists.push_back(list);
  }
  int const ranks = static_cast<int>(rows.size());
  p.size = {ranks, micro_batches, static_cast<int>(rank_of_stage.size()) / ranks};
  p.stages = static_cast<int>(rank_of_stage.size());
  p.actions = buffer<action>(total);
  p.begin = buffer<int>(ranks + 1);
  p.rank_of = buffer<std::int16_t>(p.stages);
  p.name = name;
  int at = 0;
  for (int r = 0; r < ranks; ++r) {
    p.begin.data[r] = at;
    for (action a : lists[static_cast<std::size_t>(r)]) p.actions.data[at++] = a;
  }
  p.begin.data[ranks] = at;
  for (int s = 0; s < p.stages; ++s) p.rank_of.data[s] = static_cast<std::int16_t>(rank_of_stage[static_cast<std::size_t>(s)]);
  return p;
}

/// Calls `visit(plan)` for every schedule of the catalogue at a few shapes.
template <class Visit>
void for_each_plan(Visit visit) {
  for (chevron::shape size :
       {chevron::shape{4, 8, 0}, chevron::shape{1, 1, 0}, chevron::shape{2, 5, 0}, chevron::shape{8, 16, 0}}) {
    chevron::catalogue::for_each([&](auto const& one) {
      chevron::plan const p = chevron::expand(one, size);
      visit(p);
    });
  }
}

/// The text of an action in a plan's files: `3F0`, or a pair `(0F7;7B3)OVERLAP_F_B`. Empty for a pair's second half.
inline std::string spelled(chevron::plan_view const& plan, int rank, int i) {
  if (i > plan.begin[rank] && plan.actions[i - 1].fused != 0) return "";
  std::string const one = to_text(plan.actions[i]).str();
  return plan.actions[i].fused == 0 ? one : "(" + one + ";" + to_text(plan.actions[i + 1]).str() + ")OVERLAP_F_B";
}

inline std::vector<std::string> split(std::string_view text, char at) {
  std::vector<std::string> out;
  std::size_t from = 0;
  while (true) {
    std::size_t const to = text.find(at, from);
    out.emplace_back(text.substr(from, to == std::string_view::npos ? to : to - from));
    if (to == std::string_view::npos) return out;
    from = to + 1;
  }
}

/// One XML element as it was met: its name and its attributes.
struct element {
  std::string name;
  std::vector<std::pair<std::string, std::string>> attributes;
  std::string operator[](std::string_view key) const {
    for (auto const& [k, v] : attributes) {
      if (k == key) return v;
    }
    return "";
  }
};

/// A strict reader of the little XML that is written here: every tag closed in order, every attribute quoted, once each, `&` only
/// as an entity, no `<` in text. Returns the elements in order; `error` gets the first violation.
inline std::vector<element> read_xml(std::string const& xml, std::string& error) {
  std::vector<element> out;
  std::vector<std::string> open;
  bool had_root = false;
  auto const good_entities = [](std::string_view words) {
    for (std::size_t i = words.find('&'); i != std::string_view::npos; i = words.find('&', i + 1)) {
      bool good = false;
      for (std::string_view entity : {"&amp;", "&lt;", "&gt;", "&quot;", "&#39;"})
        good = good || words.substr(i, entity.size()) == entity;
      if (!good) return false;
    }
    return true;
  };
  std::size_t i = 0;
  while (i < xml.size()) {
    if (xml[i] != '<') {
      std::size_t const end = std::min(xml.find('<', i), xml.size());
      std::string const words = xml.substr(i, end - i);
      if (!good_entities(words)) error = "bad entity in: " + words;
      if (open.empty() && words.find_first_not_of(" \n") != std::string::npos) error = "text outside the root: " + words;
      i = end;
      continue;
    }
    std::size_t const end = xml.find('>', i);
    if (end == std::string::npos) {
      error = "a tag without an end";
      return out;
    }
    std::string tag = xml.substr(i + 1, end - i - 1);
    i = end + 1;
    if (tag.starts_with("/")) {
      if (open.empty() || open.back() != tag.substr(1)) {
        error = "closes what is not open: " + tag;
        return out;
      }
      open.pop_back();
      continue;
    }
    bool const alone = tag.ends_with("/");
    if (alone) tag.pop_back();
    element e;
    std::size_t at = tag.find(' ');
    e.name = tag.substr(0, at);
    while (at < tag.size()) {
      if (tag[at] == ' ') {
        ++at;
        continue;
      }
      std::size_t const equals = tag.find("=\"", at);
      std::size_t const close = equals == std::string::npos ? equals : tag.find('"', equals + 2);
      if (close == std::string::npos) {
        error = "an attribute that is not quoted: " + tag;
        return out;
      }
      std::string const key = tag.substr(at, equals - at);
      std::string const value = tag.substr(equals + 2, close - equals - 2);
      if (!e[key].empty()) error = "an attribute twice: " + tag;
      if (!good_entities(value)) error = "bad entity in: " + tag;
      e.attributes.emplace_back(key, value);
      at = close + 1;
    }
    if (open.empty() && had_root) error = "a second root: " + tag;
    had_root = true;
    if (!alone) open.push_back(e.name);
    out.push_back(e);
  }
  if (!open.empty()) error = "never closed: " + open.back();
  return out;
}

}  // namespace show_test
