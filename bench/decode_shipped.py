"""Decoding with the translator of regard on a CPU: regard against CTranslate2, greedy and with a beam of 4.

    PYTHONPATH=src python bench/decode_shipped.py [--write]
    PYTHONPATH=src python bench/decode_shipped.py --threads 1 --processor-time     # on a busy machine

64 test sentences, token ids in and out, the same weights (those of the shipped model, in float32; CTranslate2 also in
its int8), the same number of threads. Each side runs in its own processes, in turns, since two OpenMP runtimes in one
process disturb each other; those of CTranslate2 do not import torch. A side's time is the median of all its
rounds; ratio = their time / ours. Greedy translations must be equal token by token; with a beam the number of equal
ones is given, since the searches may end differently.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from statistics import median

SIDES = ("regard", "ctranslate2 float32", "ctranslate2 int8")
WIDTHS = (1, 4)
LENGTH_PENALTY = 0.6
DISTURBED = 0.04  # of a round's time, used by other processes on all cores together


def sentences(count: int, seed: int) -> list[list[int]]:
    import torch

    from regard.training.data import corpora, text
    from regard.training.translator import open_translator

    pairs = text.pairs(corpora.folder("en-es") / "test.tsv")
    chosen = torch.randperm(len(pairs), generator=torch.Generator().manual_seed(seed))[:count].tolist()
    return open_translator()[1].encode([pairs[i][0] for i in chosen])


def ours(rows: list[list[int]], width: int, most: int):
    """A function that translates. Weights are prepared once, as by `rg.translate` and at CTranslate2's loading."""
    import torch

    from regard.generation import beam, generate, greedy
    from regard.generation.cpu_inference import weights_unchanged
    from regard.training.data.tokens import END, PAD, START
    from regard.training.translator import open_translator

    model = open_translator()[0]
    lengths = torch.tensor([len(r) for r in rows])
    source = torch.tensor([r + [PAD] * (int(lengths.max()) - len(r)) for r in rows])
    strategy = greedy() if width == 1 else beam(width, length_penalty=LENGTH_PENALTY)
    options = {"source": source, "source_lengths": lengths, "max_new_tokens": most, "eos_id": END}
    start = [[START]] * len(rows)
    once = weights_unchanged()
    once.__enter__()  # until the process ends: the function below keeps the context from being collected

    def translate(_context=once) -> list[list[int]]:
        return generate(model, start, strategy, return_log_probs=False, **options).rows()

    return translate


def prepare(folder: Path, count: int, seed: int) -> None:
    """Write the converted model, the sentences and the limit of tokens: their processes do not import torch."""
    from regard.interop.ctranslate2 import to_ctranslate2
    from regard.training.data.tokens import END, SPECIAL, START, UNKNOWN
    from regard.training.recipes.translation import max_target_tokens
    from regard.training.translator import open_translator

    model, tokens, _ = open_translator()
    words = [tokens.tokenizer.id_to_token(i) for i in range(len(tokens))]
    special = {"start": SPECIAL[START], "end": SPECIAL[END], "unknown": SPECIAL[UNKNOWN]}
    to_ctranslate2(model, words, folder / "ct2", **special)
    rows = sentences(count, seed)
    given = {"rows": rows, "words": words, "most": max_target_tokens(max(map(len, rows)))}
    (folder / "given.json").write_text(json.dumps(given))


def theirs(given: dict, width: int, kind: str, threads: int, folder: Path):
    import ctranslate2

    words = given["words"]
    number = {word: i for i, word in enumerate(words)}
    translator = ctranslate2.Translator(
        str(folder / "ct2"), device="cpu", compute_type=kind, inter_threads=1, intra_threads=threads
    )
    rows = [[words[i] for i in row] for row in given["rows"]]
    options = {"beam_size": width, "max_decoding_length": given["most"], "max_batch_size": len(rows)}
    if width > 1:
        options["length_penalty"] = LENGTH_PENALTY

    def translate() -> list[list[int]]:
        found = translator.translate_batch(rows, min_decoding_length=0, **options)
        return [[number[word] for word in one.hypotheses[0]] for one in found]

    return translate


def side(
    name: str,
    width: int,
    rounds: int,
    threads: int,
    folder: Path,
    clock: Callable[[], float],
    undisturbed: bool,
) -> dict:
    """One process: the times of its rounds, after one that is not counted, and its translations."""
    given = json.loads((folder / "given.json").read_text())
    if name == "regard":
        import torch

        torch.set_num_threads(threads)
        run = ours(given["rows"], width, given["most"])
    else:
        run = theirs(given, width, name.split()[1], threads, folder)
    found, taken, disturbed = run(), [], 0
    deadline = time.monotonic() + 20 * rounds
    while len(taken) < rounds and time.monotonic() < deadline:
        others, began = busy_elsewhere(), clock()
        run()
        ms = 1e3 * (clock() - began)
        if undisturbed and busy_elsewhere() - others > DISTURBED * ms / 1e3:
            disturbed += 1
        else:
            taken.append(ms)
    return {"ms": taken, "disturbed": disturbed, "tokens": found}


def busy_elsewhere() -> float:
    """Seconds for which other processes have used a core since the machine was started (Linux)."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = map(int, fields[:8])
    total = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    return total - time.process_time()


def measured(width: int, given: argparse.Namespace, folder: Path) -> dict:
    results: dict[str, list[dict]] = {name: [] for name in SIDES}
    for _ in range(given.turns):
        for name in SIDES:
            options = ["--rounds", given.rounds, "--threads", given.threads, "--folder", folder]
            options += ["--processor-time"] if given.processor_time else []
            options += ["--undisturbed"] if given.undisturbed else []
            command = [sys.executable, __file__, "--side", name, "--width", width, *options]
            env = {**os.environ, "OMP_NUM_THREADS": str(given.threads)}
            output = subprocess.run(list(map(str, command)), env=env, check=True, capture_output=True)
            results[name].append(json.loads(output.stdout))
    ms = {name: sorted(t for one in found for t in one["ms"]) for name, found in results.items()}
    ours_tokens, others = results["regard"][0]["tokens"], results["ctranslate2 float32"][0]["tokens"]
    equal = sum(a == b for a, b in zip(ours_tokens, others, strict=True))
    assert width > 1 or equal == len(others), "greedy translations differ"
    row = {
        "decoding": "greedy" if width == 1 else f"beam {width}",
        "sentences": len(others),
        "written tokens": sum(map(len, ours_tokens)),
        "equal to ctranslate2 float32": equal,
        "rounds": {k: len(v) for k, v in ms.items()},
        "disturbed rounds, not counted": {k: sum(r["disturbed"] for r in v) for k, v in results.items()},
        "ms": {
            k: {"median": round(median(v)), "min": round(v[0]), "max": round(v[-1])} for k, v in ms.items()
        },
        "ratios": {k: round(median(v) / median(ms["regard"]), 3) for k, v in ms.items() if k != "regard"},
    }
    print(json.dumps(row), file=sys.stderr, flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0, help="of the draw of test sentences")
    parser.add_argument("--rounds", type=int, default=5, help="in each process")
    parser.add_argument("--turns", type=int, default=2, help="processes of each side")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--processor-time", action="store_true", help="instead of wall time, for one thread")
    parser.add_argument(
        "--undisturbed", action="store_true", help="repeat rounds in which other processes used a core"
    )
    parser.add_argument("--width", type=int)
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--folder", type=Path, help="of the converted model; made by --prepare")
    parser.add_argument("--prepare", action="store_true", help="only write the folder")
    parser.add_argument("--write", action="store_true")
    given = parser.parse_args()
    if given.side:
        clock = time.process_time if given.processor_time else time.perf_counter
        options = (given.rounds, given.threads, given.folder, clock, given.undisturbed)
        print(json.dumps(side(given.side, given.width, *options)))
        return
    folder = given.folder or Path(tempfile.mkdtemp())
    if not (folder / "given.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder, given.rows, given.seed)
    if given.prepare:
        return
    import torch

    from regard.training.loop.meter import machine

    found = {
        "date": str(date.today()),
        "machine": machine(torch.device("cpu")),
        "threads": given.threads,
        "seed": given.seed,
        "clock": "processor time" if given.processor_time else "wall",
        "cases": [measured(width, given, folder) for width in ([given.width] if given.width else WIDTHS)],
    }
    text = json.dumps(found, indent=1)
    print(text)
    if given.write:
        (Path(__file__).parent / "results" / f"decode_shipped-{date.today()}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
