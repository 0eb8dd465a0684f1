# Sourced first by scripts: names of programs and folders, and an empty working folder, removed when the script ends.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
train="${CHEVRON_BUILD:?}/bin/chevron-train"
plan="$CHEVRON_BUILD/bin/chevron-plan"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"

# write_text: text.txt, to train on.
write_text() { seq -f "line %.0f of some text, as good as any" 4000 > text.txt; }

# find_python: sets `python`, the one beside LibTorch or the system's; without one the test is skipped.
find_python() {
  python=$(command -v "${CHEVRON_SOURCE:?}/.venv/bin/python" || command -v python3) || { echo "no Python to read the files with"; exit 77; }
}
