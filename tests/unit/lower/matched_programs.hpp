#pragma once

#include <vector>

#include <chevron/csv/csv_check.hpp>
#include <chevron/lower/lower.hpp>
#include <chevron/schedule.hpp>

#include "unit/prove/mutants.hpp"

/// \file
/// Random programs whose messages match one to one, in an order that may hang over channels that messages share.

namespace chevron::tests {

/// A program as a file has it: without the instructions that CSV does not know, and with messages moved later at random.
inline owned_program moved(dice& d, owned_program const& of) {
  lists<instruction> rows = lists_of(of.view());
  bool const waits = d.one_in(3);
  for (std::vector<instruction>& row : rows) {
    std::erase_if(row, [&](instruction const& one) {
      return one.op.kind == kind::optimizer_step || one.op.kind == kind::unshard || (is_wait(one.op.kind) && !waits);
    });
  }
  if (d.one_in(2)) receives_with_sends(rows);
  if (waits && d.one_in(2)) synchronous_sends(rows, d.one_in(2) ? -1 : d.below(static_cast<int>(rows.size())));
  later_messages(d, rows);
  owned_program out;
  out.source = of.source;
  out.slots = of.slots;
  fill(rows, out.instructions, out.begin);
  return out;
}

/// A program whose messages match one to one. Its ranks may wait for each other.
inline owned_program with_matched_messages(dice& d) {
  for (;;) {
    owned_program const lowered = lower(prove(lawful_plan(d))).copy();
    if (lowered.source.size.ranks == 1) continue;
    for (int tries = 0; tries < 8; ++tries) {
      owned_program made = moved(d, lowered);
      law const broken = check_messages(made.view(), false).broken;
      if (broken == law::none || broken == law::deadlock) return made;
    }
  }
}

}  // namespace chevron::tests
