"""How much longer `import cmha` takes than `import numpy`, which it needs: the median of seven runs each."""

import statistics
import subprocess
import sys


def seconds(module):
    code = f"import time; start = time.perf_counter(); import {module}; print(time.perf_counter() - start)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(7)]
    return statistics.median(float(run.stdout) for run in runs)


numpy, cmha = seconds("numpy"), seconds("cmha")
print(f"import numpy {numpy:.3f} s, import cmha {cmha:.3f} s: {(cmha - numpy) * 1e3:.0f} ms on top of numpy")
