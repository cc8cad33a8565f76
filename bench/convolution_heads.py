"""What is lost when trained heads are lowered: digits, 5-fold cross-validation, with a CNN and a ViT as baselines.

    PYTHONPATH=src python bench/convolution_heads.py --score position dot --write

For each fold: attention layers with quadratic heads, initialized at shifts, are trained (examples/digits_heads.py),
lowered at tolerance 0.05, and tested before and after. With --baselines also a CNN, a vision Transformer, and the CNN
lifted to attention and trained further. About a minute per fold and score on an idle core; --folds 1 runs one fold.
"""

import argparse
import json
import platform
import statistics
import sys
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "examples"))

import digits_heads  # noqa: E402
from digits_heads import Heads, PixelAttention, accuracy, parameters, split, train  # noqa: E402

from regard.convolution import lower_all  # noqa: E402

TOLERANCE = 0.05


def log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def attention_fold(images, labels, fold: int, score: str, epochs: int, window: int | None) -> dict:
    """One fold: accuracy before and after lowering, and the kind of each head."""
    learn, test = split(labels, fold)
    torch.manual_seed(fold)
    model = PixelAttention(score, "shifts", window)
    heads = Heads(model, images[learn][:64])
    seconds = train(model, images[learn], labels[learn], epochs, seed=fold, watch=heads)
    lowered, certificates = lower_all(model, images[learn][:128], tolerance=TOLERANCE)
    return {
        "fold": fold,
        "parameters": parameters(model),
        "seconds": seconds,
        "before": accuracy(model, images[test], labels[test]),
        "after": accuracy(lowered, images[test], labels[test]),
        "lowered": [len(certificate.lowered) for certificate in certificates.values()],
        "kind": [[head.kind for head in certificate.heads] for certificate in certificates.values()],
        "worst": [[head.worst for head in certificate.heads] for certificate in certificates.values()],
        "certified": [certificate.certified for certificate in certificates.values()],
        "measured": [certificate.measured for certificate in certificates.values()],
        "speed up": [certificate.speed_up for certificate in certificates.values()],
        "kinds": heads.kinds(),
        "near whole": heads.near_whole(),
    }


def baselines_fold(images, labels, fold: int, epochs: int) -> dict:
    """The CNN, the vision Transformer, and the lifted CNN before and after training as attention."""
    learn, test = split(labels, fold)
    results: dict = {"fold": fold}
    for name, make in {"cnn": digits_heads.cnn, "vit": digits_heads.vit}.items():
        torch.manual_seed(fold)
        model = make()
        seconds = train(model, images[learn], labels[learn], epochs, seed=fold)
        results[name] = {
            "accuracy": accuracy(model, images[test], labels[test]),
            "seconds": seconds,
            "parameters": parameters(model),
        }
        if name == "cnn":
            lifted = digits_heads.lifted_from(model)
            start = accuracy(lifted, images[test], labels[test])
            seconds = train(lifted, images[learn], labels[learn], max(1, epochs // 3), lr=1e-3, seed=fold)
            moved = max(
                (part.center - torch.tensor(part.geometry.offsets)).abs().max().item()
                for part in lifted[0:5:2]
            )
            results["lifted"] = {
                "before training": start,
                "after training": accuracy(lifted, images[test], labels[test]),
                "seconds": seconds,
                "centers moved by": moved,
            }
    return results


def summary(score: str, folds: list[dict]) -> str:
    before, after = (statistics.mean(f[name] for f in folds) for name in ("before", "after"))
    first = [f["lowered"][0] for f in folds]
    return (
        f"score={score!r}: accuracy {before:.2f} % before, {after:.2f} % after lowering at {TOLERANCE} "
        f"(folds: {', '.join('{:+.2f}'.format(f['after'] - f['before']) for f in folds)}); "
        f"first layer: {first} of {digits_heads.HEADS} heads lowered"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--score", nargs="*", choices=("dot", "position"), default=["position"])
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--folds", type=int, default=5)
    parser.add_argument("--window", type=int)
    parser.add_argument("--baselines", action="store_true", help="also the CNN, the ViT and the lifted CNN")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # weights of distant keys are denormal numbers, which are slow
    images, labels = digits_heads.digits()
    machine = {
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "threads": 1,
    }
    results: dict = {"date": str(date.today()), **machine, "epochs": options.epochs, "window": options.window}
    name = "_".join(["convolution_heads", *options.score, *(["baselines"] if options.baselines else [])])
    for score in options.score:
        results[score] = []
        for fold in range(options.folds):
            results[score].append(attention_fold(images, labels, fold, score, options.epochs, options.window))
            log(json.dumps(results[score][-1]))
        log(summary(score, results[score]))
    if options.baselines:
        results["baselines"] = []
        for fold in range(options.folds):
            results["baselines"].append(baselines_fold(images, labels, fold, options.epochs))
            log(json.dumps(results["baselines"][-1]))
    text = json.dumps(results, indent=1)
    print(text)
    if options.write:
        path = ROOT / "bench" / "results" / f"{name}-{date.today()}.json"
        path.write_text(text + "\n")
        log(f"written to {path}")


if __name__ == "__main__":
    main()
