"""What heads learn: a classifier of attention layers on scikit-learn's digits, its heads recorded during training.

    python examples/digits_heads.py [--epochs 15] [--picture heads.png]

Each pixel of an 8 × 8 image is a token; a head scores keys by a learned offset and sharpness (rg.quadratic), and by
content if score="dot". After training it is lowered to convolutions. Baselines: a CNN, a vision Transformer, and the
CNN lifted to attention and trained further. Needs scikit-learn, and matplotlib for the picture.
"""

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

import regard as rg
from regard.convolution import Spread, lift, lower_all, spread

GRID, CLASSES = (8, 8), 10
WIDTH, HEADS, LAYERS = 32, 9, 2


def digits() -> tuple[Tensor, Tensor]:
    """1,797 images (1, 8, 8), mean 0 and deviation 1, and which digit each shows."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32)
    images = (images - images.mean()) / images.std()
    return rearrange(images, "b h w -> b 1 h w"), torch.tensor(found.target)


class PixelAttention(nn.Module):
    """Pixels → vectors → attention layers with quadratic heads → the largest of each feature → class scores.

    window: how far a head may attend along rows and columns; None means everywhere.
    """

    def __init__(
        self, score: str = "dot", start: str = "shifts", window: int | None = None, layers: int = LAYERS
    ):
        super().__init__()
        attention = rg.Attention(
            WIDTH, heads=HEADS, d_k=8, d_v=8, position=rg.quadratic(grid=GRID), score=score, biases="output"
        )
        block = rg.Block(attention, rg.FeedForward(2 * WIDTH, activation="gelu"), norm_at="pre")
        spec = rg.Encoder(block, layers, head=rg.ClassifierHead(CLASSES, pool="max"))
        self.pixels, self.encoder = nn.Linear(1, WIDTH), spec.build()
        self.pattern = None if window is None else local(window)
        if start == "shifts":
            self.start_at_shifts()

    @torch.no_grad()
    def start_at_shifts(self, alpha: float = 6.0) -> None:
        """One head for each neighbor, as the taps of a 3 × 3 kernel."""
        for block in self.encoder.blocks:
            position = block.attention.position
            position.center.copy_(torch.tensor(list(product((-1.0, 0.0, 1.0), repeat=2))))
            position.alpha.fill_(alpha)

    def forward(self, images: Tensor, return_weights: bool = False):
        x = self.pixels(rearrange(images, "b 1 h w -> b (h w) 1"))
        return self.encoder(x, pattern=self.pattern, return_weights=return_weights)


def local(reach: int) -> Tensor:
    """The pairs of pixels at most `reach` rows and `reach` columns apart."""
    near = (torch.arange(GRID[0])[:, None] - torch.arange(GRID[1])).abs() <= reach
    return rearrange(near[:, None, :, None] & near[None, :, None, :], "a b c d -> (a b) (c d)")


def cnn(width: int = 38, layers: int = 3) -> nn.Sequential:
    """3 × 3 convolutions and the largest of each feature; as many parameters as the attention."""
    convs = [nn.Conv2d(width if layer else 1, width, 3, padding=1) for layer in range(layers)]
    parts = [part for conv in convs for part in (conv, nn.ReLU())]
    return nn.Sequential(*parts, nn.AdaptiveMaxPool2d(1), nn.Flatten(), nn.Linear(width, CLASSES))


def vit() -> nn.Module:
    """A vision Transformer over 2 × 2 patches with learned positions and a class token; of the same size."""
    block = rg.Block(
        rg.Attention(WIDTH, heads=4), rg.FeedForward(4 * WIDTH, activation="gelu"), norm_at="pre"
    )
    head = rg.ClassifierHead(CLASSES, pool="first")
    return rg.Vision(rg.Encoder(block, LAYERS), image=GRID, patch=(2, 2), channels=1, head=head).build()


def lifted_from(model: nn.Sequential, sharpness: float = 3.0) -> nn.Sequential:
    """The CNN with each convolution as soft attention, one head per tap, with trainable offsets."""
    return nn.Sequential(
        *(lift(part, sharpness=sharpness) if isinstance(part, nn.Conv2d) else part for part in model)
    )


def parameters(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def train(
    model: nn.Module,
    images: Tensor,
    labels: Tensor,
    epochs: int,
    lr: float = 5e-3,
    seed: int = 0,
    watch: Callable[[int], None] | None = None,
) -> float:
    """Adam on batches of 64, the rate falling to zero along a cosine; gives the seconds it took."""
    rng, begun = torch.Generator().manual_seed(seed), time.perf_counter()
    steps = epochs * -(-len(images) // 64)
    adam = torch.optim.Adam(model.parameters(), lr=lr)
    fall = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    model.train()
    for epoch in range(epochs):
        if watch is not None:
            watch(epoch)
        for some in torch.randperm(len(images), generator=rng).split(64):
            loss = F.cross_entropy(model(images[some]), labels[some])
            adam.zero_grad()
            loss.backward()
            adam.step()
            fall.step()
    if watch is not None:
        watch(epochs)
    model.eval()
    return time.perf_counter() - begun


@torch.no_grad()
def accuracy(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """In per cent."""
    model.eval()
    return 100 * (model(images).argmax(-1) == labels).float().mean().item()


@dataclass
class Heads:
    """Centers, spreads, entropies and dependence on content of every head, at each epoch watched."""

    model: PixelAttention
    images: Tensor
    epochs: list[int] = field(default_factory=list)
    layers: list[list[Spread]] = field(default_factory=list)

    @torch.no_grad()
    def __call__(self, epoch: int) -> None:
        self.model.eval()
        _, kept = self.model(self.images, return_weights=True)
        self.epochs.append(epoch)
        self.layers.append([spread(layer["self"], GRID) for layer in kept])
        self.model.train()

    def table(self) -> str:
        """The kind of each head: content if its rows depend on the image, else wide or local."""
        lines = ["layer head  center          spread  entropy  content  kind"]
        for layer, found in enumerate(self.layers[-1]):
            for head in range(HEADS):
                row, column = found.center[head].tolist()
                wide, content = found.spread[head].item(), found.content[head].item()
                lines.append(
                    f"{layer:5} {head:4}  ({row:+5.2f}, {column:+5.2f})  {wide:6.2f}  {found.entropy[head]:7.2f}  "
                    f"{content:7.2f}  {kind(wide, content)}"
                )
        return "\n".join(lines)

    def kinds(self) -> list[dict[str, int]]:
        """The number of heads of each kind, by layer, at the end."""
        found = []
        for layer in self.layers[-1]:
            names = [kind(layer.spread[h].item(), layer.content[h].item()) for h in range(HEADS)]
            found.append({name: names.count(name) for name in ("local", "wide", "content")})
        return found

    @torch.no_grad()
    def near_whole(self) -> float:
        """The share of heads whose learned offset is within 0.5 of an integer shift along both axes (lesson T4)."""
        centers = torch.cat([block.attention.position.center for block in self.model.encoder.blocks])
        return ((centers - centers.round()).norm(dim=-1) <= 0.5).double().mean().item()


def kind(wide: float, content: float) -> str:
    """content: a tenth of the weight depends on the image; wide: a spread of two pixels or more."""
    return "content" if content > 0.1 else "wide" if wide >= 2 else "local"


def picture(heads: Heads, path: str) -> None:
    """The center and spread of the heads of each layer around the query, from the first epoch to the last."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shown = [0, len(heads.epochs) // 4, len(heads.epochs) // 2, len(heads.epochs) - 1]
    layers = len(heads.layers[0])
    figure, axes = plt.subplots(layers, len(shown), figsize=(3 * len(shown), 3 * layers), squeeze=False)
    for layer, at in product(range(layers), range(len(shown))):
        found, ax = heads.layers[shown[at]][layer], axes[layer][at]
        for head in range(HEADS):
            row, column = found.center[head].tolist()
            color = f"C{head}"
            wide, content = found.spread[head].item(), found.content[head].item()
            dashes = "--" if kind(wide, content) == "content" else "-"
            ax.add_patch(plt.Circle((column, row), max(wide, 0.1), fill=False, color=color, ls=dashes))
            ax.plot(column, row, "o", color=color, ms=4)
        ax.plot(0, 0, "k+", ms=10)
        ax.set(
            xlim=(-4, 4),
            ylim=(4, -4),
            aspect="equal",
            title=f"layer {layer}, epoch {heads.epochs[shown[at]]}",
        )
        ax.set_xticks(range(-4, 5))
        ax.set_yticks(range(-4, 5))
        ax.grid(alpha=0.3)
    figure.suptitle("center and spread of each head around its query (+); dashed: depends on content")
    figure.tight_layout()
    figure.savefig(path, dpi=100)
    plt.close(figure)


def split(labels: Tensor, fold: int, folds: int = 5, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Indices to train on and to test on."""
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    parts = list(order.chunk(folds))
    return torch.cat(parts[:fold] + parts[fold + 1 :]), parts[fold]


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ask.add_argument("--epochs", type=int, default=15)
    ask.add_argument("--score", choices=("dot", "position"), default="dot")
    ask.add_argument("--start", choices=("shifts", "random"), default="shifts")
    ask.add_argument("--window", type=int)
    ask.add_argument("--picture")
    given = ask.parse_args()
    torch.set_flush_denormal(True)  # weights of distant keys are denormal numbers, which are slow
    torch.manual_seed(0)
    images, labels = digits()
    learn, test = split(labels, 0)

    model = PixelAttention(given.score, given.start, given.window)
    heads = Heads(model, images[learn][:64])
    took = train(model, images[learn], labels[learn], given.epochs, watch=heads)
    print(heads.table())
    print(f"within half a pixel of an integer shift: {heads.near_whole():.0%} of the heads")
    show("attention", model, took, images[test], labels[test])

    lowered, certificates = lower_all(model, images[learn][:128])
    for path, certificate in certificates.items():
        print(f"\n{path}\n{certificate}")
    show("lowered", lowered, 0.0, images[test], labels[test])

    for name, other in {"CNN": cnn(), "ViT": vit()}.items():
        took = train(other, images[learn], labels[learn], given.epochs)
        show(name, other, took, images[test], labels[test])
        if name == "CNN":
            lifted = lifted_from(other)
            show("CNN lifted", lifted, 0.0, images[test], labels[test])
            took = train(lifted, images[learn], labels[learn], max(1, given.epochs // 3), lr=1e-3)
            show("  trained on", lifted, took, images[test], labels[test])
    if given.picture:
        picture(heads, given.picture)
        print(f"centers and spreads: {given.picture}")


def show(name: str, model: nn.Module, seconds: float, images: Tensor, labels: Tensor) -> None:
    begun = time.perf_counter()
    right = accuracy(model, images, labels)
    taken = (time.perf_counter() - begun) * 1e3
    print(
        f"{name:12} {right:5.1f} %  {parameters(model):6,} parameters  trained {seconds:5.1f} s  test {taken:5.0f} ms"
    )


if __name__ == "__main__":
    main()
