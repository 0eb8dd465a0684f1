# timeout: 240
"""Dumps that chevron-plan explain --flight-recorder reads and refuses: pickles that would run code, truncated and changed files, limits;
equal answers from JSON and from pickles of every protocol; the console of docs/guides/other-frameworks.md.
"""
import json
import os
import pathlib
import pickle
import random
import re
import struct
import subprocess
import sys
import tempfile
import xml.dom.minidom

ROOT = pathlib.Path(os.environ.get("CHEVRON_SOURCE", pathlib.Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "support"))
import recorder_jobs as jobs
from explained_hangs import LONGEST, PLAN, explain

wrong = []


def expect(done, code, words, what):
    said = done.stdout + done.stderr
    one_line = code == 0 or (done.stderr.count("\n") == 1 and not done.stdout)
    if done.returncode != code or not re.search(words, said) or not one_line:
        wrong.append(f"{what}: exit code {done.returncode}, not {code}, or no `{words}` in: {said[:500]}")


def entry(**changes):
    made = {"record_id": 0, "process_group": ("0", "default_pg"), "collective_seq_id": 1, "p2p_seq_id": 0, "op_id": 1, "profiling_name": "nccl:all_reduce",
            "time_created_ns": 1_790_000_000_000_000_000, "input_sizes": [[4]], "input_dtypes": ["Float"], "output_sizes": [[4]],
            "output_dtypes": ["Float"], "state": "scheduled", "is_p2p": False, "timeout_ms": 1000}
    made.update(changes)
    return {key: value for key, value in made.items() if value is not KeyError}


def dump(*entries, **changes):
    made = {"version": "2.10", "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}, "entries": list(entries)}
    made.update(changes)
    return made


class Attack:
    def __reduce__(self):
        return os.system, ("touch attacked",)


def refused_pickles(one):
    refuse = lambda data, words, what: expect(one(data), 2, words, what)
    for protocol, name in ((2, "GLOBAL"), (4, "STACK_GLOBAL")):
        refuse(pickle.dumps(Attack(), protocol=protocol), rf"opcode {name} is not one of plain data, at byte \d+\. Remedy:", f"code, protocol {protocol}")
    if os.path.exists("attacked"):
        wrong.append("a pickle ran a command")
    refuse(pickle.dumps({1, 2}, protocol=4), "opcode EMPTY_SET", "a set")
    refuse(b"\x80\x02(ios\nsystem\n.", "opcode INST", "INST")
    refuse(b"\x80\x02Pname\n.", "opcode PERSID", "PERSID")
    refuse(b"\x80\x02\x82\x01.", "opcode EXT1", "EXT1")
    refuse(b"\x80\x02I1\n.", "opcode INT is", "protocol 0")
    refuse(b"\x80\x02\xff.", "opcode number 255", "an unknown opcode")
    refuse(b"(l.", "the first opcode is not PROTO at byte 0", "no PROTO")
    refuse(b"\x80\x06N.", "protocol 6", "protocol 6")
    refuse(b"\x80\x02\x80\x02N.", "a second PROTO at byte 2", "two PROTO")
    refuse(b"\x80\x02N", "ends without STOP", "no STOP")
    refuse(b"\x80\x02N.N", "bytes follow STOP at byte 4", "trailing bytes")
    refuse(b"\x80\x02NN.", "STOP with 2 values", "two values")
    refuse(b"\x80\x02(N.", "1 marks", "a mark left")
    refuse(b"\x80\x02.", "STOP with 0 values", "no value")
    refuse(b"\x80\x02\x85.", "the stack is empty at byte 2", "an empty stack")
    refuse(b"\x80\x02(\x85.", "the stack is empty", "a tuple across a mark")
    refuse(b"\x80\x02t.", "no MARK", "no mark")
    refuse(b"\x80\x02Na.", "the stack is empty", "append to nothing")
    refuse(b"\x80\x02NNa.", "is no list", "append to None")
    refuse(b"\x80\x02)Na.", "is no list", "append to a tuple")
    refuse(b"\x80\x02]NNs.", "is no dictionary", "set in a list")
    refuse(b"\x80\x02}(Nu.", "a key without a value", "an odd dictionary")
    refuse(b"\x80\x02}(NNu.", "neither a text nor an integer", "None as a key")
    refuse(b"\x80\x02h\x05.", "memo entry 5 is read before", "an unknown memo entry")
    refuse(b"\x80\x02j\xff\xff\xff\xff.", "memo entry 4294967295", "a large memo entry")
    refuse(b"\x80\x02q\x00.", "the stack is empty", "a memo of nothing")
    refuse(b"\x80\x02X\xff\xff\xff\x7fa.", "ends inside 2147483647 bytes", "a long text")
    refuse(b"\x80\x04\x8d" + struct.pack("<Q", 2**63) + b".", "ends inside 9223372036854775808 bytes", "a text of 2^63 bytes")
    refuse(b"\x80\x04\x95" + struct.pack("<Q", 2**40) + b"N.", "goes beyond the file's end", "a long frame")
    refuse(b"\x80\x02\x8a\x09" + bytes(9) + b".", "an integer of 9 bytes", "an integer of 9 bytes")
    refuse(b"\x80\x02\x8b\xff\xff\xff\xffN.", "an integer of 4294967295 bytes", "a long integer")
    refuse(b"\x80\x02]q\x00h\x00a.", "deeper than 64", "a list inside itself")
    twice = b"\x80\x02N" + b"".join(b"q" + bytes([n]) + b"h" + bytes([n]) + b"\x86" for n in range(60)) + b"."
    refuse(twice, "more than 8388608 values", "a value that doubles 60 times")
    long = b"\x80\x02(X" + struct.pack("<I", 1 << 20) + b"a" * (1 << 20) + b"q\x00" + b"h\x00" * 1000 + b"l."
    refuse(long, "texts of more than 536870912 bytes", "a text a thousand times")


def judged(name, ranks):
    """The verdict on ranks whose operations are listed as (name, second, completed)."""
    os.makedirs(name)
    for rank, operations in enumerate(ranks):
        counts, entries = {True: 0, False: 0}, []
        for what, second, completed in operations:
            is_p2p = "send" in what or "recv" in what
            counts[is_p2p] += 1
            entries.append(entry(record_id=len(entries), profiling_name=what, is_p2p=is_p2p, collective_seq_id=0 if is_p2p else counts[False],
                                 p2p_seq_id=counts[True] if is_p2p else 0, time_created_ns=jobs.BASE + int(second * 1e9), retired=completed,
                                 state="completed" if completed and what.startswith("nccl") else "scheduled", timeout_ms=600000))
        pathlib.Path(name, f"rank_{rank}").write_bytes(pickle.dumps(dump(*entries), protocol=2))
    told = json.loads(explain(name, "--format", "json").stdout)
    return told["cause"], told["culprits"]


def hand_made_jobs():
    """Two ranks each, for rules that simulated jobs seldom need."""
    def same(what, told, cause, culprits):
        if told != (cause, culprits):
            wrong.append(f"{what}: {told}, not {cause} {culprits}")

    crossed = lambda backend: [[(f"{backend}:send 0->1", 1, False), (f"{backend}:recv 0<-1", 2, False)],
                               [(f"{backend}:send 1->0", 1, False), (f"{backend}:recv 1<-0", 2, False)]]
    # A send blocks the operations behind it on its pair's channel with NCCL, and none with Gloo.
    same("both send first over NCCL", judged("crossed-nccl", crossed("nccl")), "cycle", [0, 1])
    same("both send first over Gloo", judged("crossed-gloo", crossed("gloo")), "running", [])
    # Channels of pairs leave these ranks free; one channel for the group does not.
    group = [[("nccl:all_reduce", 1, False), ("nccl:send 0->1", 2, False)], [("nccl:recv 1<-0", 1, False), ("nccl:all_reduce", 2, False)]]
    same("one channel for a group", judged("group", group), "cycle", [0, 1])
    # Rank 0 posts its receive ahead, and in each round sends before rank 1 does: it is rank 0 that stays away.
    zero, one = [], []
    for step in (0, 10, 20):
        zero += [("gloo:recv 0<-1", step, True), ("gloo:send 0->1", step + 1, True), ("gloo:all_reduce", step + 4, True)]
        one += [("gloo:recv 1<-0", step + 0.5, True), ("gloo:send 1->0", step + 2, True), ("gloo:all_reduce", step + 4, True)]
    same("a receive posted ahead", judged("ahead", [zero + [("gloo:recv 0<-1", 30, False)], one + [("gloo:recv 1<-0", 30.5, False)]]), "silent_rank", [0])


class Kept:
    """What a ring buffer has kept of a rank's operations: (name, second, completed), of another size (elements), with its end (s). The
    operation behind a name with a + is of the same batch, which ends in `coalesced`."""

    def __init__(self, *operations, lost=40, lost_messages=7, gaps=0):
        self.operations, self.lost, self.lost_messages, self.gaps = operations, lost, lost_messages, gaps

    def dump(self, world):
        collectives, messages, entries = 5, self.lost_messages, []
        for n, (what, second, completed, *more) in enumerate(self.operations):
            is_p2p = "reduce" not in what
            in_batch = n > 0 and self.operations[n - 1][0].endswith("+")
            collectives, messages = collectives + (not is_p2p), messages + (is_p2p and not in_batch)
            size, ended = [*more, 4, None][0], more[1] if len(more) > 1 else None
            entries.append(entry(record_id=self.lost + n * (1 + self.gaps), profiling_name=what.rstrip("+"), is_p2p=is_p2p, timeout_ms=600000,
                                 collective_seq_id=0 if is_p2p else collectives, p2p_seq_id=messages if is_p2p else 0, input_sizes=[[size]],
                                 output_sizes=[[size]], time_created_ns=jobs.BASE + int(second * 1e9), retired=completed,
                                 time_discovered_completed_ns=ended and jobs.BASE + int(ended * 1e9),
                                 state="completed" if completed and what.startswith("nccl") else "scheduled"))
        return dump(*entries, pg_config={"0": {"name": "0", "desc": "default_pg", "ranks": str(list(range(world)))}})


def wrapped_buffers():
    """Messages of buffers that have lost the ones before: paired by all that the dumps tell, and not decided where they tell nothing."""
    def expect_cause(name, ranks, *expected):
        os.makedirs(name)
        for rank, kept in enumerate(ranks):
            pathlib.Path(name, f"rank_{rank}").write_bytes(pickle.dumps(kept.dump(len(ranks)), protocol=2))
        told = json.loads(explain(name, "--format", "json").stdout)
        if (told["cause"], told["culprits"], told["suspects"]) != expected:
            wrong.append(f"{name}: {told['cause']} {told['culprits']} {told['suspects']}, not {expected}: {told['sentence']}")
        return told

    done, pending = True, False
    summed, sent = ("nccl:all_reduce", 0, done), lambda second, *more: ("nccl:send 0->1", second, done, *more)
    received = lambda second, completed, *more: ("nccl:recv 1<-0", second, completed, *more)
    # A send that a buffer of NCCL took, and a receive of another size. Rank 1 has kept one receive more.
    expect_cause("by a collective", [Kept(summed, sent(1), sent(2)), Kept(received(-1, done), summed, received(1, done), received(2, pending, 16))],
                 "mismatch", [1], [])
    told = expect_cause("by nothing", [Kept(sent(1), sent(2)), Kept(received(-1, done), received(1, done), received(2, pending, 16))],
                        "undecided", [], [0, 1])
    if not any("from rank 0 to rank 1 is not in the dumps" in remark for remark in told["remarks"]):
        wrong.append(f"an undecided wire is not in the remarks: {told['remarks']}")
    expect_cause("by times", [Kept(sent(1), sent(2)), Kept(received(-1, done, 4, -0.5), received(1, done, 4, 1.5), received(2, pending, 16))],
                 "mismatch", [1], [])
    expect_cause("by the first number", [Kept(sent(1), sent(2), lost_messages=0), Kept(received(1, done), received(2, pending, 16), lost_messages=0)],
                 "mismatch", [1], [])
    expect_cause("by all sends", [Kept(sent(1), sent(2, 16), lost_messages=0), Kept(received(1, done), received(2, pending, 16))],
                 "silent_rank", [0], [])
    expect_cause("by all receives", [Kept(sent(1), sent(2)), Kept(received(-1, pending, 16), lost_messages=0)], "mismatch", [0, 1], [])
    expect_cause("by a send that waits", [Kept(sent(-1), sent(1), ("nccl:send 0->1", 2, pending)),
                                          Kept(received(1, done), received(2.5, pending, 16))], "mismatch", [1], [])
    # The receive of each next step is posted before the sum that ends the step.
    expect_cause("across a collective", [Kept(summed, sent(1)), Kept(received(-2, done), received(-0.5, done, 4, 1.1), summed, received(1.5, pending))],
                 "silent_rank", [0], [])
    expect_cause("across a collective, behind a message of another channel",
                 [Kept(summed, sent(1)), Kept(received(-2, done), received(-0.5, done, 4, 1.1), summed, ("nccl:send 1->2", 1, pending), received(1.5, pending)),
                  Kept(summed)], "silent_rank", [0], [])
    # A message of a batch has run, though the batch has not: a send and a receive with rank 1; a receive from rank 0 and a send to 2.
    batch = [("nccl:send 0->1+", 2, pending), ("nccl:recv 0<-1+", 2, pending), ("nccl:coalesced", 2, pending)]
    expect_cause("a send of a batch", [Kept(summed, sent(1), *batch),
                                       Kept(received(-1, done), summed, received(1, done), received(2, done), received(3, pending))], "cycle", [0, 1], [])
    batch = [("nccl:recv 1<-0+", 1, pending), ("nccl:send 1->2+", 1, pending), ("nccl:coalesced", 1, pending)]
    expect_cause("a receive of a batch", [Kept(summed, sent(1)), Kept(received(-1, done), summed, *batch), Kept(summed)], "silent_rank", [2], [])
    # Gloo: rank 1 has not yet waited for the message of rank 0, and waits for that of rank 2.
    gloo = ("gloo:all_reduce", 0, done)
    expect_cause("before the wait", [Kept(gloo, ("gloo:send 0->1", 1, pending)),
                                     Kept(("gloo:recv 1<-0", -1, done), gloo, ("gloo:recv 1<-0", 1, pending), ("gloo:recv 1<-2", 1.5, pending)), Kept(gloo)],
                 "silent_rank", [2], [])
    # One rank of four calls a further sum: one too many, or three ranks too few.
    four = [Kept(summed, ("nccl:all_reduce", 1, pending)), Kept(summed), Kept(summed), Kept(summed)]
    expect_cause("a sum alone", four, "undecided", [], [0, 1, 2, 3])
    expect_cause("three sums", [four[0], four[0], four[0], four[1]], "silent_rank", [3], [])
    told = expect_cause("active alone", [Kept(summed, ("nccl:all_reduce", 1, pending), gaps=3, lost=0), Kept(summed, lost=0)], "undecided", [], [0, 1])
    if not any("rank 0 leaves out 3 operations" in remark for remark in told["remarks"]):
        wrong.append(f"a dump without some of its operations: {told['remarks']}")


def batch_of_a_group():
    """A batch has the number of a collective of its group, and is apart from it."""
    os.makedirs("batch")
    collective = entry(state="completed", retired=True)
    batch = [entry(record_id=1 + n, profiling_name=f"nccl:{name}", is_p2p=True, collective_seq_id=1, p2p_seq_id=1)
             for n, name in enumerate(("send 0->1", "recv 0<-1", "coalesced"))]
    for rank, entries in enumerate(([collective, *batch], [collective])):
        pathlib.Path("batch", f"rank_{rank}").write_bytes(pickle.dumps(dump(*entries), protocol=2))
    expect(explain("batch"), 0, r"\n +0 +3 +2 +waits for rank 1 in recv from rank 1", "a batch behind a collective of its number")


def actions_of_schedules():
    """The action of a schedule beside each message, as the simulated rank knows it; also where buffers have lost the first steps, and
    where each rank calls another collective within its steps."""
    compared, lost = 0, 0
    for seed in range(12):
        kind, micro_batches, stages, steps = ("1f1b", "gpipe")[seed % 2], 3 + seed % 3, 2 + seed % 3, 4
        programs, groups = jobs.pipeline(stages, 1 + seed % 2, micro_batches, steps, random.Random(seed), kind, batched=3 < seed < 8)
        for r, program in enumerate(programs):
            if seed % 4 > 1:  # behind a computation of each step, the same in all of them
                groups[f"of-{r}"] = [r]
                marks = [i for i, (what, value) in enumerate(program) if what == "compute" and value != 0.02]
                a_step = len(marks) // steps
                for i in reversed(marks[(seed + r) % a_step::a_step]):
                    op = jobs.Op("all_reduce", f"of-{r}", None, (3,))
                    program[i + 1:i + 1] = [["post", [op]], ["wait", [op]]]
            if seed % 3 == 0:  # as PyTorch does before the first step
                group, peers = f"pp{r // stages}", [p for p in (r - 1, r + 1) if p // stages == r // stages]
                posts = [jobs.Op(kind_of, group, p, (1,)) for p in peers for kind_of in ("send", "recv")]
                program[:0] = [["post", posts], ["wait", posts]]
        jobs.plant("asleep", programs, groups, seed % stages, 2, steps, random.Random(seed))
        posted, _, last = jobs.play(programs, groups, True, True)
        size = ["--schedule", {"1f1b": "1F1B", "gpipe": "GPipe"}[kind], "--ranks", str(stages), "--microbatches", str(micro_batches)]
        for keep in (None, (4 if stages == 2 else 8) * micro_batches + 6):
            folder = f"planned-{seed}" + (f"-{keep}" if keep else "")
            jobs.write_dumps(folder, posted, groups, last + 30, keep=keep)
            told = json.loads(explain(folder, "--format", "json", *size).stdout)
            for wait in told["waits"]:
                if "peer" not in wait["operation"]:
                    continue
                actions = [op.action for op in posted[wait["rank"]] if op.peer is not None and op.completed is None and op.kind == wait["operation"]["operation"]]
                compared += 1
                lost += told["ranks"][wait["rank"]]["overwritten"] > 0
                if wait["operation"].get("planned") not in actions[:1]:
                    wrong.append(f"{folder}, {kind} {stages} {micro_batches}: rank {wait['rank']} waits in {actions[:1]}, and explain says {wait['operation']}")
    if compared < 24 or lost < 6:
        wrong.append(f"only {compared} actions were compared, {lost} of them in buffers that have wrapped")
    # Another number of microbatches: no message gets an action. Less than a step is left.
    jobs.example("others")
    told = explain("others", "--schedule", "1F1B", "--ranks", "4", "--microbatches", "8")
    expect(told, 0, "A round of rank 0 has another number of messages from rank 1 than a step of the schedule, 8: give --ranks", "another number of microbatches")
    if re.search(r"\d(SEND|RECV)_", told.stdout):
        wrong.append(f"actions of another schedule stand beside messages: {told.stdout}")
    jobs.write_dumps("planned-short", posted, groups, last + 30, keep=5)
    expect(explain("planned-short", *size), 0, r"The actions of ranks .* in the schedule are unknown: dumps that lack operations have no whole step", "half a step")


def places_of_dumps():
    """Dumps beside other files; one dump; dumps that were compressed, and dumps that an earlier run left."""
    jobs.example("beside")
    for name in ("train.log", "events.out.tfevents.17.host.0"):
        pathlib.Path("beside", name).write_text("other")
    expect(explain("beside"), 2, r"'beside/events.out.tfevents.17.host.0' is no dump .* the path that TORCH_NCCL_DEBUG_INFO_TEMP_FILE had", "another file")
    expect(explain("beside/nccl_trace_rank_"), 0, "dumps of 8 of 8 ranks\n\nRank 5 called", "the beginning of paths")
    expect(explain("beside/nccl_trace_rank_3"), 0, r"dumps of 1 of 8 ranks[^$]*Remedy: collect the dumps of ranks 0, 1, 2, 4, 5 and 6, too", "one dump")
    expect(subprocess.run([PLAN, "explain", "beside"], capture_output=True, text=True, check=False), 2, "for dumps of PyTorch's flight recorder add --flight-recorder",
           "dumps in place of flight logs")
    expect(explain("beside/absent"), 2, r"'beside/absent' cannot be read \(No such file or directory\)", "no such path")
    os.chdir("beside")
    expect(explain("nccl_trace_rank_"), 0, "dumps of 8 of 8 ranks", "the beginning of names")
    os.chdir("..")
    jobs.example("compressed")
    pathlib.Path("compressed/nccl_trace_rank_5.gz").write_bytes(b"")
    expect(explain("compressed"), 0, "dumps of 8 of 8 ranks", "a dump beside its compressed copy")
    os.remove("compressed/nccl_trace_rank_5")
    expect(explain("compressed"), 2, r"'compressed/nccl_trace_rank_5.gz' is compressed. Remedy: unpack the dumps", "a compressed dump")
    # Two runs, an hour apart: rank 1 has not written its dump in the second.
    old, new = (Kept(("nccl:all_reduce", begin, True), ("nccl:all_reduce", begin + 1, begin == 0), lost=0) for begin in (0, 3600))
    os.makedirs("runs")
    for rank, kept in enumerate((new, old)):
        pathlib.Path("runs", f"rank_{rank}").write_bytes(pickle.dumps(kept.dump(2), protocol=2))
    expect(explain("runs"), 0, "The dump of rank 1 ends 3599 s before that of rank 0 begins, and may be of an earlier run", "dumps of two runs")


def refused_dumps(one):
    refuse = lambda made, words, what: expect(one(pickle.dumps(made, protocol=2)), 2, words, what)
    expect(one(b""), 2, "it is empty", "an empty file")
    expect(one(b"{ not JSON"), 2, "it is no JSON, or was cut off", "no JSON")
    refuse([1], "'version' is missing", "a list")
    refuse(dump(version="1.5"), "format 1.5, and formats 2.x", "another version")
    refuse(dump(version=2), "'version' is no text", "a number as version")
    refuse(dump(entries=3), "'entries' is no list", "no entries")
    refuse(dump(entries=[3]), "entry 0 is no dictionary", "a number as entry")
    for name in ("record_id", "collective_seq_id", "profiling_name", "state", "process_group"):
        refuse(dump(entry(), entry(record_id=1, **{name: KeyError})) if name != "record_id" else dump(entry(record_id=KeyError)), f"'{name}' of entry", f"no {name}")
    refuse(dump(entry(collective_seq_id=2**62)), "'collective_seq_id' of entry 0 is no whole number below 2\\^61", "a large number")
    refuse(dump(entry(input_sizes=[3])), "'input_sizes' of entry 0 has a size that is no list", "a size")
    refuse(dump(entry(input_dtypes=[3])), "'input_dtypes' of entry 0 has a type that is no text", "a type")
    refuse(dump(entry(profiling_name="nccl:send", is_p2p=True)), "is a send without its ranks", "a send to nobody")
    refuse(dump(entry(profiling_name="nccl:send 0->7", is_p2p=True)), "names rank 7 of process group '0', which has 2", "a peer outside")
    refuse(dump(entry(profiling_name="nccl:send 1->0", is_p2p=True)), "entry 0 is of rank 1, and the file's name says rank 0", "another rank's file")
    refuse(dump(pg_config={"0": {"ranks": "[0, -1]", "desc": ""}}), "has a rank that is no number", "a negative member")
    refuse(dump(pg_config={"0": {"ranks": "0 1", "desc": ""}}), "'ranks' of process group '0' is no list", "no members")


def main():
    with tempfile.TemporaryDirectory() as top:
        os.chdir(top)

        def one(data, name="nccl_trace_rank_0"):
            os.makedirs("one", exist_ok=True)
            for old in os.listdir("one"):
                os.remove(f"one/{old}")
            pathlib.Path("one", name).write_bytes(data)
            return explain("one")

        refused_pickles(one)
        refused_dumps(one)
        hand_made_jobs()
        wrapped_buffers()
        batch_of_a_group()
        expect(explain("nowhere"), 2, r"--flight-recorder 'nowhere' cannot be read \(No such file or directory\)\. Remedy:", "no folder")
        os.makedirs("empty")
        expect(explain("empty"), 2, "contains no file whose name ends in a rank", "an empty folder")
        places_of_dumps()
        os.makedirs("twice")
        for name in ("rank-0.json", "trace_0"):
            pathlib.Path("twice", name).write_text(json.dumps(dump()))
        expect(explain("twice"), 2, "are both of rank 0. Remedy: leave the files of one hang", "two files of a rank")
        expect(explain("twice", "other"), 2, "'other' stands beside --flight-recorder", "flight logs beside dumps")
        expect(explain("twice", "--patience", "soon"), 2, "--patience 'soon' is no time. Remedy: give seconds", "a patience in words")

        # Every prefix of a file is refused; changed bytes end in an answer or in one line.
        whole = pickle.dumps(dump(entry(), entry(record_id=1, collective_seq_id=2)), protocol=2)
        for length in range(0, len(whole), 3):
            expect(one(whole[:length]), 2, "it is empty|the file ends", f"{length} of {len(whole)} bytes")
        rng = random.Random(1)
        for n in range(250):
            changed = bytearray(whole if n % 2 else json.dumps(dump(entry(), entry(record_id=1))).encode())
            for _ in range(rng.randint(1, 4)):
                changed[rng.randrange(len(changed))] = rng.randrange(256)
            done = one(bytes(changed))
            if done.returncode not in (0, 2) or (done.returncode == 2 and (done.stderr.count("\n") != 1 or "Remedy" not in done.stderr)):
                wrong.append(f"changed bytes {n}: exit code {done.returncode}: {done.stderr[:300]}")

        # One job in all forms, with the same answer.
        posted, groups, last, rank, backend, words = jobs.faulty_job(3, "no_send")
        answers = set()
        for form in ("json", "pickle2", "pickle3", "pickle4", "pickle5"):
            jobs.write_dumps(form, posted, groups, last + 30, backend, form=form)
            told = json.loads(explain(form, "--format", "json").stdout)
            if form != "json" and "train.py:41" not in json.dumps(told):
                wrong.append(f"{form}: the line of the program is missing")
            answers.add(re.sub(r'"file": "[^"]*"|"called_at": "[^"]*",? ?|, train.py:41', "", json.dumps(told)).replace(", }", "}"))
        if len(answers) != 1:
            wrong.append(f"the forms of one dump have {len(answers)} answers: {answers}")

        # Groups of which no dump lists the members; ranks without a dump; buffers that have wrapped.
        for file, made in ((0, dump(entry(process_group=("dp", "undefined")), pg_config={})), (2, dump(entry(process_group=("dp", "undefined")), pg_config={}))):
            os.makedirs("groups", exist_ok=True)
            pathlib.Path("groups", f"r_{file}").write_bytes(pickle.dumps(made, protocol=2))
        expect(explain("groups"), 0, "No dump lists the members of process group 'dp'", "a group without members")
        jobs.write_dumps("wrapped", posted, groups, last + 30, backend, keep=20)
        expect(explain("wrapped"), 0, r"The buffers of ranks .* have wrapped: \d+ to \d+ operations before the first ones in their dumps were overwritten\.", "wrapped buffers")
        jobs.write_dumps("fewer", posted, groups, last + 30, backend, absent=[0])
        expect(explain("fewer"), 0, "dumps of \\d+ of \\d+ ranks", "a rank without a dump")
        # The same waits are no hang for a longer patience.
        expect(explain("json", "--patience", "100"), 0, r"No rank is named: ranks wait, but the oldest wait lasts 30(\.\d)? s", "patience")

        picture = explain("json", "--format", "svg").stdout
        xml.dom.minidom.parseString(picture)
        if picture.count('class="blame culprit"') != 1 or f'class="red">rank {rank}<' not in picture:
            wrong.append("the picture does not mark the rank")

        # Of a collective's long name the end is left out, and its number stays; a label is not wider than its box.
        names = ("all_reduce", "all_gather_into_tensor_coalesced", "reduce_scatter_tensor_coalesced", "_all_gather_base")
        os.makedirs("long")
        for rank in (0, 1):
            made = [entry(record_id=n, collective_seq_id=n, op_id=n, profiling_name="nccl:" + names[n % 4], time_created_ns=10**18 + n * 10**6,
                          state="completed" if n < 1238 else "scheduled") for n in range(1230, 1240 - rank)]
            pathlib.Path("long", f"r_{rank}.json").write_text(json.dumps(dump(*made)))
        root = xml.dom.minidom.parseString(explain("long", "--format", "svg").stdout)
        labels = [text.firstChild.data for text in root.getElementsByTagName("text") if text.getAttribute("text-anchor") == "middle"]
        last = {0: list(range(1232, 1240)), 1: list(range(1231, 1239))}
        if sorted(int(label.split()[-1]) for label in labels) != sorted(last[0] + last[1]):
            wrong.append(f"labels of the last operations are {labels}")
        for label in labels:
            begin, number = label.split()
            name = names[int(number) % 4]
            if not (begin == name or (begin.endswith("…") and len(begin) >= 7 and name.startswith(begin[:-1]))) or len(label) > 16:
                wrong.append(f"the operation {name} {number} has the label '{label}'")

        actions_of_schedules()
        schedule = ["--schedule", "1F1B", "--microbatches", "4", "--ranks"]
        expect(explain("planned-1", *schedule, "7"), 2, "no process group of 7 ranks has messages. Remedy: give --ranks", "another number of ranks")
        posted, groups, last, rank, backend, words = jobs.faulty_job(0, "wrong_destination")
        jobs.write_dumps("wrong", posted, groups, last + 30, backend)
        stages = max(len(members) for name, members in groups.items() if name.startswith("pp"))
        expect(explain("wrong", *schedule, str(stages)), 0, f"Rank {rank} sends to rank \\d+, and the schedule has no such message", "a message that the schedule lacks")
        os.makedirs("build/bin")
        os.symlink(PLAN, "build/bin/chevron-plan")
        os.symlink(ROOT / "tests", "tests")
        page = (ROOT / "docs/guides/other-frameworks.md").read_text()
        consoles = re.findall(r"<!-- run by: tests/process/recorder_dumps.py -->\n\n?```console\n\$ (.*)\n((?:.*\n)*?)```", page)
        for command, wanted in consoles:
            said = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=LONGEST, check=False).stdout
            if said.split() != wanted.split():
                wrong.append(f"other-frameworks.md: `{command}` prints something else than the page shows:\n{said}")
        if not consoles:
            wrong.append("other-frameworks.md has no console of this test")
    for line in wrong:
        print("FAILED: " + line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
