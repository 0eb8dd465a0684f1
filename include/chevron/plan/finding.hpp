#pragma once

#include <cstdint>
#include <string_view>

#include <chevron/plan/action.hpp>
#include <chevron/plan/channels.hpp>
#include <chevron/plan/shape.hpp>

/// \file
/// A fault of a schedule, as a value: the compiler and a running program get the same value and the same sentence.

namespace chevron {

/// The laws. A plan that keeps them all runs to its end on any transport and computes each gradient exactly once.
enum class law : int {
  none,          ///< nothing is broken
  shape,         ///< sizes make sense: P, M, V at least 1 and within range, V as the placement allows
  description,   ///< the description can be expanded: chunks it names exist, counts are not negative
  placement,     ///< every stage lives on one rank that exists, every rank has a stage
  ids_in_range,  ///< every action names a stage and a microbatch that exist, on the stage's own rank
  no_duplicate,  ///< no action appears twice; a microbatch has B, or I and W, not both
  complete,      ///< every stage has F, and B or I and W, for every microbatch
  order,         ///< on its own rank F comes before B or I, and I before W; slices go in order, and their B or I in reverse
  fused_pair,    ///< a fused pair is an F and then the B or I of another microbatch or stage
  deadlock,      ///< no rank waits, directly or through other ranks, for an action that is queued after its own next one
  in_flight,     ///< never more chunks in flight than declared
  bytes,         ///< never more bytes in flight than declared, by the sizes that stages declare
  messages,      ///< no more messages in a step than declared
  matched,       ///< sends and receives match one to one, on each directed edge in the same order
  slots,         ///< no slot is written while its content is still needed
  resident       ///< a stage under FSDP computes only while it is gathered, and no more stages are gathered than may be
};
/// The number of laws, `none` included.
inline constexpr int law_count = static_cast<int>(law::resident) + 1;

constexpr char const* name_of(law l) {
  constexpr char const* names[] = {"none",     "shape",   "description", "placement", "ids_in_range", "no_duplicate",
                                   "complete", "order",   "fused_pair",  "deadlock",  "in_flight",    "bytes",
                                   "messages", "matched", "slots",       "resident"};
  static_assert(sizeof names / sizeof *names == law_count);
  return names[static_cast<int>(l)];
}

/// One broken law: where it is broken, and the facts that its sentence (`describe`) names.
struct finding {
  law broken = law::none;
  int rank = -1;
  int position = -1;  ///< index in the rank's list
  action what{};      ///< the action concerned
  // The meaning of the members below depends on the law; only `describe` reads them.
  action other{};
  int other_rank = -1;
  int other_position = -1;
  action behind{};
  action then{};
  action last_behind{};
  int links = 0;
  std::int64_t number = 0;
  std::int64_t limit = 0;
  char const* words = "";
  int slices = 1;  ///< of the plan; they decide how actions are written
  // For a schedule that was read from text: line and column, counted from 1, and the text found there. With a line and no rank,
  // `words` are the whole sentence.
  int line = 0;
  int column = 0;
  std::string_view there{};
  // For a cycle of messages (lower/channel_order.hpp): the transport's rules, and the message `held` that stands behind `holder`
  // on a channel of `channel_rank` with `channel_peer`, which closes the cycle; rank -1: no channel does.
  channel_rules channels{};
  action held{}, holder{};
  int channel_rank = -1, channel_peer = -1;

  constexpr explicit operator bool() const { return broken != law::none; }
};

namespace detail {

/// A finding about a number, which its sentence names after `words`.
constexpr finding fault(law broken, char const* words, std::int64_t number, std::int64_t limit = 0) {
  return {.broken = broken, .number = number, .limit = limit, .words = words};
}

/// Appends a piece of a user's text in quotes: cut short, and without characters that a terminal would act upon.
constexpr void append_quoted(text& out, std::string_view there) {
  constexpr std::size_t longest = 32;
  out.append('\'');
  for (char c : there.substr(0, longest)) {
    if (c >= ' ' && c <= '~') {
      out.append(c);
      continue;
    }
    constexpr char const* digits = "0123456789abcdef";
    int const byte = static_cast<unsigned char>(c);
    out.append("\\x").append(digits[byte / 16]).append(digits[byte % 16]);
  }
  if (there.size() > longest) out.append("...");
  out.append('\'');
}

/// Appends a rank's next action, or the fused pair that begins with it.
constexpr void append_head(text& out, action a, int slices) {
  if (a.fused != 0) out.append("the pair of ");
  append(out, a, slices);
}

/// Appends that an action comes before one that it needs, and the remedy.
constexpr void append_order(text& out, finding const& f) {
  append(out, f.what, f.slices);
  out.append(" comes before ");
  append(out, f.other, f.slices);
  out.append(", which it needs");
  if (f.slices > 1 && makes_input_gradient(f.what.kind) && makes_output(f.other.kind)) {
    out.append("; a schedule of slices runs slices - 1 forwards more before its first backward, as in ");
    out.append("warmup(F * (ranks - 1 - rank + slices - 1))");
    return;
  }
  // A schedule from text names its stages itself, so their number is not added.
  if (f.number > 1 && f.line == 0) {
    out.append("; rank ").append(f.rank).append(" holds ").append(f.number);
    out.append(" chunks, and a plain letter draws the next one: F(0), F(1) and so on name a chunk");
  }
}

/// Appends the channel that closes a cycle of messages, and the remedy.
constexpr void append_channel(text& out, finding const& f) {
  if (f.channels.are_own()) return;
  out.append("; channels: ").append(name_of(f.channels.model)).append(f.channels.hosts_wait ? ", hosts wait" : "");
  if (f.channel_rank < 0) {
    out.append(". Remedy: calls that do not wait for the end of their message");
    return;
  }
  out.append(". On the channel of ");
  if (f.channels.model == channel_model::edge || f.channels.model == channel_model::pair) {
    bool const lower_first = f.channel_rank < f.channel_peer;
    out.append("ranks ").append(lower_first ? f.channel_rank : f.channel_peer);
    out.append(" and ").append(lower_first ? f.channel_peer : f.channel_rank);
  } else {
    out.append("all ranks");
  }
  out.append(" rank ").append(f.channel_rank).append(" enqueues ");
  append(out, f.holder, f.slices);
  out.append(" before ");
  append(out, f.held, f.slices);
  out.append(". Remedy: the reverse order, both in one batch, or a channel for each directed edge");
}

/// Appends the cycle of a deadlock: each action waits for one that is queued behind the next.
constexpr void append_deadlock(text& out, finding const& f) {
  append_head(out, f.what, f.slices);
  out.append(" waits for ");
  append(out, f.other, f.slices);
  out.append(", which is queued on rank ").append(f.other_rank).append(" behind ");
  append_head(out, f.behind, f.slices);
  if (f.links == 1) return;
  out.append("; ");
  append_head(out, f.behind, f.slices);
  out.append(" waits for ");
  append(out, f.then, f.slices);
  if (f.links == 2) {
    out.append(", which is queued behind ");
  } else {
    out.append(", and so on round ").append(f.links).append(f.channels.are_own() ? " ranks to " : " messages to ");
    append(out, f.last_behind, f.slices);
    out.append(", queued behind ");
  }
  append_head(out, f.what, f.slices);
}

}  // namespace detail

/// The sentence for a finding: rank, step, action, the other action that is involved, and the remedy if there is one.
constexpr text describe(finding const& f) {
  text out;
  if (f.broken == law::none) return out.append("all laws hold");
  if (f.line > 0) {
    out.append("line ").append(f.line).append(", column ").append(f.column).append(": ");
    if (!f.there.empty()) detail::append_quoted(out, f.there);
    if (f.rank < 0) return out.append(f.words);
  }
  if (f.rank >= 0) {
    out.append("rank ").append(f.rank);
    if (f.position >= 0) out.append(", step ").append(f.position);
    out.append(": ");
  }
  switch (f.broken) {
    case law::shape:
      out.append(f.words).append(f.number);
      if (f.limit != 0) out.append(", not ").append(f.limit);
      if (f.other_rank >= 0)  // a placement with uneven ranks: the fullest, and the one with the fewest stages
        out.append(": rank ")
            .append(f.other_rank)
            .append(" has ")
            .append(f.number)
            .append(" stages, rank ")
            .append(f.other_position)
            .append(" has ")
            .append(f.links);
      break;
    case law::description:
      if (!f.there.empty()) {  // a name, and the known name that is most like it
        out.append(f.words).append(f.there).append('?');
        break;
      }
      if (f.links == 2) {  // two actions of the description exclude each other
        append(out, f.what, f.slices);
        out.append(f.words);
        append(out, f.other, f.slices);
        break;
      }
      out.append(f.words).append(f.number);
      if (f.limit != 0) out.append(", not ").append(f.limit);
      break;
    case law::placement:
      out.append(f.words).append(f.number);
      if (f.limit > 0) out.append(" (there are ").append(f.limit).append(" ranks)");
      break;
    case law::ids_in_range:
      append(out, f.what, f.slices);
      out.append(f.words);
      if (f.other_rank >= 0)
        out.append(f.other_rank);
      else
        out.append(f.limit);
      break;
    case law::no_duplicate:
      append(out, f.what, f.slices);
      out.append(f.words);
      if (f.other_position >= 0) out.append(f.other_position);
      break;
    case law::complete:
      append(out, f.what, f.slices);
      out.append(" is missing: ").append(f.words);
      break;
    case law::order:
      detail::append_order(out, f);
      break;
    case law::fused_pair:
      append(out, f.what, f.slices);
      out.append(f.words);
      if (f.links > 0) append(out, f.other, f.slices);
      break;
    case law::deadlock:
      detail::append_deadlock(out, f);
      detail::append_channel(out, f);
      break;
    case law::in_flight:
      append(out, f.what, f.slices);
      out.append(" makes ").append(f.number).append(" chunks in flight, ").append(f.words).append(f.limit);
      break;
    case law::bytes:
      append(out, f.what, f.slices);
      out.append(" makes ").append(f.number).append(" bytes in flight, the declared limit is ").append(f.limit);
      break;
    case law::messages:
      out.append("a step sends ").append(f.number).append(" messages, the declared limit is ").append(f.limit);
      break;
    case law::matched:
    case law::slots:
      append(out, f.what, f.slices);
      out.append(f.words);
      append(out, f.other, f.slices);
      break;
    case law::resident:
      if (f.number >= 0) {  // a cell that moves the parameters of this stage
        out.append(f.number).append(f.words);
        if (f.limit > 0) out.append(f.limit);
        break;
      }
      append(out, f.what, f.slices);
      out.append(f.words);
      append(out, f.other, f.slices);
      break;
    case law::none:
      break;
  }
  return out;
}

}  // namespace chevron
