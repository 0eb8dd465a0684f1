"""The mutants' texts are in the code: each list of mistakes (tests/*/*mutants.py, run by hand) names its text once, in one file of the
headers or of the package of Python. A change that leaves a mistake without its text is found here, not when the list is run again.

    python3 tests/mutants.py
    python3 tests/mutants.py --build build run torture      the mistakes of these lists compile, all in one copy of the headers, as the
                                                            program of the last list is compiled
"""
import importlib.util
import pathlib
import re
import sys

TESTS = pathlib.Path(__file__).resolve().parent
sys.path.append(str(TESTS / "support"))
from header_mutants import check_syntax
INCLUDE = TESTS.parent / "include"
HEADERS = INCLUDE / "chevron"
# Of a row of each list: the files that may have the text, and the text.
PLACES = {
    "accelerator": lambda name, files, text, *_: ([HEADERS / file for file in files], text),
    "differential": lambda name, file, text, *_: ([INCLUDE / file], text),
    "gpu_double": lambda name, file, text, *_: ([HEADERS / file], text),
    "gpu_double/python_mutants": lambda name, file, text, *_: ([TESTS.parent / file], text),
    "python/support/mutants": lambda name, file, text, *_: ([TESTS.parent / file], text),
    "run/shard_mutants": lambda name, file, text, *_: ([HEADERS / file], text),
    "run": lambda name, file, text, *_: ([HEADERS / file], text),
    "torture": lambda name, kind, file, text, *_: ([HEADERS / file], text),
}


def file_of(program):
    return TESTS / f"{program}.py" if "/" in program else TESTS / program / "mutants.py"


def list_of(program):
    spec = importlib.util.spec_from_file_location(f"mutants_of_{program}", file_of(program))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if sys.argv[1:2] == ["--build"]:
    lists = [list_of(program) for program in sys.argv[3:]]
    sys.exit(check_syntax(lists[-1].PROGRAM, [mutant for each in lists for mutant in each.ALL], pathlib.Path(sys.argv[2])))

count, wrong = 0, []
for program, place in PLACES.items():
    for row in list_of(program).MUTANTS:
        files, text = place(*row)
        found = sum(len(re.findall(text, file.read_text(), re.DOTALL)) for file in files)
        count += 1
        if found != 1:
            wrong.append(f"{file_of(program).relative_to(TESTS.parent)}: \"{row[0]}\": its file has its text {found} times. Remedy: the text as it is now")
print("\n".join(wrong), end="\n" if wrong else "")
print(f"{count} mutants, {len(wrong)} without their text")
sys.exit(1 if wrong or count < 100 else 0)
