#!/bin/sh
# ./dev docs without a warning; then it tries itself: a link that leads nowhere and a docstring of an argument that is not there must fail.
# Skipped where the tools are missing, which ./dev test and ./dev docs install.
cd "${CHEVRON_SOURCE:-.}" || exit 1
build=${CHEVRON_BUILD:-build}
tools=$build/docs-tools/bin/mkdocs
{ [ -x "$tools" ] && command -v doxygen >/dev/null; } ||
  { echo "skipped: no mkdocs-material in $build/docs-tools, or no doxygen; remedy: ./dev docs"; exit 77; }
work=$build/site-test
rm -rf "$work"
mkdir -p "$work"
# A copy, so that a site that somebody looks at stays as it is.
tar -cf - mkdocs.yml README.md docs dev include examples bench/compile | tar -C "$work" -xf -
mkdir -p "$work/build"
ln -s "$(cd "$build" && pwd)/docs-tools" "$work/build/docs-tools"
cd "$work" || exit 1
sh dev docs </dev/null || exit 1
echo '[a link](nowhere.md)' >>docs/guides/which-schedule.md
if sh dev docs </dev/null >said 2>&1; then
  echo "FAILED: ./dev docs does not notice a link to no page"
  exit 1
fi
grep -q "WARNING.*nowhere.md" said || { cat said; echo "FAILED: the link that leads nowhere is not named"; exit 1; }
printf '/// \\param nobody what is not there\ninline int documented_wrongly(int one) { return one; }\n' >>include/chevron/version.hpp
{ cat docs/site/Doxyfile; echo "INPUT = include/chevron/version.hpp"; } >one
doxygen one
grep -q nobody build/doxygen-warnings.log || { echo "FAILED: doxygen says nothing of an argument that is not there"; exit 1; }
cd - >/dev/null && rm -rf "$work"
