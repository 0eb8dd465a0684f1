#!/bin/sh
# prints.sh REGEX COMMAND...: the command must exit with 0 and print a line that matches (any output will do if REGEX is empty).
# CTest's own PASS_REGULAR_EXPRESSION ignores the exit status. Standard output and errors are read apart: in one stream a warning may begin
# within a line of the output, which a program writes a buffer at a time.
regex=$1
shift
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
status=0
"$@" </dev/null >"$folder/output" 2>"$folder/errors" || status=$?
cat "$folder/output" "$folder/errors"
if [ $status -ne 0 ]; then
  echo "FAILED: exit status $status"
  exit 1
fi
if [ -n "$regex" ] && ! grep -h -E -q -e "$regex" "$folder/output" "$folder/errors"; then
  echo "FAILED: no line matches: $regex"
  exit 1
fi
