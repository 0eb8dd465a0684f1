#!/bin/sh
# use.sh COMPONENT CMAKE COMPILER LIBTORCH: installs Chevron to a folder, then builds and runs a small project against it: as an
# installed package, as a folder of sources and, for the schedule side, with nothing but -I.
set -e
component=$1
cmake=$2
compiler=$3
libtorch=$4
here=$CHEVRON_SOURCE/tests/consumer
work=$CHEVRON_BUILD/consumer-$component
rm -rf "$work"
mkdir -p "$work"

case $component in
  schedule) greeting='^chevron [0-9.]+: 4 stages on 2 ranks$' ;;
  run) greeting='^chevron [0-9.]+: rank 1, sum 3$' ;;
  nccl) greeting='^chevron [0-9.]+: (no GPU, .*Remedy: .*|[0-9]+ GPUs, sum 3)$' ;;
esac
greet() {
  printed=$("$@")
  echo "$printed"
  echo "$printed" | grep -E -q "$greeting"
}

echo "== an installed package"
"$cmake" --install "$CHEVRON_BUILD" --prefix "$work/prefix" >"$work/install.log"
# The installation is moved: nothing in it may point to where it was made.
mv "$work/prefix" "$work/moved"
if grep -r -l -F "$CHEVRON_SOURCE/include" "$work/moved"; then
  echo "FAILED: these installed files name the source tree"
  exit 1
fi
set -- -G Ninja "-DCMAKE_CXX_COMPILER=$compiler" "-DCOMPONENT=$component" "-DCHEVRON_TORCH_DIR=$libtorch"
"$cmake" -S "$here" -B "$work/package" "$@" -DWAY=package "-DCMAKE_PREFIX_PATH=$work/moved"
"$cmake" --build "$work/package"
greet "$work/package/consumer"

echo "== a folder of sources"
"$cmake" -S "$here" -B "$work/subdirectory" "$@" -DWAY=subdirectory "-DCHEVRON_SOURCE=$CHEVRON_SOURCE"
"$cmake" --build "$work/subdirectory"
greet "$work/subdirectory/consumer"

if [ "$component" = schedule ]; then
  echo "== nothing but -I"
  "$compiler" -std=c++20 "-I$CHEVRON_SOURCE/include" "$here/schedule.cpp" -o "$work/bare"
  greet "$work/bare"

  echo "== a component that does not exist is refused"
  if "$cmake" -S "$here" -B "$work/unknown" "$@" -DCOMPONENT=trainer -DWAY=package "-DCMAKE_PREFIX_PATH=$work/moved" \
    >"$work/unknown.log" 2>&1; then
    echo "FAILED: find_package(chevron COMPONENTS trainer) succeeds"
    exit 1
  fi
  grep "has the components schedule, run and nccl" "$work/unknown.log"
fi
rm -rf "$work"
