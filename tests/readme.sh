#!/bin/sh
# README's first C++ block must be examples/hello.cpp, word for word, and begin within its first 40 lines.
cd "${CHEVRON_SOURCE:-.}" || exit 1
start=$(grep -n -m 1 '^```cpp' README.md | cut -d : -f 1)
if [ -z "$start" ]; then
  echo "README.md has no \`\`\`cpp block"
  exit 1
fi
if [ "$start" -gt 40 ]; then
  echo "README.md's first block begins at line $start, not within 40 lines of the top"
  exit 1
fi
# Lines that only tell CTest how to run the example are not shown to readers.
shown=$(sed -n "$((start + 1)),\$p" README.md | sed '/^```/,$d')
source=$(grep -v -E '^// (prints|arguments|timeout|serial|skipped):' examples/hello.cpp)
if [ "$shown" != "$source" ]; then
  echo "README.md's first block differs from examples/hello.cpp (README has '+'):"
  mkdir -p "${TMPDIR:-/tmp}" && tmp=$(mktemp) && printf '%s\n' "$shown" >"$tmp"
  printf '%s\n' "$source" | diff -u - "$tmp"
  rm -f "$tmp"
  exit 1
fi
