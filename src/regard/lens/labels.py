"""Labels from the inputs of a model: the names of tokens, which tokens are padding, the patches of an image."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ..errors import ShapeError, SpecError
from .calls import Positions, Role
from .patch_grid import Grid, square_grid
from .products import Rows

TokenNames = tuple[tuple[str, ...], ...]
SOURCE_IDS, TARGET_IDS = ("input_ids", "source", "src", "x"), ("decoder_input_ids", "target", "tgt")
SOURCE_MASKS, TARGET_MASKS = ("attention_mask",), ("decoder_attention_mask",)


@dataclass(frozen=True, eq=False)
class Side:
    """One input sequence of a model: a name for each token, and which tokens are not padding."""

    names: TokenNames
    valid: Bool[Tensor, "b n"] | None = None


@dataclass(frozen=True, eq=False)
class Labels:
    """The sequences of one run."""

    source: Side | None = None
    target: Side | None = None
    image: Float[Tensor, "c height width"] | None = None
    grid: Grid | None = field(default=None)

    def of(
        self, name: str, role: Role, shape: tuple[int, int, int, int], positions: Positions
    ) -> tuple[Side, Side]:
        """The sequences of the queries and of the keys of a call, or the parts of them that it has."""
        b, _, n, m = shape
        decoder = self.target is not None and (role == "cross" or "decoder" in name.lower())
        own = self.target if decoder else self.source
        queries = self._part(own, b, n, positions.queries)
        keys = self._part(self.source if role == "cross" else own, b, m, positions.keys)
        return queries, keys

    def _part(self, side: Side | None, b: int, length: int, rows: Rows | None) -> Side:
        named = self._fit(side, b, length)
        if rows is None or rows.size == rows.length or rows.size != length:
            return named or _numbered(b, 0, length)
        whole, part = self._fit(side, b, rows.length), slice(rows.start, rows.start + rows.size)
        if whole is None:
            return named or _numbered(b, rows.start, length)
        valid = None if whole.valid is None else whole.valid[:, part]
        return Side(tuple(names[part] for names in whole.names), valid)

    def _fit(self, side: Side | None, b: int, length: int) -> Side | None:
        """The names of a sequence of this length, if there are any."""
        if side is not None and len(side.names) == b and all(len(row) == length for row in side.names):
            return side
        if self.grid is not None and length == self.grid.tokens:
            return Side((_patches(self.grid),) * b)
        return None


def _numbered(b: int, start: int, count: int) -> Side:
    return Side((tuple(str(i) for i in range(start, start + count)),) * b)


def read(inputs: Any, tokens: Any = None, grid: Any = None, image: Any = None) -> Labels:
    """The labels of `inputs`; `tokens` are their names, or a tokenizer that gives them."""
    source_ids, target_ids = _ids(inputs)
    given = {"source": tokens, "target": tokens}
    if isinstance(tokens, Mapping):
        if unknown := set(tokens) - {"source", "target"}:
            raise SpecError(f"tokens has the key {sorted(unknown)[0]!r}; its keys are 'source' and 'target'")
        given = {"source": tokens.get("source"), "target": tokens.get("target")}
    elif target_ids is not None and not _is_tokenizer(tokens):
        given["target"] = None
    pixels = _pixels(inputs)
    if image is None and pixels is not None:
        image = _as_rgb(pixels[0])
    return Labels(
        _side(given["source"], source_ids, _mask(inputs, SOURCE_MASKS)),
        _side(given["target"], target_ids, _mask(inputs, TARGET_MASKS)),
        image,
        _grid(grid),
    )


def lengths_of(shape: tuple[int, int, int, int], positions: Positions) -> set[tuple[int, int]]:
    """(batch rows, tokens) of the sequences whose names a call can show."""
    parts = [shape[2], shape[3], *(rows.length for rows in positions if rows is not None)]
    return {(shape[0], length) for length in parts}


def check_used(labels: Labels, known: set[tuple[int, int]], tokens: Any, grid: Any) -> None:
    """Refuse names, and a grid, that fit no attention call of the run: they would not be shown anywhere."""
    lengths = sorted(known)
    found = ", ".join(f"{b} rows of {length}" for b, length in lengths)
    for side in (labels.source, labels.target) if tokens is not None and not _is_tokenizer(tokens) else ():
        counts = {len(row) for row in side.names} if side is not None else set()
        if side is not None and not any((len(side.names), count) in lengths for count in counts):
            names = ", ".join(map(str, sorted(counts)))
            raise ShapeError(f"tokens has {len(side.names)} rows of {names}; the attention has {found}")
    if grid is not None and labels.grid is not None and labels.grid.tokens not in {x for _, x in lengths}:
        raise ShapeError(f"grid={grid!r} has {labels.grid.tokens} tokens; the attention has {found}")


def grid_for(labels: Labels, inputs: Any, batch: int, tokens: int) -> Grid | None:
    """The given grid, or the grid of an image of this shape in this many tokens; None for windows of the image."""
    if labels.grid is not None:
        return labels.grid
    pixels = _pixels(inputs)
    return None if pixels is None or len(pixels) != batch else square_grid(tokens, *pixels.shape[-2:])


def _grid(given: Any) -> Grid | None:
    if given is None or isinstance(given, Grid):
        return given
    if isinstance(given, tuple) and len(given) in (2, 3):
        return Grid(*given)
    raise SpecError(f"grid={given!r}: use (rows, columns) or (rows, columns, tokens before the patches)")


def _side(tokens: Any, ids: Tensor | None, valid: Tensor | None) -> Side | None:
    if tokens is not None and not _is_tokenizer(tokens):
        names = _names(tokens)
        if ids is not None and [len(r) for r in names] != [ids.shape[1]] * len(ids):
            counts = ", ".join(str(len(r)) for r in names)
            raise ShapeError(
                f"tokens has {len(names)} rows of {counts}; the input has {len(ids)} rows of {ids.shape[1]}"
            )
        return Side(names, valid)
    if ids is None:
        return None
    if tokens is None:
        names = tuple(tuple(str(i) for i in row) for row in ids.tolist())
    else:
        convert = getattr(tokens, "convert_ids_to_tokens", tokens)
        names = tuple(tuple(str(t) for t in convert(row)) for row in ids.tolist())
    return Side(names, valid if valid is not None and valid.shape == ids.shape else None)


def _names(tokens: Any) -> TokenNames:
    if isinstance(tokens, Tensor):
        raise SpecError(
            f"tokens is a tensor of shape {tuple(tokens.shape)}; several inputs are one tuple: rg.look(model, (a, b))"
        )
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        raise SpecError(
            f"tokens={tokens!r}: use a list of strings, one list per batch row, {{'source': …, 'target': …}}, "
            f"or a tokenizer"
        )
    rows = [tokens] if tokens and isinstance(tokens[0], str) else tokens
    return tuple(tuple(str(t) for t in row) for row in rows)


def _is_tokenizer(tokens: Any) -> bool:
    return hasattr(tokens, "convert_ids_to_tokens") or callable(tokens)


def _ids(inputs: Any) -> tuple[Tensor | None, Tensor | None]:
    if isinstance(inputs, Mapping):
        return _named(inputs, SOURCE_IDS, _is_ids), _named(inputs, TARGET_IDS, _is_ids)
    ids = [x for x in _positional(inputs) if _is_ids(x)]
    return (ids[0] if ids else None), (ids[1] if len(ids) > 1 else None)


def _named(inputs: Mapping[str, Any], names: tuple[str, ...], fits: Any) -> Tensor | None:
    return next((inputs[n] for n in names if n in inputs and fits(inputs[n])), None)


def _positional(inputs: Any) -> list[Any]:
    return list(inputs) if isinstance(inputs, tuple | list) else [inputs]


def _is_ids(x: Any) -> bool:
    integer = isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex()
    return integer and x.dim() == 2 and x.dtype != torch.bool


def _mask(inputs: Any, names: tuple[str, ...]) -> Tensor | None:
    if not isinstance(inputs, Mapping):
        return None
    mask = _named(inputs, names, lambda x: isinstance(x, Tensor) and x.dim() == 2)
    return None if mask is None else mask != 0


def _pixels(inputs: Any) -> Tensor | None:
    values = list(inputs.values()) if isinstance(inputs, Mapping) else _positional(inputs)
    images = (x for x in values if isinstance(x, Tensor) and x.is_floating_point() and x.dim() == 4)
    return next((x for x in images if x.shape[1] in (1, 3)), None)


def _as_rgb(pixels: Float[Tensor, "c height width"]) -> Float[Tensor, "3 height width"]:
    """The image scaled to 0 … 1, with three channels."""
    x = pixels.detach().float().cpu()
    x = (x - x.min()) / (x.max() - x.min()).clamp(min=1e-9)
    return x.expand(3, -1, -1) if x.shape[0] == 1 else x


def _patches(grid: Grid) -> tuple[str, ...]:
    before = ["class" if i == 0 else f"extra {i}" for i in range(grid.skip)]
    return (*before, *(f"{y},{x}" for y in range(grid.rows) for x in range(grid.columns)))
