# timeout: 120
"""The scripts of --completion, sourced by shells: bash completes commands, every flag that --help lists, files, folders, and values, which the
program then accepts. zsh and fish where they are installed; otherwise their scripts are only read.
"""
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

BIN = pathlib.Path(os.environ.get("CHEVRON_BUILD", "build")).resolve() / "bin"
wrong = []


def expect(holds, words):
    if not holds:
        wrong.append(words)


def said(*command, **more):
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, errors="replace", timeout=60, check=False, **more)


class Bash:
    """One bash for all questions: each line has the words of a command line, the last one to be completed."""

    def __init__(self, program, folder):
        script = said(BIN / program, "--completion", "bash")
        expect(script.returncode == 0 and script.stderr == "", f"{program} --completion bash: {script.returncode} {script.stderr}")
        (folder / "script").write_text(script.stdout)
        (folder / "asked").write_text("set -u\n. ./script\n" + r"""
name=$(complete -p "$1") && name=${name#* -F } && name=${name%% *}
while IFS=$'\t' read -r -a COMP_WORDS; do
  COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) COMPREPLY=()
  [ "${COMP_WORDS[COMP_CWORD]}" = "(nothing)" ] && COMP_WORDS[COMP_CWORD]=""
  "$name" "$1" || :
  printf '%s\t' "${COMPREPLY[@]+"${COMPREPLY[@]}"}"
  printf '\n'
done
""")
        self.program = program
        self.folder = folder

    def ask(self, questions):
        lines = "".join("\t".join([self.program, *q[:-1], q[-1] or "(nothing)"]) + "\n" for q in questions)
        done = said("bash", "--norc", "asked", self.program, input=lines, cwd=self.folder)
        expect(done.stderr == "", f"bash complains: {done.stderr[:500]}")
        answers = [[w for w in line.split("\t") if w] for line in done.stdout.split("\n")[:-1]]
        expect(len(answers) == len(questions), f"{len(answers)} answers to {len(questions)} questions: {done.stdout[:300]}")
        return answers

    def one(self, *words):
        return self.ask([list(words)])[0]


def flags_in_help(program, *command):
    out = []
    for line in said(BIN / program, *command, "--help").stdout.splitlines():
        if found := re.match(r"  (-[\w-]+(?:,-[\w-]+)*)", line):
            out += found[1].split(",")
    return out


def values_in_help(program, *command):
    """{flag: values} for flags whose type is a list of words."""
    out = {}
    for line in said(BIN / program, *command, "--help").stdout.splitlines():
        if found := re.match(r"  (-[\w-]+(?:,-[\w-]+)*) ([^ ]*\|[^ ]*)", line):
            words = [w for w in found[2].split("|") if not re.search("[A-Z]", w)]
            for flag in found[1].split(","):
                out[flag] = words
    return out


def plan(folder):
    program = "chevron-plan"
    bash = Bash(program, folder)
    commands = re.findall(r"^  (\w+) {2,}", said(BIN / program, "--help").stdout.partition("Subcommands:")[2], re.M)
    expect(len(commands) >= 11 and "plot" in commands, f"commands: {commands}")
    expect(sorted(bash.one("")) == sorted(commands), f"commands: {bash.one('')}")
    expect(sorted(bash.one("s")) == ["search", "show"], f"s: {bash.one('s')}")
    names = [line.split()[0] for line in said(BIN / program, "list").stdout.splitlines()[1:]]
    names = [n for n in names if n in said(BIN / program, "show", "--help").stdout]
    schedules = bash.one("show", "")
    expect({"1F1B", "ZBVZeroBubble", "Seq1F1B", "ForwardOnly", "a b.csv", "sub"} <= set(schedules), f"show: {schedules}")
    expect("notes.txt" not in schedules and "run.jsonl" not in schedules, f"show: {schedules}")
    expect(bash.one("show", "--schedule", "ZBV") == ["ZBVZeroBubble"], "show --schedule ZBV")
    expect(bash.one("show", "--schedule", "=", "ZBV") == ["ZBVZeroBubble"], "show --schedule=ZBV")
    expect(bash.one("show", "--schedule", "=") == bash.one("show", "--schedule", ""), "show --schedule=")
    expect(len(names) >= 10 and set(names) <= set(schedules), f"{names} beside {schedules}")
    expect(bash.one("show", "1F1B", "--format", "cs") == ["csv", "csv-steps"], "show --format cs")
    expect(bash.one("--completion", "") == ["bash", "zsh", "fish"], "--completion")
    expect(bash.one("show", "--ranks", "") == [], f"--ranks: {bash.one('show', '--ranks', '')}")
    expect(set(bash.one("plot", "")) == {"run.jsonl", "sub"}, f"plot: {bash.one('plot', '')}")
    expect(set(bash.one("plot", "run.jsonl", "")) == {"run.jsonl", "sub"}, "plot: a second file")
    expect({"a b.csv", "notes.txt"} <= set(bash.one("show", "-o", "")), "show -o")
    expect("--y" in bash.one("plot", "run.jsonl", "--log", "--"), "a flag after a flag without a value")
    expect("--y" in bash.one("plot", "--metrics", "run.jsonl", "--"), "a flag after a flag that takes several values")
    expect("run.jsonl" in bash.one("plot", "--log", ""), "a file after a flag without a value")
    expect("run.jsonl" in bash.one("plot", "--x", "step", ""), "a file after a flag's value")
    # All flags and all values of all commands, and nothing else.
    questions, wanted = [], []
    for command in [[], *[[c] for c in commands]]:
        questions.append([*command, "-"])
        wanted.append(flags_in_help(program, *command))
        for flag, words in values_in_help(program, *command).items():
            questions.append([*command, flag, ""])
            wanted.append(words)
    expect(len(wanted) > 50, f"only {len(wanted)} lists are compared")
    for question, listed, answer in zip(questions, wanted, bash.ask(questions)):
        found = set(answer) if question[-1] == "-" else set(answer) - set(schedules) - {"run.jsonl", "notes.txt", "sub"}
        expect(found == set(listed), f"{' '.join(question)}: {sorted(found ^ set(listed))} differ")
    # The program accepts each value: what it says of one that it does not know has these words.
    small = ["--ranks", "2", "--microbatches", "2"]
    sizes = {"model": ["--layers", "2", "--width", "64", "--tflops", "1", "--bandwidth", "1GB/s"], "plot": ["run.jsonl"], "search": [*small, "--trials", "1"],
             "fit": [*small, "--trials", "1", "--memory", "1GiB", "--activation-bytes", "1", "--static-bytes", "1"], "compare": small, "show": ["1F1B"], "check": ["1F1B"],
             "lower": ["1F1B"], "explain": ["--flight-recorder", "sub"]}
    accepted = 0
    for command in commands:
        for flag, words in values_in_help(program, command).items():
            if "equal" in words or flag == "--color" or flag == "--schedule" or flag == "schedule":  # a list of shares, or schedules, which may stand there, too
                continue
            given = sizes.get(command, [])
            if flag == "--gpu":
                given = given[:4]
            if (command, flag) == ("lower", "--channels"):
                given = [*given, "--format", "promela"]
            for word in [*words, "nonsense"]:
                if (command, flag, word) == ("plot", "--format", "pdf"):
                    continue
                done = said(BIN / program, command, *given, flag, word, cwd=folder)
                accepted += 1
                expect((f"{flag} '{word}' is not known" in done.stderr) == (word == "nonsense"), f"{command} {flag} {word}: {done.stderr[:200]}")
    expect(accepted > 100, f"only {accepted} values were given")
    unknown = said(BIN / program, "--completion", "tcsh")
    expect(unknown.returncode == 2 and "--completion tcsh is not known: choose one of bash, zsh, fish" in unknown.stderr, unknown.stderr)
    other_shells(program, folder, commands)


def other_shells(program, folder, commands):
    for shell in ("zsh", "fish"):
        script = said(BIN / program, "--completion", shell)
        expect(script.returncode == 0, f"{program} --completion {shell}: {script.stderr}")
        for word in [*commands, *(flag.lstrip("-") for flag in flags_in_help(program) if flag.startswith("--"))]:
            expect(word in script.stdout, f"{program} --completion {shell} lacks {word}")
        (folder / f"script.{shell}").write_text(script.stdout)
        if shutil.which(shell):
            checked = said(shell, "-n", folder / f"script.{shell}")
            expect(checked.returncode == 0 and checked.stderr == "", f"{shell} -n: {checked.stderr[:500]}")
    if shutil.which("fish"):
        def ask(line):
            return {w.split("\t")[0] for w in said("fish", "--no-config", "-c", f"source script.fish; complete -C '{line}'", cwd=folder).stdout.splitlines()}

        expect(set(commands) <= ask(f"{program} "), f"fish: {sorted(ask(f'{program} '))[:20]}")
        if commands:
            expect(ask(f"{program} show --format cs") == {"csv", "csv-steps"}, f"fish: {ask(f'{program} show --format cs')}")
            expect("--schedule" in ask(f"{program} show --sch"), "fish: show --sch")


def trainer(program, folder):
    bash = Bash(program, folder)
    flags = flags_in_help(program)
    expect(len(flags) > 30 and set(bash.one("-")) == set(flags), f"{program}: {sorted(set(bash.one('-')) ^ set(flags))} differ")
    expect(bash.one("--backend", "") == ["threads", "gloo", "nccl", "copies"], f"{program} --backend")
    expect(bash.one("--schedule", "1F") == ["1F1B"], f"{program} --schedule 1F: {bash.one('--schedule', '1F')}")
    expect(bash.one("--checkpoint", "") == ["sub"], f"{program} --checkpoint: {bash.one('--checkpoint', '')}")
    expect("notes.txt" in bash.one("--data", "run.jsonl", "") or program == "chevron-finetune", f"{program} --data: a second file")
    version = said(BIN / program, "--version").stdout
    expect(re.fullmatch(rf"{program} \d+\.\d+\.\d+\nLibTorch \d+\.\d+\.\d+\S*\n", version), version)
    other_shells(program, folder, [])


def main():
    with tempfile.TemporaryDirectory() as top:
        for program in ("chevron-plan", "chevron-train", "chevron-finetune"):
            folder = pathlib.Path(top, program)
            (folder / "sub").mkdir(parents=True)
            for name in ("a b.csv", "notes.txt", "run.jsonl"):
                (folder / name).write_text('{"step": 1, "loss_metrics/global_avg_loss": 2}\n')
            if program == "chevron-plan":
                plan(folder)
            elif (BIN / program).exists():
                trainer(program, folder)
    version = said(BIN / "chevron-plan", "--version").stdout
    expect(re.fullmatch(r"chevron-plan \d+\.\d+\.\d+\n", version), version)
    for words in wrong[:20]:
        print(words)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
