#!/usr/bin/env python3
"""Do tests/python/gpus.py and gpu_models.py notice mistakes in the GPU side of chevron_pipelining? Puts mistakes into a copy of the package and
of the headers, one at a time, and runs the part of a test that must fail. Run by hand, a quarter of an hour:

    CXX=clang++-16 .venv/bin/python tests/gpu_double/python_mutants.py --double build/tests/libchevron-gpu-double-python.so
    … stream                     those whose name contains one of these words
    … --folder build/mutants     keeps the copy, whose binding is then compiled only when a header has changed

The Python that runs it has torch; `--double` is the double of CUDA and NCCL as a library. Mistakes of C++ are compiled together, each behind a
number that the environment chooses; those of Python are changes of a file's text. The exit code is 1 where a mistake is not found; one
whose text is no longer in its file is an error, too.
"""
import argparse
import concurrent.futures
import pathlib
import re
import shutil
import sys
import tempfile

sys.path.append(str(pathlib.Path(__file__).resolve().parents[1] / "support"))
from header_mutants import ROOT, SWITCH, Mutant, package_with, put_in_all, tell, verdict_of  # noqa: E402

CONNECTION, JOB, MODULE, BINDING = (f"python/chevron_pipelining/binding/{name}" for name in ("connection.hpp", "job.hpp", "module.hpp", "binding.cpp"))
STREAMS, TRANSFERS, DRAWS, MEMORY = (f"include/chevron/{name}.hpp" for name in ("run/core/compute_streams", "transports/gpu/gpu_streams",
                                                                                 "run/stage/random_scope", "run/core/allocator_stats"))
RUNTIME, STAGE, OF_JOB, MODELS, TITAN = (f"python/chevron_pipelining/{name}.py" for name in ("runtime", "stage", "job", "transformers", "torchtitan"))

# name; file; regular expression; replacement, in C++ of the expression's first group, a statement or an expression; part of gpus.py, or
# gpu_models; why it is not found, if so
MUTANTS = [
    ("streams: a step does not wait for the caller's stream", STREAMS, r"(of\.after\(of\.stream\(0\), \*outside_\);)", "", "streams"),
    ("streams: the caller's stream does not wait for the step", STREAMS, r"(of_->after\(\*outside_, of_->stream\(0\)\);)", "", "streams"),
    ("streams: stages run on the caller's stream", STREAMS, r"(stream_\.emplace\(of\.stream\(0\)\);)", "", "streams"),
    ("streams: a message is sent before it is computed", TRANSFERS, r"(C10_CUDA_CHECK\(cudaStreamWaitEvent\(on\.get\(\), e\.get\(\), 0\)\);)", "", "streams"),
    ("streams: a stage computes before its message is there", TRANSFERS, r"(C10_CUDA_CHECK\(cudaStreamWaitEvent\(current\(\), e\.get\(\), 0\)\);)", "", "bits"),
    ("streams: a run does not wait for the stream of the last run", RUNTIME, r"            now\.wait_stream\(self\._stream\)", "            pass", "streams"),
    ("streams: the stream of a run is forgotten", RUNTIME, r"        self\._stream = now", "        pass", "streams"),
    ("streams: the stream of the current GPU instead of the stages' GPU", RUNTIME, r"current_stream\(self\._device\)", "current_stream()", "elsewhere"),
    ("draws: the GPU's generator is not seeded", DRAWS, r"(of_device\.set_current_seed\(seed\);)", "", "trainer"),
    ("draws: the GPU's generator keeps what a stage drew", DRAWS, r"(of_device\.set_state\(before\);)", "", "trainer"),
    ("draws: the generator of GPU 0", DRAWS, r"defaultGenerator\((t\.device\(\))\)", "at::Device(t.device().type(), 0)", "trainer"),
    ("draws: the process's generator keeps what a stage drew", MODULE, r"(all_\.set_engine\(before_->engine\);)", "", "trainer"),
    ("memory: figures of GPU 0", MEMORY, r"GetAllocator\(where\.type\(\)\)\),\s+(where\.index\(\))\)", "0", "trainer"),
    ("memory: peak_memory is what is reserved", BINDING, r'"peak_memory"_a = (r\.memory\.active)', "r.memory.reserved", "trainer"),
    ("memory: peak_reserved is what tensors have", BINDING, r'"peak_reserved"_a = (r\.memory\.reserved)', "r.memory.active", "trainer"),
    ("device: the trainer computes on the CPU", BINDING, r"(setup\.options\.device = with->device\(\);)", "", "keywords"),
    ("device: the job's GPU is GPU 0", JOB, r"at::Device\(at::kCUDA, (static_cast<c10::DeviceIndex>\(gpu\))\)", "c10::DeviceIndex(0)", "keywords"),
    ("device: messages are of the GPU of the local rank's number", CONNECTION, r"options\{\.device = (gpu)\}", "-1", "keywords"),
    ("device: the stages' GPU stays current after they are connected", CONNECTION, r"here\((static_cast<c10::DeviceIndex>\(mine\))\)",
     "(c10::cuda::set_device(static_cast<c10::DeviceIndex>(mine)), static_cast<c10::DeviceIndex>(mine))", "elsewhere"),
    ("device: calls keep the program's current GPU", JOB, r"OptionalDeviceGuard\((device_\.is_cuda\(\)) &&", "false", "elsewhere"),
    ("device: \"cuda\" is GPU 0", STAGE, r"torch\.cuda\.current_device\(\) if", "0 if", "trainer"),
    ("device: messages over Gloo", OF_JOB, r"gpu = device\.index if device\.type == \"cuda\" else -1", "gpu = -1", "trainer"),
    ("device: arguments stay where they are", RUNTIME, r"value\.to\(self\._device\) if isinstance\(value, torch\.Tensor\) else value", "value", "keywords"),
    ("device: weights of a folder stay on the CPU", MODELS, r"read\.train\(\)\.to\(device\)", "read.train()", "gpu_models"),
    ("device: torchtitan's stages are on the CPU", TITAN, r"stage\.num_stages, stage\.device", "stage.num_stages, 'cpu'", "gpu_models"),
    ("queues: none are requested", CONNECTION, r"if \((!chevron::detail::has_cuda_context\(\))\)", "false", "keywords"),
    ("queues: requested after the first use of a GPU", CONNECTION, r"if \((!chevron::detail::has_cuda_context\(\))\)", "true", "late_import"),
    ("refusals: a late import", CONNECTION, r"if \((std::getenv\(chevron::detail::device_queues\) == nullptr && chevron::detail::has_cuda_context\(\))\)",
     "false", "late_import"),
    ("refusals: ranks on the CPU beside ranks on GPUs", CONNECTION, r"if \((\(theirs == \"cpu\"\) != gpu\.empty\(\))\)", "false", "mixed"),
    ("refusals: two ranks on one GPU", CONNECTION, r"if \((!gpu\.empty\(\) && all\[r\]\.substr\(end \+ 1\) == gpu)\)", "false", "shared"),
    ("refusals: GPUs of two machines count as one", CONNECTION, r"to_string\(mine\), (machine \+ \" \" \+ address)\)", "address", "shared_by_name"),
    ("refusals: two GPUs of a machine count as one", CONNECTION, r"to_string\(mine\), (machine \+ \" \" \+ address)\)", "machine", "keywords"),
    ("refusals: another accelerator", STAGE, r"if device\.type != \"cuda\":", "if False:", "refusals"),
    ("refusals: a binding without NCCL", STAGE, r"if binding\.no_nccl:", "if False:", "refusals"),
    ("refusals: a GPU that torch does not see", STAGE, r"if count == 0 or \(device\.index or 0\) >= count:", "if False:", "refusals"),
    ("refusals: parameters elsewhere", STAGE, r"if tensor\.device != self\.device:", "if False:", "refusals"),
    ("refusals: buffers elsewhere", STAGE, r", \(\"buffer\", self\.submod\.named_buffers\(\)\)\)", ",)", "refusals"),
    ("refusals: stages of a process on two GPUs", RUNTIME, r"if stage\.device != self\._device:", "if False:", "refusals"),
    ("refusals: pipelines of a process on two GPUs", OF_JOB, r" and other != device\)", " and False)", "refusals"),
]


def is_cpp(file):
    return file.endswith((".hpp", ".cpp"))


def run_part(part, place, shared, double, number, longest):
    """Runs a part of gpus.py, all with part "", or gpu_models.py, with the package of a folder, and the binding of the folder `shared`.
    Returns why it fails, in one line; else empty"""
    script = "gpu_models" if part == "gpu_models" else "gpus"
    command = [sys.executable, str(ROOT / f"tests/python/{script}.py"), *([part] if script == "gpus" and part else [])]
    verdict, _ = verdict_of(command, told, number, longest, PYTHONPATH="", CHEVRON_SOURCE=str(place), CHEVRON_BUILD=str(place),
                            CHEVRON_PIPELINING_CACHE=f"{shared}/cache", CHEVRON_GPU_DOUBLE=str(double),
                            CHEVRON_PIPELINING_CXXFLAGS=f"-O0 -include {shared}/switch.hpp")
    return verdict


def told(output):
    """The first failure that a script tells."""
    found = re.findall(r"^(?:FAILED: (?!rank \d ended).*|\S*Error: .*|rule broken: .*)", output, re.M)
    return found[0][:150] if found else ""


def tried(mutant, number, shared, double):
    """Runs the mutant's part. Returns what `run_part` returns"""
    if is_cpp(mutant.header):
        return run_part(*mutant.arguments, shared, shared, double, number, 300)
    with tempfile.TemporaryDirectory() as folder:
        place = pathlib.Path(folder)
        package_with(mutant, shared, place)
        return run_part(*mutant.arguments, place, shared, double, number, 300)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="only mutants whose name contains one of these")
    parser.add_argument("--double", type=pathlib.Path, required=True, help="the double as a library (libchevron-gpu-double-python.so)")
    parser.add_argument("--folder", type=pathlib.Path, help="keeps the copy of package and headers (default: a temporary folder)")
    parser.add_argument("--jobs", type=int, default=2, help="mutants that run at the same time (default: 2)")
    how = parser.parse_args()
    all_of = [Mutant(name, file, text, instead, "", [part], *unseen) for name, file, text, instead, part, *unseen in MUTANTS]
    compiled = [mutant for mutant in all_of if is_cpp(mutant.header)]
    wanted = [mutant for mutant in all_of if not how.names or any(name in mutant.name for name in how.names)]
    double, found = how.double.resolve(), 0
    with tempfile.TemporaryDirectory() as temporary:
        shared = (how.folder or pathlib.Path(temporary)).resolve()
        for name in ("python", "include"):
            shutil.rmtree(shared / name, ignore_errors=True)
            shutil.copytree(ROOT / name, shared / name, ignore=shutil.ignore_patterns("__pycache__"))
        (shared / "cache").mkdir(exist_ok=True)
        (shared / "switch.hpp").write_text(SWITCH)
        errors = [f"{mutant.name}: {mutant.header} has not this text once" for mutant in all_of
                  if len(re.findall(mutant.text, (ROOT / mutant.header).read_text(), re.DOTALL)) != 1]
        errors += put_in_all(compiled, shared)
        parts = sorted({mutant.arguments[0] for mutant in wanted})
        whole = lambda part: run_part(part, shared, shared, double, -1, 900)  # noqa: E731
        with concurrent.futures.ThreadPoolExecutor(how.jobs) as pool:
            # The first run compiles. All parts that mutants are to break pass without a mistake.
            verdicts = [whole(parts[0]), *pool.map(whole, parts[1:])]
        errors += [f"{part} fails without a mistake: {verdict}" for part, verdict in zip(parts, verdicts) if verdict]
        print("\n".join(errors), end="\n" if errors else "", flush=True)
        with concurrent.futures.ThreadPoolExecutor(how.jobs) as pool:
            running = {mutant.name: pool.submit(tried, mutant, compiled.index(mutant) if mutant in compiled else -1, shared, double)
                       for mutant in wanted}
            for mutant in wanted:
                verdict = running[mutant.name].result()
                found += verdict != ""
                if tell(mutant, verdict):
                    errors.append(mutant.name)
    print(f"\n{found} of {len(wanted)} found")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
