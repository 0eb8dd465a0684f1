# timeout: 300
"""chevron-plan check --channels beside an independent player (shared/channel_player.py): equal verdicts in every model on 210 files
whose receives were made later at random, and on the same files where hosts wait; all exports of the catalogue run in every model;
the order of pytorch#172668 is refused over channels of pairs and of the group. The player is tried itself: on files with a known
verdict in each model."""
import concurrent.futures
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parent / "shared"))
from channel_player import left_over, rows_of

program = os.path.join(os.environ.get("CHEVRON_BUILD", "build"), "bin", "chevron-plan")
MODELS = ("edge", "pair", "group", "batched")
SCHEDULES = ("GPipe 1F1B Eager1F1B LoopedBFS Interleaved1F1B Hanayo InterleavedZeroBubble ZB-H1 ZB-H2 ZBVZeroBubble V-Half V-Min "
             "DualPipeV 1F1B-R Seq1F1B SeqZB-H1 SeqInterleaved1F1B ForwardOnly").split()
wrong = []


def expect(holds, what):
    if not holds:
        wrong.append(what)
        print("FAILED: " + what, flush=True)


def ran(*arguments, stdin=None):
    return subprocess.run([program, *arguments], input=stdin, capture_output=True, text=True)


def proved(text, *flags):
    """The models that `check` proves for a file; None if it refuses the file."""
    out = ran("check", "-", *flags, stdin=text)
    line = re.search(r"Channels: proved for ([a-z, ]+?)(, not for|;|, of the messages)", out.stdout)
    if out.returncode == 5 and "'deadlock'" in out.stdout:
        return set()
    return set(re.findall(r"[a-z]+", line[1].replace(" and ", ", "))) if line else None


def played(text, hosts_wait=False):
    rows = rows_of(text)
    return {model for model in MODELS if not left_over(rows, model, hosts_wait)}


def exported(schedule, ranks, micro_batches, dialect="csv-comms"):
    slices = ["--slices", "2"] if schedule.startswith("Seq") else []
    out = ran("lower", schedule, "--ranks", str(ranks), "--microbatches", str(micro_batches), "--format", dialect, *slices)
    return out.stdout if out.returncode == 0 else None


def with_later_receives(text, dice):
    """The file with receives moved later, each at most to its computation, and those of a directed edge in their order."""
    rows = [line.split(",") for line in text.splitlines()]
    home = {int(re.match(r"\(?(\d+)", cell)[1]): rank for rank, row in enumerate(rows) for cell in row if "_" not in cell}
    for rank, row in enumerate(rows):
        for sender in range(len(rows)):
            def is_from_sender(cell):
                match = re.match(r"(\d+)RECV_([FB])", cell)
                return match and home[int(match[1]) + (-1 if match[2] == "F" else 1)] == sender
            receives = [cell for cell in row if is_from_sender(cell)]
            limit = len(row)
            # From the last receive on, so that each stays before the next of its edge.
            for cell in reversed(receives):
                at = row.index(cell)
                used = cell.replace("RECV_", "") if "RECV_F" in cell else re.sub(r"RECV_B", "[BI]", cell)
                use = next(i for i, other in enumerate(row) if re.search(rf"(?<![\d.]){used}(?![\d.])", other))
                latest = min(use, limit) - 1
                if dice.random() < 0.4 and latest > at:
                    to = dice.randint(at, latest)
                    row.insert(to, row.pop(at))
                limit = row.index(cell)
    return "".join(",".join(row) + "\n" for row in rows)


def judge_later(seed):
    dice = random.Random(seed)
    text = None
    while not text:
        text = exported(dice.choice(SCHEDULES[:13]), dice.choice((2, 3, 4)), dice.randint(2, 8))
    text = with_later_receives(text, dice)
    return seed, text, proved(text), played(text), proved(text, "--hosts-wait"), played(text, True)


def judge_export(size):
    found = []
    text = exported(*size)
    if text is not None:
        for hosts_wait in (False, True) if size[2] in (1, 2, 3, 8) else (False,):
            found.append((size, hosts_wait, proved(text, *(["--hosts-wait"] if hosts_wait else [])), played(text, hosts_wait)))
    return found


# The player: known verdicts.
crossed = "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1\n1RECV_F0,1F0,1B0,1SEND_B0,1RECV_F1,1F1,1B1,1SEND_B1\n"
expect(played(crossed) == {"edge", "batched"}, f"the player on a send against a send: {played(crossed)}")
expect(played(crossed, True) == {"batched"}, f"the player on a send against a send, where hosts wait: {played(crossed, True)}")
straight = crossed.replace("0SEND_F1,0RECV_B0", "0RECV_B0,0SEND_F1")
expect(played(straight) == set(MODELS) == played(straight, True), "the player refuses an order that runs")
early = crossed.replace("0RECV_B0,0B0,0RECV_B1,0B1", "0B0,0RECV_B0,0RECV_B1,0B1")
expect(played(early) == set(), "the player accepts a gradient that is used before it is received")

# pytorch#172668.
reported = ("0F0,0SEND_F0,0F1,0SEND_F1,2RECV_F0,2F0,2SEND_F0,2RECV_F1,2F1,2SEND_F1,2RECV_B0,2B0,2SEND_B0,2RECV_B1,2B1,2SEND_B1,"
            "0RECV_B0,0B0,0RECV_B1,0B1\n"
            "1RECV_F0,1F0,1SEND_F0,1RECV_F1,1F1,1SEND_F1,3RECV_F0,3F0,3B0,3SEND_B0,3RECV_F1,3F1,3B1,3SEND_B1,1RECV_B0,1B0,"
            "1SEND_B0,1RECV_B1,1B1,1SEND_B1\n")
expect(proved(reported) == played(reported) == {"edge", "batched"}, f"the reported order: {proved(reported)}, {played(reported)}")

counts = {model: 0 for model in MODELS}
waiting = dict(counts)
with concurrent.futures.ThreadPoolExecutor(2) as pool, tempfile.TemporaryDirectory() as folder:
    for seed, text, says, plays, says_waiting, plays_waiting in pool.map(judge_later, range(210)):
        expect(says is not None and says == plays, f"seed {seed}: check proves {says}, the player {plays}\n{text}")
        expect(says_waiting == plays_waiting, f"seed {seed}, hosts wait: check proves {says_waiting}, the player {plays_waiting}\n{text}")
        for model in MODELS:
            counts[model] += model not in plays
            waiting[model] += model not in plays_waiting
    print(f"210 files with later receives: refused over {counts}; where hosts wait {waiting}")
    expect(counts["edge"] == 0 and all(10 <= counts[model] <= 200 for model in ("pair", "group", "batched")),
           f"too few or too many files are refused to compare verdicts: {counts}")

    sizes = [(schedule, ranks, micro_batches) for schedule in SCHEDULES for ranks in (2, 3, 4, 8) for micro_batches in range(1, 17)]
    judged = 0
    for found in pool.map(judge_export, sizes):
        for size, hosts_wait, says, plays in found:
            judged += 1
            expect(says == plays == set(MODELS), f"{size}, hosts wait {hosts_wait}: check proves {says}, the player {plays}")
    print(f"{judged} verdicts on exports of the catalogue: all run over {', '.join(MODELS)}")
    expect(judged > 1000, "too few exports were judged")
sys.exit(1 if wrong else 0)
