#!/usr/bin/env python3
"""Does the harness find faults? Takes mends back, or puts faults in, one at a time, in a copy of include/, builds chevron-differential
against it, and runs that for up to five minutes. Run by hand:

    tests/differential/mutants.py --build build            all of them (of each, what includes it is compiled anew: a minute or two)
    tests/differential/mutants.py --build build eval       those whose name contains `eval`

`--build` is a folder in which the harness has been built: how it is compiled and linked is read from there. A mutant that is not
found makes the exit code 1; one whose text is no longer in the headers is an error, too: then it is to be written anew.
"""
import argparse
import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
CHEVRON = "chevron/"

# name, file, old text (a regular expression), new text, text of the programs that can find the mutant (empty: any program)
MUTANTS = [
    ("roots of W that nobody used", CHEVRON + "run/stage/graph/stage_graph.hpp",
     r"if \(!std::all_of\(weight_gradients_[^)]*\(\), weight_gradients_[^)]*\(\), defined\)\) \{", "if (false) {", ""),
    ("strides that do not cross", CHEVRON + "run/comm/tensor_strides.hpp",
     r"if \(own\) return", "if (value.is_contiguous()) return", "line=(gloo|far|streams|fork)"),
    ("eval() undone by the trainer", CHEVRON + "run/train/build_stages.hpp",
     r"if \(!made\)\s*throw usage_error\(\"stage \"", "made.training(true);\n      if (!made) throw usage_error(\"stage \"", ""),
    ("eval() undone by evaluation", CHEVRON + "run/train/evaluator.hpp",
     r"stages_\[s\]\.set_modes\(before_\[s\]\);", "stages_[s].training(true);", ""),
    ("buffers of stage(module, callable)", CHEVRON + "run/stage/module_kinds.hpp",
     r"for \(auto const& item : module->named_buffers\(true\)\) buffers[^;]*;", "", ""),
    ("mode of stage(module, callable)", CHEVRON + "run/stage/stage.hpp",
     r"parts_\.emplace_back\(\)\.mode = detail::mode_of\(module\);", "parts_.emplace_back();", ""),
    ("the last microbatch's weight", CHEVRON + "run/stage/split_batch.hpp",
     r"p\.weight = p\.counts / global_weight;", "p.weight = (&p == &parts_.back() ? parts_.front() : p).counts / global_weight;", ""),
    ("recomputation changes buffers twice", CHEVRON + "run/stage/stage_execution.hpp",
     r"before\.put_back\(\);", "", ""),
    ("a step done over keeps buffers", CHEVRON + "run/train/trainer.hpp",
     r"parts_\.begin_again\(reports_\.last\(\)\.skipped\);", "", "pv="),
    ("a step done over keeps the first step", CHEVRON + "run/train/optimizer_snapshot.hpp",
     r"if \(t\.defined\(\)\) t\.copy_\(kept\);", "static_cast<void>(kept);", "pv="),
    ("clipping with half the factor", CHEVRON + "run/train/step_policy.hpp",
     r"clip_ / \(report\.grad_norm \+ 1e-6\)", "clip_ / report.grad_norm", "clip="),
    ("a part's draws from its stage's stream", CHEVRON + "run/stage/stage.hpp",
     r"place\.part = static_cast<int>\(p\);", "place.part = 0;", ""),
    ("accumulated microbatches numbered anew", CHEVRON + "run/train/trainer.hpp",
     r"batch_\.number_from\(accumulated_\.passes\(\) \* batch_\.count\(\)\);", "batch_.number_from(0);", "acc="),
    ("tied gradients added in the order of ranks", CHEVRON + "run/train/tied_parameters.hpp",
     r"return a\.stage < b\.stage; \}\);", "return a.stage > b.stage; });", "tie"),
    ("replicas summed the other way round", CHEVRON + "run/comm/threads/thread_collectives.hpp",
     r"values\[0\]\.add_\(values\[r\]\.to\(values\[0\]\.device\(\)\)\);", "values[0].add_(values[values.size() - r].to(values[0].device()));", "rep=3"),
    ("the norm counts every shard's gradients", CHEVRON + "run/train/model_norm.hpp",
     r'if \(shard == 0 \|\| one\.held != "whole"\) squared', "squared", "shards=2"),
    ("copies that nobody compares", CHEVRON + "run/train/copy_agreement.hpp",
     r"return where_\.replicas \* where_\.shards == 1 && tied_\.empty\(\) \? 0 : before_tied \+ 2 \* tied_\.size\(\);", "return 0;", "groups=part"),
    ("tied copies in groups of their own are refused", CHEVRON + "run/train/copy_agreement.hpp",
     r"options = class_name_of", "options = copies_[i].of.name + std::to_string(copies_[i].stage) + class_name_of", "groups=tied"),
    ("shares that others never get", CHEVRON + "run/train/optimizer_share.hpp",
     r"comm\.start_share_gather\(first_bucket_ \+ static_cast<int>\(k\), memory_of\(values\), one\.cut\);", "", "shard="),
    ("a share stepped twice", CHEVRON + "run/train/optimizer_share.hpp",
     r"piece\.defined\(\)\) mine\.push_back\(piece\);", "piece.defined()) mine.insert(mine.end(), piece.is_same(p) ? 1 : 2, piece);", "shard="),
    ("a stage's gradients scattered before its last W", "chevron/lower/lower.hpp",
     r"if \(--left_\.data\[stage\] == 0\)", "if (--left_.data[stage] == 1)", "shard="),
    ("gradients freed before their sums are there", CHEVRON + "run/train/gradient_buckets.hpp",
     r"for \(flat_gradients& f : flats_\) f\.wait_sums\(comm\);",
     "for (flat_gradients& f : flats_) f.is_freed() && f.own().numel() > 0 ? void() : f.wait_sums(comm);", "shard=gradients"),
    ("a share kept from the beginning of its buffer", CHEVRON + "run/train/flat_gradients.hpp",
     r"return row\(cut_\[replica_\], cut_\[replica_ \+ 1\] - cut_\[replica_\]\);",
     "return is_there() ? memory_.narrow(0, 0, cut_[replica_ + 1] - cut_[replica_]) : share_;", "shard=gradients"),
    ("the norm of one replica's share", CHEVRON + "run/train/model_norm.hpp",
     r"replica = 1; sharded_ && replica <", "replica = 1; false && replica <", "shard=.*clip=|clip=.*shard="),
    ("a tied share counted twice in the norm", CHEVRON + "run/train/gradient_buckets.hpp",
     r"if \(!counts_here\(i\)\) return;", "", "clip=.*tie"),
    ("shares clipped by nobody", CHEVRON + "run/train/gradient_buckets.hpp",
     r"f\.own\(\)\.mul_\(factor\);", "if (!f.is_shared()) f.own().mul_(factor);", "clip=0.01.*shard="),
    ("a step done over leaves the others' shares", CHEVRON + "run/train/step_end.hpp",
     r"optimizer_->start_gather\(step_\);\n    optimizer_->finish_gather\(\);", "static_cast<void>(0);", "pv=.*shard="),
    ("a stage computes before its parameters are whole", CHEVRON + "run/execute/executor.hpp",
     r"\{ unshard_\(o\.stage\(\)\); \}", "{ static_cast<void>(o); }", "late="),
    ("another stage's parameters are awaited", CHEVRON + "run/train/optimizer_share.hpp",
     r"static_cast<int>\(one\.stage\) != \*stage\)", "static_cast<int>(one.stage) == *stage)", "late="),
    ("masters that no parameter is rounded from", CHEVRON + "run/train/master_parameters.hpp",
     r"at::_foreach_copy_\(rounded_, masters_\);", "", "masters="),
    ("calls that one rank refuses", CHEVRON + "run/train/step_accumulator.hpp",
     r"if \(other == first\) continue;", "continue;", "slip=one"),
    ("autocast keeps casts", CHEVRON + "run/stage/autocast.hpp",
     r"at::autocast::set_autocast_cache_enabled\(false\);", "at::autocast::set_autocast_cache_enabled(true);", "cast="),
    ("replicas keep buffers of their own", CHEVRON + "run/stage/buffers.hpp",
     r"if \(where\.replicas == 1\) return;", "return;", "rep="),
    ("views as gradients", CHEVRON + "run/train/gradient_buckets.hpp",
     r"gradient_view\(trained_\[i\]\.value, row\)\.detach\(\)", "gradient_view(trained_[i].value, row)", "zg="),
    ("ranks with less do not hear of other shapes", CHEVRON + "run/train/rank_context.hpp",
     r"gathers \? on_any_rank\(changed, cut\.cuts_mark\(\)\) : changed", "changed", "less="),
    ("a rank between the ends needs its batch", CHEVRON + "run/train/rank_context.hpp", r"\(stages_\.front\(\) \|\| stages_\.back\(\)\) &&", "", "less="),
    ("microbatches of other first dimensions by their inputs", CHEVRON + "run/stage/split_batch.hpp", r"if \(!by_samples\)", "if (false)", "odd="),
    ("the loss's side inputs are those of microbatch 0", CHEVRON + "run/execute/stage_runner.hpp",
     r"\.side_inputs = batch\.side_inputs\(m\)", ".side_inputs = batch.side_inputs(0)", "side="),
    ("a carry's gradient is dropped", CHEVRON + "run/stage/stage_carries.hpp", r"rounded\(of_carries\[begin_ \+ k\], ways_\[k\]\.dtype\)",
     "at::Tensor()", "slices="),
    ("each replica's own count stands for all", CHEVRON + "run/train/replica_counts.hpp",
     r"totals_\[k\] = sums\.const_data_ptr<double>\(\)\[k\];", "totals_[k] *= comm.topology().replicas;", "rep=.*vary="),
    ("the mean of the replicas' means in evaluation", CHEVRON + "run/train/evaluator.hpp",
     r"of_rank\(r\)\[micro_batches \+ m\] / counts\)", "of_rank(r)[micro_batches + m] / (std::accumulate(of_rank(r) + micro_batches, of_rank(r) + 2 * micro_batches, 1e-30) * "
     "comm().topology().replicas))", "eval=.*rep="),
    ("a transport stays open for another trainer", CHEVRON + "run/comm/transport.hpp",
     r"return program_ == program; }", "return program_ != 0 && program != 0; }", "turn="),
    ("a step awaits its verdict in another trainer's turn", CHEVRON + "run/comm/transport.hpp",
     r"if \(auto const finish = std::exchange\(unfinished_, \{\}\)\.lock\(\)\) \(\*finish\)\(\);", "", "pv=.*turn="),
    ("half-precision gradients added in half", CHEVRON + "run/train/gradient_place.hpp",
     r"return p\.scalar_type\(\) == at::kHalf \|\| p\.scalar_type\(\) == at::kBFloat16; \}", "return p.scalar_type() == at::kHalf; }", "bf16"),
    ("custom functions asked by I and by W", CHEVRON + "run/stage/graph/graph_nodes.hpp",
     r"return !node\.post_hooks\(\)\.empty\(\) \|\| !type\.starts_with\(\"N5torch8autograd9generated\"\) \|\|", "return", "(eff|noise|hook)"),
    ("custom functions' gradients added out of turn", CHEVRON + "run/stage/graph/stage_graph.hpp",
     r"onward->set_sequence_nr\(node\.sequence_nr\(\)\);", "", "turn"),
    ("backwards draw from the process's generator", CHEVRON + "run/stage/stage_execution.hpp",
     r"if \(task\.around\.draws\) scope\.emplace\(s\.places, near, use\);", "", "(noise|hook)"),
    ("backwards draw in the order in which nodes run", CHEVRON + "run/stage/backward_scope.hpp",
     r"key\.node = node->sequence_nr\(\) - range->first \+ 1;", "key.node = 0;", "(noise|hook)"),
    ("a loss of a stage without its weight", CHEVRON + "run/stage/split_batch.hpp",
     r"return one\.weight \* one\.factor \* scale_;", "return one.factor * scale_;", "(aux)"),
    ("a loss with a weight of its own counts as the model's", CHEVRON + "run/stage/split_batch.hpp",
     r"if \(!weights\[k\]\) continue;", "continue;", "own"),
    ("losses of recomputed parts have no gradient", CHEVRON + "run/stage/declared_losses.hpp",
     r"append_gradients\(task\.loss_seeds, output_gradients\);",
     "append_gradients(task.owner->recomputes(of.first) ? tensors(task.loss_seeds.size()) : task.loss_seeds, output_gradients);", "(aux)"),
    ("frozen stages below all trained ones are followed", CHEVRON + "run/train/trainer.hpp",
     r"end_->lowest_trained\(\)", "0", "frozen"),
    ("a replica of an expert group leaves out what only its own microbatch does not count", CHEVRON + "run/core/joint_calls.hpp",
     r"bool over_replicas\(\) const \{ return replicas_ > 1;", "bool over_replicas() const { return false;", "exp=.*weigh=.*moe"),
    ("buffers of experts are those of replica 0", CHEVRON + "run/stage/buffers.hpp", r"copies_\[of_experts \? 1 : 0\]", "copies_[0]", r"exp=.*\+count"),
    ("a fused weight is saved as its pieces in a row", CHEVRON + "checkpoint/shard_cuts.hpp",
     r"if \(parts\[0\]\.size\(\) == 1\) return in_row", "if (true) return in_row", r"resume=.*tp2=.*\+fused"),
    ("shards compare nothing", CHEVRON + "run/train/shard_agreement.hpp", r"due_ = steps_ < first_steps [^;]*;", "due_ = false;", "tp=.*no(copy|whole)"),
    ("parameters may be written under a late gather", CHEVRON + "run/train/step_end.hpp",
     r"void check_unchanged\(\) \{", "void check_unchanged() {\n    return;\n   ", "act=rush"),
    ("the caller's steps of the optimizer are not found", CHEVRON + "run/train/optimizer_calls.hpp",
     r"if \(of == nullptr \|\| !was_stepped\(\*of\)\) return;", "return;", "act=again"),
    ("dropped gradients stay", CHEVRON + "run/train/step_accumulator.hpp", r"    \+\+calls_;\n    passes_ = 0;\n", "    ++calls_;\n", "act=drop"),
    ("dropped counts are counted on one replica", CHEVRON + "run/train/step_buffers.hpp", r"summed_\.drop\(\);", "", "act=drop.*rep=.*tally"),
    ("each replica keeps its own counts", CHEVRON + "run/stage/summed_buffers.hpp", r"place\.sub_\(each\.before\);", "place.zero_();", "rep=.*tally"),
    ("slices are not compared with their sequence", CHEVRON + "run/execute/stage_runner.hpp",
     r"slices_\.emplace\(stages\);", "", "whole="),
    ("one label for all slices", CHEVRON + "run/train/rank_context.hpp", r"cut\.check_labels\(slicing_\.slices\);", "static_cast<void>(0);", "label="),
    ("a resumed run has the program's rates", CHEVRON + "checkpoint/optimizer_file.hpp",
     r"rates\[g\] = rate\.value_or\(rates\[g\]\);", "", "rate2="),
    ("own actions draw from the process's generator", CHEVRON + "run/execute/stage_runner.hpp",
     r"\.use = random_use::own_action,", ".use = random_use::forward,", "own="),
]


def commands(build):
    """How each source of the harness is compiled, and how it is linked."""
    listed = json.loads((build / "compile_commands.json").read_text())
    each = {pathlib.Path(c["file"]).name: c for c in listed if "/chevron-differential.dir/" in c["command"]}
    if not each:
        sys.exit(f"{build} does not build chevron-differential")
    return each


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="only mutants whose name contains one of these")
    parser.add_argument("--build", type=pathlib.Path, required=True, help="a folder in which chevron-differential has been built")
    parser.add_argument("--minutes", type=float, default=5)
    parser.add_argument("--jobs", type=int, default=2, help="programs at a time")
    parser.add_argument("--skip", default="", help="regular expression of programs that fail with unchanged headers: left out")
    parser.add_argument("--include", type=pathlib.Path, default=ROOT / "include")
    how = parser.parse_args()
    missed = []
    for name, file, old, new, only in MUTANTS:
        if how.names and not any(n in name for n in how.names):
            continue
        with tempfile.TemporaryDirectory() as folder:
            place = pathlib.Path(folder)
            shutil.copytree(how.include, place / "include")
            header = place / "include" / file
            text, count = re.subn(old, lambda _: new, header.read_text(), flags=re.DOTALL)
            if count == 0:
                print(f"{name}: {file} has no such text any more", flush=True)
                missed.append(name)
                continue
            header.write_text(text)
            program = build_against(place, how, file)
            if program is None:
                print(f"{name}: does not compile", flush=True)
                missed.append(name)
                continue
            begin = time.time()
            arguments = [program, "--minutes", str(how.minutes), "--seed", "1", "--findings", "1", "--shrink", "20",
                         "--jobs", str(how.jobs), "--skip", how.skip]
            ran = subprocess.run(arguments + (["--only", only] if only else []), capture_output=True, text=True)
            if ran.returncode == 1:
                lines = ran.stdout.splitlines()
                first = next((l for l in lines if l.startswith("seed ") and " after " in l), "")
                small = next((l for l in lines if l.startswith("  smallest")), "")
                print(f"{name}: found after {time.time() - begin:.0f} s with shrinking\n  {first[:200]}\n{small}", flush=True)
            else:
                print(f"{name}: NOT FOUND in {how.minutes} minutes", flush=True)
                missed.append(name)
    return 1 if missed else 0


def is_without(build, compiled, file):
    """Whether an object is there and Ninja knows that it was made without this header."""
    name = str(compiled.relative_to(build))
    known = subprocess.run(["ninja", "-t", "deps", name], cwd=build, capture_output=True, text=True).stdout
    return compiled.exists() and "#deps" in known and file not in known


def build_against(place, how, file):
    """The program that sees the headers of `place`, of which `file` is another; None where it does not compile."""
    out = place / "out"
    out.mkdir()
    objects = []
    for source, c in commands(how.build).items():
        compiled = pathlib.Path(c["directory"]) / re.search(r" -o (\S+)", c["command"]).group(1)
        if is_without(how.build.resolve(), compiled, file):
            objects.append(str(compiled))  # the mutant is not in it
            continue
        made = out / (source + ".o")
        command = c["command"].replace(str(ROOT / "include"), str(place / "include"))
        # Without the precompiled header, which contains the headers without the mutation.
        command = re.sub(r" -include \S+cmake_pch\S*| -Xclang -include(-pch)? -Xclang \S+| -Winvalid-pch", "", command)
        command = re.sub(r" -o \S+", f" -o {made}", command)
        if subprocess.run(command, shell=True, cwd=c["directory"], capture_output=True).returncode != 0:
            return None
        objects.append(str(made))
    link = (how.build / "tests/CMakeFiles/chevron-differential.dir/link.txt")
    if link.exists():
        words = link.read_text()
    else:  # Ninja keeps it to itself
        words = subprocess.run(["ninja", "-t", "commands", "-s", "bin/chevron-differential"], cwd=how.build, capture_output=True, text=True).stdout
    program = out / "chevron-differential"
    words = re.sub(r"\S*chevron-differential\.dir/\S+\.o\b", "", words)
    words = re.sub(r" -o \S+", f" {' '.join(objects)} -o {program}", words)
    return str(program) if subprocess.run(words, shell=True, cwd=how.build, capture_output=True).returncode == 0 else None


if __name__ == "__main__":
    sys.exit(main())
