// expect: error: .*this_is_not_a_name
// The control that must pass: the harness finds the library, a nonsense body fails and an empty one compiles.
#include <chevron/version.hpp>
int main() {
#ifndef LEGAL
  return this_is_not_a_name;
#endif
}
