"""rg.look: run a model once, record its attention calls, compute maps and statistics from them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ..compat import version
from ..errors import FormatError, RegardError, ShapeError, SpecError, nearest
from ..nested import tensors_in
from . import ablation, head_similarity, labels
from . import relations as marked_pairs
from .calls import AttentionCall, is_causal_call, is_index, query_offset, tensors_of
from .head_kinds import RULES, HeadKind, Rule, classify_heads
from .intercept import InterceptedCall, Interceptor, intercept
from .rollout import rollout
from .run_model import run
from .statistics import HeadStatistics, head_statistics
from .text_table import Table
from .token_matches import SEPARATORS, Tokens, numbered

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
    """Run the model once on these inputs, with its usual kernels, and record each attention call.

    inputs: a mapping (by name), a tuple (in order), or a single argument. tokens: names for the ids: a list per batch
    row, {"source": …, "target": …}, or a tokenizer. grid: (rows, columns[, tokens before them]) of an image's
    patches; inferred if an input is an image. keep: with False, statistics are computed while the model runs and no
    queries and keys are stored, so that there are no maps (for very long inputs); "copy" copies them (for a model
    that overwrites its tensors). The model runs in its current mode, eval() or train(), without gradients. Several
    threads may call `look` at the same time; what other threads run is not recorded.
    """
    if keep not in (True, False, "copy"):
        raise RegardError(f"keep={keep!r}; use True, False or 'copy'")
    _refuse_meta(model, inputs)
    named = labels.read(inputs, tokens, grid, image)
    collector = _CallCollector(named, inputs, separators, keep)
    with torch.no_grad(), intercept(model, collector.add) as interceptor:
        run(model, inputs)
    if not collector.calls and interceptor.empty:
        raise ShapeError(f"{interceptor.empty[0]}: there is no attention to show; pass at least one token")
    if not collector.calls:
        raise RegardError(_no_calls(model, interceptor))
    labels.check_used(named, collector.lengths, tokens, grid)
    return View(collector, tuple(interceptor.missed), model, inputs)


def _refuse_meta(model: Any, inputs: Any) -> None:
    parameters = model.parameters() if isinstance(model, nn.Module) else ()
    if any(x.is_meta for x in (*parameters, *tensors_in(inputs))):
        raise SpecError(
            f"{type(model).__name__} or its input is on the device meta, where tensors have shapes but no numbers: "
            "there are no weights to show; build it on the CPU or a GPU, or use rg.cost"
        )


def _no_calls(model: Any, ran: Interceptor) -> str:
    text = f"no attention call was found while {type(model).__name__} ran ({ran.module_calls} module calls)"
    if ran.missed:
        return f"{text}; {'; '.join(ran.missed)}"
    if ran.softmaxes:
        return (
            f"{text}; a softmax ran, but no matrix product of its result with values, summed over the axis of the "
            "softmax, was recognized"
        )
    return f"{text}: it has none, computes weights without a softmax, or runs outside PyTorch"


class _CallCollector:
    """Collects and labels the calls of one run."""

    def __init__(self, named: labels.Labels, inputs: Any, separators: tuple[str, ...], keep: Keep):
        self.labels, self.inputs, self.separators, self.keep = named, inputs, separators, keep
        self.calls: list[AttentionCall] = []
        self.statistics: dict[int, HeadStatistics] = {}
        self.lengths: set[tuple[int, int]] = set()  # (batch rows, tokens) of the sequences of the calls
        self._runs: dict[str, int] = {}

    def add(self, call: InterceptedCall) -> None:
        source = call.source
        if self.keep == "copy" or any(x.is_inference() for x in tensors_of(source)):
            fields = ("q", "k") if hasattr(source, "q") else ("table",)
            source = replace(source, **{f: getattr(source, f).clone() for f in fields})
        if self.labels.grid is None and (
            grid := labels.grid_for(self.labels, self.inputs, source.shape[0], source.shape[2])
        ):
            self.labels = replace(self.labels, grid=grid)
        queries, keys = self.labels.of(call.name, call.role, source.shape, call.positions)
        self.lengths |= labels.lengths_of(source.shape, call.positions)
        offset = query_offset(source, call.role, call.positions)
        runs = self._runs[call.name] = self._runs.get(call.name, 0) + 1
        recorded = AttentionCall(
            layer=len(self.calls),
            name=call.name if runs == 1 else f"{call.name}#{runs}",
            role=call.role,
            implementation=call.implementation,
            source=source,
            shape=source.shape,
            causal=is_causal_call(source, call.role, offset),
            query_offset=offset,
            versions=tuple(version(x) for x in tensors_of(source)),
            queries=queries.names,
            keys=keys.names,
            valid=queries.valid,
        )
        if not self.keep:
            self.statistics[recorded.layer] = self.statistics_of(recorded)
            recorded = replace(recorded, source=None)
        self.calls.append(recorded)

    def statistics_of(self, call: AttentionCall) -> HeadStatistics:
        device = tensors_of(call.source)[0].device.type if call.source is not None else "cpu"
        with torch.autocast(device, enabled=False):
            return head_statistics(call, self.tokens(call), self.labels.grid)

    def tokens(self, call: AttentionCall) -> Tokens | None:
        named = self.labels.source is not None or self.labels.target is not None
        if not named or _are_indices(call.queries) or _are_indices(call.keys):
            return None
        return numbered(call.queries, call.keys, self.separators)


def _are_indices(names: labels.TokenNames) -> bool:
    """Whether the names are only positions: 0, 1, 2, … ."""
    return all(row == tuple(str(i) for i in range(len(row))) for row in names)


class View:
    """The attention calls of one run of a model.

    heads: a table, one row per head. map(layer, head): its weights. save("heads.html"): a page that needs no network;
    also ".json", ".svg", ".png" and ".pdf". missed: what could not be recorded, in sentences.
    """

    def __init__(self, collector: _CallCollector, missed: tuple[str, ...], model: Any, inputs: Any):
        self.calls: tuple[AttentionCall, ...] = tuple(collector.calls)
        self.missed = missed
        self.title = type(getattr(model, "_orig_mod", model)).__name__
        self.grid: tuple[int, int] | None = None
        self.skip = 0
        if (grid := collector.labels.grid) is not None:
            self.grid, self.skip = (grid.rows, grid.columns), grid.skip
        self.image = collector.labels.image
        self.effects: dict[tuple[int, int], float] = {}
        self.rules: tuple[Rule, ...] = RULES
        self._collector, self._model, self._inputs = collector, model, inputs

    # maps

    def call(self, layer: int | str) -> AttentionCall:
        """A call by its number, its name, or the end of its name."""
        if isinstance(layer, int):
            if not 0 <= layer < len(self.calls):
                raise ShapeError(
                    f"layer {layer}: there are {len(self.calls)} layers, 0 to {len(self.calls) - 1}"
                )
            return self.calls[layer]
        exact = [c for c in self.calls if c.name == layer]
        ends = exact or [c for c in self.calls if c.name.endswith(f".{layer}")]
        if len(ends) == 1:
            return ends[0]
        names = [c.name for c in self.calls]
        if ends:
            raise ShapeError(f"{layer!r} matches {len(ends)} layers: {', '.join(c.name for c in ends)}")
        raise ShapeError(f"no layer is named {layer!r}; {nearest(layer, names)}")

    def map(self, layer: int | str, head: int, batch: int = 0) -> Float[Tensor, "n m"]:
        """The weights of one head: row i is the attention of query i."""
        return self.call(layer).weights([head], None, batch)[0]

    def scores(self, layer: int | str, head: int, batch: int = 0) -> Float[Tensor, "n m"]:
        """The input of the softmax of one head; −∞ at pairs that are not allowed."""
        return self.call(layer).scores([head], None, batch)[0]

    def queries(self, layer: int | str, batch: int = 0) -> tuple[str, ...]:
        call = self.call(layer)
        return call.queries[call.region(batch=batch).batch]

    def keys(self, layer: int | str, batch: int = 0) -> tuple[str, ...]:
        call = self.call(layer)
        return call.keys[call.region(batch=batch).batch]

    def row(self, layer: int | str, head: int, query: int | str, batch: int = 0) -> dict[str, float]:
        """The weights of one query, by the names of the keys; a name that occurs twice has its position added.

        query: its position, or its token if that occurs once.
        """
        names, keys = self.queries(layer, batch), self.keys(layer, batch)
        if isinstance(query, str):
            if names.count(query) != 1:
                raise ShapeError(
                    f"the token {query!r} occurs {names.count(query)} times in batch row {batch}; use a position"
                )
            query = names.index(query)
        weights = self.call(layer).weights([head], [query], batch)[0, 0].tolist()
        labels = [k if keys.count(k) == 1 else f"{k} ({j})" for j, k in enumerate(keys)]
        return dict(zip(labels, weights))

    # numbers

    @cached_property
    def statistics(self) -> tuple[HeadStatistics, ...]:
        """The statistics of each layer."""
        return tuple(self.compute(c.layer) for c in self.calls)

    def compute(self, layer: int) -> HeadStatistics:
        """The statistics of one layer, computed once. For long inputs, call it per layer to report progress."""
        done = self._collector.statistics
        if layer not in done:
            done[layer] = self._collector.statistics_of(self.calls[layer])
        return done[layer]

    def mark(self, relations: marked_pairs.Relations) -> "View":
        """Mark pairs of a query and the key that it relates to, as words or as indices, and classify heads by them.

        {"agreement": [("[MASK]", "cats")], "coreference": [(0, "it", "cat")]}: (query, key) in every batch row that
        has both, or (batch row, query, key). `statistics` then have the weight on the related keys, and heads that
        attend to them are of the kind `agreement` or `coreference`.
        """
        marked = marked_pairs.read(relations)
        marked_pairs.check(self.calls, marked)
        self.statistics = tuple(
            replace(s, relations=marked_pairs.related_weights(call, marked))
            for call, s in zip(self.calls, self.statistics)
        )
        return self

    @property
    def kinds(self) -> tuple[tuple[HeadKind, ...], ...]:
        """The kind of each head of each layer, by `rules`."""
        return tuple(classify_heads(s, self.rules) for s in self.statistics)

    def rows(self) -> list[dict[str, Any]]:
        """One row per head: its layer, its kind, its statistics; None where a statistic does not apply."""
        table = []
        for call, s, of_layer in zip(self.calls, self.statistics, self.kinds):
            for head, head_kind in enumerate(of_layer):
                row: dict[str, Any] = {
                    "layer": call.layer,
                    "name": call.name,
                    "role": call.role,
                    "head": head,
                    "kind": head_kind.name,
                    "confidence": round(head_kind.confidence, 4),
                    "evidence": head_kind.evidence,
                }
                row |= {k: (v if isfinite(v) else None) for k, v in s.numbers(head).items()}
                if self.effects:
                    row["effect"] = self.effects.get((call.layer, head))
                table.append(row)
        return table

    @property
    def heads(self) -> Any:
        """`rows` as a pandas DataFrame, or as a text table where pandas is not installed."""
        try:
            import pandas
        except ImportError:
            return Table(self.rows())
        return pandas.DataFrame(self.rows())

    def agreement(self, layer: int | str, other: int | str | None = None) -> Float[Tensor, "h g"]:
        """The cosine between the maps of two heads, for each pair of heads of one layer or of two."""
        first = self.call(layer)
        return head_similarity.agreement(first, first if other is None else self.call(other))

    def angles(self, layer: int | str, of: Literal["query", "key"] = "query") -> Float[Tensor, "h h d_k"]:
        """The principal angles between the subspaces that two heads' queries (or keys) span, in radians."""
        return head_similarity.head_angles(self.call(layer), of)

    def rollout(
        self, rows: list[int] | None = None, batch: int = 0, residual: float = 0.5
    ) -> Float[Tensor, "r n"]:
        """How much of each input token reaches the top of the first stack of self-attentions."""
        stack = [c for c in self.calls if c.role == "self" and c.n == c.m == self.calls[0].n]
        if any(c.role == "cross" for c in self.calls):
            stack = [c for c in stack if "decoder" not in c.name.lower()]
        return rollout(stack, rows, batch, residual)

    # ablation

    def remove_heads(self, loss: ablation.Loss | None = None) -> "View":
        """Fill `effects` with the effect of removing each head: one more run of the model per head."""
        self.effects = ablation.remove_heads(self._model, self._inputs, self.calls, loss)
        return self

    def remove_key(
        self,
        key: int,
        layer: int | str | Sequence[int | str] | None = None,
        head: int | None = None,
        loss: ablation.Loss | None = None,
    ) -> float:
        """The relative change of the output (or the increase of the loss) if no query may attend to a key.

        layer: one, several, or None for all. An encoder-decoder has keys of two sequences, so name its layers.
        """
        given = self.calls if layer is None else [layer] if isinstance(layer, int | str) else layer
        calls = [c if isinstance(c, AttentionCall) else self.call(c) for c in given]
        for call in calls:
            call.region(None if head is None else [head])
            if not is_index(key, call.m):
                raise ShapeError(
                    f"key {key!r} of layer {call.layer} ({call.name}): it has {call.m} keys, 0 to {call.m - 1}"
                    + ("; name the layers to change: layer=[0, 1]" if layer is None else "")
                )
        return ablation.remove_key(self._model, self._inputs, key, [c.layer for c in calls], head, loss)

    # files

    def to_plain(self, maps: bool = False, batch: int = 0) -> dict[str, Any]:
        """Plain data for JSON: the tokens of a batch row and the statistics; with maps, also the weights, rounded."""
        layers: list[dict[str, Any]] = [
            {
                "layer": c.layer,
                "name": c.name,
                "role": c.role,
                "implementation": c.implementation,
                "heads": c.heads,
                "n": c.n,
                "m": c.m,
                "queries": list(c.queries[batch]),
                "keys": list(c.keys[batch]),
            }
            for c in self.calls
        ]
        if maps:
            for layer, c in zip(layers, self.calls):
                of_heads = (self.map(c.layer, head, batch).tolist() for head in range(c.heads))
                layer["maps"] = [
                    [[round(w, 6) if isfinite(w) else None for w in row] for row in weights]
                    for weights in of_heads
                ]
        plain: dict[str, Any] = {"title": self.title, "layers": layers, "heads": self.rows()}
        return plain | {"missed": list(self.missed)}

    def save(self, path: str | Path, title: str | None = None) -> Path:
        """Write a page (.html), a picture (.svg, .png, .pdf) or the numbers (.json). title: of the page."""
        path = Path(path)
        kind = path.suffix.lower()
        if kind not in (".html", ".json", ".svg", ".png", ".pdf"):
            raise FormatError(f"{path.name}: unknown format; accepted: .html, .json, .svg, .png and .pdf")
        try:
            if kind == ".html":
                from .html_report import page

                path.write_text(page(self, title=title), encoding="utf-8")
            elif kind == ".json":
                path.write_text(json.dumps(self.to_plain(), indent=1) + "\n", encoding="utf-8")
            else:
                from .figures import overview

                overview(self).savefig(path)
        except OSError as e:
            raise RegardError(
                f"cannot write {path}: {e.strerror or e}; choose a folder with write permission"
            ) from e
        return path

    def _repr_html_(self) -> str:
        from .html_report import inline

        return inline(self)

    def __repr__(self) -> str:
        implementations = ", ".join(sorted({c.implementation for c in self.calls}))
        heads = sum(c.heads for c in self.calls)
        missed = f"; not recorded: {'; '.join(self.missed)}" if self.missed else ""
        return f"<View of {self.title}: {len(self.calls)} layers, {heads} heads ({implementations}){missed}>"
