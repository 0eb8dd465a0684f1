#!/bin/sh
# timeout: 900
# compiled.sh CMAKE COMPILER LIBTORCH: installs Chevron to a folder, and compiles, links and runs programs that link
# chevron::compiled: ranks as threads, ranks as processes, a checkpoint.
set -e
. "$CHEVRON_SOURCE/tests/consumer/shared.sh"
cmake=$1
compiler=$2
libtorch=$3
here=$CHEVRON_SOURCE/tests/consumer/compiled
begin compiled
install_headers
set -- -S "$here" -G Ninja "-DCMAKE_CXX_COMPILER=$compiler" "-DCHEVRON_TORCH_DIR=$libtorch" "-DEXAMPLES=$CHEVRON_SOURCE/examples"

echo "== the folder of sources defines the target, too"
"$cmake" -B "$work/sources" "$@" "-DCHEVRON_SOURCE=$CHEVRON_SOURCE" >"$work/sources.log"
echo "== a header that the script cannot read, no headers, and no Python are refused by name"
interfaces=$work/prefix/share/cmake/chevron/compiled/interfaces.py
mkdir -p "$work/odd/chevron/run"
printf 'namespace chevron {\ninline int f() {\n  return 1;\n' >"$work/odd/chevron/run/odd.hpp"
refused "chevron/run/odd.hpp:2: no } closes this bracket" python3 "$interfaces" "$work/odd" "$work/odd-out"
refused "has no folder chevron. Remedy:" python3 "$interfaces" "$work" "$work/odd-out"
refused "it needs Python 3.9 or later while CMake configures. Remedy: install python3" \
  "$cmake" -B "$work/no-python" "$@" "-DCMAKE_PREFIX_PATH=$work/prefix" -DCMAKE_DISABLE_FIND_PACKAGE_Python3=ON

echo "== compiled, linked and run"
"$cmake" -B "$work/build" "$@" "-DCMAKE_PREFIX_PATH=$work/prefix" -DCMAKE_CXX_FLAGS=-O0 >"$work/configure.log"
"$cmake" --build "$work/build"
cd "$work"
for program in minimal_train processes save_resume; do
  expected=$(sed -n 's,^// prints: ,,p' "$CHEVRON_SOURCE/examples/$program.cpp")
  "./build/$program" >"$program.out"
  tail -n 1 "$program.out"
  grep -q -E "$expected" "$program.out" || fail "$program does not print: $expected"
done

echo "== programs have few functions of Chevron's: the library has the trainer"
defined() {
  nm -C --defined-only "$1" | grep -c -F "$2" || true
}
object=$(find build/CMakeFiles/minimal_train.dir -name 'minimal_train.cpp.o')
library=$(find build -name 'libchevron_compiled.a')
[ "$(defined "$object" 'chevron::detail::executor::')" -eq 0 ] || fail "the program compiles the executor"
[ "$(defined "$library" 'chevron::detail::executor::')" -gt 10 ] || fail "the library lacks the executor"
cd /
rm -rf "$work"
