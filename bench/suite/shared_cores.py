"""Plays a schedule on fewer cores than ranks, by the rules of SCHED_FIFO for threads of one priority."""

import collections
import heapq
import re

ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


def actions_of(csv):
    """For each rank its actions, each a list of (stage, kind, microbatch): two of a fused pair, else one."""
    ranks = [[ACTION.findall(cell) for cell in line.split(",")] for line in csv.split()]
    return [[[(int(s), kind, int(m)) for s, kind, m in cell] for cell in rank if cell] for rank in ranks]


def played(ranks, cost, message, latency, cores, replicas=1):
    """
    The time from the start to the last action's end, of `replicas` equal pipelines side by side.

    ranks     as of `actions_of`
    cost      {(stage, kind): time}; B takes its own entry, or that of I and of W
    message   time of a transfer between two ranks; a direction between two ranks carries one transfer after the other
    latency   time from a transfer's end to its arrival
    cores     ranks that compute at one time

    A rank computes until an input is missing; then its core takes the rank that has waited longest for a core. A rank whose input
    arrives takes a free core, or joins the end of those that wait for one.
    """
    rank_of = {stage: r for r, actions in enumerate(ranks) for action in actions for stage, _, _ in action}
    last = max(rank_of)
    threads = [(replica, r) for replica in range(replicas) for r in range(len(ranks))]
    place, arrived, wires = dict.fromkeys(threads, 0), {}, {}
    events, queue, waiting, free, order = [], collections.deque(), set(threads), cores, 0

    def time_of(stage, kind):
        return cost[stage, kind] if (stage, kind) in cost else cost[stage, "I"] + cost[stage, "W"]

    def inputs(thread):
        """Results that the next action takes; of its own rank's earlier actions each is there."""
        taken = []
        for stage, kind, micro_batch in ranks[thread[1]][place[thread]]:
            if kind == "F" and stage > 0:
                taken.append((thread[0], stage - 1, "F", micro_batch))
            if kind in "BI" and stage < last:
                taken.append((thread[0], stage + 1, "G", micro_batch))
        return taken

    def ready(thread, now):
        if place[thread] == len(ranks[thread[1]]):
            return False
        return all(arrived.get(one, now + 1) <= now for one in inputs(thread))

    def start(thread, now):
        nonlocal order
        order += 1
        took = sum(time_of(stage, kind) for stage, kind, _ in ranks[thread[1]][place[thread]])
        heapq.heappush(events, (now + took, order, thread, True))

    def wake(now):
        nonlocal free
        for thread in [thread for thread in threads if thread in waiting and ready(thread, now)]:
            waiting.remove(thread)
            queue.append(thread)
        while free > 0 and queue:
            free -= 1
            start(queue.popleft(), now)

    now = 0.0
    wake(now)
    while events:
        now, _, thread, ends = heapq.heappop(events)
        if ends:
            for stage, kind, micro_batch in ranks[thread[1]][place[thread]]:
                to = {"F": stage + 1, "B": stage - 1, "I": stage - 1}.get(kind, -1)
                if not 0 <= to <= last:
                    continue
                at = now
                if rank_of[to] != thread[1]:
                    wire = (thread[0], thread[1], rank_of[to])
                    wires[wire] = max(now, wires.get(wire, 0.0)) + message
                    at = wires[wire] + latency
                    order += 1
                    heapq.heappush(events, (at, order, thread, False))
                arrived[thread[0], stage, "F" if kind == "F" else "G", micro_batch] = at
            place[thread] += 1
            # The thread goes on before others that an arrival at the same moment wakes.
            if ready(thread, now):
                start(thread, now)
            else:
                free += 1
                waiting.add(thread)
        wake(now)
    stuck = [thread for thread in threads if place[thread] < len(ranks[thread[1]])]
    if stuck:
        raise ValueError(f"rank {stuck[0][1]} waits for ever. Remedy: a schedule that chevron-plan check accepts")
    return max(now, 0.0)
