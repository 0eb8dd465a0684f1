// A view of what is gone at the end of the line.
// expect: use of deleted function .*program::view\(\) const &&
// expect: use of deleted function .*program::operator chevron::program_view\(\) const &&
// expect: use of deleted function .*plan::view\(\) const &&
// expect-clang: call to deleted member function 'view'
// expect-clang: conversion function from 'program' to 'const program_view' invokes a deleted function
#include <chevron/schedule.hpp>

using namespace chevron;

plan const kept = expand(catalogue::gpipe, shape{.ranks = 2, .micro_batches = 2});
#ifdef LEGAL
program const made = lower(kept);
program_view const seen = made.view();
program_view const converted = made;
plan_view const plan_seen = kept.view();
#else
program_view const seen = lower(kept).view();
program_view const converted = lower(kept);
plan_view const plan_seen = expand(catalogue::gpipe, shape{.ranks = 2, .micro_batches = 2}).view();
#endif
