"""A process that compiles kernels: reads `module<TAB>parameter…` lines, answers each with a line when its machine code is on disk."""

import sys

from .store import find

for line in sys.stdin:
    find(*line.rstrip("\n").split("\t"))
    print("done", flush=True)
