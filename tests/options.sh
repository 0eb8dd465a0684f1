#!/bin/sh
# docs/reference/options.md has a row, or part of one, for each member of the structs that users fill or read, in their order but for
# step_report's, with the member's type, and for nothing else; docs/reference/errors.md has a row for each class of error with its exit code. Then the
# check tries itself: in a copy of the pages that lacks one of them it must be noticed.
cd "${CHEVRON_SOURCE:-.}" || exit 1
errors=include/chevron/run/core/error.hpp

pages=$(mktemp) && copy=$(mktemp)
cat docs/reference/options.md docs/reference/errors.md >"$pages"

# missing_in <pages>: prints each option that the pages lack, a line each.
missing_in() {
  for kind in trainer_setup trainer_options step_report stage_loss_value final_gradients own_work loss_scaling process_options \
    thread_options evaluator_setup evaluation_report; do
    header=$(grep -rl "^struct $kind {" include/chevron/run include/chevron/jobs) || echo "there is no struct $kind"
    declared=$(sed -n "/^struct $kind {/,/^};/p" $header | grep '^  [a-z]' | sed 's|//.*||; s| = .*||; s|[{;].*||; s|^ *||; s| *$||')
    members=$(echo "$declared" | awk '{ print $NF }')
    [ "$(echo "$members" | wc -l)" -ge 2 ] || echo "only these members of $kind were found in $header: $members"
    # The table under this heading, up to the next empty line.
    table=$(sed -n "/^| .$kind. /,/^$/p" "$1")
    for member in $members; do
      echo "$table" | cut -d '|' -f 2 | grep -q "\`$member\`" || echo "docs/reference/options.md has no row for $kind::$member"
      # The types of a row are in the order of its names.
      type=$(echo "$declared" | sed -n "s| $member\$||p")
      echo "$table" | awk -F ' *[|] *' -v name="\`$member\`" -v type="\`$type\`" '
        { names = split($2, of, ", "); split($3, types, ", ")
          for (n = 1; n <= names; ++n) if (of[n] == name) right = types[n] == type }
        END { exit !right }' || echo "docs/reference/options.md does not say that $kind::$member is a $type"
    done
    words=$(echo "$table" | sed 1d | cut -d '|' -f 2 | grep -o '`[^`]*`' | tr -d '`')
    # Users name options in the order of the members.
    [ $kind = step_report ] || [ "$words" = "$members" ] || echo "docs/reference/options.md has not the rows of $kind in the order of its members"
    for word in $words; do
      echo "$members" | grep -qx "$word" || echo "docs/reference/options.md has a row for $kind::$word, which is not there"
    done
  done
  table=$(sed -n '/^| exit code /,/^$/p' "$1")
  classes=$(sed -n 's/^struct \([a-z_]*_error\) : error {.*/\1/p' $errors)
  [ "$(echo "$classes" | wc -l)" -ge 7 ] || echo "only these classes of errors were found in $errors: $classes"
  for class in $classes; do
    code=$(sed -n "s/^  ${class%_error} = \([0-9]*\).*/\1/p" $errors)  # none of its own: that of what is nested
    echo "$table" | grep -q "^| ${code:-1} | \`$class\` | [^|]* | [^|]* |$" || echo "docs/reference/errors.md has no row for $class with exit code ${code:-1}"
  done
  echo "$table" | grep -q "\`invalid_schedule_error\`" || echo "docs/reference/errors.md has no row for invalid_schedule_error"
}

found=$(missing_in "$pages")
for word in clip_grad_norm peak_in_flight timeout_error invalid_schedule_error longest_delay final_gradients; do
  sed "/^|.*\`$word\`/d" "$pages" >"$copy"
  [ -n "$(missing_in "$copy")" ] || found="$found
this check does not notice a page without $word"
done
sed 's/^| 4 | `timeout_error`/| 9 | `timeout_error`/' "$pages" >"$copy"
[ -n "$(missing_in "$copy")" ] || found="$found
this check does not notice a wrong exit code"
sed 's/^| `seed` | `std::uint64_t`/| `seed` | `std::int64_t`/' "$pages" >"$copy"
[ -n "$(missing_in "$copy")" ] || found="$found
this check does not notice another type"
sed 's/`stable_steps`/`calm_steps`, `stable_steps`/' "$pages" >"$copy"
[ -n "$(missing_in "$copy")" ] || found="$found
this check does not notice a row for an option that is not there"
sed -n '/^| `seed`/{h;d};/^| `autocast`/{p;g};p' "$pages" >"$copy"
[ -n "$(missing_in "$copy")" ] || found="$found
this check does not notice options in another order"
rm -f "$pages" "$copy"
[ -z "$found" ] || { echo "$found"; exit 1; }
