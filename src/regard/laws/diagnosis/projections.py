"""Finds the matrices of an attention module among its parameters, by their names and shapes."""

import copy
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from ..adapters.names import HEAD_COUNTS, KV_HEAD_COUNTS, size_of, source_of, text_of
from .cause import Cause

FILLERS = {
    "proj",
    "linear",
    "lin",
    "to",
    "w",
    "fc",
    "layer",
    "weight",
    "projection",
    "net",
    "map",
    "dense",
    "conv",
    "attn",
}
TABLES = re.compile(r"table|relative|rel_pos|pos_?emb|position", re.I)
ROLES = {
    "q": ("q", "query", "queries", "wq", "qs"),
    "k": ("k", "key", "keys", "wk", "ks"),
    "v": ("v", "value", "values", "wv", "vs"),
    "o": ("o", "out", "output", "wo", "c", "merge", "unify", "unifyheads", "final", "mix"),
    "qkv": ("qkv", "in", "cattn", "querykeyvalue", "wqkv", "kqv", "packed", "fused", "all"),
    "kv": ("kv", "wkv", "keyvalue"),
}


@dataclass(frozen=True)
class Matrix:
    """y = x @ w + b, with w of shape (in, out)."""

    w: Tensor
    b: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        y = x @ self.w
        return y if self.b is None else y + self.b

    def part(self, columns: Any) -> "Matrix":
        return Matrix(self.w[:, columns], None if self.b is None else self.b[columns])


@dataclass(frozen=True)
class Arrangement:
    """The projections of a module and how heads are split. order: "(h d)" or "(d h)"."""

    q: Matrix
    k: Matrix
    v: Matrix
    o: Matrix | None
    heads: int
    kv_heads: int
    order: str = "(h d)"
    rotary: str = ""  # "", "half" or "pairs"
    residual: bool = False
    packing: str = ""  # how q, k and v are packed in one matrix, if not as blocks in this order
    alibi: bool = False
    projected: dict = field(default_factory=dict, init=False, compare=False, repr=False)  # of samples, kept

    def split(self, y: Tensor, heads: int) -> Tensor:
        return rearrange(y, f"b n {self.order} -> b h n d", h=heads)

    def project(self, x: Tensor, source: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.split(self.q(x), self.heads)
        k, v = self.split(self.k(source), self.kv_heads), self.split(self.v(source), self.kv_heads)
        if self.rotary:
            q, k = (rotated(y, self.rotary) for y in (q, k))
        return q, k, v

    def merge(self, o: Tensor, x: Tensor) -> Tensor:
        y = rearrange(o, f"b h n d -> b n {self.order}")
        y = y if self.o is None else self.o(y)
        return y + x if self.residual else y


def rotated(x: Tensor, form: str, base: float = 10000.0) -> Tensor:
    """Rotary positions 0, 1, …; half: column c is paired with c + d/2; pairs: neighboring columns."""
    d = x.shape[-1]
    if d % 2:
        return x
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * base ** (
        -torch.arange(0, d, 2, dtype=x.dtype) / d
    )
    cos, sin = angles.cos().to(x.device), angles.sin().to(x.device)
    if form == "half":
        one, two = x[..., : d // 2], x[..., d // 2 :]
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1)
    one, two = x[..., ::2], x[..., 1::2]
    return torch.stack([one * cos - two * sin, two * cos + one * sin], -1).flatten(-2)


def arrangements(module: nn.Module) -> Iterator[Arrangement]:
    """All plausible arrangements of a module's parameters in float64, the most usual first."""
    found = _matrices(module)
    heads_known = size_of(module, HEAD_COUNTS)
    kv_known = size_of(module, KV_HEAD_COUNTS)
    rotaries = ("", "half", "pairs") if mentions(module, r"rot|rope|\bcos\b|freq") else ("",)
    alibis = (True, False) if mentions(module, "alibi|slope") else (False,)
    for q, k, v, o, fixed_heads, packing in _readings(found, heads_known, kv_known):
        for heads, kv in _head_counts(q, k, fixed_heads or heads_known, kv_known):
            for order in ("(h d)", "(d h)"):
                for rotary in rotaries:
                    for residual, alibi in itertools.product((False, True), alibis):
                        if v.w.shape[1] % kv == 0 and (
                            o is None or o.w.shape[0] == heads * v.w.shape[1] // kv
                        ):
                            yield Arrangement(q, k, v, o, heads, kv, order, rotary, residual, packing, alibi)


def mentions(module: nn.Module, words: str) -> bool:
    """Whether the docstring, comments or code of a module match this regular expression."""
    return bool(re.search(words, f"{text_of(module)}\n{source_of(module)}", re.I))


def without_tables(module: nn.Module) -> nn.Module | None:
    """A copy whose tables of positions are 0; None where it has none."""
    plainer = copy.deepcopy(module)
    tables = position_tables(plainer)
    for table in tables:
        with torch.no_grad():
            table.zero_()
    return plainer if tables else None


def position_tables(module: nn.Module) -> list[Tensor]:
    """Embeddings, and parameters that are named after positions."""
    tables = [m.weight for m in module.modules() if isinstance(m, nn.Embedding)]
    named = [p for name, p in module.named_parameters() if p.dim() > 1 and TABLES.search(name)]
    return tables + [p for p in named if all(p is not table for table in tables)]


def _head_counts(q: Matrix, k: Matrix, heads: int | None, kv: int | None) -> Iterator[tuple[int, int]]:
    width, narrow = q.w.shape[1], k.w.shape[1]
    for h in [heads] if heads else [1, 2, 3, 4, 6, 8]:
        if width % h:
            continue
        d = width // h
        if narrow % d == 0 and h % max(1, narrow // d) == 0:
            yield h, narrow // d


def _role(name: str) -> str:
    """q, k, v, o, qkv or kv, from the last words of a parameter's name; "" if it has no known word."""
    words = [w for w in name.lower().split(".") if w and not w.isdigit()]
    for word in reversed(words[-2:]):
        kept = [t for t in word.split("_") if t and t not in FILLERS]
        for flat in (word.replace("_", ""), "".join(kept)):
            for role, names in ROLES.items():
                if flat in names:
                    return role
        if not kept and word.split("_")[-1] in ("proj", "fc", "dense", "linear", "projection"):
            return "o"
    return ""


def _matrices(module: nn.Module) -> list[tuple[str, str, Matrix]]:
    """(role, name, matrix) of every linear map: Linear modules, Conv1D of transformers, bare 2-D parameters."""
    found, owned = [], set()
    for name, m in module.named_modules():
        weight: Any = getattr(m, "weight", None)
        bias: Any = getattr(m, "bias", None)
        if isinstance(m, nn.Linear):
            matrix = Matrix(weight.detach().double().mT, None if bias is None else bias.detach().double())
        elif type(m).__name__ == "Conv1D" and isinstance(weight, Tensor):
            matrix = Matrix(weight.detach().double(), None if bias is None else bias.detach().double())
        elif isinstance(m, nn.Conv1d) and m.kernel_size == (1,):
            matrix = Matrix(
                weight.detach().double()[..., 0].mT, None if bias is None else bias.detach().double()
            )
        else:
            continue
        owned |= {id(p) for p in m.parameters()}
        found.append((_role(name), name, matrix))
    bare = [(n, p) for n, p in module.named_parameters() if id(p) not in owned]
    for name, p in bare:
        if p.dim() == 2 and "weight" in name:
            bias = next((b for n, b in bare if n == name.replace("weight", "bias")), None)
            found.append(
                (
                    _role(name.replace("weight", "").rstrip("_")),
                    name,
                    Matrix(p.detach().double().mT, None if bias is None else bias.detach().double()),
                )
            )
        elif p.dim() == 2:
            found.append((_role(name), name, Matrix(p.detach().double())))
        elif p.dim() == 3:  # (h, d_model, d) or (d_model, h, d)
            role = _role(name)
            w = p.detach().double()
            form = "h d e -> (h d) e" if role == "o" else "h e d -> e (h d)"
            found.append((role, name, Matrix(rearrange(w, form))))
    return found


def _stack(parts: list[Matrix], output: bool = False) -> Matrix:
    """Matrices of separate heads as one."""
    if len(parts) == 1:
        return parts[0]
    if output:
        return Matrix(torch.cat([p.w for p in parts], 0), parts[0].b)
    bias = None if parts[0].b is None else torch.cat([p.b for p in parts if p.b is not None])
    return Matrix(torch.cat([p.w for p in parts], 1), bias)


def _readings(
    found: list[tuple[str, str, Matrix]], heads: int | None, kv: int | None
) -> Iterator[tuple[Matrix, Matrix, Matrix, Matrix | None, int | None, str]]:
    by_role: dict[str, list[Matrix]] = {}
    for role, _, matrix in found:
        by_role.setdefault(role, []).append(matrix)
    counts = {len(by_role[role]) for role in "qkv" if role in by_role}
    if len(counts) > 1 or any(len({m.w.shape for m in each}) > 1 for each in by_role.values()):
        return  # several attentions, or other maps with such names
    out = _stack(by_role["o"], True) if "o" in by_role else None
    outs = [out] if out is not None else [None]
    if {"q", "k", "v"} <= set(by_role):
        count = len(by_role["q"])
        q, k, v = (_stack(by_role[r]) for r in "qkv")
        for o in outs:
            yield q, k, v, o, count if count > 1 else None, ""
        return
    if "qkv" in by_role:
        packed = by_role["qkv"][0]
        for o in outs:
            yield from ((*three, o, None, packing) for packing, *three in _packed(packed, heads, kv))
        return
    if "kv" in by_role and "q" in by_role:
        q, both = by_role["q"][0], by_role["kv"][0]
        half = both.w.shape[1] // 2
        for o in outs:
            yield q, both.part(slice(0, half)), both.part(slice(half, None)), o, None, ""
            yield q, both.part(slice(half, None)), both.part(slice(0, half)), o, None, ""
        return
    square = [m for _, _, m in found if m.w.shape[0] == m.w.shape[1]]
    if len(square) == len(found) == 4:
        yield square[0], square[1], square[2], square[3], None, ""
    elif len(square) == len(found) == 3:
        yield square[0], square[1], square[2], None, None, ""
    elif len(found) == 2 and found[0][2].w.shape[1] % 3 == 0:
        for _, *three in _packed(found[0][2], heads, kv):
            yield (*three, found[1][2], None, "")


def _packed(
    packed: Matrix, heads: int | None, kv: int | None
) -> Iterator[tuple[str, Matrix, Matrix, Matrix]]:
    """(packing, q, k, v) for q, k and v inside one matrix: as blocks or interleaved, in every order."""
    width = packed.w.shape[1]
    index = torch.arange(width)
    if heads and kv and kv != heads:
        d = width // (heads + 2 * kv)
        a, b = heads * d, (heads + kv) * d
        yield "", packed.part(index[:a]), packed.part(index[a:b]), packed.part(index[b:])
        return
    for fewer in range(1, heads or 1):  # fewer heads of k and v, if no attribute has their number
        d = packed.w.shape[0] // (heads or 1)
        if heads and heads % fewer == 0 and width == (heads + 2 * fewer) * d:
            a, b = heads * d, (heads + fewer) * d
            yield "", packed.part(index[:a]), packed.part(index[a:b]), packed.part(index[b:])
    if width % 3:
        return
    forms = [("", rearrange(index, "(t e) -> t e", t=3))]
    if heads and width % (3 * heads) == 0:
        forms.append(("per head", rearrange(index, "(h t d) -> t (h d)", t=3, h=heads)))
        forms.append(("per column", rearrange(index, "(h d t) -> t (h d)", t=3, h=heads)))
    for name, form in forms:
        for order in itertools.permutations(range(3)):  # the positions of q, k and v
            q, k, v = (packed.part(form[i]) for i in order)
            letters = "".join("qkv"[order.index(position)] for position in range(3))
            yield " ".join(w for w in (name, "" if letters == "qkv" else letters) if w), q, k, v


def has_learned_slopes(module: nn.Module) -> bool:
    return any(re.search("slope|alibi", name) for name, p in module.named_parameters() if p.requires_grad)


def _is_bare_attention(module: nn.Module) -> bool:
    """Whether the docstring excludes a residual; or it is called attention, has no norm and mentions no residual."""
    if re.search(r"\b(no|without|not|never)\b[^.;\n]{0,25}\b(residual|skip)", text_of(module), re.I):
        return True
    words = f"{type(module).__name__} {text_of(module)}"
    named = re.search("attention|attn", words, re.I) and not re.search(r"\b(block|layer)\b", words, re.I)
    normed = any("norm" in type(m).__name__.lower() for m in module.modules())
    return bool(named) and not normed and not mentions(module, "residual|skip")


def misread(a: Arrangement, module: nn.Module) -> Cause | None:
    """A cause if a fused projection is used in another order than stated, or if the input is added to the output."""
    text = text_of(module)
    named = any(re.search("qkv|in_proj", name.lower()) for name, _ in module.named_parameters())
    order = next((w for w in a.packing.split() if w not in ("per", "head", "column")), "")
    if order and (named or re.search(r"\bqkv\b|\bq, k,? (and )?v\b", text)):
        words = f"the fused projection is split in the order {', '.join(order)} instead of q, k, v"
    elif a.packing.startswith("per head") and re.search(
        r"\(3, (heads|h|n_heads|num_heads)\b|all of q\b|\bq, then k", text
    ):
        words = "the fused projection is split as (heads, 3, d), but documented as (3, heads, d)"
    elif a.residual and _is_bare_attention(module):
        return Cause(
            "the input is added to the output", "residual inside",
            "return only the attention; the block around it adds the input", "the outputs minus the input equal "
            "attention with the module's projections", "", 1, 1,
        )  # fmt: skip
    else:
        return None
    fix = "split the projection in the order of its weights"
    return Cause(words, "wrong projection", fix, "the outputs equal attention with these matrices", "", 1, 1)
