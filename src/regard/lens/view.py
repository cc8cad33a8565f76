"""rg.look: run a model once, keep what its attentions compared, answer questions about it."""

import json
from dataclasses import replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from ..errors import FormatError, RegardError, ShapeError, nearest
from . import causes, labels, subspaces
from .capture import Seen, watching
from .captured import Captured, held, looks_back, version
from .kinds import RULES, Kind, Rule, kinds
from .running import run
from .statistics import HeadStatistics, head_statistics
from .table import Table
from .tokens import SEPARATORS, Tokens, numbered

Keep = bool | str  # "copy"


def look(
    model: Any,
    inputs: Any,
    tokens: Any = None,
    *,
    grid: Any = None,
    image: Float[Tensor, "c height width"] | None = None,
    separators: tuple[str, ...] = SEPARATORS,
    keep: Keep = True,
) -> "View":
    """Run the model once on these inputs, with the kernels it runs anyway, and see each of its attentions.

    inputs: a mapping (by name), a tuple (in order), or the one argument. tokens: names for the ids: a list, one a
    batch row, {"source": …, "target": …}, or a tokenizer. grid: (rows, columns[, tokens before them]) of an image's
    patches; found out where an image goes in. keep=False counts while the model runs and lets queries and keys go:
    statistics, but no maps, of very long inputs. keep="copy" copies them, for a model that writes over its tensors.
    The model is run as it is: under eval() or train(), without gradients.
    """
    if keep not in (True, False, "copy"):
        raise RegardError(f"keep={keep!r}; use True, False or 'copy'")
    named = labels.read(inputs, tokens, grid, image)
    gathering = _Gathering(named, inputs, separators, keep)
    with torch.no_grad(), watching(model, gathering.see) as watcher:
        run(model, inputs)
    if not gathering.calls:
        raise RegardError(_nothing(model, watcher.modules, watcher.missed))
    return View(gathering, tuple(watcher.missed), model, inputs)


def _nothing(model: Any, modules: int, missed: list[str]) -> str:
    said = f"no attention was seen while {type(model).__name__} ran ({modules} module calls)"
    return f"{said}; {'; '.join(missed)}" if missed else f"{said}: it has none, or it runs outside PyTorch"


class _Gathering:
    """The calls of one run, labelled as they come."""

    def __init__(self, named: labels.Labels, inputs: Any, separators: tuple[str, ...], keep: Keep):
        self.named, self.inputs, self.separators, self.keep = named, inputs, separators, keep
        self.calls: list[Captured] = []
        self.statistics: dict[int, HeadStatistics] = {}
        self._times: dict[str, int] = {}

    def see(self, seen: Seen) -> None:
        source = seen.source
        if self.keep == "copy" or any(x.is_inference() for x in held(source)):
            fields = ("q", "k") if hasattr(source, "q") else ("table",)
            source = replace(source, **{f: getattr(source, f).clone() for f in fields})
        queries, keys = self.named.of(seen.name, seen.role, source.shape)
        if self.named.grid is None and (found := labels.grid_for(self.named, self.inputs, source.shape[2])):
            self.named = replace(self.named, grid=found)
            queries, keys = self.named.of(seen.name, seen.role, source.shape)
        times = self._times[seen.name] = self._times.get(seen.name, 0) + 1
        call = Captured(
            layer=len(self.calls),
            name=seen.name if times == 1 else f"{seen.name}#{times}",
            role=seen.role,
            way=seen.way,
            source=source,
            shape=source.shape,
            causal=looks_back(source, seen.role),
            versions=tuple(version(x) for x in held(source)),
            queries=queries.names,
            keys=keys.names,
            real=queries.real,
        )
        if not self.keep:
            self.statistics[call.layer] = self.count(call)
            call = replace(call, source=None)
        self.calls.append(call)

    def count(self, call: Captured) -> HeadStatistics:
        return head_statistics(call, self.tokens(call), self.named.grid)

    def tokens(self, call: Captured) -> Tokens | None:
        known = self.named.source is not None or self.named.target is not None
        numbers = not known or _are_places(call.queries) or _are_places(call.keys)
        return None if numbers else numbered(call.queries, call.keys, self.separators)


def _are_places(names: labels.Names) -> bool:
    """Whether the names are made up: 0, 1, 2, … ."""
    return all(row == tuple(str(i) for i in range(len(row))) for row in names)


class View:
    """What was seen in one run of a model.

    heads: a table, one row a head. map(layer, head): its weights. save("heads.html"): a page that needs no network;
    ".json", ".svg", ".png" and ".pdf" too. missed: what could not be seen, in sentences.
    """

    def __init__(self, gathered: _Gathering, missed: tuple[str, ...], model: Any, inputs: Any):
        self.calls: tuple[Captured, ...] = tuple(gathered.calls)
        self.missed = missed
        self.title = type(getattr(model, "_orig_mod", model)).__name__
        self.grid: tuple[int, int] | None = None
        self.skip = 0
        if (grid := gathered.named.grid) is not None:
            self.grid, self.skip = (grid.rows, grid.columns), grid.skip
        self.image = gathered.named.image
        self.effects: dict[tuple[int, int], float] = {}
        self.rules: tuple[Rule, ...] = RULES
        self._gathered, self._model, self._inputs = gathered, model, inputs

    # maps

    def call(self, layer: int | str) -> Captured:
        """A captured call by its number, its name, or the end of its name."""
        if isinstance(layer, int):
            if not 0 <= layer < len(self.calls):
                raise ShapeError(f"layer {layer}: {len(self.calls)} were seen, 0 to {len(self.calls) - 1}")
            return self.calls[layer]
        exact = [c for c in self.calls if c.name == layer]
        ends = exact or [c for c in self.calls if c.name.endswith(f".{layer}")]
        if len(ends) == 1:
            return ends[0]
        names = [c.name for c in self.calls]
        if ends:
            raise ShapeError(f"{layer!r} names {len(ends)} layers: {', '.join(c.name for c in ends)}")
        raise ShapeError(f"no layer is called {layer!r}; {nearest(layer, names)}")

    def map(self, layer: int | str, head: int, batch: int = 0) -> Float[Tensor, "n m"]:
        """The weights of one head: row i is where query i looks."""
        return self.call(layer).weights([head], None, batch)[0]

    def scores(self, layer: int | str, head: int, batch: int = 0) -> Float[Tensor, "n m"]:
        """What the softmax of one head was given; −∞ where a query may not look."""
        return self.call(layer).scores([head], None, batch)[0]

    def queries(self, layer: int | str, batch: int = 0) -> tuple[str, ...]:
        return self.call(layer).queries[batch]

    def keys(self, layer: int | str, batch: int = 0) -> tuple[str, ...]:
        return self.call(layer).keys[batch]

    # numbers

    @cached_property
    def statistics(self) -> tuple[HeadStatistics, ...]:
        """The statistics of each layer."""
        done = self._gathered.statistics
        return tuple(done[c.layer] if c.layer in done else self._gathered.count(c) for c in self.calls)

    @property
    def kinds(self) -> tuple[tuple[Kind, ...], ...]:
        """The kind of each head of each layer, by `rules`."""
        return tuple(kinds(s, self.rules) for s in self.statistics)

    def rows(self) -> list[dict[str, Any]]:
        """One row a head: where it is, its kind, its numbers; None where a number does not apply."""
        table = []
        for call, s, of_layer in zip(self.calls, self.statistics, self.kinds):
            for head, found in enumerate(of_layer):
                row: dict[str, Any] = {
                    "layer": call.layer,
                    "name": call.name,
                    "role": call.role,
                    "head": head,
                    "kind": found.name,
                    "confidence": round(found.confidence, 4),
                    "evidence": found.evidence,
                }
                row |= {k: (v if isfinite(v) else None) for k, v in s.numbers(head).items()}
                if self.effects:
                    row["effect"] = self.effects.get((call.layer, head))
                table.append(row)
        return table

    @property
    def heads(self) -> Any:
        """`rows` as a pandas DataFrame, or as a plain table where pandas is not installed."""
        try:
            import pandas
        except ImportError:
            return Table(self.rows())
        return pandas.DataFrame(self.rows())

    def agreement(self, layer: int | str, other: int | str | None = None) -> Float[Tensor, "h g"]:
        """The cosine between the maps of two heads, for each pair of heads of one layer or of two."""
        first = self.call(layer)
        return subspaces.agreement(first, first if other is None else self.call(other))

    def angles(self, layer: int | str, of: Literal["query", "key"] = "query") -> Float[Tensor, "h h d_k"]:
        """The principal angles between what two heads' queries (or keys) span over the tokens, in radians."""
        return subspaces.head_angles(self.call(layer), of)

    def rollout(
        self, rows: list[int] | None = None, batch: int = 0, residual: float = 0.5
    ) -> Float[Tensor, "r n"]:
        """How far each input token reaches the top of the first stack of self-attentions, layer by layer."""
        stack = [c for c in self.calls if c.role == "self" and c.n == c.m == self.calls[0].n]
        if any(c.role == "cross" for c in self.calls):
            stack = [c for c in stack if "decoder" not in c.name.lower()]
        return causes.rollout(stack, rows, batch, residual)

    # causes

    def remove_heads(self, loss: causes.Loss | None = None) -> "View":
        """Fill `effects` with what each head's removal does: one more run of the model a head."""
        self.effects = causes.remove_heads(self._model, self._inputs, self.calls, loss)
        return self

    def remove_key(
        self,
        key: int,
        layer: int | str | None = None,
        head: int | None = None,
        loss: causes.Loss | None = None,
    ) -> float:
        """How far the output moves (or the loss rises) when no query may look at a key."""
        at = None if layer is None else self.call(layer).layer
        return causes.remove_key(self._model, self._inputs, key, at, head, loss)

    # out

    def to_plain(self) -> dict[str, Any]:
        """Everything but the maps, ready for JSON."""
        layers = [
            {
                "layer": c.layer,
                "name": c.name,
                "role": c.role,
                "way": c.way,
                "heads": c.heads,
                "n": c.n,
                "m": c.m,
            }
            for c in self.calls
        ]
        plain: dict[str, Any] = {"title": self.title, "layers": layers, "heads": self.rows()}
        return plain | {"missed": list(self.missed)}

    def save(self, path: str | Path) -> Path:
        """Write a page (.html), a picture (.svg, .png, .pdf) or the numbers (.json)."""
        path = Path(path)
        kind = path.suffix.lower()
        if kind not in (".html", ".json", ".svg", ".png", ".pdf"):
            raise FormatError(f"{path.name}: save knows .html, .json, .svg, .png and .pdf")
        try:
            if kind == ".html":
                from .report import page

                path.write_text(page(self), encoding="utf-8")
            elif kind == ".json":
                path.write_text(json.dumps(self.to_plain(), indent=1) + "\n", encoding="utf-8")
            else:
                from .figures import overview

                overview(self).savefig(path)
        except OSError as e:
            raise RegardError(
                f"{path} cannot be written: {e.strerror or e}; name a folder you may write to"
            ) from e
        return path

    def _repr_html_(self) -> str:
        from .report import inline

        return inline(self)

    def __repr__(self) -> str:
        ways = ", ".join(sorted({c.way for c in self.calls}))
        heads = sum(c.heads for c in self.calls)
        said = f"; not seen: {'; '.join(self.missed)}" if self.missed else ""
        return f"<View of {self.title}: {len(self.calls)} layers, {heads} heads ({ways}){said}>"
