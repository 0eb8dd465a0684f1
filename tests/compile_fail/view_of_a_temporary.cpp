// A view of an object that ends with the statement.
// expect: use of deleted function .*proved_program::view\(\) const &&
// expect: use of deleted function .*proved_program::operator chevron::program_view\(\) const &&
// expect: use of deleted function .*proved_plan::view\(\) const &&
// expect: use of deleted function .*proved_plan::operator chevron::plan_view\(\) const &&
// expect: use of deleted function .*plan::view\(\) const &&
// expect-clang: call to deleted member function 'view'
// expect-clang: conversion function from '(chevron::)?proved_program' to 'const (chevron::)?program_view' invokes a deleted function
// expect-clang: conversion function from '(chevron::)?proved_plan' to 'const (chevron::)?plan_view' invokes a deleted function
#include <chevron/schedule.hpp>

using namespace chevron;

plan const kept = expand(catalogue::gpipe, shape{.ranks = 2, .micro_batches = 2});
#ifdef LEGAL
proved_plan const proof = prove(kept);
proved_program const made = lower(proof);
program_view const seen = made.view();
program_view const converted = made;
plan_view const proved_seen = proof.view();
plan_view const proved_converted = proof;
plan_view const plan_seen = kept.view();
#else
program_view const seen = lower(prove(kept)).view();
program_view const converted = lower(prove(kept));
plan_view const proved_seen = prove(kept).view();
plan_view const proved_converted = prove(kept);
plan_view const plan_seen = expand(catalogue::gpipe, shape{.ranks = 2, .micro_batches = 2}).view();
#endif
