# timeout: 120
"""chevron-train --tensorboard beside --metrics: the event files hold the same figures at the same steps, a resumed run's file
replaces the steps that it does again. Read by TensorBoard's own reader where its Python package is installed.
"""
import json
import os
import pathlib
import shutil
import struct
import subprocess
import sys
import tempfile

TRAIN = pathlib.Path(os.environ.get("CHEVRON_BUILD", "build")).resolve() / "bin" / "chevron-train"
COMMON = ["--layers", "2", "--width", "16", "--heads", "2", "--context", "8", "--microbatch-size", "1", "--replicas", "1", "--sample", "0", "--timeline",
          "none", "--trace", "none", "--data", "text.txt", "--checkpoint", "saved", "--save-every", "4", "--tensorboard", "events", "--metrics", "m.jsonl"]


def numbers(message):
    """Fields of a message of protocol buffers, as (number, content)."""
    at = 0

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        key = varint()
        if key % 8 == 0:
            yield key >> 3, varint()
            continue
        size = {1: 8, 5: 4}.get(key % 8) or varint()
        yield key >> 3, message[at : at + size]
        at += size


def events(folder):
    """{figure: {step: value}} of all files in the order of their names, and the steps with which runs began."""
    out, begins = {}, []
    for file in sorted(folder.iterdir()):
        data, at = file.read_bytes(), 0
        while at < len(data):
            (size,) = struct.unpack_from("<Q", data, at)
            event = dict(numbers(data[at + 12 : at + 12 + size]))
            at += size + 16
            if 7 in event:
                begins.append(event.get(2, 0))
                for steps in out.values():
                    for step in [s for s in steps if s >= begins[-1]]:
                        del steps[step]
            for _, value in numbers(event.get(5, b"")):
                fields = dict(numbers(value))
                out.setdefault(fields[1].decode(), {})[event[2]] = struct.unpack("<f", fields[2])[0]
    return out, begins


def main():
    if not TRAIN.exists():
        print("skipped: chevron-train is not built")
        return 77
    wrong = []
    with tempfile.TemporaryDirectory() as top:
        folder = pathlib.Path(top)
        (folder / "text.txt").write_text("".join(f"line {i} of some text, as good as any\n" for i in range(2000)))

        def train(*words):
            done = subprocess.run([TRAIN, *COMMON, *words], cwd=folder, capture_output=True, text=True, timeout=90, check=False,
                                  env={**os.environ, "OMP_NUM_THREADS": "1"})
            if done.returncode != 0:
                wrong.append(f"{words}: {done.returncode}: {done.stderr[:500]}")

        train("--steps", "6")
        shutil.rmtree(folder / "saved/step-00000006")  # as if the run had been killed after its checkpoint of step 4
        train("--steps", "8", "--resume")
        lines = [json.loads(line) for line in (folder / "m.jsonl").read_text().splitlines()]
        wanted = {name: {line["step"]: line[name] for line in lines} for name in lines[0] if name != "step"}
        found, begins = events(folder / "events")
        if begins != [1, 5] or len(lines) != 8:
            wrong.append(f"runs begin with steps {begins}, and the metrics have {len(lines)} lines")
        if {name: sorted(steps) for name, steps in found.items()} != {name: sorted(steps) for name, steps in wanted.items()}:
            wrong.append(f"figures or steps differ: {sorted(found)} and {sorted(wanted)}")
        wrong += [f"{name}, step {step}: {value} and {wanted[name][step]}" for name, steps in found.items() for step, value in steps.items()
                  if abs(value - wanted[name][step]) > 1e-6 * abs(wanted[name][step])]
        try:
            from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        except ImportError:
            print("TensorBoard's own reader is not installed: read by this test's alone")
        else:
            reader = EventAccumulator(str(folder / "events"))
            reader.Reload()
            theirs = {name: {one.step: one.value for one in reader.Scalars(name)} for name in reader.Tags()["scalars"]}
            if theirs != found:
                wrong.append(f"TensorBoard reads {theirs}, not {found}")
        refused = subprocess.run([TRAIN, *COMMON, "--tensorboard", "text.txt"], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
        if refused.returncode != 2 or "--tensorboard text.txt cannot be written to" not in refused.stderr:
            wrong.append(f"a file as a folder: {refused.returncode}: {refused.stderr[:500]}")
    print("\n".join(wrong[:20]))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
