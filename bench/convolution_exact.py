"""How exact lifting and lowering are: 200 random convolutions, 1-D and 2-D, of every kind.

    PYTHONPATH=src python bench/convolution_exact.py [--write]

hard: largest |lifted − convolution|. soft: |lifted − convolution| against the bound, on 200 random inputs each; how
far the bound is above the error on the worst of them. round trip: largest difference of a weight of
lower(lift(conv)).
"""

import argparse
import json
import sys
import warnings
from datetime import date
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests" / "helpers"))

from convolution_cases import inputs_for, random_convolution  # noqa: E402
from regard.convolution import lift, lower  # noqa: E402

COUNT, INPUTS, SHARPNESS = 200, 200, (0.7, 3.0, 8.0, 20.0)


@torch.no_grad()
def hard(dtype: torch.dtype) -> float:
    worst = 0.0
    for seed in range(COUNT):
        conv = random_convolution(seed, dtype)
        x = inputs_for(conv, 2, seed)
        worst = max(worst, (lift(conv)(x) - conv(x)).abs().max().item())
    return worst


@torch.no_grad()
def soft(dtype: torch.dtype) -> dict[str, float]:
    """How far an error is above its bound in units of ulp · Σ∣tap∣ · range; how loose a bound is where it counts."""
    over, loose = 0.0, 0.0
    for seed in range(COUNT):
        conv = random_convolution(seed, dtype)
        x = inputs_for(conv, INPUTS, seed)
        span = (x.max().clamp(min=0) - x.min().clamp(max=0)).item()
        unit = torch.finfo(dtype).eps * conv.weight.abs().flatten(1).sum(1).max().item() * span
        for alpha in SHARPNESS[seed % 2 :: 2]:
            lifted = lift(conv, sharpness=alpha)
            error, bound = (lifted(x) - conv(x)).abs().flatten(2).amax(-1), lifted.bound(x)
            over = max(over, ((error - bound).max() / unit).item())
            worst = error.amax(-1).argmax()
            if bound[worst].max() > 1e-4:
                loose = max(loose, (bound[worst].max() / error[worst].max()).item())
    return {"ulp above the bound": over, "bound / error at the worst input": loose}


@torch.no_grad()
def round_trip() -> float:
    worst = 0.0
    for seed in range(COUNT):
        conv = random_convolution(seed, torch.float32)
        back = lower(lift(conv), inputs_for(conv, 1, seed)).convolution
        assert back is not None
        worst = max(worst, (back.weight - conv.weight).abs().max().item())
    return worst


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ask.add_argument("--write", action="store_true")
    given = ask.parse_args()
    warnings.simplefilter("ignore")  # an even kernel with padding="same"
    torch.set_num_threads(1)
    results = {"date": str(date.today()), "torch": torch.__version__, "convolutions": COUNT}
    for name, dtype in {"float32": torch.float32, "float64": torch.float64}.items():
        results[name] = {"hard": hard(dtype), **soft(dtype)}
        print(name, results[name], file=sys.stderr, flush=True)
    results["round trip"] = round_trip()
    text = json.dumps(results, indent=1)
    print(text)
    if given.write:
        (ROOT / "bench" / "results" / f"convolution_exact-{date.today()}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
