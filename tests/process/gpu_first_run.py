"""bench/gpu/first_run.py, rehearsed without a GPU: its order and its time, with clocks that pretend that every part is slow, and its end where
there is no driver."""
import os
import pathlib
import subprocess
import sys
import tempfile

SOURCE = pathlib.Path(os.environ.get("CHEVRON_SOURCE", pathlib.Path(__file__).resolve().parents[2]))
sys.path.append(str(SOURCE / "bench/gpu"))
import first_run


class pretended:
    """A machine on which every part takes a share of its time and ends with a code of the test's."""

    def __init__(self, share, codes=None, gpus=1):
        self.count, self.environments = gpus, []
        self.share, self.codes, self.time, self.ran, self.started, self.widest = share, codes or {}, 0.0, [], [], 0

    def now(self):
        return self.time

    def run(self, command, seconds, environment):
        text = " ".join(str(word) for word in command)
        eager = environment.get("CUDA_MODULE_LOADING") == "EAGER"
        self.ran.append(("eager " if eager else "") + text)
        self.environments.append(environment)
        self.time += min(seconds, seconds * self.share)
        stopped = self.share >= 1
        code = next((code for word, code in self.codes.items() if word in text and not eager), 0)
        return (124 if stopped else code), "x" * 50_000 + "\nthe last line"

    def run_beside(self, several):
        began, out = self.time, []
        for one in several:
            self.time = began
            out.append((*self.run(*one), self.time - began))
        self.time = max(began + took for _, _, took in out)
        self.widest = max(self.widest, len(several))
        return out

    def gpus(self):
        return self.count

    def start(self, command, log):
        self.started.append(command)


wrong = []


def expect(holds, what):
    if not holds:
        wrong.append(what)
        print("FAILED: " + what, flush=True)


def rehearse(which, share, codes=None, built=True, gpus=1):
    with tempfile.TemporaryDirectory() as folder:
        out, work, carried = (pathlib.Path(folder) / name for name in ("out", "work", "carried"))
        if built:
            script = work / "bench/gpu/run.py"
            script.parent.mkdir(parents=True)
            script.touch()
        (pathlib.Path(folder) / "python").mkdir()  # the binding of Python, which `./dev gpu pack` compiles
        on = pretended(share, codes, gpus)
        run = first_run.first_run(out, work, 590, on)
        site = pathlib.Path("/site")
        beginning = first_run.beginning(site, carried)
        parts = {"first": lambda: beginning + first_run.first(carried), "pair": lambda: beginning + first_run.pair(carried),
                 "second": lambda: beginning + first_run.second(carried, work, out, on.gpus()), "third": lambda: first_run.third(run)}[which]()
        run.run_all(parts)
        code = run.end()
        expect(on.time <= 590, f"{which} at {share} took {on.time:.0f} s")
        files = sorted(file.name for file in out.iterdir())
        expect(files == ["log.txt", "summary.txt"][0 if on.ran else 1:], f"{which} wrote {files}")
        if on.ran:
            expect((out / "log.txt").stat().st_size < 45_000 * len(on.ran) + 200_000, "log.txt holds the end of each output")
        return code, on, (out / "summary.txt").read_text(), [one.name for one in parts]


code, on, summary, names = rehearse("first", 0.3)
expect(code == 0 and len(on.ran) == len(names), f"of {len(names)} parts {len(on.ran)} ran")
expect(all(f"{name}: " in summary for name in names), "each part has its line")
expect(on.widest == first_run.WIDTH, f"{on.widest} parts ran beside each other")

code, on, summary, names = rehearse("first", 0.9)
expect(code == 0 and "not begun" in summary, "what there was no time for is named")
expect(names.index("tests of graphs") < names.index("tests of memory"), "graphs are worth more than memory")
expect("tests of devices" in summary.split("not run")[0], "devices come first")

code, on, summary, _ = rehearse("first", 1.0)
expect(code == 1 and len(on.ran) == 1 and "stopped here" in summary, "a machine that hangs at its first part is left")

code, on, summary, _ = rehearse("first", 0.1, {"streams_test": 4, "graphs_test": 1})
expect(code == 1 and "failed: tests of streams, tests of graphs" in summary, "a failed part is named at the end")
expect(sum("eager " in text and "streams_test" in text for text in on.ran) == 1, "it is run again, loading eagerly")
expect(not any("eager " in text and "graphs_test" in text for text in on.ran), "a part that does not hang is not")
expect("tests of streams, loading eagerly" in summary, "and says so")

code, on, summary, _ = rehearse("first", 0.1, {"devices_test": 1})
expect(code == 1 and "stopped here" in summary and not any("trainer" in text for text in on.ran), "without devices nothing else is tried")

code, on, summary, _ = rehearse("second", 0.4, {"streams.py": 1})
expect(code == 0 and "streams of 8 queues: 16 s, ended with 1, as it must" in summary, f"an expected failure is right:\n{summary}")
code, on, summary, _ = rehearse("second", 0.4)
expect(code == 1 and "failed: streams of 8 queues" in summary, "and its absence is wrong")
expect("memory errors: not run, there is no compute-sanitizer" in summary or "memory errors: 48 s" in summary, "what is missing is named")
code, on, summary, names = rehearse("second", 0.5, {"streams.py": 1})
measured = ["a step on a GPU", "the end of a step beside PyTorch", "a step beside PyTorch", "a receive that waits"]
expect(all(f"{name}: " in summary.split("not run")[0] for name in measured), f"what PyTorch is beaten at, or not, comes first:\n{summary}")

code, on, summary, names = rehearse("second", 0.3, {"streams.py": 1}, gpus=2)
expect(code == 0 and not any("partitions" in text for text in on.ran), "parts of one GPU are for one GPU")

code, on, summary, names = rehearse("pair", 0.2, gpus=2)
expect(code == 0 and len(on.ran) == len(names), f"pair: of {len(names)} parts {len(on.ran)} ran")
expect(not any("--share-gpus" in text for text in on.ran), "each rank of a pair has a GPU of its own")
expect(sum("threads" in text for text in on.ran) == 2, "losses are compared with the CPU's")
expect(names.index("train 1F1B by copies on two GPUs") < names.index("a receive that waits on two GPUs"), "what trains comes first")
expect(any(each.get("NCCL_DEBUG") == "INFO" for each in on.environments), "NCCL tells which way it takes")
code, on, summary, names = rehearse("pair", 0.2, {"grep -c": 1}, gpus=1)
expect(code == 1 and not any("chevron-train" in text for text in on.ran), "a pair needs two GPUs")
code, on, summary, names = rehearse("pair", 0.2, {"--cuda-graph": 4}, gpus=2)
expect(code == 1 and "stopped here" in summary, "without graphs beside NCCL the rest is not tried")
for cause in ("NCCL_P2P_DISABLE=1", "CUDA_MODULE_LOADING=EAGER", "NCCL_CUMEM_ENABLE=0"):
    expect(f"train ZBVZeroBubble as graphs on two GPUs, {cause}: " in summary, f"{cause} is tried")

code, on, summary, _ = rehearse("third", 0.5)
expect(code == 0 and any("--only tests,train,bench" in text for text in on.ran), "the figures come from run.py")
code, on, summary, _ = rehearse("third", 0.5, built=False)
expect("official figures: not run, there is no " in summary, "without the build its part is not begun")

# In a bare folder, without a driver.
with tempfile.TemporaryDirectory() as folder:
    place = pathlib.Path(folder)
    environment = {**os.environ, "OUT": str(place / "out"), "WORK": str(place / "work"), "PATH": "/usr/bin:/bin", "BUDGET": "60"}
    (place / "work").mkdir()
    (place / "work/build.log").touch()  # no build here
    done = subprocess.run([sys.executable, SOURCE / "bench/gpu/first_run.py", "first"], env=environment, capture_output=True, text=True,
                          stdin=subprocess.DEVNULL, timeout=100)
    if "no torch for" in done.stderr:
        print("this Python has no torch: the end without a driver is not looked at")
    elif "machine: 0 s, ended well" in done.stdout:
        print("there is a GPU here")
    else:
        expect(done.returncode == 1 and "stopped here" in done.stdout, f"ended with {done.returncode}: {done.stdout}{done.stderr}")
        expect(sorted(p.name for p in (place / "out").iterdir()) == ["log.txt", "summary.txt"], "two files")
        print(done.stdout, end="")

sys.exit(1 if wrong else 0)
