#!/bin/sh
# timeout: 120
# package.sh CMAKE COMPILER: the Debian packages that cpack makes of this build, used as on a machine that has nothing of Chevron's
# but them: unpacked into a bare folder, which is that machine's root where this may be done. With an installed Debian for a root,
# and its compilers: ./dev package SUITE.
set -e
cmake=$1
compiler=$2
command -v dpkg-deb >/dev/null || { echo "skipped: no dpkg-deb here"; exit 77; }
[ -x "$CHEVRON_BUILD/bin/chevron-plan" ] || { echo "FAILED: chevron-plan is not built"; exit 1; }
here=$CHEVRON_SOURCE/tests/consumer
. "$here/shared.sh"
begin package
mkdir "$work/root"

(cd "$work" && "${cmake%cmake}cpack" --config "$CHEVRON_BUILD/CPackConfig.cmake" -B "$work" >cpack.log) || { cat "$work/cpack.log"; exit 1; }
dev=$(ls "$work"/libchevron-dev_*_all.deb)
tools=$(ls "$work"/chevron-tools_*.deb)
field() { dpkg-deb --field "$1" "$2"; }
[ "$(field "$dev" Version)" = "$(field "$tools" Version)" ] || fail "the packages' versions differ"
field "$dev" Depends | grep -q 'libboost-dev (>= 1.74)' || fail "headers that include Boost's do not depend on it"
if field "$tools" Depends | grep -E 'libstdc|torch'; then fail "chevron-plan needs more than the C library"; fi
version=$(field "$dev" Version | cut -d - -f 1)
grep -q "\"version\": \"$version\"" "$CHEVRON_SOURCE/cmake/packaging/vcpkg/chevron/vcpkg.json" || fail "vcpkg's recipe is not for version $version"
grep -q "^## $version" "$CHEVRON_SOURCE/docs/reference/CHANGELOG.md" || fail "docs/reference/CHANGELOG.md has no chapter on version $version"
# Nothing names the place where it was made, and no rank's LibTorch is in it.
dpkg-deb --fsys-tarfile "$dev" | tar -C "$work/root" -xf -
dpkg-deb --fsys-tarfile "$tools" | tar -C "$work/root" -xf -
if grep -r -l -F "$CHEVRON_SOURCE" "$work/root/usr/include" "$work/root/usr/share"; then fail "these files name the source tree"; fi
[ "$(cd "$work/root" && find . -mindepth 1 -maxdepth 2 | sort | tr '\n' ' ')" = "./usr ./usr/bin ./usr/include ./usr/share " ] ||
  fail "the packages hold other folders: $(cd "$work/root" && find . -mindepth 1 -maxdepth 2)"

echo "== the headers, by CMake and by pkg-config"
"$cmake" -S "$here" -B "$work/use" -G Ninja "-DCMAKE_CXX_COMPILER=$compiler" -DWAY=component "-DCMAKE_PREFIX_PATH=$work/root/usr" >"$work/use.log" ||
  { cat "$work/use.log"; exit 1; }
"$cmake" --build "$work/use" >>"$work/use.log" || { cat "$work/use.log"; exit 1; }
"$work/use/consumer" | grep -E '^chevron [0-9.]+: 4 stages on 2 ranks$'
if command -v pkg-config >/dev/null; then
  # shellcheck disable=SC2046  # flags are words
  "$compiler" -std=c++20 -fsyntax-only $(PKG_CONFIG_PATH=$work/root/usr/share/pkgconfig pkg-config --cflags chevron-schedule) "$here/schedule.cpp"
fi

echo "== the program"
if [ "$(id -u)" -eq 0 ] && chroot / true 2>/dev/null; then
  # The C library is all that Depends names.
  ldd "$work/root/usr/bin/chevron-plan" | grep -o '/[^ ]*' | while read -r library; do
    mkdir -p "$work/root$(dirname "$library")"
    cp -L "$library" "$work/root$library"
  done
  chroot "$work/root" /usr/bin/chevron-plan show ZBVZeroBubble | grep 'makespan 51 '
else
  "$work/root/usr/bin/chevron-plan" show ZBVZeroBubble | grep 'makespan 51 '
fi
rm -rf "$work"
