"""PyTorch's own tests of scaled_dot_product_attention, with rg.attention in its place.

    python bench/sdpa_own_tests.py PATH [--select cpu] [--out sdpa_own_tests.json]

PATH is a copy of PyTorch's test/test_transformers.py, which is not part of its packages. The tests run with a
function of SDPA's signature that calls rg.attention. Where a test allows nothing but PyTorch's math backend, as these
tests do for the result that they compare with, SDPA itself runs. Tests that fail run again as they are: listed are
those that pass then.

As a pytest plugin (-p sdpa_own_tests) this file replaces the function.
"""

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

REPLACED, RESULTS = "REGARD_REPLACES_SDPA", "REGARD_SDPA_RESULTS"
found = {}
calls = Counter()


def pytest_configure(config):
    if os.environ.get(REPLACED):
        replace_sdpa()


def replace_sdpa():
    import torch
    import torch.nn.functional as F
    from torch.nn.attention.bias import CausalBias

    import regard as rg

    sdpa, enabled = F.scaled_dot_product_attention, torch.backends.cuda

    def attention(
        query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False
    ):
        if not torch.compiler.is_compiling():  # which cannot trace these
            if not (enabled.flash_sdp_enabled() or enabled.mem_efficient_sdp_enabled()):
                options = {"scale": scale, "enable_gqa": enable_gqa}
                return sdpa(query, key, value, attn_mask, dropout_p, is_causal, **options)
            calls["regard"] += 1
        if is_causal and attn_mask is not None:
            raise RuntimeError("Explicit attn_mask should not be set when is_causal=True")
        pattern, bias = (rg.causal() if is_causal else None), attn_mask
        if attn_mask is not None and (attn_mask.dtype == torch.bool or isinstance(attn_mask, CausalBias)):
            pattern, bias = attn_mask, None
        return rg.attention(
            query,
            key,
            value,
            pattern,
            bias=bias,
            scale=scale,
            dropout_p=dropout_p,
            at=0 if is_causal else None,
        )

    F.scaled_dot_product_attention = attention


def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        error = report.longreprtext.strip().rsplit("\n", 1)[-1] if report.failed else ""
        found[report.nodeid.split("::", 1)[-1]] = [report.outcome, calls.pop("regard", 0), error]


def pytest_sessionfinish():
    if path := os.environ.get(RESULTS):
        Path(path).write_text(json.dumps(found), encoding="utf-8")


def outcomes(path, selected, replaced, folder):
    result, log, root = Path(folder, "results.json"), Path(folder, "log"), Path(__file__).parents[1]
    result.unlink(missing_ok=True)
    paths = root / "src", root / "bench", os.environ.get("PYTHONPATH", "")
    env = {**os.environ, RESULTS: str(result), "PYTHONPATH": os.pathsep.join(map(str, paths))}
    env[REPLACED] = "1" if replaced else ""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "sdpa_own_tests", "-p", "no:cacheprovider"]
    command += ["--rootdir", str(path.parent), "-W", "default", *selected]
    with log.open("w", encoding="utf-8") as file:
        subprocess.run(command, cwd=path.parent, env=env, stdout=file, stderr=subprocess.STDOUT, check=False)
    if not result.exists():
        raise SystemExit(f"pytest did not finish:\n{log.read_text(encoding='utf-8')[-2000:]}")
    return json.loads(result.read_text(encoding="utf-8"))


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="a copy of PyTorch's test_transformers.py")
    parser.add_argument("--select", default="CPU", help="which tests, as pytest's -k takes it")
    parser.add_argument("--out", help="a file for the results")
    options = parser.parse_args()
    path = options.path.resolve()
    with TemporaryDirectory() as folder:
        here = outcomes(path, ["-k", options.select, str(path)], True, folder)
        failed = [name for name, (outcome, *_) in here.items() if outcome == "failed"]
        there = outcomes(path, [f"{path}::{name}" for name in failed], False, folder) if failed else {}
    counts = Counter(outcome for outcome, *_ in here.values())
    called = sum(outcome == "passed" and count > 0 for outcome, count, _ in here.values())
    folder = f"{Path(__file__).parents[1]}{os.sep}"  # results name files by their place in the repository
    failed_here = {name: here[name][2].replace(folder, "") for name in failed if there[name][0] == "passed"}
    print(f"{dict(counts)}; {called} of the tests that passed called regard", flush=True)
    print(f"{len(failed)} failed, and {len(failed_here)} of these pass with SDPA itself:")
    for name, error in failed_here.items():
        print(f"  {name}: {error[:200]}")
    if options.out:
        from torch import __version__

        results = {"torch": __version__, **counts, "passed and called regard": called}
        results["fail here and pass with SDPA"] = failed_here
        Path(options.out).write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
