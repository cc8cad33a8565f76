"""How long does `import regard` take beyond `import torch`? The limit is one second; the best of three runs.

python bench/import_time.py
"""

import platform
import subprocess
import sys

PROGRAM = """
import time, torch, numpy, einops, safetensors, jaxtyping
start = time.perf_counter()
import regard
print(time.perf_counter() - start)
"""


def main() -> None:
    runs = [
        float(
            subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True).stdout
        )
        for _ in range(3)
    ]
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}")
    print(f"import regard after torch: minimum {min(runs):.3f} s, all " + ", ".join(f"{r:.3f}" for r in runs))
    print("under 1 s" if min(runs) < 1 else "NOT under 1 s")


if __name__ == "__main__":
    main()
