#!/bin/sh
# check.sh COMPILER FILE FOLDER:FOLDER...: FILE must fail to compile, with the words it expects, and must compile with -DLEGAL.
# The folders are the include path.
compiler=$1
file=$2
folders=$3
LC_ALL=C
export LC_ALL

# Source lines are not echoed, so that an expectation matches only the compiler's messages, not the code.
if "$compiler" --version | grep -q clang; then
  kind=clang
  set -- -fconstexpr-steps=268435456 -fno-caret-diagnostics -ferror-limit=0
else
  kind=gcc
  set -- -fconstexpr-ops-limit=268435456 -fno-diagnostics-show-caret -fmessage-length=0
fi
set -- -std=c++20 -O0 "$@"
old_ifs=$IFS
IFS=:
header=
for folder in $folders; do
  set -- "$@" "-I$folder"
  if [ -z "$header" ] && [ -e "$folder/chevron/schedule.hpp" ]; then header=$folder/chevron/schedule.hpp; fi
done
IFS=$old_ifs

# The header all files begin with is compiled once for each compiler, in the folder the tests run in, and again when it changed:
# without it a test takes four times as long. Whoever comes first makes it, the others wait.
store=precompiled-$(printf %s "$compiler" | tr -c 'A-Za-z0-9' _)
fresh() {
  [ -e "$store/made" ] && [ -z "$(find "$(dirname "$header")" -name '*.hpp' -newer "$store/made" | head -n 1)" ]
}
if [ -n "$header" ] && ! fresh; then
  tries=0
  until mkdir "$store.lock" 2>/dev/null || fresh || [ $tries -ge 100 ]; do
    sleep 1
    tries=$((tries + 1))
  done
  if ! fresh; then
    rm -rf "$store" && mkdir -p "$store/chevron"
    if [ $kind = clang ]; then made=$store/schedule.pch; else made=$store/chevron/schedule.hpp.gch; fi
    "$compiler" "$@" -w -x c++-header -o "$made" "$header" && touch "$store/made"
  fi
  rmdir "$store.lock" 2>/dev/null
fi
if [ -n "$header" ] && [ -e "$store/made" ]; then
  if [ $kind = clang ]; then set -- -include-pch "$store/schedule.pch" "$@"; else set -- "-I$store" "$@"; fi
fi
set -- -S -o /dev/null "$@"

expected=
if [ $kind = clang ]; then
  expected=$(sed -n 's|^// expect-clang: *||p' "$file")
fi
if [ -z "$expected" ]; then
  expected=$(sed -n 's|^// expect: *||p' "$file")
fi
if [ -z "$expected" ]; then
  echo "FAILED: $file has no line '// expect: <regex>'"
  exit 1
fi

if output=$("$compiler" "$@" "$file" 2>&1); then
  echo "FAILED: it compiles, but must not"
  exit 1
fi
# clang would cut a long text short, so the library hands it sentences in pieces; here they are put together again.
output=$(printf '%s\n' "$output" | sed 's/"}, fixed_string<[0-9]*>{"//g')
status=0
while IFS= read -r regex; do
  if printf '%s\n' "$output" | grep -E -q -e "$regex"; then
    echo "says as expected: $(printf '%s\n' "$output" | grep -E -m 1 -e "$regex" | cut -c 1-400)"
  else
    echo "FAILED: it does not compile, but not for the expected reason; no line matches: $regex"
    status=1
  fi
done <<EXPECTED
$expected
EXPECTED
most=$(sed -n 's|^// errors: *||p' "$file")
errors=$(printf '%s\n' "$output" | grep -c 'error:')
if [ -n "$most" ] && [ "$errors" -ne "$most" ]; then
  echo "FAILED: $errors errors where one mistake must give $most"
  status=1
fi
if [ $status -ne 0 ]; then
  echo "the compiler says:"
  printf '%s\n' "$output" | grep -E 'error|note' | cut -c 1-600 | head -n 30
  exit 1
fi

if ! output=$("$compiler" "$@" -DLEGAL "$file" 2>&1); then
  echo "FAILED: the legal neighbour (-DLEGAL) does not compile:"
  printf '%s\n' "$output" | head -n 30
  exit 1
fi
echo "the legal neighbour compiles"
