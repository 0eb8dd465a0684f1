"""Simulated jobs of PyTorch ranks that write dumps in the form of PyTorch's flight recorder (format 2.10).

A rank is a list of actions: compute, post operations, wait for operations. Messages need both sides; a collective needs all members of
its group. With `ordered` operations of a channel (a pair of ranks in a group, or a group's collectives) run in the order in which each
rank posted them, as on NCCL's streams; without it each runs as soon as all sides have posted it, as with Gloo.

    python3 tests/support/recorder_jobs.py dumps     writes the dumps of docs/guides/other-frameworks.md into the folder `dumps`
"""
import json
import os
import pickle
import random
import sys

BASE = 1_790_000_000_000_000_000  # ns since 1970
LATENCY = 0.001
FRAMES = [{"name": "isend", "filename": "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", "line": 2600},
          {"name": "step", "filename": "/home/user/train.py", "line": 41}]


class Op:
    def __init__(self, kind, group, peer=None, shape=(4, 8), dtype="Float"):
        self.kind, self.group, self.peer, self.shape, self.dtype = kind, group, peer, shape, dtype
        self.action = None  # of the schedule, as `1SEND_F0`
        self.rank = self.created = self.completed = self.sequence = self.batch = None

    def copy(self, **changes):
        out = Op(self.kind, self.group, self.peer, self.shape, self.dtype)
        for name, value in changes.items():
            setattr(out, name, value)
        return out


def play(programs, groups, ordered=True, eager=False):
    """Runs the programs until nothing moves. Gives the posted operations of each rank, and when the last rank stopped moving."""
    world = len(programs)
    posted, wires, meetings = [[] for _ in range(world)], {}, {}
    time, place, channels, collectives, batches = [0.0] * world, [0] * world, [{} for _ in range(world)], [{} for _ in range(world)], [0] * world
    moved = True
    while moved:
        moved = False
        for r in range(world):
            while place[r] < len(programs[r]):
                what, value = programs[r][place[r]]
                if what == "stop":
                    break
                if what == "compute":
                    time[r] += value
                elif what == "wait":
                    if any(op.completed is None for op in value):
                        break
                    time[r] = max([time[r]] + [op.completed for op in value])
                else:
                    batches[r] += 1
                    for op in value:
                        op.rank, op.created, op.batch = r, time[r], batches[r] if len(value) > 1 else None
                        time[r] += 1e-5
                        posted[r].append(op)
                        if op.peer is None:
                            op.sequence = collectives[r][op.group] = collectives[r].get(op.group, 0) + 1
                            meetings.setdefault((op.group, op.sequence), {})[r] = op
                            channel = op.group
                        else:
                            wire = (op.group, r, op.peer) if op.kind == "send" else (op.group, op.peer, r)
                            wires.setdefault(wire, ([], []))[op.kind == "recv"].append(op)
                            channel = (op.group, frozenset((r, op.peer)))
                        channels[r].setdefault(channel, []).append(op)
                        op.channel = channels[r][channel]
                        if eager and op.kind == "send":
                            op.completed = op.created + LATENCY
                place[r] += 1
                moved = True

        def is_head(op):
            if not ordered:
                return True
            for before in op.channel:
                if before is op or (op.batch is not None and before.batch == op.batch):
                    return True
                if before.completed is None:
                    return False
            return True

        for sends, receives in wires.values():
            for send, receive in zip(sends, receives):
                alike = send.shape == receive.shape and send.dtype == receive.dtype
                if receive.completed is None and alike and is_head(send) and is_head(receive):
                    receive.completed = max(send.created, receive.created) + LATENCY
                    send.completed = send.completed or receive.completed
                    moved = True
        for (group, _), met in meetings.items():
            ops = list(met.values())
            if len(ops) == len(groups[group]) and ops[0].completed is None and all(is_head(op) for op in ops):
                if len({(op.kind, op.shape, op.dtype) for op in ops}) == 1:
                    for op in ops:
                        op.completed = max(op.created for op in ops) + LATENCY
                    moved = True
    ended = [place[r] == len(programs[r]) for r in range(world)]
    last = max([t for t in time] + [op.completed or 0 for ops in posted for op in ops])
    return posted, ended, last


def entries_of(rank, posted, groups, backend, moment, version):
    out, p2p, ids = [], {}, {name: i for i, name in enumerate(groups)}
    posted = [op for op in posted if op.created <= moment]

    def entry(op, name, sequence, is_p2p, completed, record):
        tensors = [] if op is None else [list(op.shape)]
        types = [] if op is None else [op.dtype]
        made = {"frames": FRAMES, "record_id": record, "pg_id": ids[group], "process_group": (group, "default_pg" if group == "0" else f"mesh_{group}"),
                "collective_seq_id": 0 if is_p2p else sequence, "p2p_seq_id": sequence if is_p2p else 0, "op_id": record + 1,
                "profiling_name": f"{backend}:{name}", "time_created_ns": BASE + int(created * 1e9), "input_sizes": tensors, "input_dtypes": types,
                "output_sizes": tensors, "output_dtypes": types, "state": "scheduled", "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None, "retired": bool(completed), "timeout_ms": 600000, "is_p2p": is_p2p}
        if version == "2.10":
            made.update(thread_id="140399503027072", thread_name="python")
        if completed and backend != "gloo":
            made.update(state="completed", time_discovered_completed_ns=BASE + int(completed * 1e9))
        return made

    for n, op in enumerate(posted):
        group, created = op.group, op.created
        done = op.completed if op.completed is not None and op.completed <= moment else None
        if op.peer is None:
            out.append(entry(op, op.kind, op.sequence, False, done, len(out)))
            continue
        if op.batch is None or n == 0 or posted[n - 1].batch != op.batch:
            p2p[group] = p2p.get(group, 0) + 1
        mine, other = groups[group].index(rank), groups[group].index(op.peer)
        name = f"send {mine}->{other}" if op.kind == "send" else f"recv {mine}<-{other}"
        out.append(entry(op, name, p2p[group], True, done if op.batch is None or backend == "gloo" else None, len(out)))
        if backend != "gloo" and op.batch is not None and (n + 1 == len(posted) or posted[n + 1].batch != op.batch):
            batch = [one for one in posted if one.batch == op.batch]
            ends = [one.completed for one in batch]
            all_done = max(ends) if all(end is not None and end <= moment for end in ends) else None
            out.append(entry(None, "coalesced", p2p[group], True, all_done, len(out)))
    return out


def write_dumps(folder, posted, groups, moment, backend="nccl", absent=(), form="pickle", keep=None, version="2.10", active=False):
    """One file for each rank but the absent ones, with the states of this moment (s). `keep`: the size of the ring buffer. `active`: only
    operations that are not complete, as PyTorch's `onlyActive`."""
    os.makedirs(folder, exist_ok=True)
    for r, ops in enumerate(posted):
        if r in absent:
            continue
        entries = entries_of(r, ops, groups, backend, moment, version)
        if active:
            batches = {(one["process_group"], one["p2p_seq_id"]) for one in entries if one["profiling_name"].endswith("coalesced") and one["retired"]}
            entries = [one for one in entries if not one["retired"] and not (one["is_p2p"] and (one["process_group"], one["p2p_seq_id"]) in batches)]
        config = {name: {"name": name, "desc": "default_pg" if name == "0" else f"mesh_{name}", "ranks": str(members)}
                  for name, members in groups.items() if r in members}
        dump = {"version": version, "pg_config": config, "comm_lib_version": "2.27.5", "pg_status": {},
                "entries": entries if keep is None else entries[-keep:]}
        path = os.path.join(folder, f"nccl_trace_rank_{r}")
        if form == "json":
            for one in dump["entries"]:
                del one["frames"]
            path += ".json"
            data = json.dumps(dump).encode()
        else:
            data = pickle.dumps(dump, protocol=int(form[-1]) if form[-1].isdigit() else 2)
        with open(path, "wb") as file:
            file.write(data)
        os.utime(path, ns=(BASE + int(moment * 1e9),) * 2)


def pipeline(stages, replicas, micro_batches, steps, rng, kind="1f1b", ahead=False, batched=False, slow=0.0):
    """Programs and groups of a training job: `stages` ranks a pipeline, replica by replica; each step ends with the sum of a stage's
    gradients over the replicas and with the sum of the loss over all ranks. `slow`: how much longer a computation may take."""
    world = stages * replicas
    groups = {"0": list(range(world))}
    for q in range(replicas):
        groups[f"pp{q}"] = [q * stages + s for s in range(stages)]
    if replicas > 1:
        for s in range(stages):
            groups[f"dp{s}"] = [q * stages + s for q in range(replicas)]
    programs = []
    for r in range(world):
        s, group = r % stages, f"pp{r // stages}"
        warm = micro_batches if kind == "gpipe" else min(micro_batches, stages - 1 - s)
        order = ["F"] * warm
        while order.count("B") < micro_batches:
            if order.count("F") < micro_batches:
                order.append("F")
            order.append("B")
        program = []
        for _ in range(steps):
            made, sent = [], []
            for what in order:
                source = r - 1 if what == "F" and s > 0 else r + 1 if what == "B" and s < stages - 1 else None
                target = r + 1 if what == "F" and s < stages - 1 else r - 1 if what == "B" and s > 0 else None
                made.append((what, Op("recv", group, source) if source is not None else None, Op("send", group, target) if target is not None else None))
            for i, (what, receive, send) in enumerate(made):
                micro_batch = order[:i].count(what)
                for op, side in ((receive, "RECV"), (send, "SEND")):
                    if op:
                        op.action = f"{s}{side}_{what}{micro_batch}"
                posts = []
                if receive and not (ahead and i > 0):
                    program.append(["post", [receive]])
                if ahead and i + 1 < len(made) and made[i + 1][1]:
                    posts.append(made[i + 1][1])
                if posts:
                    program.append(["post", posts])
                if receive:
                    program.append(["wait", [receive]])
                program.append(["compute", 0.01 * (1 if what == "F" else 2) * (1 + slow * rng.random())])
                if send:
                    program.append(["post", [send]])
                    sent.append(send)
                if batched and send and i + 1 < len(made) and made[i + 1][1] and not ahead and made[i + 1][1].peer == send.peer:
                    # As Megatron's send_forward_recv_backward: posted together.
                    receive = made[i + 1][1]
                    receive.action = f"{s}RECV_{made[i + 1][0]}{order[:i + 1].count(made[i + 1][0])}"
                    program[-1] = ["post", [send, receive]]
                    made[i + 1] = (made[i + 1][0], None, made[i + 1][2])
                    program.append(["wait", [send, receive]])
            program.append(["wait", sent])
            for name in ([f"dp{s}"] if replicas > 1 else []) + ["0"]:
                op = Op("all_reduce", name, None, (16, 16) if name != "0" else (1,))
                program += [["post", [op]], ["wait", [op]]]
            program.append(["compute", 0.02])
        programs.append(program)
    return programs, groups


def megatron(stages, tensor, micro_batches, steps, rng):
    """As `pipeline`, but each stage is divided among `tensor` ranks, which sum activations and gradients twice in each computation."""
    programs, groups = [], {"0": list(range(stages * tensor))}
    for t in range(tensor):
        groups[f"pp{t}"] = [s * tensor + t for s in range(stages)]
    for s in range(stages):
        groups[f"tp{s}"] = [s * tensor + t for t in range(tensor)]
    for r in range(stages * tensor):
        s, t = divmod(r, tensor)
        lone = pipeline(stages, 1, micro_batches, steps, rng, batched=True)[0][s]
        program = []
        for what, value in lone:
            if what == "post":
                for op in value:
                    if op.peer is not None:
                        op.group, op.peer, op.shape = f"pp{t}", op.peer * tensor + t, (4, 1, 64)
            program.append([what, value])
            if what == "compute":
                for _ in range(2):
                    op = Op("all_reduce", f"tp{s}", None, (4, 1, 64), "BFloat16")
                    program += [["post", [op]], ["wait", [op]]]
        programs.append(program)
    return programs, groups


def plant(fault, programs, groups, rank, step, steps, rng):
    """Changes one rank's program in one step; False where the fault finds no place. The rank's dump is left out for `dead`."""
    program = programs[rank]
    marks = [i for i, (what, value) in enumerate(program) if what == "post" and value[0].peer is None and value[0].group == "0"]
    begin = 0 if step == 0 else marks[step - 1] + 2
    end = marks[step] + 2
    posts = [i for i in range(begin, end) if program[i][0] == "post"]

    def alone(kind):
        found = [i for i in posts if len(program[i][1]) == 1 and program[i][1][0].kind == kind]
        return rng.choice(found) if found else None

    def drop(i):
        gone = program[i][1][0]
        program[i] = ["compute", 0.0]
        for what, value in program:
            if what == "wait" and gone in value:
                value.remove(gone)

    if fault in ("asleep", "dead"):
        program[rng.randrange(begin, end):] = [["stop", None]]
    elif fault == "exit":
        del program[rng.randrange(begin, end):]
    elif fault in ("no_send", "no_receive"):
        i = alone("send" if fault == "no_send" else "recv")
        if i is None:
            return False
        drop(i)
    elif fault in ("wrong_destination", "wrong_source"):
        i = alone("send" if fault == "wrong_destination" else "recv")
        if i is None:
            return False
        op = program[i][1][0]
        others = [r for r in groups[op.group] if r not in (rank, op.peer)]
        unused = [r for r in others if abs(r - rank) > 1] or others
        if not unused:
            return False
        op.peer = rng.choice(unused)
    elif fault == "order":
        pairs = [(i, j) for i, j in zip(posts, posts[1:]) if program[i][1][0].kind != program[j][1][0].kind or program[i][1][0].peer != program[j][1][0].peer]
        if not pairs:
            return False
        i, j = rng.choice(pairs)
        # The second operation runs to its end before the first begins.
        second, rest = program[j], program[i:j]
        program[i:j + 1] = [second, ["wait", list(second[1])]] + rest
    elif fault in ("no_collective", "extra_collective", "other_collective", "other_size", "other_type"):
        found = [i for i in posts if program[i][1][0].peer is None]
        i = rng.choice(found)
        op = program[i][1][0]
        if fault == "no_collective":
            drop(i)
        elif fault == "extra_collective":
            more = op.copy()
            program[i:i] = [["post", [more]], ["wait", [more]]]
        elif fault == "other_collective":
            op.kind = "broadcast"
        elif fault == "other_size":
            op.shape = op.shape[:-1] + (op.shape[-1] + 1,)
        else:
            op.dtype = "BFloat16"
    elif fault in ("message_size", "message_type"):
        i = alone(rng.choice(["send", "recv"]))
        if i is None:
            return False
        op = program[i][1][0]
        if fault == "message_size":
            op.shape = op.shape[:-1] + (op.shape[-1] * 2,)
        else:
            op.dtype = "BFloat16"
    return True


FAULTS = ["asleep", "dead", "exit", "no_send", "no_receive", "wrong_destination", "wrong_source", "order", "no_collective", "extra_collective",
          "other_collective", "other_size", "other_type", "message_size", "message_type"]


def faulty_job(seed, fault, first_step=2):
    """A job that hangs through this fault in a step from `first_step` on: posted operations, groups, when it stopped, the rank, backend, a
    description."""
    rng = random.Random(f"{fault} {seed}")
    for _ in range(400):
        stages, replicas = rng.choice([(2, 1), (3, 1), (4, 1), (4, 2), (3, 2), (2, 3)])
        backend = rng.choice(["nccl", "gloo"])
        ahead, batched = backend == "gloo" and rng.random() < 0.5, rng.random() < 0.3  # on one channel a pair, a receive ahead blocks sends
        steps = rng.choice([3, 4])
        kind, micro_batches = rng.choice(["1f1b", "gpipe"]), rng.choice([2, 4, 5])
        eager = backend == "gloo" or kind == "1f1b" or rng.random() < 0.4  # on one channel a pair 1F1B needs sends that do not wait
        programs, groups = pipeline(stages, replicas, micro_batches, steps, rng, kind, ahead, batched)
        rank, step = rng.randrange(stages * replicas), rng.randrange(first_step, steps if first_step else 1)
        if not plant(fault, programs, groups, rank, step, steps, rng):
            continue
        posted, ended, last = play(programs, groups, backend == "nccl", eager)
        if all(ended[r] for r in range(len(programs)) if not (fault == "exit" and r == rank)):
            continue  # no other rank notices
        words = f"{fault} {seed}: {kind} {stages}x{replicas} M={micro_batches} {backend}{' ahead' if ahead else ''}{' batched' if batched else ''}{' eager' if eager else ''} rank {rank} step {step} of {steps}"
        return posted, groups, last, rank, backend, words
    raise RuntimeError(f"no job hangs by {fault}")


def healthy_job(seed):
    """A slow job that does not hang, and a moment in it: the form of `faulty_job`, without a rank."""
    rng = random.Random(f"healthy {seed}")
    stages, replicas = rng.choice([(2, 1), (4, 1), (4, 2), (3, 2)])
    backend = rng.choice(["nccl", "gloo"])
    programs, groups = pipeline(stages, replicas, rng.choice([2, 4, 5]), 4, rng, rng.choice(["1f1b", "gpipe"]),
                                backend == "gloo" and rng.random() < 0.5, rng.random() < 0.3,
                                slow=rng.choice([1.0, 20.0, 100.0]))
    posted, ended, last = play(programs, groups, backend == "nccl", True)
    assert all(ended)
    return posted, groups, last * rng.uniform(0.3, 1.0) if seed % 5 else last + 100, backend, f"healthy {seed} {backend}"


def example(folder):
    """The dumps of docs/guides/other-frameworks.md: 1F1B on 4 stages and 2 replicas; in the third step rank 5 leaves out a send."""
    programs, groups = pipeline(4, 2, 4, 4, random.Random(0))
    program = programs[5]
    last = [i for i, (what, value) in enumerate(program) if what == "post" and value[0].peer is None and value[0].group == "0"][1]
    i = next(i for i in range(last, len(program)) if program[i][0] == "post" and program[i][1][0].kind == "send")
    gone = program[i][1][0]
    program[i] = ["compute", 0.0]
    for what, value in program:
        if what == "wait" and gone in value:
            value.remove(gone)
    posted, _, moment = play(programs, groups, True, True)
    write_dumps(folder, posted, groups, moment + 600, "nccl")


if __name__ == "__main__":
    example(sys.argv[1])
