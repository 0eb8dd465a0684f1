#!/bin/sh
# prints.sh REGEX COMMAND...: the command must exit with 0 and print a line that matches (any output will do if REGEX is empty).
# CTest's own PASS_REGULAR_EXPRESSION ignores the exit status.
regex=$1
shift
output=$("$@" 2>&1 </dev/null)
status=$?
printf '%s\n' "$output"
if [ $status -ne 0 ]; then
  echo "FAILED: exit status $status"
  exit 1
fi
if ! printf '%s\n' "$output" | grep -E -q -e "$regex"; then
  echo "FAILED: no line matches: $regex"
  exit 1
fi
