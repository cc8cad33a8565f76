"""Hugging Face's own attention tests with regard in place of sdpa.

The attention and mask functions of the name "sdpa" are replaced by regard's, and the tests of the transformers
repository (`--tests FOLDER`, a checkout that the user has; nothing is downloaded) that compare eager with sdpa,
generate greedily, by sampling and by beams, pad on the left, train, and use a static cache run unchanged. A test that
fails is run again with PyTorch's sdpa, to distinguish failures of the machine or of the checkout. Each family runs in
its own process and is stored at once.

    python bench/huggingface_own_tests.py --tests ~/transformers
    python bench/huggingface_own_tests.py --table
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

FAMILIES = [
    "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "gemma", "gemma3", "phi", "phi3", "olmo",
    "olmo2", "starcoder2", "stablelm", "cohere", "granite", "gpt2", "gpt_neox", "opt", "helium", "glm",
    "bert", "roberta", "electra", "distilbert", "modernbert", "bart", "mbart", "marian", "pegasus", "m2m_100",
    "whisper", "t5", "vit", "deit", "clip", "siglip", "wav2vec2",
]  # fmt: skip
SELECTED = (
    "eager_matches_sdpa or greedy_generate or sample_generate or beam_search_generate or left_padding "
    "or test_training or with_static_cache or sdpa_padding_matches"
)


class Replaced:
    """A pytest plug-in: regard under the name "sdpa", and what became of each test."""

    def __init__(self, by_regard: bool):
        self.results: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self.calls = 0
        if by_regard:
            from transformers import AttentionInterface, AttentionMaskInterface

            from regard.interop.huggingface.attention import attend
            from regard.interop.huggingface.masks import mask

            def counted(*args: Any, **kwargs: Any) -> Any:
                self.calls += 1
                return attend(*args, **kwargs)

            AttentionInterface.register("sdpa", counted)
            AttentionMaskInterface.register("sdpa", mask)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.results[report.nodeid] = report.outcome
            if report.outcome == "failed":
                self.reasons[report.nodeid] = str(report.longrepr)[-400:]


QUICK = "((eager_matches_sdpa_inference and fp32) or not eager_matches_sdpa_inference) and not dict_output"


def run(tests: Path, family: str, by_regard: bool, only: list[str], selected: str) -> dict[str, Any]:
    import pytest

    os.chdir(tests)
    plugin = Replaced(by_regard)
    files = sorted(str(f) for f in (tests / "tests" / "models" / family).glob("test_modeling_*.py"))
    chosen = only or [*files, "-k", selected]
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly", "--no-header", "-x" if only else "-q"]
    pytest.main([*chosen, *options], plugins=[plugin])
    return {"results": plugin.results, "reasons": plugin.reasons, "calls": plugin.calls}


def forked(*args: Any) -> dict[str, Any]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            found = run(*args)
        except BaseException as error:
            found = {"results": {}, "reasons": {"": repr(error)}, "calls": 0}
        with os.fdopen(write, "w") as file:
            file.write(json.dumps(found))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        text = file.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else {"results": {}, "reasons": {"": "the process ended"}, "calls": 0}


def family_row(tests: Path, family: str, selected: str) -> dict[str, Any]:
    began = time.time()
    found = forked(tests, family, True, [], selected)
    counts = Counter(found["results"].values())
    failed = []
    for test in [t for t, outcome in found["results"].items() if outcome == "failed"]:
        plain = forked(tests, family, False, [test], selected)["results"].get(test, "?")
        failed.append({"test": test.split("::")[-1], "with sdpa": plain, "reason": found["reasons"][test]})
    return {
        "family": family, **{k: counts.get(k, 0) for k in ("passed", "failed", "skipped")}, "calls": found["calls"],
        "failures": failed, "error": found["reasons"].get("", ""), "seconds": round(time.time() - began, 1),
    }  # fmt: skip


def table(out: Path) -> None:
    rows = list({r["family"]: r for r in map(json.loads, out.read_text().splitlines())}.values())
    ours = [f for r in rows for f in r["failures"] if f["with sdpa"] == "passed"]
    print("# Hugging Face's own attention tests with regard in place of sdpa\n")
    print(
        f"{len(rows)} families, {sum(r['passed'] for r in rows)} tests passed, {len(ours)} failed that pass with "
        f"sdpa; {sum(r['failed'] for r in rows) - len(ours)} more fail with sdpa too. Made by "
        f"`bench/huggingface_own_tests.py`.\n"
    )
    print("| family | passed | failed by regard alone | failed by both | skipped | calls of regard |")
    print("|---|--:|--:|--:|--:|--:|")
    for r in rows:
        alone = sum(f["with sdpa"] == "passed" for f in r["failures"])
        print(
            f"| {r['family']} | {r['passed']} | {alone} | {r['failed'] - alone} | {r['skipped']} | {r['calls']} |"
        )
    for f in ours:
        print(f"\n- {f['test']}: {f['reason'][-200:]}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tests", type=Path, help="a checkout of transformers that has tests/models")
    parser.add_argument("--out", type=Path, default=Path("bench/results/huggingface_own_tests.jsonl"))
    parser.add_argument("--table", action="store_true", help="print the stored rows as a page")
    parser.add_argument(
        "--quick", action="store_true", help="float32 only where dtypes vary, and no dictionaries"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no family after this time")
    parser.add_argument("families", nargs="*", default=FAMILIES, help="these families only")
    args = parser.parse_args()
    if args.table:
        table(args.out)
        return
    out = args.out.resolve()
    sys.path.insert(0, str(args.tests))
    import regard.interop.huggingface  # noqa: F401

    done = {json.loads(line)["family"] for line in out.read_text().splitlines()} if out.exists() else set()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True
    ).stdout.strip()
    started = time.time()
    for family in args.families:
        if family in done:
            continue
        if time.time() - started > 60 * args.minutes:
            print(f"{args.minutes:g} minutes have passed; the same command continues from here")
            return
        row = family_row(
            args.tests.resolve(), family, f"({SELECTED}) and {QUICK}" if args.quick else SELECTED
        )
        row |= {"selection": "quick" if args.quick else "all", "commit": commit}
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(
            {k: v for k, v in row.items() if k != "failures"},
            [f["test"] for f in row["failures"]],
            flush=True,
        )


if __name__ == "__main__":
    main()
