#!/bin/sh
# timeout: 900
# precompile.sh CMAKE COMPILER LIBTORCH: installs Chevron to a folder, and compiles and runs programs that call
# chevron_precompile. Clang refuses a precompiled header whose flags are other ones; g++ does by -Werror=invalid-pch.
set -e
. "$CHEVRON_SOURCE/tests/consumer/shared.sh"
cmake=$1
compiler=$2
libtorch=$3
here=$CHEVRON_SOURCE/tests/consumer/precompile
begin precompile
install_headers
set -- -S "$here" -G Ninja "-DCMAKE_CXX_COMPILER=$compiler" "-DCMAKE_PREFIX_PATH=$work/prefix" "-DCHEVRON_TORCH_DIR=$libtorch" \
  "-DTRAINING_PROGRAM=$CHEVRON_SOURCE/examples/minimal_train.cpp"

# headers FOLDER: how many precompiled headers a build makes.
headers() {
  grep -o 'chevron-precompiled-[0-9a-f]*' "$1/compile_commands.json" | sort -u | wc -l
}
# command_of FILE FOLDER: how a source file is compiled.
command_of() {
  grep -F '"command"' "$2/compile_commands.json" | grep -e "-c [^ ]*$1\""
}

"$cmake" -B "$work/build" "$@" >"$work/configure.log"
cat "$work/configure.log"
echo "== targets of equal flags share a header; a shared library has one of its own"
[ "$(headers "$work/build")" -eq 2 ] || fail "other than two headers"
saying "another precompiled header for shared, since its flags differ from those of embeds: with -fPIC" "$work/configure.log"
command_of minimal_train.cpp "$work/build" | grep -q 'cmake_pch.hxx' || fail "the training program is compiled without the header"
if command_of in_c.c "$work/build" | grep cmake_pch; then fail "a file in C is compiled with the header"; fi

echo "== a flag after the call makes another header, and CMake names it"
"$cmake" -B "$work/late" "$@" -DLATE_FLAG=-fno-math-errno >"$work/late.log"
saying "-fno-math-errno" "$work/late.log"
[ "$(headers "$work/late")" -eq 3 ] || fail "the flag makes no further header"

echo "== CMake's switch turns it off"
"$cmake" -B "$work/off" "$@" -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON >"$work/off.log"
if grep cmake_pch "$work/off/compile_commands.json"; then fail "a header is precompiled"; fi

echo "== several configurations in one build"
"$cmake" -B "$work/multi" "$@" -G "Ninja Multi-Config" >"$work/multi.log"
ninja -C "$work/multi" -f build-Release.ninja -n train >"$work/multi.log"
if grep 'Debug/' "$work/multi.log"; then fail "Release takes a header of Debug"; fi

echo "== wrong calls are refused, with a remedy"
for wrong in "library|does not link chevron::run" "folder|Remedy: call it in the CMakeLists.txt of that folder" \
  "own|has precompiled headers of its own" "twice|one call for each target" "interface|compiles no files" \
  "shared|Remedy: leave out FOR_EXECUTABLES"; do
  refused "${wrong#*|}" "$cmake" -B "$work/wrong" "$@" "-DWRONG=${wrong%%|*}"
done

echo "== compiled, linked and run"
"$cmake" --build "$work/build"
"$work/build/train" | grep -E '^step 60  loss 0[.]1'
for program in embedding both; do
  "$work/build/part/$program" | grep '^embedded: 32 numbers$'
done
case $("$compiler" --version) in
  *clang*)
    size=$(find "$work/build" -name 'minimal_train.cpp.o' -exec stat -c %s {} +)
    echo "minimal_train.cpp.o has $size bytes"
    # Functions of the headers, compiled again, are 13 MB.
    [ "$size" -lt 3000000 ] || fail "functions of the precompiled header are compiled with the program"
    ;;
esac
rm -rf "$work"
