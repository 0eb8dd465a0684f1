#!/usr/bin/env python3
"""Do the tests of shards notice what is wrong? Puts mistakes into a copy of chevron's headers, each behind a number, and runs a test of
chevron-shard-tests with each of them, which must fail. Run by hand, some minutes:

    tests/run/shard_mutants.py --build build              all of them
    tests/run/shard_mutants.py --build build norm         those whose name contains one of these words
    tests/run/shard_mutants.py --build build --compile    only compiles them

`--build` is a folder in which chevron-shard-tests has been built. The exit code is 1 where a mutant is not found; one whose text is no
longer in the headers is an error, too.
"""
import pathlib
import sys

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from header_mutants import doctest_error, of_tests, options, run

GROUP, DRAWS, GUARD = "run/comm/shard_group.hpp", "run/stage/random_scope.hpp", "run/train/shard_agreement.hpp"
SUMS, NORM, LOSSES, TRANSPORT = "run/train/flat_gradients.hpp", "run/train/model_norm.hpp", "run/train/model_losses.hpp", "run/comm/transport.hpp"
SHARDS, GROUPS, CONTRACT = "train/shards", "transports/shard_group_process", "comm/shard_collective"
EXPERTS, OVER_REPLICAS = "train/experts", "train/experts_over_replicas"
SAVED, CUTS = "checkpoint/shards_checkpoint", "checkpoint/shard_cuts.hpp"
FUSED, WATCHED = "checkpoint/fused_weights", "train/shard_guard"

OF_PARTS = r"(comm\.over_group\(rank_group::shards, group_collective::all_reduce, row\.is_complex\(\)[^;]*;)"
SUM_PARTS = "comm.over_group(rank_group::shards, group_collective::all_reduce, row);"
COUNTED = r'if \((shard == 0 \|\| one\.held != "whole")\) squared'

# name; header below include/chevron; regular expression, whose group is a statement or an expression; what stands in its place; test;
# why the test does not find the mutant, if so
MUTANTS = [
    ("partial gradients are not summed", SUMS, OF_PARTS, "", SHARDS),
    ("partial gradients are summed twice", SUMS, OF_PARTS, SUM_PARTS + SUM_PARTS, SHARDS),
    ("the norm counts what all shards hold T times", NORM, COUNTED, "true", SHARDS),
    ("the norm counts the piece of shard 0 alone", NORM, COUNTED, "shard == 0", SHARDS),
    ("each shard decides with the norms of its own piece", NORM, r"norm_of\(all, where_\.rank_at\(replica, rank, (shard)\)", "where_.shard()", SHARDS),
    ("norms of what all shards hold are not compared", NORM, r'if \((shard > 0 && one\.held == "whole")\)\s+check_equal_norms', "false", SHARDS),
    ("losses of shards are not compared", LOSSES, r"(check_equal_losses\([^;]*;)", "", SHARDS),
    ("the loss counts T times", LOSSES, r"report\.loss \+= (loss);", "loss * where_.shards", SHARDS),
    ("samples count T times", "run/train/batch_weights.hpp", r"sum \+= (static_cast<std::int64_t>\(most\));", "static_cast<std::int64_t>(most) * where_.shards", SHARDS),
    ("the evaluator adds up every shard's loss", "run/train/evaluator.hpp", r"double sum = 0;\n    for \(int r = 0; r < world; r \+= (shards)\)", "1", SHARDS),
    ("all cuts lose the same elements", DRAWS, r"(key\.shard = 1 \+ shard;)", "key.shard = 1;", SHARDS),
    ("all cut regions of a stage lose the same elements", DRAWS, r"(key\.region = \+\+around_->regions_;)", "key.region = 1;", SHARDS),
    ("each shard draws its own numbers outside of cut regions", "run/execute/stage_runner.hpp", r"replica_\((where\.replica\(\))\)",
     "where.replica() * where.shards + where.shard()", SHARDS),
    ("a sum's gradient is doubled", GROUP, r"kind::reduced, gradient\);\s+return (gradient);", "gradient.mul(2)", GROUPS),
    ("the copy's gradient is not summed", GROUP, r"return (summed\(gradient\));", "gradient", GROUPS),
    ("a gathered tensor's gradient is not summed", GROUP, r"if \((next == after_gather::partial)\) \{", "false", GROUPS),
    ("a reduce-scatter's gradient is gathered backwards", GROUP, r"return (gathered\(gradient, along, size\));",
     "gathered(gradient, along, size).flip({along})", GROUPS),
    ("a reduce-scatter gives the piece of shard 0", GROUP, r"return all\.narrow\(0, (cut\[me\]), cut\[me \+ 1\] - cut\[me\]\)\.clone\(\)", "0", GROUPS),
    ("an exchange's gradient goes the forward's way", GROUP, r"back\[(to \* members \+ from)\]", "from * members + to", GROUPS),
    ("a sum over shards goes over the replicas", TRANSPORT, r"among = topology_\.plain\((among)\);\n    start", "rank_group::replicas", CONTRACT),
    ("a group of shards has ranks of several replicas", "run/core/topology.hpp", r"return (rank_at\(replica\(\), pipeline_rank\(\), number\));",
     "rank_at(number % replicas, pipeline_rank(), number / replicas)", CONTRACT),
    ("a group of replicas has ranks of several shards", "run/core/topology.hpp", r"return (rank_at\(number, pipeline_rank\(\), shard\(\)\));",
     "rank_at(number, pipeline_rank(), 0)", CONTRACT),
    ("gradients of experts are summed over all replicas", "run/train/gradient_buckets.hpp",
     r"\? (rank_group::expert_copies) : rank_group::replicas", "rank_group::replicas", EXPERTS),
    ("the norm counts the experts of replica 0 alone", NORM, r'\(one\.held == "experts" \? (where_\.expert_replicas) : 1\)', "1", EXPERTS),
    ("an expert group has the ranks of other replicas", "run/core/topology.hpp",
     r"return rank_at\((replica\(\) / expert_replicas \* expert_replicas \+ number / shards),", "number / shards", EXPERTS),
    ("fused pairs of expert groups over replicas run at the same time", "run/train/rank_context.hpp", r"(!joint_calls\(comm_->topology\(\)\)\.any\(\))",
     "comm_->topology().shards == 1", OVER_REPLICAS),
    ("expert groups over replicas may defer weights", "run/core/joint_calls.hpp", r"bool any\(\) const \{ return (shards_ > 1 \|\| replicas_ > 1);",
     "shards_ > 1", OVER_REPLICAS),
    ("each replica of an expert group leaves out what its own microbatch does not count", "run/core/joint_calls.hpp",
     r"bool over_replicas\(\) const \{ return (replicas_ > 1);", "false", OVER_REPLICAS),
    ("a backward begins at the first custom function alone", "run/stage/graph/custom_roots.hpp", r"roots\.emplace_back\(node, i\);\n(      gradients\.push_back[^;]*;)",
     "gradients.push_back(node->input_metadata(i).zeros_like()); next.clear();", OVER_REPLICAS),
    ("buffers of experts are those of replica 0", "run/stage/buffers.hpp", r"copies_\[(of_experts \? 1 : 0)\]", "0", OVER_REPLICAS),
    ("buffers of experts are copied within a group, too", "run/stage/buffers.hpp", r"members\((of_experts \? rank_group::expert_copies : rank_group::replicas)\)",
     "rank_group::replicas", OVER_REPLICAS,
     "a gather over one member does nothing"),
    ("a checkpoint compares the experts' buffers of all replicas", "checkpoint/checkpoint_ranks.hpp", r"int const first = (experts \? replica % where\.expert_replicas : 0);",
     "0", OVER_REPLICAS),
    ("one rank may freeze its experts", "run/train/preflight.hpp", r'needs a gradient", (p\.value\.requires_grad\(\)) \?', "true", OVER_REPLICAS),
    ("losses of stages are not compared over shards", "run/train/stage_losses.hpp", r"(check_equal_losses\([^;]*;)", "", EXPERTS),
    ("messages go to shard 0", "run/core/topology.hpp", r"rank_at\(replica\(\), pipeline_rank_of_peer, (shard\(\))\)", "0", CONTRACT),
    ("shards that wait in different calls are not told", "run/core/wait_table.hpp", r"return \{\.period = world, \.run = (grid\.shards)\};", "1", CONTRACT),
    ("errors name no rank's shard", "run/core/error.hpp", r"sentence \+ (detail::places_of\(named\(where\), where\.rank\))", '""', CONTRACT),
    ("a published failure loses the ranks that it names", "run/core/failure.hpp", r"\.ranks = (std::move\(ranks\))", "std::vector<int>()", CONTRACT),
    ("tied gradients are summed over all shards", "run/train/tied_parameters.hpp", r"gradient_of\(m\)\.copy_\((total)\);",
     "(comm.over_group(rank_group::shards, group_collective::all_reduce, total), total)", SHARDS),
    ("a shard reads the piece of another shard", CUTS, r"return tensor_part\{cut->along, (cut->ranges\(me\))",
     "cut->ranges(cut->parts.size() - 1 - me)", SAVED),
    ("a shard reads its piece one element late", CUTS, r"out\.push_back\(\{(begin), parts", "begin + (piece == 0 && parts[0][0] > 1 ? 1 : 0)", SAVED),
    ("a file holds the piece of the shard that writes", CUTS,
     r"return (cut->joined\(shard_group\(\*comm_, cut->over\)\.gathered\(piece, cut->along, ends\)\));",
     "piece.repeat_interleave(cut->size() / piece.size(cut->along), cut->along)", SAVED),
    ("a fused weight is saved as its pieces in a row", CUTS, r"if \((parts\[0\]\.size\(\) == 1)\) return in_row", "true", FUSED),
    ("a shard reads a fused weight as if it had one block", CUTS, r"return tensor_part\{cut->along, (cut->ranges\(me\))",
     "std::vector<tensor_part::range>{{cut->ranges(me)[0].begin, cut->size(me)}}", FUSED),
    ("unequal blocks count as equal ones", "run/stage/stage_parts.hpp", r"return (how\.sizes);",
     "std::vector<std::int64_t>(how.sizes.size(), size / static_cast<std::int64_t>(how.sizes.size()))", FUSED),
    ("the guard is off", GUARD, r"due_ = (steps_ < first_steps [^;]*);", "false", SHARDS),
    ("the guard compares a shard with itself", GUARD, r"equals\((all\[0\])\[i\], exact_\)", "all[t]", SHARDS),
    ("a sum of whole gradients is not refused", GUARD, r"if \((equal_evidence\(all, i\))\) out\.push_back\(i\);", "false", SHARDS),
    ("a whole parameter that is declared cut is not refused", GUARD, r"(find_whole_pieces\(\);)\s+compare", "", WATCHED),
    ("gradients between stages are not compared", "run/execute/stage_runner.hpp", r"(watch_->gives\(shard_watch::kind::input,[^;]*;)", "", WATCHED),
    ("gradients of carries are not compared", "run/execute/stage_runner.hpp", r"(watch_->gives\(shard_watch::kind::carry,[^;]*;)", "", WATCHED),
    ("gradients at sums are not compared", GROUP, r"(watch\(detail::shard_watch::kind::reduced, gradient\);)", "", WATCHED),
    ("arguments of copy are not compared", GROUP, r"(watch\(detail::shard_watch::kind::copied, whole\);)", "", WATCHED),
    ("a needless copy is not found", GUARD, r"if \((!equal_evidence\(all_values, i\))\) continue;", "true", WATCHED),
    ("pieces that repeat prove a fault", GUARD, r"if \((repeated && first\.by_chance\(\))\)", "false", WATCHED),
    ("a batch that repeats ends the comparison", GUARD, r"by_chance\(\)\) \{\s+again_ = (true);", "false", WATCHED),
    ("gradients that are not finite end the comparison", GUARD, r"again_ = again_ \|\| (!row\[1\]\.empty\(\));", "false", WATCHED),
    ("gradients that are not finite prove a fault", "run/comm/shard_watch.hpp", r"(!has_fractions \|\| is_finite\(t\.detach\(\)\))\) \{", "true", WATCHED),
    ("a bias in a sum is not found", "run/stage/stage_execution.hpp", r"task\.watch != nullptr\) (watch_summed_parameters\([^;]*;)", "", WATCHED),
    ("an own optimizer gets pieces", "run/train/call_factory.hpp", r"make\.steps_pieces\(\) \|\| (!kind_of\(\*out\)\.empty\(\)) \?", "true", WATCHED),
    ("the hook gets pieces", "run/train/step_end.hpp", r"(detail::check_hook\(optimizer\.parameters\(\), options\);)", "", WATCHED),
]


PROGRAM, ALL = "bin/chevron-shard-tests", of_tests(MUTANTS)


if __name__ == "__main__":
    sys.exit(run(PROGRAM, ALL, options(__doc__), doctest_error))
