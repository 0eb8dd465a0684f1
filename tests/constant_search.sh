#!/bin/sh
# constant_search.sh COMPILER FOLDER:FOLDER...: constant_search.cpp compiles, and finds the same plans while compiling and when run.
compiler=$1
folders=$2
here=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
work=$(mktemp -d) || exit 1
trap 'rm -rf "$work"' EXIT

if "$compiler" --version | grep -q clang; then set -- -fconstexpr-steps=268435456; else set -- -fconstexpr-ops-limit=268435456; fi
old_ifs=$IFS
IFS=:
for folder in $folders; do set -- "$@" "-I$folder"; done
IFS=$old_ifs

"$compiler" -std=c++20 -O1 "$@" "$here/constant_search.cpp" -o "$work/found" || exit 1
"$work/found"
