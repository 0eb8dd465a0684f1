#!/bin/sh
# chroot.sh SUITE [COMPILER...]: a bare Debian of that suite (bookworm, trixie, sid) in a folder, the packages of CHEVRON_BUILD installed in
# it by apt, and used there: chevron-plan, the headers by CMake and pkg-config, and compilers.sh under the compilers named (Debian's
# packages, as g++-14; without any: all that the suite offers from g++ 12 and clang 16). With a wheel of chevron_pipelining in
# CHEVRON_BUILD/packages also PyTorch and the wheel, installed by pip, and the first program of docs/guides/python.md on two ranks;
# then the same of a binary wheel, without a compiler, which is left in CHEVRON_BUILD/packages.
# Needs root, mmdebstrap and Debian's archive; for PyTorch the package index that pip uses here.
set -e
suite=$1
shift
work=$CHEVRON_BUILD/chroot-$suite
[ "$(id -u)" -eq 0 ] || { echo "skipped: making a Debian in a folder needs root"; exit 77; }
command -v mmdebstrap >/dev/null || { echo "skipped: no mmdebstrap here (Debian: mmdebstrap)"; exit 77; }
rm -rf "$work"
mkdir -p "$CHEVRON_BUILD/packages"
(cd "$CHEVRON_BUILD/packages" && cpack --config "$CHEVRON_BUILD/CPackConfig.cmake" -B . >cpack.log) ||
  { cat "$CHEVRON_BUILD/packages/cpack.log"; exit 1; }
# Signatures are looked at, dates are not: mirrors of sid lag behind.
mmdebstrap --quiet --variant=apt --aptopt='Acquire::Check-Valid-Until "false"' "$suite" "$work"
trap 'rm -rf --one-file-system "$work"' EXIT
inside() {
  env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive \
    CHEVRON_BUILD=/build CHEVRON_SOURCE=/source chroot "$work" "$@"
}

mkdir "$work/packages" "$work/build" "$work/source"
cp "$CHEVRON_BUILD"/packages/*.deb "$work/packages"
inside apt-get -q -q update
echo "== $suite: installed by apt"
inside sh -c 'apt-get -q -q -y -o Dpkg::Use-Pty=0 install --no-install-recommends /packages/*.deb' \
  >"$work/apt.log" 2>&1 || { tail "$work/apt.log"; exit 1; }
inside dpkg-query -W -f '${Package} ${Version} ${Status}\n' libchevron-dev chevron-tools
inside chevron-plan show ZBVZeroBubble | grep 'makespan 51 '

# Compilers need the sources of the test, not those of the library.
tar -C "$CHEVRON_SOURCE" -cf - README.md examples/hello.cpp tests/consumer | tar -C "$work/source" -xf -
mkdir "$work/source/include"
[ $# -gt 0 ] || set -- $(inside apt-cache search --names-only '^(g\+\+-1[2-9]|clang-(1[6-9]|2[0-9]))$' | cut -d ' ' -f 1)
echo "== $suite: $*"
inside apt-get -q -q -y -o Dpkg::Use-Pty=0 install --no-install-recommends g++ cmake ninja-build pkgconf "$@" \
  >"$work/apt.log" 2>&1 || { tail "$work/apt.log"; exit 1; }
inside sh -e -c '{ cmake -S /source/tests/consumer -B /build/use -G Ninja -DWAY=component &&
    cmake --build /build/use; } >/build/log 2>&1 || { cat /build/log; exit 1; }
  if grep -i -A 9 warning /build/log; then echo FAILED: a user is warned; exit 1; fi
  /build/use/consumer
  c++ -std=c++20 $(pkg-config --cflags chevron-schedule) /source/tests/consumer/schedule.cpp -o /build/by-pkg-config && /build/by-pkg-config'
inside sh /source/tests/consumer/compilers.sh
wheel=$(find "$CHEVRON_BUILD/packages" -name 'chevron_pipelining-*-py3-none-any.whl')
torch=$(sed -n 's/^torch=//p' "$CHEVRON_SOURCE/dev")
if [ -n "$wheel" ]; then
  echo "== $suite: chevron_pipelining"
  cp "$wheel" "$work/packages"
  sed -n '/^```python file train[.]py$/,/^```$/{/^```/d;p}' "$CHEVRON_SOURCE/docs/guides/python.md" >"$work/build/train.py"
  inside sh -e -c '{ apt-get -q -q -y -o Dpkg::Use-Pty=0 install --no-install-recommends g++ python3-venv python3-dev &&
      python3 -m venv /build/venv; } >/build/log 2>&1 || { cat /build/log; exit 1; }'
  # How this machine reaches its package index; apt has brought certificates, too.
  for file in /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do [ ! -f $file ] || install -D -m 644 $file "$work$file"; done
  echo "127.0.0.1 localhost $(hostname)" >"$work/etc/hosts"  # names of the ranks' store
  cp "$CHEVRON_SOURCE/python/binary_wheel.py" "$work/build"
  inside sh -e -c 'cd /build
    began=$(date +%s)
    venv/bin/pip install --quiet --disable-pip-version-check "$1" numpy /packages/chevron_pipelining-*-py3-none-any.whl
    echo "pip install, with PyTorch: $(($(date +%s) - began)) s"
    began=$(date +%s)
    venv/bin/torchrun --standalone --nproc-per-node 2 train.py
    echo "compiled and trained: $(($(date +%s) - began)) s"
    began=$(date +%s)
    venv/bin/torchrun --standalone --nproc-per-node 2 train.py
    echo "trained, with the binding compiled: $(($(date +%s) - began)) s"
    venv/bin/python binary_wheel.py /packages/chevron_pipelining-*-py3-none-any.whl /packages
    venv/bin/pip install --quiet --disable-pip-version-check --force-reinstall --no-deps /packages/chevron_pipelining-*-linux_*.whl
    began=$(date +%s)
    PATH=/build/venv/bin CHEVRON_PIPELINING_CACHE=/build/empty venv/bin/torchrun --standalone --nproc-per-node 2 train.py
    echo "trained by the binary wheel, without a compiler: $(($(date +%s) - began)) s"' sh "$torch"
  cp "$work"/packages/chevron_pipelining-*-linux_*.whl "$CHEVRON_BUILD/packages"
fi
echo "== $suite: removed"
inside apt-get -q -q -y -o Dpkg::Use-Pty=0 remove libchevron-dev chevron-tools >"$work/apt.log" 2>&1
[ -z "$(inside find /usr/include/chevron /usr/bin/chevron-plan /usr/share/cmake/chevron 2>/dev/null)" ] || { echo "FAILED: files stay"; exit 1; }
