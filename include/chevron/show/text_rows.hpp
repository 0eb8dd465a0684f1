#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <chevron/show/format.hpp>
#include <chevron/show/picture.hpp>
#include <chevron/show/text_scale.hpp>

/// \file
/// The rows of a timeline for a terminal.

namespace chevron::show {

/// The rows of a picture: an axis and one line a rank, in as many bands as the width asks for, and the legend. Only compute
/// is drawn. A picture that would need too many bands becomes an overview: each column shows the letter that fills most of it.
template <class = void>
std::string rows_text(picture const& p, text_style const& style = {}) {
  char const* const dot = style.unicode ? "\xc2\xb7" : ".";
  char const* const bar = style.unicode ? "\xe2\x94\x80" : "-";
  char const* const edge = style.unicode ? "\xe2\x96\x95" : " ";
  int const digits = static_cast<int>(std::to_string(std::max(p.rows - 1, 0)).size());
  int const prefix = std::max(5, digits + 2);
  int const room = std::max(20, style.width - prefix);
  double const zero = first_start(p);
  double makespan = 0;
  for (box const& b : p.boxes) {
    if (is_compute(b.op.kind)) makespan = std::max(makespan, b.end - zero);
  }
  detail::scale const scale = detail::scale_for(p, zero, makespan, room);
  if (scale.columns == 0) return "nothing to draw\n";

  std::vector<std::vector<detail::cell>> rows(static_cast<std::size_t>(p.rows),
                                              std::vector<detail::cell>(static_cast<std::size_t>(scale.columns)));
  // Overview: how much of each column each kind and chunk fills.
  int const chunks = std::max(p.size.chunks, 1);
  std::size_t const sorts = static_cast<std::size_t>(compute_kinds * chunks);
  std::vector<double> covered(scale.overview ? rows.size() * static_cast<std::size_t>(scale.columns) * sorts : 0);
  for (auto& row : rows) {
    for (auto& c : row) c.glyph = style.colour ? " " : dot;
  }
  bool present[compute_kinds] = {};
  bool pairs = false;
  for (std::size_t index = 0; index < p.boxes.size(); ++index) {
    box const& b = p.boxes[index];
    if (!is_compute(b.op.kind)) continue;
    present[static_cast<int>(b.op.kind)] = true;
    auto& row = rows[static_cast<std::size_t>(b.rank)];
    double left = (b.start - zero) * scale.columns_per_unit;
    double right = (b.end - zero) * scale.columns_per_unit;
    int const background = style.colour ? detail::background_of(b.op.kind, b.chunk, p.size.chunks) : 1;
    if (scale.overview) {
      if (b.of_pair != half::none) (b.of_pair == half::first ? right : left) = (left + right) / 2;
      for (int i = static_cast<int>(left); i < scale.columns && i < right; ++i) {
        std::size_t const at = static_cast<std::size_t>(b.rank * scale.columns + i) * sorts;
        covered[at + static_cast<std::size_t>(static_cast<int>(b.op.kind) * chunks + std::min(b.chunk, chunks - 1))] +=
            std::min(right, i + 1.0) - std::max(left, static_cast<double>(i));
      }
      continue;
    }
    int begin = static_cast<int>(std::lround(left));
    int end = std::min(static_cast<int>(std::lround(right)), scale.columns);
    std::string const label = detail::label_of(b, p.size.chunks);
    int const length = static_cast<int>(label.size());
    if (b.of_pair != half::none) {
      pairs = true;
      std::size_t const other = b.of_pair == half::first ? index + 1 : index - 1;
      int const others = static_cast<int>(detail::label_of(p.boxes[other], p.size.chunks).size());
      bool const first = b.of_pair == half::first;
      int const middle = detail::middle_of_pair(begin, end, first ? length : others, first ? others : length, scale.band);
      (first ? end : begin) = middle;
    }
    // A box cut by the end of a band carries its label where there is more room.
    int const cut = (begin / scale.band + 1) * scale.band;
    int const label_at = cut < end && cut - begin < length && end - cut > cut - begin ? cut : begin;
    for (int i = begin; i < end; ++i) {
      int const in_label = i - label_at;
      bool const last = i == end - 1 && end - begin > length;
      auto& c = row[static_cast<std::size_t>(i)];
      c.edge = last && style.colour && b.of_pair != half::first;
      if (in_label >= 0 && in_label < length)
        c.glyph = label[static_cast<std::size_t>(in_label)];
      else if (last && b.of_pair == half::first)
        c.glyph = style.colour ? " " : "+";
      else if (last)
        c.glyph = style.colour ? edge : " ";
      else
        c.glyph = style.colour ? " " : bar;
      c.background = background;
    }
  }

  for (std::size_t column = 0; column * sorts < covered.size(); ++column) {
    auto const from = covered.begin() + static_cast<std::ptrdiff_t>(column * sorts);
    auto const most = std::max_element(from, from + static_cast<std::ptrdiff_t>(sorts));
    double busy = 0;
    for (auto i = from; i != from + static_cast<std::ptrdiff_t>(sorts); ++i) busy += *i;
    if (busy < 0.5) continue;
    int const which = static_cast<int>(most - from);
    box sample;
    sample.op.kind = static_cast<kind>(which / chunks);
    sample.chunk = which % chunks;
    std::string const label = detail::label_of(sample, std::min(chunks, 2));
    int const background = style.colour ? detail::background_of(sample.op.kind, sample.chunk, chunks) : 1;
    rows[column / static_cast<std::size_t>(scale.columns)][column % static_cast<std::size_t>(scale.columns)] = {
        label.substr(0, 1), background, false};
  }

  std::string out;
  for (int from = 0; from < scale.columns; from += scale.band) {
    int const to = std::min(from + scale.band, scale.columns);
    if (from > 0) out += "\n";
    out += "rank" + detail::spaces(prefix - 4) + detail::axis(from, to, scale.columns_per_unit, 0) + "\n";
    for (int r = 0; r < p.rows; ++r) {
      std::string const name = std::to_string(r);
      out += detail::spaces(prefix - 1 - static_cast<int>(name.size())) + name + " ";
      std::string line = detail::render(rows[static_cast<std::size_t>(r)], from, to, style.colour);
      while (!line.empty() && line.back() == ' ') line.pop_back();
      out += line + "\n";
    }
  }

  std::vector<std::string> legend;
  for (int k = 0; k < compute_kinds; ++k) {
    if (!present[k]) continue;
    std::string const letter = letters_of(static_cast<kind>(k));
    std::string sample = letter;
    if (style.colour) {
      int const background = detail::background_of(static_cast<kind>(k), 0, p.size.chunks);
      sample = detail::paint(background, detail::foreground_on(background)) + letter + "\x1b[0m";
    }
    legend.push_back(sample + " " + row_of(static_cast<kind>(k)).words);
  }
  if (scale.overview) {
    legend.push_back("overview: a column is " + number(1 / scale.columns_per_unit, 3) + (p.unit.empty() ? "" : " " + p.unit));
  } else {
    legend.push_back(p.size.chunks > 2 ? "5F3: stage 5, microbatch 3" : "F3: microbatch 3");
  }
  if (p.size.chunks == 2) legend.push_back("lower case: second chunk");
  if (pairs) legend.push_back(style.colour ? "two colours: a pair, run as one" : "F3+B1: a pair, run as one");
  if (!style.colour) legend.push_back(std::string(dot) + " idle");
  // Escape sequences take no columns: break the lines by the plain words.
  std::string line;
  int columns = 0;
  out += "\n";
  for (std::string const& word : legend) {
    int const width = columns_of(word) - (word.find('\x1b') == std::string::npos ? 0 : static_cast<int>(word.find("m") + 1 + 4));
    if (columns > 0 && columns + 3 + width > style.width) {
      out += line + "\n";
      line.clear();
      columns = 0;
    }
    line += (columns > 0 ? "   " : "") + word;
    columns += (columns > 0 ? 3 : 0) + width;
  }
  return out + line + "\n";
}

}  // namespace chevron::show
