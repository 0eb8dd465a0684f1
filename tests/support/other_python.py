"""A script that runs by another Python, such as one with another release of PyTorch: `--python PATH` among its arguments."""
import os
import sys


def by_asked_python():
    """Starts the script anew where its arguments have --python PATH; exit code 77, as of a skipped test, where PATH does not exist."""
    if "--python" not in sys.argv:
        return
    at = sys.argv.index("--python")
    if at + 1 == len(sys.argv):
        sys.exit("--python is without a path. Remedy: --python PATH, a Python that can import torch")
    python = sys.argv[at + 1]
    if not os.access(python, os.X_OK):
        print(f"skipped: no Python {python}. Remedy: an environment with the release of torch to be tested")
        sys.exit(77)
    os.execv(python, [python, sys.argv[0], *sys.argv[1:at], *sys.argv[at + 2:]])
