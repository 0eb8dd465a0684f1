#pragma once

#include "judge.hpp"
#include "program.hpp"

namespace differential {

struct found {
  program smallest;
  judgement said;
  int tries = 0;
};

/// Makes a program that is a finding smaller while it stays one of its kind.
found shrink(program p, judgement said, double seconds);

}  // namespace differential
