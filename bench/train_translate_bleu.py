"""BLEU after a fixed training time: ours against Marian of the same size, tokenizer and rows.

    python bench/train_translate_bleu.py --minutes 6                      # one run after another, 50 minutes
    python bench/train_translate_bleu.py --minutes 6 --parallel 8         # 16 cores: two for each run
    python bench/train_translate_bleu.py --one ours --minutes 1           # a single run

A run that is already in the folder is not repeated.

Both: 3 + 3 layers of 256 and as many parameters, no dropout (no row comes twice), label smoothing 0.1, clipping at
1, AdamW, two threads, greedy decoding, and sacreBLEU on the test rows. Ours is the recipe as it is. Marian
(transformers) gets `group_by_length`, batches of as many padded tokens as ours, a warm-up over a tenth of the
budget, then a cosine to 0, and the best of three learning rates (seed 0, by the test BLEU, which favors it).
Only training time is counted. The interval is over resampled test rows, of the mean over seeds.
"""

import argparse
import datetime
import json
import math
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue

import torch

RESULTS = Path(__file__).parent / "results"
RATES = (5e-4, 1e-3, 2e-3)


def ours(minutes: float, seed: int, dials: dict, folder: Path) -> dict:
    from regard.training import recipes
    from regard.training.recipes.run import Run
    from regard.training.recipes.translation import translate

    run = Run(recipes.translate(minutes, seed=seed, **dials), folder / f"ours-{seed}", "cpu")
    model = run.train()
    texts = run.data.texts
    began = time.perf_counter()
    said = translate(model, run.data.tokens, [source for source, _ in texts])
    return {
        "said": said,
        "references": [target for _, target in texts],
        "updates": run.trainer.step,
        "predicted": run.trainer.seen,
        "loss": run.trainer.best,
        "decoding_seconds": time.perf_counter() - began,
    }


def marian(minutes: float, seed: int, rate: float, dials: dict, folder: Path) -> dict:
    import train_translate as speed

    from regard.training import recipes
    from regard.training.data.batches import by_tokens

    recipe = recipes.translate(minutes, seed=seed, **dials)
    ready = recipe.data.load(folder / f"marian-{seed}-{rate}")
    plan = by_tokens(ready.train.sizes, recipe.settings.tokens)
    lengths = ready.train.source.lengths.tolist()
    order, size = speed.sized(
        ready.train, lambda size: speed.grouped(lengths, size, seed), plan.padded / len(plan)
    )
    torch.manual_seed(seed)
    side = speed.Peer(speed.Marian(recipe.data.vocab, dropout=0.0), ready.train, order, size, rate)
    began, budget = time.perf_counter(), 60 * minutes
    predicted = 0
    while (done := (time.perf_counter() - began) / budget) < 1:
        warm = min(done / 0.1, 1.0)
        for group in side.optimizer.param_groups:
            group["lr"] = (
                rate * max(warm, 1e-3)
                if warm < 1
                else rate * 0.5 * (1 + math.cos(math.pi * (done - 0.1) / 0.9))
            )
        predicted += side.step()
    said = _marian_says(side.model.inner.eval(), ready)
    return {
        "said": said,
        "references": [target for _, target in ready.texts],
        "updates": side.index,
        "seen": predicted,
        "rows_a_batch": size,
    }


@torch.no_grad()
def _marian_says(model, ready) -> list[str]:
    from regard.training.data.tokens import END

    rows = ready.test.source
    order = rows.lengths.argsort(descending=True).tolist()
    said = [""] * len(order)
    for i in range(0, len(order), 64):
        part = order[i : i + 64]
        source, lengths = rows.pad(torch.tensor(part), 0)
        most = 2 * int(lengths.max()) + 10
        out = model.generate(
            input_ids=source,
            attention_mask=(source != 0).long(),
            num_beams=1,
            do_sample=False,
            max_new_tokens=most,
            use_cache=True,
        )
        for j, ids in zip(part, out.tolist(), strict=True):
            ids = ids[1:]
            said[j] = ready.tokens.decode([ids[: ids.index(END)] if END in ids else ids])[0]
    return said


def bleu(one: dict) -> float:
    from sacrebleu.metrics import BLEU

    return BLEU().corpus_score(one["said"], [one["references"]]).score


def interval(a: list[dict], b: list[dict], times: int = 1000) -> tuple[float, float]:
    """The 95 % interval of the difference of mean BLEU over resampled test rows, the same rows for all."""
    from sacrebleu.metrics import BLEU

    metric = BLEU()
    stats = [
        [
            torch.tensor(metric._extract_corpus_statistics(o["said"], [o["references"]]), dtype=torch.float64)
            for o in side
        ]
        for side in (a, b)
    ]
    noise = torch.Generator().manual_seed(0)
    n = len(stats[0][0])
    found = []
    for _ in range(times):
        rows = torch.randint(n, (n,), generator=noise)
        means = []
        for side in stats:
            scores = [metric._compute_score_from_stats(s[rows].sum(0).long().tolist()).score for s in side]
            means.append(sum(scores) / len(scores))
        found.append(means[0] - means[1])
    found.sort()
    return found[int(0.025 * times)], found[int(0.975 * times)]


def single(given) -> None:
    torch.set_num_threads(2)
    dials = json.loads(given.dials)
    if given.one == "ours":
        result = ours(given.minutes, given.seed, dials, given.folder)
    else:
        result = marian(given.minutes, given.seed, given.rate, dials, given.folder)
    result |= {
        "side": given.one,
        "seed": given.seed,
        "rate": given.rate,
        "dials": dials,
        "bleu": bleu(result),
    }
    result["torch"] = torch.__version__
    if given.out:
        given.out.write_text(json.dumps(result), encoding="utf-8")
    for i in range(3):
        print(f"{result['said'][i]}\n    {result['references'][i]}")
    print({k: v for k, v in result.items() if k not in ("said", "references")})


def many(given, jobs: list[tuple[str, int, float]]) -> list[dict]:
    """Each job in a process of its own, on two cores of its own."""
    cores: Queue[int] = Queue()
    for i in range(given.parallel):
        cores.put(i)

    def do(job: tuple[str, int, float]) -> dict:
        side, seed, rate = job
        out = given.folder / f"{side}-{seed}-{rate}-{given.minutes:g}.json"
        if out.is_file():
            return json.loads(out.read_text(encoding="utf-8"))
        at = cores.get()
        command = [
            sys.executable,
            __file__,
            "--one",
            side,
            "--seed",
            str(seed),
            "--rate",
            str(rate),
            "--out",
            str(out),
        ]
        command += ["--minutes", str(given.minutes), "--folder", str(given.folder), "--dials", given.dials]
        pinned = ["taskset", "-c", f"{2 * at},{2 * at + 1}"] if given.parallel > 1 else []
        env = {**os.environ, "OMP_NUM_THREADS": "2", "TOKENIZERS_PARALLELISM": "false"}
        done = subprocess.run([*pinned, *command], capture_output=True, text=True, env=env)
        cores.put(at)
        if done.returncode:
            raise RuntimeError(f"{side} {seed} {rate}: {done.stderr[-2000:]}")
        result = json.loads(out.read_text(encoding="utf-8"))
        print(
            f"{side:7} seed {seed} rate {rate:g}: BLEU {result['bleu']:.2f}, {result['updates']} updates",
            flush=True,
        )
        return result

    with ThreadPoolExecutor(given.parallel) as pool:
        return list(pool.map(do, jobs))


def main() -> None:
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asked.add_argument("--minutes", type=float, default=6.0)
    asked.add_argument("--seeds", type=int, default=3)
    asked.add_argument(
        "--rival-seeds", type=int, help="of Marian at its best rate; as many as ours by default"
    )
    asked.add_argument("--parallel", type=int, default=1)
    asked.add_argument("--rates", type=float, nargs="+", default=RATES)
    asked.add_argument("--folder", type=Path, default=Path("runs/bench-bleu"))
    asked.add_argument("--results", type=Path, default=RESULTS)
    asked.add_argument("--one", choices=("ours", "marian"))
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--rate", type=float, default=1e-3)
    asked.add_argument(
        "--dials", default="{}", help="of the recipe, as JSON; batches and tokens are Marian's too"
    )
    asked.add_argument("--out", type=Path)
    asked.add_argument("--machine", help="where the runs in the folder were made, if not here")
    given = asked.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    if given.one:
        single(given)
        return
    first = [("ours", seed, 0.0) for seed in range(given.seeds)] + [
        ("marian", 0, rate) for rate in given.rates
    ]
    result = many(given, first)
    mine, theirs = result[: given.seeds], result[given.seeds :]
    best = max(theirs, key=lambda one: one["bleu"])
    others = many(
        given, [("marian", seed, best["rate"]) for seed in range(1, given.rival_seeds or given.seeds)]
    )
    rivals = [best, *others]
    low, high = interval(mine, rivals)
    scores = {"ours": [one["bleu"] for one in mine], "marian": [one["bleu"] for one in rivals]}
    means = {name: sum(found) / len(found) for name, found in scores.items()}
    ahead = means["ours"] - means["marian"]
    print(f"ours {scores['ours']}\nMarian at {best['rate']:g} {scores['marian']}")
    print(f"ours is {ahead:+.2f} BLEU, 95 % of resamplings {low:+.2f} to {high:+.2f}")
    kept = {
        "date": str(datetime.date.today()),
        "machine": given.machine
        or f"{platform.processor() or platform.machine()}, two threads each, {given.parallel} at once",
        "torch": sorted({one["torch"] for one in [*mine, *theirs, *others]}),
        "minutes": given.minutes,
        "bleu": scores,
        "marian_by_rate": {one["rate"]: one["bleu"] for one in theirs},
        "ahead": ahead,
        "interval": [low, high],
        "updates": {"ours": [one["updates"] for one in mine], "marian": [one["updates"] for one in rivals]},
        "examples": [
            {"reference": r, "ours": a, "marian": b}
            for r, a, b in list(zip(mine[0]["references"], mine[0]["said"], best["said"], strict=True))[:10]
        ],
    }
    given.results.mkdir(exist_ok=True, parents=True)
    path = given.results / f"train_translate_bleu-{datetime.date.today()}.json"
    path.write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
