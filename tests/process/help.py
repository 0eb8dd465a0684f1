# timeout: 120
"""`--help` of every program and command: no marks of the parser beside a flag; one default at most for each flag, which is the value that
the flag has without being given: with all of them typed a program does the same. On a terminal no line is longer than it is wide."""
import fcntl
import json
import os
import pathlib
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
import threading

BIN = pathlib.Path(os.environ.get("CHEVRON_BUILD", "build")).resolve() / "bin"
wrong = []


def expect(holds, words):
    if not holds:
        wrong.append(words)


def said(program, *words, cwd=None):
    return subprocess.run([BIN / program, *map(str, words)], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL, cwd=cwd, check=False)


def flags_of(program, *command):
    """(first flag, name of its value, description) for each flag of a help text."""
    text = said(program, *command, "--help").stdout
    expect(re.search(r"^[A-Z][\w ]+:$", text, re.M), f"{program} {' '.join(command)}: no headings:\n{text}")
    found = re.findall(r"^  (-[\w,-]+)(?: (\S+(?: \.\.\.)?))?(?:\n)? {2,}(\S.*)$", text, re.M)
    expect(len(found) >= 2, f"{program} {' '.join(command)}: no flags in\n{text}")
    return [(names.split(",")[-1], value, words) for names, value, words in found]


def default_of(words):
    stated = re.findall(r"; without this flag, ([^\s;]+)$", words)
    return stated[0] if stated else None


def check_words(program, command, flags):
    expect("--help" in {flag for flag, _, _ in flags}, f"{program} {' '.join(command)}: --help does not say what it does")
    for flag, value, words in flags:
        place = f"{program} {' '.join(command)} {flag}"
        expect(not re.search(r"REQUIRED|Needs:|Excludes:|:FLOAT|TEXT|UINT|\[UNIT\]|\{", value + words), f"{place}: a word of the parser in {value} {words}")
        expect("=" not in value or value in ("A-B=TIME[:RATE]", "RANK=FACTOR"), f"{place}: a default beside the flag: {value}")
        expect(len(re.findall("ithout this flag", words)) <= 1, f"{place}: two defaults: {words}")
        expect(not words.startswith("Print") and not words.startswith("Display"), f"{place}: the parser's own words: {words}")


PLAN = {
    "show": ["1F1B", "--format", "json"], "check": ["1F1B"], "lower": ["1F1B"], "compare": ["--format", "json", "--jitter", "5%"],
    "search": ["--trials", "1", "--jitter", "5%", "--format", "json"],
    "fit": ["--trials", "1", "--format", "json", "--memory", "1GiB", "--activation-bytes", "1", "--static-bytes", "1"],
    "model": ["--layers", "2", "--width", "256", "--gpu", "h100", "--format", "json"],
    "cluster": ["profile.json", "--memory", "80GiB", "--batch-tokens", "64k", "--link-inside", "1GB/s", "--format", "json"], "plot": ["run.jsonl"],
}


def plan(folder):
    check_words("chevron-plan", [], flags_of("chevron-plan"))
    commands = re.findall(r"^  (\w+) {2,}", said("chevron-plan", "--help").stdout.partition("Subcommands:")[2], re.M)
    expect(set(PLAN) <= set(commands), f"commands: {commands}")
    (folder / "run.jsonl").write_text("".join(f'{{"step": {s}, "loss_metrics/global_avg_loss": {9 - s}}}\n' for s in range(1, 5)))
    expect(said("chevron-plan", "model", "--layers", 4, "--width", 256, "--gpu", "h100", "-o", "profile.json", cwd=folder).returncode == 0, "no profile")
    check_widths("chevron-plan", "--help-all")
    expect(max(map(len, said("chevron-plan", "--help-all").stdout.split("\n"))) > 130, "chevron-plan --help-all: lines in a pipe are cut")
    typed = 0
    for command in commands:
        check_widths("chevron-plan", command, "--help")
        flags = flags_of("chevron-plan", command)
        check_words("chevron-plan", [command], flags)
        if command not in PLAN:
            continue
        without = said("chevron-plan", command, *PLAN[command], cwd=folder)
        expect(without.returncode == 0 and len(without.stdout) > 20, f"chevron-plan {command}: {without.stderr}")
        for flag, _, words in flags:
            default = default_of(words)
            if default is None or flag in PLAN[command]:
                continue
            given = said("chevron-plan", command, *PLAN[command], flag, default, cwd=folder)
            typed += 1
            expect(given.stdout == without.stdout, f"chevron-plan {command} {flag} {default} is not what it is without the flag: {given.stderr}{given.stdout[:300]}")
    expect(typed >= 40, f"only {typed} defaults were given")


def on_terminal(columns, program, *words):
    """What a program prints on a terminal of so many columns. The test writes a mark after the program's end, and keeps the
    terminal open until the mark has been read: on a busy machine the last line may be lost when the last writer closes a terminal."""
    ours, its = pty.openpty()
    fcntl.ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    with subprocess.Popen([BIN / program, *words], stdin=subprocess.DEVNULL, stdout=its, stderr=its) as running:
        marking = threading.Thread(target=lambda: (running.wait(), os.write(its, b"\0")))
        marking.start()
        printed = b""
        while not printed.endswith(b"\0"):
            printed += os.read(ours, 1 << 16)
        marking.join()
    os.close(its)
    os.close(ours)
    return printed[:-1].decode().replace("\r\n", "\n")


def check_widths(program, *command):
    """Lines of a help text are no longer than a terminal is wide, but for one word; their words are those that a pipe gets, whose lines are
    not cut; and what continues a description is below its beginning."""
    whole = said(program, *command).stdout
    for columns in (60, 80, 100, 133, 400):
        place = f"{program} {' '.join(command)} on {columns} columns"
        text = on_terminal(columns, program, *command)
        expect(text.split() == whole.split(), f"{place}: other words than in a pipe:\n{text[:2000]}")
        for line in text.split("\n"):
            expect(len(line) <= columns or len(line.split()) <= 2, f"{place}: {len(line)} columns: {line}")
        described = {found.start(1) for line in text.split("\n") if (found := re.match(r" {2,4}\S.*?  +(\S)", line))}
        begins = {len(line) - len(line.lstrip()) for line in text.split("\n") if line.strip()}
        expect(begins <= {0, 2, 4} | described, f"{place}: lines begin at {begins}, descriptions at {described}")
        expect(len(described) <= 2, f"{place}: descriptions begin at {described}")
    narrow = on_terminal(20, program, *command)
    expect(narrow == whole, f"{program} {command}: a terminal that is narrower than the columns of flags has lines cut")


def trainer(program, folder):
    """--print-groups ends before a tensor is read, and says the sizes."""
    (folder / "config.json").write_text(json.dumps(dict(model_type="llama", hidden_size=32, intermediate_size=64, num_hidden_layers=2,
                                                        num_attention_heads=2, vocab_size=64)))
    check_widths(program, "--help")
    flags = flags_of(program)
    check_words(program, [], flags)
    needed = {flag: folder if flag == "--model" else "x" for flag, _, words in flags
              if words.endswith(("; must be given", "; may be left out with --dry-run alone"))}
    expect(set(needed) == ({"--model", "--data", "--out"} if program == "chevron-finetune" else set()), f"{program}: {needed} must be given")
    defaults = {flag: default for flag, _, words in flags if (default := default_of(words)) is not None}
    expect(len(defaults) >= 15 and defaults.get("--ranks") == "2", f"{program}: {defaults}")
    # With other flags only:
    alone = {"--nproc", "--save-every", "--keep-checkpoints", "--memory-limit", "--validate-every", "--validation-batches"}
    words = [word for pair in [*needed.items(), *((f, d) for f, d in defaults.items() if f not in alone)] for word in pair]
    given = said(program, *words, "--print-groups")
    without = said(program, *(word for pair in needed.items() for word in pair), "--print-groups")
    expect(given.returncode == 0 and given.stdout == without.stdout and "global rank" in given.stdout, f"{program} {words}: {given.stderr}")
    for flag in needed:
        left = [word for pair in needed.items() if pair[0] != flag for word in pair]
        expect(f"{flag} is required" in said(program, *left).stderr, f"{program} without {flag}")


def main():
    with tempfile.TemporaryDirectory() as folder:
        plan(pathlib.Path(folder))
        for program in ("chevron-train", "chevron-finetune"):
            if (BIN / program).exists():
                trainer(program, pathlib.Path(folder))
    for words in wrong[:20]:
        print(words)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
