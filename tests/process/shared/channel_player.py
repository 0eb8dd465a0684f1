"""A player of schedule files over channels, independent of Chevron: least fixed points of three rules, in a few lines. An end of a
message is posted once its row has come to it and all earlier batches of its channel are done; a message is done once both of its
ends are posted; a row passes an action once the message that the action waits for is done."""
import re

CELL = re.compile(r"(\d+)(SEND_F|SEND_B|RECV_F|RECV_B|WAIT_SEND_F|WAIT_SEND_B|F|B|I|W|R)(\d+(?:\.\d+)?)")


def rows_of(text):
    """The rows of a file, without cells that no rank waits for."""
    return [[(what, int(stage), unit) for stage, what, unit in CELL.findall(re.sub(r"\d+(WAIT_)?REDUCE_GRAD|OVERLAP_F_B", "", line))]
            for line in text.splitlines() if not line.startswith("#")]


def message_of(what, stage, unit):
    """A message: its direction, the lower of its two stages, its microbatch."""
    return what[-1], stage if what in ("SEND_F", "WAIT_SEND_F", "RECV_B") else stage - 1, unit


def left_over(rows, model, hosts_wait=False):
    """The messages and rows that are never done over channels of this model; empty: the file runs."""
    home = {stage: rank for rank, row in enumerate(rows) for what, stage, _ in row if what in "FBIWR"}
    channels, waits = {}, [[None] * len(row) for row in rows]
    for rank, row in enumerate(rows):
        batch = 0
        for at, (what, stage, unit) in enumerate(row):
            message, neighbour = None, {"F": stage - 1, "B": stage + 1, "I": stage + 1}.get(what)
            if what[:4] in ("SEND", "RECV"):
                message = message_of(what, stage, unit)
                if model != "batched" or at == 0 or row[at - 1][0][:4] not in ("SEND", "RECV"):
                    batch = at
                peer = home[2 * message[1] + 1 - stage]
                name = {"edge": (peer, what[:4]), "pair": peer}.get(model)
                lines = channels.setdefault((rank, name), [])
                if not lines or lines[-1][0] != batch:
                    lines.append((batch, []))
                lines[-1][1].append(message)
                waits[rank][at] = message if hosts_wait else None
            elif what[:4] == "WAIT":
                waits[rank][at] = message_of(what, stage, unit)
            elif neighbour in home and home[neighbour] != rank:
                waits[rank][at] = message_of("RECV_F" if what == "F" else "RECV_B", stage, unit)
    done, reached, before = set(), [0] * len(rows), None
    while before != (len(done), reached):
        before = len(done), list(reached)
        for rank, row in enumerate(rows):
            while reached[rank] < len(row) and waits[rank][reached[rank]] in done | {None}:
                reached[rank] += 1
        posted = {}
        for (rank, _), lines in channels.items():
            first = next((line for line in lines if not done.issuperset(line[1])), None)
            if first and first[0] <= reached[rank]:
                for message in first[1]:
                    posted[message] = posted.get(message, 0) + 1
        done |= {message for message, ends in posted.items() if ends == 2}
    stuck = {message for lines in channels.values() for _, messages in lines for message in messages if message not in done}
    return stuck | {rank for rank, row in enumerate(rows) if reached[rank] < len(row)}
