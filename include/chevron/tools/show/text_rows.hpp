#pragma once

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include <chevron/base/format.hpp>
#include <chevron/tools/show/picture.hpp>
#include <chevron/tools/show/text_scale.hpp>

/// \file
/// The rows of a timeline for a terminal.

namespace chevron::show {

namespace detail {

/// Draws a picture's computations in columns of characters: first cells, then bands of lines, then the legend.
class text_rows {
 public:
  text_rows(picture const& p, text_style const& style)
      : p_(p), style_(style), zero_(first_start(p)), chunks_(std::max(p.size.chunks, 1)) {
    int const digits = static_cast<int>(std::to_string(std::max(p.rows - 1, 0)).size());
    prefix_ = std::max(5, digits + 2);
    double makespan = 0;
    for (box const& b : p.boxes) {
      if (is_compute(b.op.kind)) makespan = std::max(makespan, b.end - zero_);
    }
    scale_ = scale_for(p, zero_, makespan, std::max(20, style.width - prefix_));
  }

  std::string drawn() {
    if (scale_.columns == 0) return "nothing to draw\n";
    cell idle;
    idle.glyph = style_.colour ? " " : dot();
    rows_.assign(static_cast<std::size_t>(p_.rows), std::vector<cell>(static_cast<std::size_t>(scale_.columns), idle));
    if (scale_.overview) covered_.resize(rows_.size() * static_cast<std::size_t>(scale_.columns) * sorts());
    for (std::size_t i = 0; i < p_.boxes.size(); ++i) {
      box const& b = p_.boxes[i];
      if (!is_compute(b.op.kind)) continue;
      present_[static_cast<int>(b.op.kind)] = true;
      scale_.overview ? cover(b) : draw_box(i);
    }
    if (scale_.overview) draw_covered();
    return bands() + "\n" + wrapped(legend(), style_.width);
  }

 private:
  char const* dot() const { return style_.unicode ? "\xc2\xb7" : "."; }
  char const* bar() const { return style_.unicode ? "\xe2\x94\x80" : "-"; }
  char const* edge() const { return style_.unicode ? "\xe2\x96\x95" : " "; }
  /// The number of pairs of kind and chunk: each may fill a part of an overview's column.
  std::size_t sorts() const { return static_cast<std::size_t>(compute_kinds * chunks_); }

  /// For an overview: adds, for each column that a box covers, the covered share to the sum of the box's kind and chunk.
  void cover(box const& b) {
    double left = (b.start - zero_) * scale_.columns_per_unit;
    double right = (b.end - zero_) * scale_.columns_per_unit;
    if (b.of_pair != half::none) (b.of_pair == half::first ? right : left) = (left + right) / 2;
    auto const sort = static_cast<std::size_t>(static_cast<int>(b.op.kind) * chunks_ + std::min(b.chunk, chunks_ - 1));
    for (int i = static_cast<int>(left); i < scale_.columns && i < right; ++i) {
      covered_[static_cast<std::size_t>(b.rank * scale_.columns + i) * sorts() + sort] +=
          std::min(right, i + 1.0) - std::max(left, static_cast<double>(i));
    }
  }
  /// For an overview: writes into each column that is at least half busy the letter of the kind that covers most of it.
  void draw_covered() {
    auto const width = static_cast<std::ptrdiff_t>(sorts());
    auto from = covered_.begin();
    for (auto& row : rows_) {
      for (cell& c : row) {
        auto const most = std::max_element(from, from + width);
        double busy = 0;
        for (auto i = from; i != from + width; ++i) busy += *i;
        int const which = static_cast<int>(most - from);
        from += width;
        if (busy < 0.5) continue;
        box sample;
        sample.op.kind = static_cast<kind>(which / chunks_);
        sample.chunk = which % chunks_;
        int const background = style_.colour ? background_of(sample.op.kind, sample.chunk, chunks_) : 1;
        c = {label_of(sample, std::min(chunks_, 2)).substr(0, 1), background, false};
      }
    }
  }

  void draw_box(std::size_t index) {
    box const& b = p_.boxes[index];
    auto& row = rows_[static_cast<std::size_t>(b.rank)];
    int begin = static_cast<int>(std::lround((b.start - zero_) * scale_.columns_per_unit));
    int end = std::min(static_cast<int>(std::lround((b.end - zero_) * scale_.columns_per_unit)), scale_.columns);
    std::string const label = label_of(b, p_.size.chunks, p_.size.slices);
    int const length = static_cast<int>(label.size());
    bool const first_half = b.of_pair == half::first;
    if (b.of_pair != half::none) {
      pairs_ = true;
      int const others =
          static_cast<int>(label_of(p_.boxes[first_half ? index + 1 : index - 1], p_.size.chunks, p_.size.slices).size());
      int const middle = middle_of_pair(begin, end, first_half ? length : others, first_half ? others : length, scale_.band);
      (first_half ? end : begin) = middle;
    }
    // A box that is cut by the end of a band gets its label on the side with more room.
    int const cut = (begin / scale_.band + 1) * scale_.band;
    int const label_at = cut < end && cut - begin < length && end - cut > cut - begin ? cut : begin;
    int const background = style_.colour ? background_of(b.op.kind, b.chunk, p_.size.chunks) : 1;
    for (int i = begin; i < end; ++i) {
      int const in_label = i - label_at;
      bool const last = i == end - 1 && end - begin > length;
      cell& c = row[static_cast<std::size_t>(i)];
      c.edge = last && style_.colour && !first_half;
      if (in_label >= 0 && in_label < length)
        c.glyph = label[static_cast<std::size_t>(in_label)];
      else if (last && first_half)
        c.glyph = style_.colour ? " " : "+";
      else if (last)
        c.glyph = style_.colour ? edge() : " ";
      else
        c.glyph = style_.colour ? " " : bar();
      c.background = background;
    }
  }

  /// Writes axis and ranks, in as many bands as the width requires.
  std::string bands() const {
    std::string out;
    for (int from = 0; from < scale_.columns; from += scale_.band) {
      int const to = std::min(from + scale_.band, scale_.columns);
      if (from > 0) out += "\n";
      out += "rank" + spaces(prefix_ - 4) + axis(from, to, scale_.columns_per_unit) + "\n";
      for (int r = 0; r < p_.rows; ++r) {
        std::string const name = std::to_string(r);
        std::string line = render(rows_[static_cast<std::size_t>(r)], from, to, style_.colour);
        while (!line.empty() && line.back() == ' ') line.pop_back();
        out += spaces(prefix_ - 1 - static_cast<int>(name.size())) + name + " " + line + "\n";
      }
    }
    return out;
  }

  std::vector<std::string> legend() const {
    std::vector<std::string> out;
    for (int k = 0; k < compute_kinds; ++k) {
      if (!present_[k]) continue;
      std::string sample = letters_of(static_cast<kind>(k));
      if (style_.colour) {
        int const background = background_of(static_cast<kind>(k), 0, p_.size.chunks);
        sample = paint(background, foreground_on(background)) + sample + "\x1b[0m";
      }
      out.push_back(sample + " " + row_of(static_cast<kind>(k)).words);
    }
    if (scale_.overview)
      out.push_back("overview: a column is " + number(1 / scale_.columns_per_unit, 3) + (p_.unit.empty() ? "" : " " + p_.unit));
    else
      out.push_back(p_.size.slices > 1   ? "F3.1: microbatch 3, slice 1"
                    : p_.size.chunks > 2 ? "5F3: stage 5, microbatch 3"
                                         : "F3: microbatch 3");
    if (p_.size.chunks == 2) out.push_back("lower case: second chunk");
    if (pairs_) out.push_back(style_.colour ? "two colours: a pair, run as one" : "F3+B1: a pair, run as one");
    if (!style_.colour) out.push_back(std::string(dot()) + " idle");
    return out;
  }
  picture const& p_;
  text_style const& style_;
  double zero_;
  int chunks_, prefix_ = 0;
  scale scale_{};
  std::vector<std::vector<cell>> rows_;
  std::vector<double> covered_;  // for an overview, covered shares by rank, column, kind and chunk
  bool present_[compute_kinds] = {}, pairs_ = false;
};

}  // namespace detail

/// The rows of a picture: an axis and one line for each rank, in as many bands as the width requires, and the legend. Only
/// computations are drawn. A picture that would need too many bands becomes an overview, in which each column shows the letter
/// of the kind that covers most of it.
template <class = void>
std::string rows_text(picture const& p, text_style const& style = {}) {
  return detail::text_rows(p, style).drawn();
}

}  // namespace chevron::show
