#!/bin/sh
# use.sh COMPONENT CMAKE COMPILER LIBTORCH: installs Chevron to a folder, then builds and runs a small project against it: as an
# installed package, as a folder of sources and, for the schedule side, fetched as an archive, by pkg-config, and with nothing but -I.
set -e
. "$CHEVRON_SOURCE/tests/consumer/shared.sh"
component=$1
cmake=$2
compiler=$3
libtorch=$4
here=$CHEVRON_SOURCE/tests/consumer
begin "$component"

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
if grep -r -l -F "$CHEVRON_SOURCE/include" "$work/moved/include" "$work/moved/share"; then
  fail "these installed files name the source tree"
fi
package=-DCMAKE_PREFIX_PATH=$work/moved
set -- -G Ninja "-DCMAKE_CXX_COMPILER=$compiler" "-DCOMPONENT=$component"
unset CHEVRON_TORCH_DIR
"$cmake" -S "$here" -B "$work/package" "$@" -DWAY=package "$package" "-DCHEVRON_TORCH_DIR=$libtorch"
"$cmake" --build "$work/package"
greet "$work/package/consumer"
echo "== its component named"
"$cmake" "$work/package" -DWAY=component
"$cmake" --build "$work/package"

echo "== a folder of sources"
"$cmake" -S "$here" -B "$work/subdirectory" "$@" -DWAY=subdirectory "-DCHEVRON_SOURCE=$CHEVRON_SOURCE" "-DCHEVRON_TORCH_DIR=$libtorch"
"$cmake" --build "$work/subdirectory"
greet "$work/subdirectory/consumer"

nowhere="-DCHEVRON_TORCH_DIR=$work/nowhere"
if [ "$component" = schedule ]; then
  echo "== nothing but -I"
  # Its headers stand no warning of a project that looks for all of them.
  "$compiler" -std=c++20 -Werror -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion "-I$CHEVRON_SOURCE/include" \
    "$here/schedule.cpp" -o "$work/bare"
  greet "$work/bare"

  echo "== fetched as an archive"
  tar -C "$CHEVRON_SOURCE" -czf "$work/chevron.tar.gz" CMakeLists.txt cmake include
  sum=$(sha256sum "$work/chevron.tar.gz" | cut -d ' ' -f 1)
  "$cmake" -S "$here" -B "$work/fetch" "$@" -DWAY=fetch "-DARCHIVE=$work/chevron.tar.gz" "-DSUM=$sum"
  "$cmake" --build "$work/fetch"
  greet "$work/fetch/consumer"

  if command -v pkg-config >/dev/null; then
    echo "== pkg-config"
    PKG_CONFIG_PATH=$work/moved/share/pkgconfig
    export PKG_CONFIG_PATH
    [ "$(pkg-config --modversion chevron-schedule)" = "$("$work/moved/bin/chevron-plan" --version | grep -o '[0-9][0-9.]*' | head -n 1)" ]
    # shellcheck disable=SC2046  # flags are words
    "$compiler" -std=c++20 $(pkg-config --cflags chevron-schedule) "$here/schedule.cpp" -o "$work/by-pkg-config"
    greet "$work/by-pkg-config"
  else
    echo "left out: no pkg-config here"
  fi

  echo "== no LibTorch: schedules alone"
  "$cmake" -S "$here" -B "$work/alone" "$@" -DWAY=package "$package" "$nowhere" >"$work/alone.log" 2>&1
  saying "chevron::run and chevron::nccl are left out: " "$work/alone.log"
  "$cmake" "$work/alone" -DWAY=component >"$work/alone.log" 2>&1
  if grep "left out" "$work/alone.log"; then
    fail "a project that asks for schedules alone is told what else there is"
  fi

  echo "== a component that does not exist is refused"
  refused "has the components schedule, run, nccl and compiled" "$cmake" -S "$here" -B "$work/unknown" "$@" -DCOMPONENT=trainer -DWAY=component "$package"
  echo "== the programs are installed"
  "$work/moved/bin/chevron-plan" show ZBVZeroBubble | grep -q 'makespan 51 '
fi
if [ "$component" = run ]; then
  echo "== no LibTorch: the reason and the remedy"
  why="No LibTorch found in: CHEVRON_TORCH_DIR=$work/nowhere."
  for way in component package subdirectory; do
    refused "$why Remedy: " "$cmake" -S "$here" -B "$work/none-$way" "$@" -DWAY=$way "$package" "-DCHEVRON_SOURCE=$CHEVRON_SOURCE" "$nowhere"
  done
  saying "chevron::run is left out, since " "$work/refused.log"

  echo "== CHEVRON_TORCH_DIR of the environment is remembered"
  env "CHEVRON_TORCH_DIR=$libtorch" "$cmake" -S "$here" -B "$work/remembers" "$@" -DWAY=package "$package" >"$work/remembers.log"
  "$cmake" "$work/remembers" >"$work/remembers.log"
  env "CHEVRON_TORCH_DIR=$work/nowhere" "$cmake" "$work/remembers" >"$work/remembers.log"
  saying "not the environment's $work/nowhere" "$work/remembers.log"
  refused "$why" env "CHEVRON_TORCH_DIR=$libtorch" "$cmake" "$work/remembers" "$nowhere"

  echo "== Chevron's own .venv, in a folder of sources"
  site=$work/sources/.venv/lib/python3/site-packages
  mkdir -p "$site"
  ln -s "$libtorch" "$site/torch"
  ln -s "$CHEVRON_SOURCE/CMakeLists.txt" "$CHEVRON_SOURCE/cmake" "$CHEVRON_SOURCE/include" "$work/sources"
  "$cmake" -S "$here" -B "$work/own" "$@" -DWAY=subdirectory "-DCHEVRON_SOURCE=$work/sources" >"$work/own.log"
  saying "Found LibTorch: $site/torch/lib" "$work/own.log"

  echo "== the programs are installed, and find LibTorch"
  env -u LD_LIBRARY_PATH "$work/moved/bin/chevron-train" --help | grep -q -e '--schedule'
fi
rm -rf "$work"
