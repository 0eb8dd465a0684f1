# timeout: 180
"""Every block of docs/tutorial.md compiles; or, where words stand under it, does not, and those words are what the compiler says."""
import os
import re
import subprocess
import sys
import tempfile

source = os.environ.get("CHEVRON_SOURCE", ".")
compiler, folders = sys.argv[1], sys.argv[2].split(":")
with open(os.path.join(source, "docs", "tutorial.md")) as page:
    blocks = re.findall(r"^```(cpp|says)( prelude)?\n(.*?)^```$", page.read(), re.M | re.S)
command = [compiler, "-std=c++20", "-fsyntax-only", "-Wall", "-Wextra", "-Wno-unused-variable", "-Wno-unused-const-variable",
           *(f"-I{folder}" for folder in folders), "-x", "c++", "-"]
prelude, failed, tried, refused = "", 0, 0, 0
for index, (sort, is_prelude, text) in enumerate(blocks):
    if is_prelude:
        prelude = text
    if sort == "says" or is_prelude:
        continue
    wanted = blocks[index + 1][2].strip().splitlines() if index + 1 < len(blocks) and blocks[index + 1][0] == "says" else []
    done = subprocess.run(command, input=prelude + text, capture_output=True, text=True, timeout=120)
    said = " ".join(done.stderr.split())
    missing = [line for line in wanted if line not in said]
    tried += 1
    refused += 1 if wanted else 0
    if (done.returncode != 0) == bool(wanted) and not missing:
        continue
    failed += 1
    print(f"FAILED: block {tried}\n{text}")
    print("not said: " + missing[0] if missing else "it compiles, but must not" if wanted else "it must compile; the compiler says:")
    print("\n".join(line[:300] for line in done.stderr.splitlines() if "error" in line or "invalid_schedule" in line)[:3000])
print(f"{tried} blocks, {refused} of them refused in the words that the page shows, {failed} failed")
sys.exit(1 if failed or not refused else 0)
