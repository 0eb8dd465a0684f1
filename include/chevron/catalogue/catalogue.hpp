#pragma once

#include <string_view>

#include <boost/hana/basic_tuple.hpp>
#include <boost/hana/for_each.hpp>
#include <boost/hana/size.hpp>

#include <chevron/catalogue/dual_pipe_v.hpp>
#include <chevron/catalogue/eager_1f1b.hpp>
#include <chevron/catalogue/forward_only.hpp>
#include <chevron/catalogue/gpipe.hpp>
#include <chevron/catalogue/hanayo.hpp>
#include <chevron/catalogue/interleaved_1f1b.hpp>
#include <chevron/catalogue/interleaved_zero_bubble.hpp>
#include <chevron/catalogue/looped_bfs.hpp>
#include <chevron/catalogue/one_f_one_b.hpp>
#include <chevron/catalogue/seq_1f1b.hpp>
#include <chevron/catalogue/slack.hpp>
#include <chevron/catalogue/v_half.hpp>
#include <chevron/catalogue/v_min.hpp>
#include <chevron/catalogue/zb_h1.hpp>
#include <chevron/catalogue/zb_h2.hpp>
#include <chevron/catalogue/zb_v.hpp>

/// \file
/// Finds published schedules by name. Comparison ignores case, - and _, so the names of the C++ constants work, too.

namespace chevron::catalogue {

/// Schedules for training, in the order in which tables list them; `recomputing` and `sliced` have further ones.
inline constexpr auto all =
    hana::make_basic_tuple(&gpipe, &one_f_one_b, &eager_1f1b, &looped_bfs, &interleaved_1f1b, &hanayo, &interleaved_zero_bubble,
                           &zb_h1, &zb_h2, &zb_v, &v_half, &v_min, &dual_pipe_v);

/// Schedules for stages that recompute their forwards.
inline constexpr auto recomputing = hana::make_basic_tuple(&one_f_one_b_recompute);

/// Schedules for training with sequences cut into slices. With one slice per sequence, each equals a schedule of `all` that has
/// another name.
inline constexpr auto sliced = hana::make_basic_tuple(&seq_1f1b, &seq_zb_h1, &seq_interleaved_1f1b);

/// Schedules for evaluation: forwards only. `make_plan` accepts their names; trainers refuse their plans.
inline constexpr auto evaluation = hana::make_basic_tuple(&forward_only);

/// Calls `visit(description)` for each schedule of `all`; `description.name` is its name.
template <class Visit>
constexpr void for_each(Visit&& visit) {
  hana::for_each(all, [&](auto const* one) { visit(*one); });
}

/// Calls `visit(description)` for each schedule that trains, those of `all`, `recomputing` and `sliced`.
template <class Visit>
constexpr void for_each_that_trains(Visit&& visit) {
  for_each(visit);
  hana::for_each(recomputing, [&](auto const* one) { visit(*one); });
  hana::for_each(sliced, [&](auto const* one) { visit(*one); });
}

/// Whether `a` and `b` are the same name, without regard to case, - and _.
constexpr bool same_name(std::string_view a, std::string_view b) {
  auto const lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
  auto const skips = [](std::string_view of, std::size_t i) { return i < of.size() && (of[i] == '-' || of[i] == '_'); };
  for (std::size_t i = 0, j = 0;; ++i, ++j) {
    while (skips(a, i)) ++i;
    while (skips(b, j)) ++j;
    if (i == a.size() || j == b.size()) return i == a.size() && j == b.size();
    if (lower(a[i]) != lower(b[j])) return false;
  }
}

/// A second name of a schedule: the paper's name, where `own` is PyTorch's, or the name of the C++ constant.
struct other_name {
  std::string_view own, other;
};
inline constexpr other_name other_names[] = {{zb_v.name, "ZB-V"},
                                             {one_f_one_b.name, "one_f_one_b"},
                                             {one_f_one_b_recompute.name, "one_f_one_b_recompute"},
                                             {seq_zb_h1.name, "seq_zb_h1"}};

/// Whether `name` is `own` or a second name of the schedule called `own`.
constexpr bool goes_by(std::string_view own, std::string_view name) {
  bool found = same_name(own, name);
  for (other_name const& one : other_names) found = found || (same_name(own, one.own) && same_name(name, one.other));
  return found;
}

/// Calls `visit(name, description)` for each schedule that has a variant with slack for slow links: `name` is that of the
/// schedule, `description` the variant with all of `slacks`.
/// \param slacks a range of `slack`, one per link
template <class Slacks, class Visit>
constexpr void for_each_with_slack(Slacks const& slacks, Visit&& visit) {
  visit(one_f_one_b.name, one_f_one_b_for(slacks));
  visit(zb_h1.name, zb_h1_for(slacks));
}

/// Whether a schedule for training has this name; the name may include slack, such as `1F1B+1@3-4`.
constexpr bool trains(std::string_view name) {
  bool found = false;
  if (name_parts const parts = parts_of(name); parts.slacks.count > 0) {
    for_each_with_slack(slack_view{}, [&](char const* of, auto const&) { found = found || same_name(of, parts.schedule); });
    return found && parts.good;
  }
  for_each_that_trains([&](auto const& one) { found = found || goes_by(one.name, name); });
  return found;
}

/// Whether a schedule, for training or for evaluation, has this name.
constexpr bool contains(std::string_view name) {
  bool found = trains(name);
  hana::for_each(evaluation, [&](auto const* one) { found = found || goes_by(one->name, name); });
  return found;
}

/// The schedule with several chunks on each rank beside a schedule with one: words for a finding that ends in a number.
struct with_chunks {
  std::string_view one;
  char const* words;
};
inline constexpr with_chunks with_several_chunks[] = {
    {one_f_one_b.name, "1F1B has one chunk on each rank; with several it is Interleaved1F1B. chunks can be "},
    {zb_h1.name, "ZB-H1 has one chunk on each rank; with several it is InterleavedZeroBubble. chunks can be "},
    {seq_1f1b.name, "Seq1F1B has one chunk on each rank; with several it is SeqInterleaved1F1B. chunks can be "}};

/// The name of the catalogue that is most like `asked`; empty if none is like it.
constexpr std::string_view nearest_name(std::string_view asked) {
  constexpr std::size_t longest = 40;
  std::string_view best;
  std::size_t fewest = (asked.size() < 6 ? 4 : asked.size()) / 2 + 1;
  if (asked.size() > longest) return best;
  auto const lower = [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; };
  auto const look_at = [&](std::string_view name) {
    std::size_t row[longest + 1] = {};  // Levenshtein's distances to the beginnings of `asked`
    for (std::size_t j = 0; j <= asked.size(); ++j) row[j] = j;
    for (std::size_t i = 1; i <= name.size(); ++i) {
      std::size_t diagonal = row[0];
      row[0] = i;
      for (std::size_t j = 1; j <= asked.size(); ++j) {
        std::size_t const replaced = diagonal + (lower(name[i - 1]) == lower(asked[j - 1]) ? 0 : 1);
        diagonal = row[j];
        row[j] = row[j] < row[j - 1] ? row[j] + 1 : row[j - 1] + 1;
        row[j] = replaced < row[j] ? replaced : row[j];
      }
    }
    if (row[asked.size()] >= fewest) return;
    fewest = row[asked.size()];
    best = name;
  };
  for_each_that_trains([&](auto const& one) { look_at(one.name); });
  hana::for_each(evaluation, [&](auto const* one) { look_at(one->name); });
  return best;
}

/// Expands the schedule with this name to a plan. Nothing is checked yet: `prove` does that.
/// \param name a name such as `ZBVZeroBubble` (docs/reference/schedules.md), or one with slack, `1F1B+1@3-4`
/// \param size ranks and microbatches; chunks 0: the schedule's default
/// \returns a plan; if the name is unknown, or the schedule does not exist at this size, the plan's `problem` says so, and
/// its name is the name asked for
// A template, so that only files that call `make_plan` compile the expansion of every schedule, a fifth of this header's cost.
template <class = void>
constexpr plan make_plan(std::string_view name, shape size) {
  int count = static_cast<int>(decltype(hana::size(evaluation))::value);
  for_each_that_trains([&](auto const&) { ++count; });
  finding unknown = chevron::detail::fault(law::description, "no schedule of the catalogue has that name; it holds ", count);
  if (std::string_view const like = nearest_name(name); !like.empty()) {
    unknown.words = "no schedule of the catalogue has that name; did you mean ";
    unknown.there = like;
  }
  plan made = chevron::detail::refused(size, "", unknown);
  for (std::size_t i = 0; i < name.size() && i < static_cast<std::size_t>(plan_name::capacity); ++i)
    made.name.characters[i] = name[i];
  auto const work_out = [&](auto const& one) {
    if (goes_by(one.name, name)) made = expand(one, size);
  };
  for_each_that_trains(work_out);
  hana::for_each(evaluation, [&](auto const* one) { work_out(*one); });
  if (made.problem.broken == law::shape && size.chunks > 1 && made.problem.number == 1 && made.problem.limit == size.chunks) {
    for (with_chunks const& each : with_several_chunks) {
      if (same_name(each.one, made.name.characters)) made.problem.words = each.words;
    }
  }
  name_parts const parts = parts_of(name);
  if (parts.slacks.count == 0 || !parts.good) return made;
  slack_view const given{parts.slacks.begin(), parts.slacks.end()};
  finding no_link;
  for (slack const& one : given) {
    if (one.after_rank + 1 < size.ranks) continue;
    no_link = chevron::detail::fault(law::description, "slack is for a link between two ranks, and there is none after rank ",
                                     one.after_rank);
  }
  for_each_with_slack(given, [&](char const* of, auto const& one) {
    if (!same_name(of, parts.schedule)) return;
    made = no_link ? chevron::detail::refused(size, "", no_link) : expand(one, size);
    made.name = name_with_slack(of, given.first, given.last);
  });
  return made;
}

}  // namespace chevron::catalogue
