"""A record of losses, gradient norms and head statistics during training, for the figures of `lens.figures`."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..errors import FormatError, RegardError, ShapeError
from .view import View

FORMAT = 1


@dataclass
class Recorder:
    """Losses, gradient norms, head statistics and tables of vectors, at the steps that are recorded.

    losses: (step, loss) of each series; floors: the smallest loss that a series can reach, if known.
    gradients, clipped: the norm of each part's gradient, before and after clipping.
    heads: the rows of a view, with the center of each head on its grid. tables: vectors, such as positions.
    """

    losses: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    floors: dict[str, float] = field(default_factory=dict)
    gradients: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    clipped: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    heads: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list)
    tables: list[tuple[int, str, Float[Tensor, "p d"]]] = field(default_factory=list)

    def loss(
        self, step: int, value: float | Tensor, series: str = "train", floor: float | None = None
    ) -> None:
        """One point of a training curve, and the floor of its series."""
        self.losses.setdefault(series, []).append((step, _number(value)))
        if floor is not None:
            self.floors[series] = float(floor)

    def gradient(self, step: int, model: nn.Module, *, clipped: bool = False) -> None:
        """The norms of the gradients after `backward`, layer by layer; with `clipped`, after clipping."""
        norms = gradient_norms(model)
        if not norms:
            raise RegardError("no parameter has a gradient; record after loss.backward()")
        (self.clipped if clipped else self.gradients).append((step, norms))

    def view(self, step: int, view: View) -> None:
        """The statistics of every head of a view, and the center of its attention on its grid."""
        rows = view.rows()
        for row in rows:
            center = view.statistics[row["layer"]].center
            row["center"] = None if center is None else center[row["head"]].tolist()
        self.heads.append((step, rows))

    def table(self, step: int, name: str, vectors: Float[Tensor, "p d"]) -> None:
        """A table of vectors as it is now: position vectors, patch filters."""
        self.tables.append((step, name, vectors.detach().clone().cpu()))

    def series(self, layer: int, head: int, number: str) -> list[tuple[int, float | list[float] | None]]:
        """One statistic of one head over the steps; of two numbers where it is a center."""
        points = []
        for step, rows in self.heads:
            row = next((r for r in rows if (r["layer"], r["head"]) == (layer, head)), None)
            if row is None:
                last = f"layer {rows[-1]['layer']}, head {rows[-1]['head']}"
                raise ShapeError(f"step {step} has no layer {layer}, head {head}; its last is {last}")
            if number not in row:
                raise ShapeError(f"step {step} has no {number!r}; it has {', '.join(row)}")
            points.append((step, row[number]))
        return points

    def save(self, path: str | Path) -> Path:
        """Write a JSON file."""
        path = Path(path)
        plain = {
            "format": FORMAT,
            "losses": self.losses,
            "floors": self.floors,
            "gradients": self.gradients,
            "clipped": self.clipped,
            "heads": self.heads,
            "tables": [(step, name, vectors.tolist()) for step, name, vectors in self.tables],
        }
        try:
            path.write_text(json.dumps(plain) + "\n", encoding="utf-8")
        except OSError as e:
            raise RegardError(f"cannot write {path}: {e.strerror or e}") from e
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Recorder":
        """Read a file that `save` wrote."""
        try:
            plain = json.loads(Path(path).read_text(encoding="utf-8"))
        except json.JSONDecodeError as e:
            raise FormatError(f"{path} is not JSON: {e.msg} at line {e.lineno}") from e
        if not isinstance(plain, dict) or plain.pop("format", None) != FORMAT:
            raise FormatError(f"{path} is not a record in regard's format {FORMAT}")
        return cls(
            losses={name: [(s, v) for s, v in points] for name, points in plain["losses"].items()},
            floors=plain["floors"],
            gradients=[(s, norms) for s, norms in plain["gradients"]],
            clipped=[(s, norms) for s, norms in plain["clipped"]],
            heads=[(s, rows) for s, rows in plain["heads"]],
            tables=[(s, name, torch.tensor(vectors)) for s, name, vectors in plain["tables"]],
        )


def gradient_norms(model: nn.Module, part: Callable[[str], str] | None = None) -> dict[str, float]:
    """The norm of the gradient of each part, in order; a part is a numbered layer, or a top-level name."""
    squares: dict[str, float] = {}
    for name, parameter in model.named_parameters():
        if parameter.grad is None:
            continue
        where = (part or layer_of)(name)
        squares[where] = squares.get(where, 0.0) + float(parameter.grad.double().square().sum())
    return {where: square**0.5 for where, square in squares.items()}


def layer_of(name: str) -> str:
    """The start of a parameter's path up to its first number, or its first word.

    >>> layer_of("encoder.layer.3.attention.self.query.weight"), layer_of("embedding.table")
    ('encoder.layer.3', 'embedding')
    """
    words = name.split(".")
    return ".".join(words[: next(_numbers(words), 0) + 1])


def _numbers(words: list[str]) -> Iterator[int]:
    return (i for i, word in enumerate(words) if word.isdigit())


def _number(x: float | Tensor) -> float:
    return float(x.detach() if isinstance(x, Tensor) else x)
