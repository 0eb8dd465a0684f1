#pragma once

#include <cstdio>
#include <cstdlib>
#include <iostream>

namespace chevron::train {

/// Ends a program that has nothing left to do. Destroying LibTorch's static objects takes a third as long as to start it, and what
/// is in them ends with the process.
[[noreturn]] inline void end_program(int code) {
  std::cout.flush();
  std::fflush(nullptr);
  std::_Exit(code);
}

}  // namespace chevron::train
