#!/bin/sh
# docs/training.md has a row, or part of one, for each member of trainer_options and of step_report.
cd "${CHEVRON_SOURCE:-.}" || exit 1
header=include/chevron/run/training/trainer_options.hpp
missing=0
for kind in trainer_options step_report; do
  members=$(sed -n "/^struct $kind {/,/^};/p" $header | grep '^  [a-z]' | sed 's|//.*||; s| = .*||; s|[{;].*||' | awk '{ print $NF }')
  [ "$(echo "$members" | wc -l)" -ge 10 ] || { echo "only these members of $kind were found in $header: $members"; missing=1; }
  # The table under this heading, up to the next empty line.
  table=$(sed -n "/^| .$kind. /,/^$/p" docs/training.md)
  for member in $members; do
    echo "$table" | cut -d '|' -f 2 | grep -q "\`$member\`" && continue
    echo "docs/training.md has no row for $kind::$member"
    missing=1
  done
done
exit $missing
