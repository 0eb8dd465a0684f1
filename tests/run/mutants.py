#!/usr/bin/env python3
"""Do the tests of slices notice what is wrong? Puts mistakes into a copy of chevron's headers, each behind a number, and runs a test of
chevron-slice-tests with each of them, which must fail. Run by hand, some minutes:

    tests/run/mutants.py --build build              all of them
    tests/run/mutants.py --build build gradient     those whose name contains one of these words
    tests/run/mutants.py --build build --compile    only compiles them

`--build` is a folder in which chevron-slice-tests has been built. The exit code is 1 where a mutant is not found; one whose text is no
longer in the headers is an error, too.
"""
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from header_mutants import doctest_error, of_tests, options, run

SECTION = "run/stage/stage_carries.hpp"
STAGE = "run/stage/stage_execution.hpp"
PARTS = "run/stage/stage_parts.hpp"
STORE = "run/execute/carry_store.hpp"
RUNNER = "run/execute/stage_runner.hpp"
CUTS = "run/stage/slice_cuts.hpp"
SPLIT = "run/stage/split_batch.hpp"
AGREEMENT = "run/execute/slice_agreement.hpp"
CONTEXT = "run/train/rank_context.hpp"

# The test that is to notice the mistake.
SLICES, CARRIES, LOSSES, PACKED = "stage/slices", "stage/carries", "stage/sliced_losses", "train/packed_documents"
COMPARED = "execute/slice_agreement"
STEPS = "train/sliced_steps"
HELD = r"(rounded\(of_carries\[begin_ \+ k\], ways_\[k\]\.dtype\))"
UNEQUAL = r"(out\.second = false;)"

# name; header below include/chevron; regular expression, whose groups are statements or expressions; what stands in place of each; test;
# why the test does not find the mutant, if so
MUTANTS = [
    ("gradient of a carry: dropped", SECTION, HELD, "at::Tensor()", SLICES),
    ("gradient of a carry: added twice", SECTION, HELD,
     "of_carries[begin_ + k].defined() ? of_carries[begin_ + k] * 2 : at::Tensor()", SLICES),
    ("gradient of a carry: of another carry", SECTION, HELD, "of_carries[begin_ + ways_.size() - 1 - k]", SLICES),
    ("gradient of a carry: summed in half precision by autograd", SECTION, r"one\.handed_on = (.*?);", "false", CARRIES),
    ("gradient of a carry: summed in half precision", SECTION, r"(a\.to\(at::kFloat\) \+ b)", "a + b", CARRIES),
    ("gradient of a carry: of the slice alone where it is handed on", SECTION, r"(sum_of\(of_later, own\))", "own", CARRIES),
    ("gradient of a carry: of another microbatch's slice", STORE, r"(&of\.gradients\[m\])", "&of.gradients[0]", CARRIES),
    ("carry: the first slice takes that of an earlier step", STORE,
     r"== step_graph::none\) (here->held\.clear\(\);).*?plan_\.size\.slices - 1 : 0\)\) (here->held\.clear\(\);)", ("", ""), CARRIES),
    ("gradient of a carry: not given where inputs need none", STAGE, r"return s\.differentiable \|\| (.*?);", "false", SLICES),
    ("gradient of a carry: flows into one that is detached", SECTION, r"p >= lowest && (!one\.detached)", "true", SLICES),
    ("gradient of a carry: none in the lowest part that is trained", SECTION, r"(p >= lowest) && !one", "p > lowest", SLICES),
    ("gradient of a carry: left in the place of another section's", SECTION, r"(std::exchange\(of_carries\[begin_ \+ k\], \{\}\))", "of_carries[begin_ + k]", SLICES,
     "a carry that takes no gradient in one slice never gave one"),
    ("carry: of another microbatch's slice", STORE, r"(&of\.values\[m\])", "&of.values[0]", CARRIES),
    ("carry: appended twice by a forward that is run again", STAGE, r"(for \(auto const& c : companions_\) c->keep\(s\.parts\);).*?(loss = run\(task, s, values\);)",
     ("", "loss = run(task, s, values); for (auto const& c : companions_) c->keep(s.parts);"), SLICES),
    ("carry: none for a forward that is run again", SECTION, r"(sections_\[of\.number\]\.take_kept\(carries_\);)", "", SLICES),
    ("carry: a forward that is run again leaves its own among gradients", SECTION, r"(carries_ = std::move\(under_way_\);)", "", SLICES),
    ("carry: given in the order of declaration, backwards", PARTS, r"into\[k\] = std::move\(results\[(outputs \+ k)\]\);", "results.size() - 1 - k", PACKED),
    ("carry: stays when forwards are thrown away", RUNNER, r"(if \(carries_\) carries_->clear\(\);)", "", SLICES,
     "the first slices take none, whatever is left"),
    ("carry: changes in place are not noticed", STORE, r"if \((detail::version_of\(here->held\[k\]\) == here->versions\[k\])\) continue;", "true", CARRIES),
    ("carry: may lose its dtype", SECTION, r"(value\.scalar_type\(\) != one\.arrived)", "false", CARRIES),
    ("statistics of slices are not refused", RUNNER, r"\.sliced = (plan_\.size\.slices > 1)", "false", CARRIES),
    ("slices count alike, whatever their length", SPLIT, r"p\.counts = (whole\[m\]\.counts \* \(length \? .*? : 1\));", "whole[m].counts / into.slices", SLICES),
    ("samples are summed after slices divide them", SPLIT, r"return (counts_); \}", "sum_of_parts()", STEPS),
    ("an evaluation divides by the slices' rounded counts", "run/train/evaluator.hpp", r"(mine\[2 \* count\] = batch_\.counts\(\);)",
     "for (int m = 0; m < batch_.count(); ++m) mine[2 * count] += batch_.counts(m);", STEPS),
    ("every slice starts at 0", SPLIT, r"add_slice_start\(p\.data, (bounds\[s\]),", "0", PACKED),
    ("slices start at 0 on a rank that no tensor tells", SPLIT, r"if \((!length && into\.start_on && into\.slices > 1)\)", "false", LOSSES),
    ("the first token of a slice counts as a batch", SPLIT, r"return (e\.name != slice_start);", "e.name.size() > 0", LOSSES),
    ("slices are not compared with their sequence", RUNNER, r"(slices_\.emplace\(stages\);)", "", COMPARED),
    ("tokens that depend on later ones are not found", AGREEMENT, r"if \((one\.last_of_first > tolerance)\)", "false", COMPARED),
    ("the comparison of slices leaves modules in evaluation mode", AGREEMENT, r"(of\.set_modes\(modes\);)", "", COMPARED),
    ("the comparison of slices leaves its buffers", AGREEMENT, r"(before\.put_back\(\);)", "", COMPARED),
    ("a stage's independence of slices is not asked for", AGREEMENT, r"(of\.has_independent_slices\(\)) \|\| ", "false", COMPARED),
    ("stages that take unequal tensors without tokens are not compared", AGREEMENT, UNEQUAL, "return {};", COMPARED),
    ("slice 1 is compared although joined slices were given slice 0's tensor", AGREEMENT, UNEQUAL, "", COMPARED),
    ("labels of sequences are taken for labels of tokens", SPLIT, r"if \((by_token) \|\| ", "true", COMPARED),
    ("boundaries that differ by rank are not compared", CONTEXT, r"(check_cuts\(all\);)", "", COMPARED),
    ("boundaries of the caller are left aside", CUTS, r"if \((how\.cuts)\) \{", "decltype(how.cuts)()", PACKED),
]


PROGRAM, ALL = "bin/chevron-slice-tests", of_tests(MUTANTS, abort_after=1)


if __name__ == "__main__":
    sys.exit(run(PROGRAM, ALL, options(__doc__), doctest_error))
