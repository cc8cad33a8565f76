"""Write the translator that is part of regard from a trained run: 8-bit weights, scores, card, checksums.

    PYTHONPATH=src python bench/ship_translator.py RUN [--out src/regard/training/models/en-es]

RUN is the folder of `regard train translate-h200`. The scores are those of the 8-bit weights that are shipped, on the
validation and test rows, greedily and with a beam of 4. For test rows with numbers, names, questions, capitals or
many words ("traps"), the share of translations that preserve them is reported.
"""

import argparse
import json
import re
import shutil
import time
from pathlib import Path

import torch

from regard.generation import Strategy, beam, greedy
from regard.nn.serialization import load, save
from regard.training.data import corpora, text
from regard.training.models import CARD, SUMS, checksum
from regard.training.recipes.run import open_run
from regard.training.recipes.translation import scores, translate

STRATEGIES: dict[str, Strategy] = {"beam 4": beam(4), "greedy": greedy()}
SENTENCES = [
    "Hello world",
    "Where is the library?",
    "Good morning!",
    "My sister lives in Madrid.",
    "I would like a cup of coffee, please.",
    "How old are you?",
    "What time does the train leave?",
    "The file could not be opened.",
    "There are 42 devices in the room.",
    "In the beginning God created the heavens and the earth.",
]


def traps(pairs: list[tuple[str, str]], outputs: list[str]) -> dict[str, dict]:
    """For each kind of trap: the rows, and the share of translations that keep what must be kept."""
    found: dict[str, list[bool]] = {"numbers": [], "names": [], "questions": [], "first capital": []}
    for (source, reference), output in zip(pairs, outputs, strict=True):
        if numbers := re.findall(r"\d+", source):
            found["numbers"].append(sorted(numbers) == sorted(re.findall(r"\d+", output)))
        names = [w for w in re.findall(r"(?<=[a-z,] )[A-Z]\w+", source) if w in reference]
        if names:
            found["names"].append(all(name in output for name in names))
        if source.endswith("?"):
            found["questions"].append(output.endswith("?") and "¿" in output)
        if source[:1].isalpha() and reference[:1].isalpha():
            same = source[:1].isupper() == reference[:1].isupper()
            found["first capital"] += [output[:1].isupper() == reference[:1].isupper()] if same else []
    return {k: {"rows": len(v), "kept": round(sum(v) / max(len(v), 1), 4)} for k, v in found.items()}


def by_length(pairs: list[tuple[str, str]], outputs: list[str]) -> dict[str, dict]:
    """BLEU and chrF of test rows by the number of English words."""
    groups = {"3 to 5": (3, 5), "6 to 10": (6, 10), "11 to 20": (11, 20), "21 to 40": (21, 40)}
    found = {}
    for name, (least, most) in groups.items():
        rows = [i for i, (source, _) in enumerate(pairs) if least <= len(source.split()) <= most]
        result = scores([outputs[i] for i in rows], [pairs[i][1] for i in rows])
        found[name] = {"rows": len(rows), "BLEU": round(result.bleu, 1), "chrF": round(result.chrf, 1)}
    return found


def evaluated(folder: Path, limit: int | None) -> dict:
    model, tokens = load(folder / "model").eval(), open_run(folder)[1]
    found: dict = {"scores": {}, "signatures": {}}
    for part in ("test", "valid"):
        pairs = text.pairs(corpora.folder("en-es") / f"{part}.tsv")[:limit]
        for name, strategy in STRATEGIES.items():
            began = time.perf_counter()
            outputs = translate(model, tokens, [source for source, _ in pairs], strategy)
            result = scores(outputs, [reference for _, reference in pairs])
            found["scores"][f"{part}, {name}"] = {
                "rows": len(pairs),
                "BLEU": round(result.bleu, 2),
                "chrF": round(result.chrf, 2),
            }
            found["signatures"] = {"BLEU": result.bleu_signature, "chrF": result.chrf_signature}
            print(part, name, result, f"{time.perf_counter() - began:.0f} s", flush=True)
            if (part, name) == ("test", "beam 4"):
                found["by length"] = by_length(pairs, outputs)
                found["traps"] = traps(pairs, outputs)
    outputs = translate(model, tokens, SENTENCES, beam(4))
    found["sentences"] = dict(zip(SENTENCES, outputs, strict=True))
    return found


def trained(run: Path) -> dict:
    """How the run went, from its log."""
    events = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    done = next(e for e in reversed(events) if e["event"] == "done")
    valid = [e for e in events if e["event"] == "valid"]
    speeds = sorted(e["tokens_per_second"] for e in events if e["event"] == "train")
    return {
        "minutes": round(done["seconds"] / 60, 2),
        "updates": done["step"],
        "epochs": done["epochs"],
        "predicted tokens per second": speeds[len(speeds) // 2],
        "validation loss": round(valid[-1]["loss"], 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, default=Path("src/regard/training/models/en-es"))
    parser.add_argument("--device", default="NVIDIA H200", help="the GPU that trained it")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--limit", type=int, help="of rows, to try the script")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    model, _, _ = open_run(given.run)
    given.out.mkdir(parents=True, exist_ok=True)
    save(model, given.out / "model", weights="int8")
    for name in ("recipe.json", "tokens.json"):
        shutil.copy(given.run / name, given.out / name)
    card = {
        "name": "en-es",
        "parameters": sum(p.numel() for p in model.parameters()),
        "weights": "int8, one scale per row",
        "decoding": {"beam": 4, "length_penalty": 0.6},
        "trained": {"device": given.device, **trained(given.run)},
        **evaluated(given.out, given.limit),
    }
    (given.out / CARD).write_text(json.dumps(card, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    size = (given.out / "model" / "model.safetensors").stat().st_size
    (given.out / "README.md").write_text(readme(card, size), encoding="utf-8")
    write_sums(given.out)


README = (Path(__file__).parent / "translator_card.md").read_text(encoding="utf-8")


def readme(card: dict, size: int) -> str:
    """The card for people, from the card for programs."""

    def table(rows: list[tuple]) -> str:
        return "\n".join(f"| {' | '.join(map(str, row))} |" for row in rows)

    names = {"numbers": "numbers", "names": "names", "questions": "¿ … ?", "first capital": "first capital"}
    traps = [f"{names[k]} {v['kept']:.1%} of {v['rows']:,}" for k, v in card["traps"].items()]
    return README.format(
        parameters=card["parameters"],
        size=size / 1e6,
        minutes=card["trained"]["minutes"],
        device=card["trained"]["device"],
        updates=card["trained"]["updates"],
        epochs=card["trained"]["epochs"],
        speed=card["trained"]["predicted tokens per second"],
        scores=table(
            [
                (
                    f"{v['rows']:,} {name.split(', ')[0]}",
                    name.split(", ")[1],
                    f"{v['BLEU']:.1f}",
                    f"{v['chrF']:.1f}",
                )
                for name, v in card["scores"].items()
            ]
        ),
        bleu_signature=card["signatures"]["BLEU"],
        chrf_signature=card["signatures"]["chrF"],
        lengths=table([(k, v["rows"], v["BLEU"], v["chrF"]) for k, v in card["by length"].items()]),
        traps=", ".join(traps),
        sentences=table(list(card["sentences"].items())),
    )


def write_sums(folder: Path) -> None:
    files = sorted(f for f in folder.rglob("*") if f.is_file() and f.name != SUMS)
    lines = [f"{checksum(f)}  {f.relative_to(folder).as_posix()}" for f in files]
    (folder / SUMS).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
