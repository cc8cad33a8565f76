"""Damage to the folder of a run, one file at a time: is it reported, or does it change a result?

    python bench/files_damage.py --cases 1000 --out bench/results/files_damage.json
    python bench/files_damage.py --cases 0 --disk /mnt/small     # only the named damages and a full disk

A small translator is trained twice (two seeds). Each case copies its folder, damages one file (a flipped bit, a cut,
a block of zeros, a file exchanged with another one, a file removed) and then does what reads it: opens the run,
translates, reads the stored scores and checks, and resumes training from the newest checkpoint. A case is

    refused    a RegardError
    harmless   the same translations, scores and weights as from the undamaged folder
    changed    a result differs: a failure
    traceback  any other exception: a failure

Named damages come first: NaN weights, two weights exchanged, a rotated tokenizer, headers that are cut or name a
wrong length (with the manifest and without), files of the desktop beside checkpoints; with --disk, training in a
folder of a file system that is too small (mount -t tmpfs -o size=300k tmpfs /mnt/small).

The log may change: it is appended to for hours and only displayed; a damaged line is skipped.
"""

import argparse
import collections
import hashlib
import json
import os
import random
import shutil
import struct
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from origin import origin
from safetensors.torch import load_file, save_file

import regard as rg
from regard.errors import RegardError
from regard.training import recipes
from regard.training.data.datasets import SentencePairs
from regard.training.loop import log
from regard.training.recipes import evaluation, preflight
from regard.training.recipes.run import Run, open_run
from regard.training.recipes.translation import translate

WORDS = [("one", "uno"), ("two", "dos"), ("cat", "gato"), ("dog", "perro"), ("red", "rojo")]
TEXTS = ["one cat", "two red dog", "dog"]
STEPS = 6  # more updates when a damaged folder is trained on


def recipe(folder: Path, steps: int, seed: int) -> recipes.Recipe:
    lines = [f"{a} {c}\t{b} {d}" for a, b in WORDS for c, d in WORDS]
    for name, chosen in (("train.tsv", lines * 2), ("valid.tsv", lines[:9])):
        (folder / name).write_text("\n".join(chosen) + "\n", encoding="utf-8")
    data = SentencePairs(
        train=str(folder / "train.tsv"), valid=str(folder / "valid.tsv"), vocab=300, max_tokens=40
    )
    made = recipes.translate(None, steps=12, d_model=16, layers=1, heads=2, data=data, tokens=600, seed=seed)
    settings = replace(made.settings, steps=steps, save_every=4, log_every=3)
    return replace(made, settings=settings)


def train(home: Path, name: str, seed: int) -> Path:
    run = Run(recipe(home, 12, seed), home / name, "cpu")
    run.preflight()
    run.train()
    run.evaluate()
    return home / name


def digest(model: torch.nn.Module) -> str:
    plain = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    return hashlib.sha256(plain).hexdigest()


def opened(folder: Path) -> object:
    model, tokens, made = open_run(folder)
    scores = evaluation.stored(folder)
    checks = preflight.stored(folder)
    log.read(folder)
    return (
        digest(model), translate(model, tokens, TEXTS), made.json(),
        None if scores is None else scores.json(), None if checks is None else checks.json(),
    )  # fmt: skip


def resumed(home: Path, folder: Path, seed: int) -> object:
    run = Run(recipe(home, 12 + STEPS, seed), folder, "cpu")
    return digest(run.train())


def files_of(folder: Path) -> list[str]:
    kept = (str(p.relative_to(folder)) for p in sorted(folder.rglob("*")) if p.is_file())
    return [name for name in kept if name != "lock"]


def damage(rng: random.Random, folder: Path, other: Path, name: str) -> str:
    """Change one file of a folder; what was done."""
    path = folder / name
    content = bytearray(path.read_bytes())
    kind = rng.choices(("bit", "cut", "zeros", "exchange", "remove"), (70, 12, 6, 8, 4))[0]
    if not content:
        kind = "remove"
    if kind == "bit":
        place, bit = rng.randrange(len(content)), rng.randrange(8)
        content[place] ^= 1 << bit
        path.write_bytes(content)
        return f"bit {bit} of byte {place}"
    if kind == "cut":
        length = rng.randrange(len(content))
        path.write_bytes(content[:length])
        return f"cut to {length} of {len(content)} bytes"
    if kind == "zeros":
        place = rng.randrange(len(content))
        path.write_bytes(content[:place] + b"\0" * len(content[place : place + 64]) + content[place + 64 :])
        return f"zeros from byte {place}"
    if kind == "exchange":
        source = other / name if (other / name).is_file() and rng.random() < 0.5 else None
        source = source or folder / rng.choice([n for n in files_of(folder) if n != name])
        shutil.copyfile(source, path)
        return (
            f"replaced by {source.name} of {'the other run' if other in source.parents else 'the same run'}"
        )
    path.unlink()
    return "removed"


def named(folder: Path) -> dict[str, Callable[[], None]]:
    """Damages that a careless tool makes: what they are, and how they are done to a folder."""
    weights, tokenizer = folder / "model" / "model.safetensors", folder / "tokens.json"

    def rewritten(change: Callable[[dict[str, torch.Tensor]], None]) -> None:
        tensors = load_file(weights)
        change(tensors)
        save_file(tensors, weights)

    def poison(tensors: dict[str, torch.Tensor]) -> None:
        next(t for t in tensors.values() if t.is_floating_point())[0] = float("nan")

    def exchange(tensors: dict[str, torch.Tensor]) -> None:
        names = list(tensors)
        a, b = next((a, b) for a in names for b in names if a < b and tensors[a].shape == tensors[b].shape)
        tensors[a], tensors[b] = tensors[b], tensors[a]

    def rotate() -> None:
        read = json.loads(tokenizer.read_text("utf-8"))
        table = read["model"]["vocab"]
        words = sorted(table, key=table.get)
        read["model"]["vocab"] = dict(zip(words[1:] + words[:1], range(len(words)), strict=True))
        tokenizer.write_text(json.dumps(read), encoding="utf-8")

    def header(length: int) -> None:
        weights.write_bytes(struct.pack("<Q", length) + weights.read_bytes()[8:])

    def desktop() -> None:
        for place in (folder, folder / "checkpoints", folder / "model"):
            (place / ".DS_Store").write_bytes(b"Bud1")

    def unlisted(act: Callable[[], None]) -> None:
        act()
        (folder / "model" / "manifest.json").unlink()
        (folder / "manifest.json").unlink()

    return {
        "NaN weights, no manifest": lambda: unlisted(lambda: rewritten(poison)),
        "weights cut in the header, no manifest": lambda: unlisted(
            lambda: weights.write_bytes(weights.read_bytes()[:100]) and None
        ),
        "a header of 2⁶³ bytes, no manifest": lambda: unlisted(lambda: header(1 << 63)),
        "a header of 3 bytes, no manifest": lambda: unlisted(lambda: header(3)),
        "NaN weights": lambda: rewritten(poison),
        "two weights exchanged": lambda: rewritten(exchange),
        "a rotated tokenizer": rotate,
        "weights cut in the header": lambda: weights.write_bytes(weights.read_bytes()[:100]) and None,
        "weights of 4 bytes": lambda: weights.write_bytes(b"1234") and None,
        "a header of 2⁶³ bytes": lambda: header(1 << 63),
        "a header of 3 bytes": lambda: header(3),
        ".DS_Store beside checkpoints": desktop,
    }


def judge(act, expected: object) -> tuple[str, str]:
    try:
        got = act()
    except RegardError as e:
        return "refused", str(e)
    except Exception:  # what the figure counts
        return "traceback", traceback.format_exc()[-600:]
    return ("harmless", "") if got == expected else ("changed", repr(got)[:200])


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--cases", type=int, default=1000)
    options.add_argument("--minutes", type=float, help="stop after this time")
    options.add_argument("--seed", type=int, default=0)
    options.add_argument(
        "--disk", type=Path, help="a folder of a small file system, for training on a full disk"
    )
    options.add_argument("--out", type=Path)
    given = options.parse_args()
    torch.set_num_threads(1)
    rng, began = random.Random(given.seed), time.monotonic()
    counts: collections.Counter = collections.Counter()
    by_file: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    failures = []
    special: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        first, second = train(home, "first", 0), train(home, "second", 1)
        expected = opened(first)
        copy = home / "copy"
        shutil.copytree(first, copy)
        expected_resumed = resumed(home, copy, 0)
        names, case = files_of(first), -1
        for done in named(copy):
            shutil.rmtree(copy)
            shutil.copytree(first, copy)
            named(copy)[done]()
            result, detail = judge(lambda: opened(copy), expected)
            special[done] = f"{result}: {detail}"[:300]
        if given.disk:
            result, detail = judge(lambda: train(given.disk, "run", 0) and None, None)
            special["a full disk"] = f"{result}: {detail}"[-300:]
        print(json.dumps(special, indent=1, ensure_ascii=False), flush=True)
        for case in range(given.cases):
            if given.minutes and time.monotonic() - began > 60 * given.minutes:
                break
            name = names[case % len(names)]
            shutil.rmtree(copy)
            shutil.copytree(first, copy)
            done = damage(rng, copy, second, name)
            results = [("open", *judge(lambda: opened(copy), expected))]
            if not name.startswith(("model/", "evaluation", "report", "log")):
                results.append(("resume", *judge(lambda: resumed(home, copy, 0), expected_resumed)))
            for act, result, detail in results:
                counts[f"{act}: {result}"] += 1
                by_file[name][f"{act}: {result}"] += 1
                if result in ("changed", "traceback"):
                    failures.append(
                        {"file": name, "damage": done, "act": act, "result": result, "detail": detail}
                    )
                    print(f"{result}: {act} after {name}: {done}\n{detail}", flush=True)
    result = {
        **origin(), "cases": case + 1, "seed": given.seed, "named": special,
        "seconds": round(time.monotonic() - began, 1), **dict(sorted(counts.items())),
        "failures": failures[:40], "files": {name: dict(c) for name, c in by_file.items()}, "regard": rg.__version__,
        "threads": os.environ.get("OMP_NUM_THREADS", ""),
    }  # fmt: skip
    print(json.dumps({k: v for k, v in result.items() if k not in ("files", "failures")}, indent=1))
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
