#pragma once

#include "accelerator/stream_order.hpp"
#include <chevron/plan/finding.hpp>

/// \file
/// A fault in the order of the ranks' stream operations, as a value and as a sentence.

namespace chevron {

/// An operation of a rank's list.
struct stream_place {
  int rank = -1;
  int position = -1;  ///< in the rank's list
  stream_operation what{};
};

/// A link of a deadlock: the operation that is queued before the awaited operation, and the operation for which it waits.
struct stream_link {
  stream_place behind{};
  stream_place awaited{};
};

/// The first broken law of stream lists: the place, and the facts for its sentence (`describe`).
struct stream_finding {
  law broken = law::none;
  stream_place at{};
  char const* words = "";
  stream_place other{};  ///< with a rank: the operation that the words are about
  char const* more = "";
  bool names_needed = false;
  action needed{};  ///< what is not there, if it is not an operation
  int links = 0;    ///< of a deadlock: how many streams wait round
  stream_link next{}, after_next{};

  constexpr explicit operator bool() const { return broken != law::none; }
};

/// The sentence for a finding.
constexpr text describe(stream_finding const& f) {
  text out;
  if (!f) return out.append("all laws hold");
  auto const say = [&](stream_place const& p, bool with_rank) {
    append(out, p.what);
    out.append(" (");
    if (with_rank) out.append("rank ").append(p.rank).append(", ");
    out.append("operation ").append(p.position).append(')');
  };
  out.append("rank ").append(f.at.rank).append(", operation ").append(f.at.position).append(": ");
  append(out, f.at.what);
  out.append(f.words);
  if (f.other.rank >= 0) say(f.other, f.other.rank != f.at.rank);
  if (f.names_needed) append(out, f.needed);
  out.append(f.more);
  for (int i = 1; i < f.links && i < 3; ++i) {
    stream_link const& link = i == 1 ? f.next : f.after_next;
    out.append(", which is behind ");
    append(out, link.behind.what);
    if (i == 2 && f.links > 3) break;
    out.append("; that waits for ");
    say(link.awaited, true);
  }
  if (f.links > 3) return out.append(", and so on round ").append(f.links).append(" streams");
  if (f.links > 0) out.append(", which is behind the first");
  return out;
}

}  // namespace chevron
