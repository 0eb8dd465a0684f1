# Shared by the tests of refusals: an empty folder to work in, and `refused`. `seconds`: the time limit of each call.
. "$(dirname "$0")/shared/folder.sh"
failed=0

# refused <code> <pattern of the message> <command…>: the command ends with this code, and with one line that has a remedy.
refused() {
  expected=$1
  words=$2
  shift 2
  code=0
  timeout "$seconds" "$@" > output 2> errors || code=$?
  if [ $code -ne "$expected" ] || ! grep -q -e "$words" errors; then
    echo "$*: exit code $code, not $expected, or no \`$words\` in:"
    cat errors
    failed=1
  fi
  if [ "$(wc -l < errors)" -ne 1 ] || ! grep -q "Remedy: " errors; then
    echo "$*: not one line with a remedy:"
    cat errors
    failed=1
  fi
}
