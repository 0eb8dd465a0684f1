# timeout: 300
"""The program of docs/guides/python.md, run as the page says."""
import os
import pathlib
import re
import subprocess
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parent))
from support.ranks import BUILD, SOURCE, check, finish  # noqa: E402

page = (SOURCE / "docs" / "guides" / "python.md").read_text()
program = re.search(r"```python file train\.py\n(.*?)```", page, re.S).group(1)
file = BUILD / "python" / "train.py"
file.write_text(program)
check("PYTHONPATH=python torchrun --nproc-per-node 2 train.py" in page, "the page's command")
ran = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(file)], capture_output=True,
                     text=True, env=dict(os.environ, PYTHONPATH=str(SOURCE / "python")))
losses = [float(loss) for loss in re.findall(r"rank [01]: loss ([0-9.]+), idle \d+ %", ran.stdout)]
check(ran.returncode == 0 and len(losses) == 2 and losses[0] == losses[1] < 0.4, f"{ran.returncode}: {ran.stdout}{ran.stderr[-3000:]}")
finish()
