"""Where a stored result comes from: date, commit, versions and processor, for the scripts of this folder."""

import datetime
import os
import platform
import subprocess
from pathlib import Path


def origin() -> dict[str, str | int | None]:
    """COMMIT in the environment names the commit on a machine to which the files came without their history."""
    import torch

    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True
    )
    commit = found.stdout.strip() if found.returncode == 0 else os.environ.get("COMMIT")
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return {
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M} UTC",
        "commit": commit,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }
