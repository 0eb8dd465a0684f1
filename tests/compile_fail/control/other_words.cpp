// expect: error: static assertion failed: these words are only in this comment
// complaint: FAILED: it does not compile, but not for the expected reason
int main() {
#ifndef LEGAL
  return this_is_not_a_name;  // error: static assertion failed: these words are only in this comment
#endif
}
