"""Draws the pictures of README.md and docs/pictures.md into docs/pictures/."""

from pathlib import Path

import torch

import regard as rg
from regard.lens import figures
from regard.schedule import inverse_sqrt, warmup_cosine

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"


def pictures() -> dict[str, object]:
    """Every picture that needs no trained model, by file name."""
    torch.manual_seed(0)
    pattern = rg.causal() & (rg.window(2) | rg.every(4))
    words = ["The", "cat", "sat", "on", "the", "mat", "because", "it", "was", "tired"]
    view = rg.look(rg.preset("tiny-gpt").build().eval(), torch.arange(len(words))[None], tokens=words)
    q, k, v = torch.randn(3, 6, 8, dtype=torch.float64)
    return {
        "mask": figures.mask_matrix(pattern, 16),
        "masks": figures.mask_table(),
        "reach": figures.receptive_field(rg.causal() & rg.dilated(1, 3), 40, 5),
        "architecture": figures.architecture(
            rg.preset("transformer-base"), source='"Hello world"', target='"<s> Hola mundo"'
        ),
        "map": figures.attention_map(view, 0, 1),
        "positions": figures.positional_encoding(),
        "rates": figures.learning_rates(warmup_cosine(1e-3, 4000, 100_000), inverse_sqrt(512, 4000)),
        "saturation": figures.saturation(samples=500),
        "sharpness": figures.sharpness([2.0, 2.0, 1.0, 0.0], q, k, v),
        "costs": figures.layer_costs(),
    }


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, figure in pictures().items():
        figure.savefig(FOLDER / f"{name}.png", dpi=80)
        print(FOLDER / f"{name}.png")
