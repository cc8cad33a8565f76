"""What is lost when trained heads are lowered: digits, 5-fold cross-validation, a CNN and a ViT beside.

    PYTHONPATH=src python bench/convolution_heads.py --score position dot --write

For each fold: attention layers with quadratic heads started at shifts are trained (examples/digits_heads.py),
lowered at tolerance 0.05, and tested before and after. With --rivals also a CNN, a vision Transformer, and the CNN
lifted to attention, which trains on. About a minute a fold and score on an idle core; --folds 1 for one of them.
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


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def attention_fold(images, labels, fold: int, score: str, epochs: int, window: int | None) -> dict:
    """One fold: accuracy before and after lowering, and what became of the heads."""
    learn, test = split(labels, fold)
    torch.manual_seed(fold)
    model = PixelAttention(score, "shifts", window)
    heads = Heads(model, images[learn][:64])
    seconds = train(model, images[learn], labels[learn], epochs, seed=fold, watch=heads)
    lowered, told = lower_all(model, images[learn][:128], tolerance=TOLERANCE)
    return {
        "fold": fold,
        "parameters": parameters(model),
        "seconds": seconds,
        "before": accuracy(model, images[test], labels[test]),
        "after": accuracy(lowered, images[test], labels[test]),
        "lowered": [len(certificate.lowered) for certificate in told.values()],
        "became": [[head.became for head in certificate.heads] for certificate in told.values()],
        "worst": [[head.worst for head in certificate.heads] for certificate in told.values()],
        "certified": [certificate.certified for certificate in told.values()],
        "measured": [certificate.measured for certificate in told.values()],
        "speed up": [certificate.speed_up for certificate in told.values()],
        "kinds": heads.kinds(),
        "near whole": heads.near_whole(),
    }


def rivals_fold(images, labels, fold: int, epochs: int) -> dict:
    """The CNN, the vision Transformer, and the lifted CNN before and after it trains on as attention."""
    learn, test = split(labels, fold)
    found: dict = {"fold": fold}
    for name, make in {"cnn": digits_heads.cnn, "vit": digits_heads.vit}.items():
        torch.manual_seed(fold)
        model = make()
        seconds = train(model, images[learn], labels[learn], epochs, seed=fold)
        found[name] = {
            "accuracy": accuracy(model, images[test], labels[test]),
            "seconds": seconds,
            "parameters": parameters(model),
        }
        if name == "cnn":
            lifted = digits_heads.lifted_from(model)
            start = accuracy(lifted, images[test], labels[test])
            seconds = train(lifted, images[learn], labels[learn], max(1, epochs // 3), lr=1e-3, seed=fold)
            moved = max(
                (part.centre - torch.tensor(part.frame.offsets)).abs().max().item() for part in lifted[0:5:2]
            )
            found["lifted"] = {
                "at once": start,
                "trained on": accuracy(lifted, images[test], labels[test]),
                "seconds": seconds,
                "centres moved by": moved,
            }
    return found


def summary(score: str, folds: list[dict]) -> str:
    before, after = (statistics.mean(f[name] for f in folds) for name in ("before", "after"))
    first = [f["lowered"][0] for f in folds]
    return (
        f"score={score!r}: accuracy {before:.2f} % before, {after:.2f} % after lowering at {TOLERANCE} "
        f"(folds: {', '.join('{:+.2f}'.format(f['after'] - f['before']) for f in folds)}); "
        f"first layer: {first} of {digits_heads.HEADS} heads lowered"
    )


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ask.add_argument("--score", nargs="*", choices=("dot", "position"), default=["position"])
    ask.add_argument("--epochs", type=int, default=10)
    ask.add_argument("--folds", type=int, default=5)
    ask.add_argument("--window", type=int)
    ask.add_argument("--rivals", action="store_true", help="the CNN, the ViT and the lifted CNN too")
    ask.add_argument("--write", action="store_true")
    given = ask.parse_args()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # weights of far keys are no normal floats, which are slow
    images, labels = digits_heads.digits()
    machine = {
        "torch": torch.__version__,
        "machine": platform.processor() or platform.machine(),
        "threads": 1,
    }
    found: dict = {"date": str(date.today()), **machine, "epochs": given.epochs, "window": given.window}
    name = "_".join(["convolution_heads", *given.score, *(["rivals"] if given.rivals else [])])
    for score in given.score:
        found[score] = []
        for fold in range(given.folds):
            found[score].append(attention_fold(images, labels, fold, score, given.epochs, given.window))
            say(json.dumps(found[score][-1]))
        say(summary(score, found[score]))
    if given.rivals:
        found["rivals"] = []
        for fold in range(given.folds):
            found["rivals"].append(rivals_fold(images, labels, fold, given.epochs))
            say(json.dumps(found["rivals"][-1]))
    text = json.dumps(found, indent=1)
    print(text)
    if given.write:
        path = ROOT / "bench" / "results" / f"{name}-{date.today()}.json"
        path.write_text(text + "\n")
        say(f"written to {path}")


if __name__ == "__main__":
    main()
