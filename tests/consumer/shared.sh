# Sourced by the scripts of this folder: an empty folder to work in, and commands that end a test with their words.
fail() {
  echo "FAILED: $*"
  exit 1
}
# begin NAME: $work, an empty folder for this script.
begin() {
  work=$CHEVRON_BUILD/consumer-$1
  rm -rf "$work"
  mkdir -p "$work"
}
# install_headers: the headers with their CMake package, into $work/prefix.
install_headers() {
  "$cmake" --install "$CHEVRON_BUILD" --component dev --prefix "$work/prefix" >"$work/install.log"
}
# saying TEXT FILE: line ends and indentation are CMake's own.
saying() {
  tr -s ' \n' '  ' <"$2" | grep -q -F -e "$1" || { cat "$2"; fail "nothing says: $1"; }
}
# refused TEXT COMMAND...: the command fails, and says the text.
refused() {
  said=$1
  shift
  if "$@" >"$work/refused.log" 2>&1; then fail "no failure: $*"; fi
  saying "$said" "$work/refused.log"
}
