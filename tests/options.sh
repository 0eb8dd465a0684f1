#!/bin/sh
# docs/reference/options.md has a row, or part of one, for each member of the structs that users fill or read, in the order of members
# but for step_report's, with the member's type, and for nothing else; docs/reference/errors.md has a row for each class of error with
# its exit code. Then the check tries itself: in a copy of the pages that lacks one of them it must be noticed.
cd "${CHEVRON_SOURCE:-.}" || exit 1
errors=include/chevron/run/core/error.hpp

pages=$(mktemp) && copy=$(mktemp)
cat docs/reference/options.md docs/reference/errors.md >"$pages"

structs="trainer_setup trainer_options step_report stage_loss_value final_gradients own_work loss_scaling process_options thread_options
evaluator_setup evaluation_report"
# Struct, member and type of each member, a line each, with tabs between.
declared=$(mktemp)
for kind in $structs; do
  header=$(grep -rl "^struct $kind {" include/chevron/run include/chevron/jobs) || { echo "there is no struct $kind"; exit 1; }
  sed -n "/^struct $kind {/,/^};/p" $header | grep '^  [a-z]' | sed 's|//.*||; s| = .*||; s|[{;].*||; s|^ *||; s| *$||' |
    awk -v kind="$kind" '{ name = $NF; sub(/ [^ ]*$/, ""); print kind "\t" name "\t" $0 }'
done >"$declared"

# missing_in <pages>: prints each option that the pages lack, a line each.
missing_in() {
  # The table of a struct goes from its heading to the next empty line; names and types of a row are in one order.
  awk -F '\t' -v structs="$structs" '
    NR == FNR { ++count[$1]; member[$1, count[$1]] = $2; type[$1, $2] = $3; next }
    /^$/ { kind = "" }
    match($0, /^\| `[a-z_]*` \| type \|/) { split($0, heading, "`"); kind = heading[2]; next }
    kind != "" {
      split($0, cells, / *[|] */)
      names = split(cells[2], of, ", ")
      split(cells[3], types, ", ")
      for (n = 1; n <= names; ++n) {
        if (of[n] !~ /^`.*`$/) continue
        name = substr(of[n], 2, length(of[n]) - 2)
        row[kind, ++rows[kind]] = name
        said[kind, name] = types[n]
      }
    }
    END {
      page = "docs/reference/options.md "
      all = split(structs, kinds, /[ \n]+/)
      for (k = 1; k <= all; ++k) {
        kind = kinds[k]
        if (count[kind] < 2) print "only " count[kind] + 0 " members of " kind " were found"
        ordered = rows[kind] == count[kind]
        for (m = 1; m <= count[kind]; ++m) {
          name = member[kind, m]
          if (!((kind, name) in said)) print page "has no row for " kind "::" name
          else if (said[kind, name] != "`" type[kind, name] "`") print page "does not say that " kind "::" name " is a " type[kind, name]
          if (row[kind, m] != name) ordered = 0
        }
        # Users name options in the order of the members.
        if (!ordered && kind != "step_report") print page "has not the rows of " kind " in the order of its members"
        for (m = 1; m <= rows[kind]; ++m)
          if (!((kind, row[kind, m]) in type)) print page "has a row for " kind "::" row[kind, m] ", which is not there"
      }
    }' "$declared" "$1"
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
rm -f "$pages" "$copy" "$declared"
[ -z "$found" ] || { echo "$found"; exit 1; }
