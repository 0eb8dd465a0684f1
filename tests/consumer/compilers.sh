#!/bin/sh
# timeout: 420
# compilers.sh [LIBTORCH]: every g++ from 12 and every clang++ from 16 that is installed here compiles the schedule side without a
# warning, and the program prints the lines of README.md; the newest does so without exceptions and RTTI, too. The newest of g++ and of
# clang++ also read the run side, where there is a LibTorch: g++ takes more names for shadowed ones. The build itself uses one of them;
# tests/compile_fail compares the words of errors.
set -e
. "$CHEVRON_SOURCE/tests/consumer/shared.sh"
begin compilers
sed -n '/^schedule   4 ranks/,/^F forward/p' "$CHEVRON_SOURCE/README.md" >"$work/expected"
[ "$(wc -l <"$work/expected")" -ge 10 ]
warnings="-Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion"
found=
limit() {
  case $1 in
    g++*) echo -fconstexpr-ops-limit=268435456 ;;
    clang*) echo -fconstexpr-steps=268435456 ;;
  esac
}
for compiler in $(printf 'g++-%s ' 12 13 14 15 16 17 18) $(printf 'clang++-%s ' 16 17 18 19 20 21 22 23 24); do
  command -v "$compiler" >/dev/null || continue
  began=$(date +%s)
  # All of the schedule side, its proof of README.md's schedule among it.
  { cat "$CHEVRON_SOURCE/examples/hello.cpp"; printf '#include <chevron/%s.hpp>\n' search show csv; } >"$work/hello.cpp"
  "$compiler" -std=c++20 "$(limit "$compiler")" -Werror $warnings "-I$CHEVRON_SOURCE/include" "$work/hello.cpp" -o "$work/hello"
  "$work/hello" >"$work/said"
  # The wrong neighbour is an error under each of them.
  if sed 's/(ranks - 1 - rank)/rank/' "$CHEVRON_SOURCE/examples/hello.cpp" |
    "$compiler" -std=c++20 -fsyntax-only "-I$CHEVRON_SOURCE/include" -x c++ - 2>"$work/refusal"; then
    fail "$compiler takes a schedule that waits for ever"
  fi
  grep -q 'invalid_schedule<.*deadlock' "$work/refusal" ||
    { cat "$work/refusal"; fail "$compiler does not say which law is broken"; }
  sed -n '/^schedule   4 ranks/,/^F forward/p' "$work/said" | diff "$work/expected" - || fail "with $compiler"
  echo "$compiler $("$compiler" -dumpfullversion -dumpversion): $(($(date +%s) - began)) s"
  found="$found $compiler"
  case $compiler in
    g++*) gcc=$compiler ;;
    clang*) clang=$compiler ;;
  esac
done
for last in $found; do :; done
if [ -n "$found" ]; then
  "$last" -std=c++20 "$(limit "$last")" -Werror $warnings -fno-exceptions -fno-rtti "-I$CHEVRON_SOURCE/include" \
    "$CHEVRON_SOURCE/tests/consumer/no_exceptions.cpp" -o "$work/no_exceptions"
  code=0
  "$work/no_exceptions" 2>"$work/said" || code=$?
  { [ $code -eq 134 ] && grep -q '^chevron: rank 0, step 0: 0B0 comes before 0F0' "$work/said"; } ||
    { cat "$work/said"; fail "without exceptions a broken plan ends with $code"; }
  echo "$last, without exceptions: a broken plan aborts, and says why"
fi
if [ -n "${1:-}" ]; then
  # A number of a stage may be a seed as it is: only headers are looked at for changes of sign, what the program makes of their
  # templates included.
  { printf '#include <chevron/%s.hpp>\n' run multiprocess checkpoint data
    echo '#pragma GCC diagnostic ignored "-Wsign-conversion"'
    cat "$CHEVRON_SOURCE/examples/minimal_train.cpp"; } >"$work/train.cpp"
  for compiler in ${gcc:-} ${clang:-}; do
    began=$(date +%s)
    "$compiler" -std=c++20 "$(limit "$compiler")" -fsyntax-only -Werror $warnings \
      -DUSE_C10D -DUSE_C10D_GLOO -DUSE_DISTRIBUTED "-I$CHEVRON_SOURCE/include" "-I$CHEVRON_SOURCE/examples" \
      -isystem "$CHEVRON_SOURCE/include/chevron/transports/gloo/shim" -isystem "$1/include" \
      -isystem "$1/include/torch/csrc/api/include" "$work/train.cpp"
    echo "$compiler, the run side: $(($(date +%s) - began)) s"
  done
fi
[ -n "$found" ] || { echo "skipped: neither g++-12 nor clang++-16 nor newer ones are installed under such names"; exit 77; }
rm -rf "$work"
