# Shared by the tests of chevron-plan: an empty folder to work in, and `expect`. `seconds`: the time limit of each call.
. "$(dirname "$0")/shared/folder.sh"
failed=0

# expect <code> <regex that a line of standard output or errors must match> <arguments…>
expect() {
  expected=$1
  words=$2
  shift 2
  code=0
  timeout "$seconds" "$plan" "$@" > output 2> errors || code=$?
  if [ $code -ne "$expected" ] || ! cat output errors | grep -q -e "$words"; then
    echo "chevron-plan $*: exit code $code, not $expected, or no \`$words\` in:"
    cat output errors
    failed=1
  fi
  if [ "$expected" -eq 2 ] && { [ "$(wc -l < errors)" -ne 1 ] || [ -s output ]; }; then
    echo "chevron-plan $*: not just one line:"
    cat output errors
    failed=1
  fi
}
