#pragma once

#include <string_view>

#include <chevron/describe/expression.hpp>
#include <chevron/plan/costs.hpp>
#include <chevron/plan/plan.hpp>

/// \file
/// Slack for slow links: before their first backward, the ranks before a link run extra forwards, so that they wait once for a
/// message over the link and the gradient that returns, and not for every microbatch.

namespace chevron::catalogue {

/// Slack for the link from `after_rank` to the next rank: all ranks up to `after_rank` run `forwards` more forwards before
/// their first backward.
struct slack {
  int after_rank = 0;
  int forwards = 0;
};

/// Slack of several links; their number is known while compiling.
template <int Count>
struct slacks {
  slack each[array_size(Count)];
  constexpr slack const* begin() const { return each; }
  constexpr slack const* end() const { return each + Count; }
};
/// Slack of several links, in an array that the caller owns.
struct slack_view {
  slack const* first;
  slack const* last;
  constexpr slack const* begin() const { return first; }
  constexpr slack const* end() const { return last; }
};

/// A rank expression: the sum of `forwards` of the links between this rank and the last (`behind`) or between rank 0 and this
/// rank.
template <class Slacks>
struct slack_beside : expression::node {
  Slacks all;
  bool behind;
  constexpr slack_beside(Slacks const& s, bool which) : all(s), behind(which) {}
  constexpr int operator()(rank_parameters const& here) const {
    int sum = 0;
    for (slack const& one : all) sum += (here.rank <= one.after_rank) == behind ? one.forwards : 0;
    return sum;
  }
};
/// The summed slack of the links between this rank and the last.
template <class Slacks>
constexpr auto slack_behind(Slacks const& all) {
  return slack_beside<Slacks>(all, true);
}
/// The summed slack of the links between rank 0 and this rank.
template <class Slacks>
constexpr auto slack_before(Slacks const& all) {
  return slack_beside<Slacks>(all, false);
}

/// Removes a decimal number from the start of `text` and returns the number; returns -1 if `text` does not start with a digit
/// or the number exceeds `max_stages`.
constexpr int take_number(std::string_view& text) {
  int number = -1;
  while (!text.empty() && text.front() >= '0' && text.front() <= '9') {
    number = (number < 0 ? 0 : number) * 10 + (text.front() - '0');
    if (number > max_stages) return -1;
    text.remove_prefix(1);
  }
  return number;
}
constexpr bool take(std::string_view& text, char wanted) {
  if (text.empty() || text.front() != wanted) return false;
  text.remove_prefix(1);
  return true;
}

/// The least slack with which no slow link limits throughput more than the fastest link does, with one stage on each rank. A
/// link of delay d (transfer and latency) with e forwards of slack passes a microbatch every 2(t + d) / (2 + e) in the long
/// run, where t is the largest T_F + T_B of a stage, or T_F + T_I if backwards are split. If the fastest link takes no time,
/// the slack is ⌈2d / t⌉.
/// \param split backwards are split into I and W
/// \param room the largest sum of slack over all links; if more is needed, the slowest links get it
/// \returns an entry for each link that gets slack
constexpr buffer<slack> slack_for(cost_view const& costs, int ranks, bool split, int room = max_micro_batches) {
  double stage = 0;
  for (int s = 0; s < ranks; ++s) {
    double const one = costs.of(kind::forward, s) + costs.of(gradient_kind(split), s);
    stage = one > stage ? one : stage;
  }
  double fastest = ranks > 1 ? costs.of_delay(0) : 0;
  for (int s = 0; s + 1 < ranks; ++s) fastest = costs.of_delay(s) < fastest ? costs.of_delay(s) : fastest;
  buffer<int> forwards(ranks, zeroed);
  for (; room > 0 && stage > 0; --room) {
    int slowest = -1;
    double longest = (stage + fastest) * (1 + 1e-9);
    for (int s = 0; s + 1 < ranks; ++s) {
      double const period = 2 * (stage + costs.of_delay(s)) / (2 + forwards.data[s]);
      if (period <= longest) continue;
      longest = period;
      slowest = s;
    }
    if (slowest < 0) break;
    ++forwards.data[slowest];
  }
  int count = 0;
  for (int const n : forwards) count += n > 0 ? 1 : 0;
  buffer<slack> out(count);
  count = 0;
  for (int s = 0; s < ranks; ++s) {
    if (forwards.data[s] > 0) out.data[count++] = {s, forwards.data[s]};
  }
  return out;
}

/// A schedule's name with its slack: `1F1B+1@3-4` means one more forward before the link from rank 3 to rank 4. A name of more
/// than `plan_name::capacity` characters becomes `1F1B with slack`.
constexpr plan_name name_with_slack(std::string_view schedule, slack const* first, slack const* last) {
  plan_name out;
  int at = 0;
  auto const put = [&](char c) {
    if (at < plan_name::capacity) out.characters[at] = c;
    ++at;
  };
  auto const put_number = [&](int n) {
    int scale = 1;
    while (n / scale >= 10) scale *= 10;
    for (; scale > 0; scale /= 10) put(static_cast<char>('0' + n / scale % 10));
  };
  for (char c : schedule) put(c);
  for (; first != last; ++first) {
    put('+');
    put_number(first->forwards);
    put('@');
    put_number(first->after_rank);
    put('-');
    put_number(first->after_rank + 1);
  }
  if (at > plan_name::capacity) {
    out = {};
    at = 0;
    for (char c : schedule) put(c);
    for (char c : std::string_view(" with slack")) put(c);
  }
  return out;
}

/// The parts of a schedule's name, which may include slack.
struct name_parts {
  std::string_view schedule;  ///< the name without its slack
  buffer<slack> slacks;       ///< empty if the name has no slack
  bool good = true;           ///< false: the text after a `+` does not describe slack
};
constexpr name_parts parts_of(std::string_view name) {
  name_parts out{name.substr(0, name.find('+')), {}, true};
  int count = 0;
  for (char c : name) count += c == '+' ? 1 : 0;
  out.slacks = buffer<slack>(count);
  std::string_view rest = name.substr(out.schedule.size());
  for (int i = 0; i < count && out.good; ++i) {
    bool const begins = take(rest, '+');
    int const forwards = take_number(rest);
    bool const at = take(rest, '@');
    int const rank = take_number(rest);
    bool const to = take(rest, '-');
    int const next = take_number(rest);
    out.good = begins && at && to && forwards > 0 && rank >= 0 && next == rank + 1;
    out.slacks.data[i] = {rank, forwards};
  }
  out.good = out.good && rest.empty();
  return out;
}

}  // namespace chevron::catalogue
