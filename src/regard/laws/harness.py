"""A target in use: which dtypes and shapes it takes, draws for its cases, calls whose outputs are looked at."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from .. import reference
from ..pattern import causal, documents, every, lengths, window
from .law import Case, Space
from .target import Function, Model, Part, Target

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
SMALL = {
    "b": (1, 2, 3),
    "h": (1, 2, 3),
    "n": (1, 2, 3, 5, 7, 11),
    "d_k": (1, 2, 3, 5, 8),
    "d_v": (1, 2, 3, 5),
}


class WrongShape(Exception):
    """A target that gave something else than a tensor of the shape it owes."""


class Asked(NamedTuple):
    """Options of a call, and what they say in one table: True = may look; None = every pair."""

    options: dict[str, Any]
    allowed: Bool[Tensor, "..."] | None


class Lab:
    """One target, one dtype. `begin(case)` seeds the draws, so that a case is the same each time."""

    def __init__(
        self, target: Target, found: dict[str, bool] | None = None, dtype: torch.dtype | None = None
    ):
        self.target = target
        self.found = {} if found is None else found
        self.device = torch.device(target.device)
        self.dtype = dtype or next((DTYPES[name] for name in DTYPES if self.takes(name)), torch.float32)
        self.random = torch.Generator().manual_seed(0)
        self.calls = 0
        self._modules: dict[torch.dtype, nn.Module] = {}

    def takes(self, word: str) -> bool:
        """Claimed, or found out by trying."""
        said = self.target.says(word)
        return bool(self.found.get(word, False) if said is None else said)

    @property
    def slack(self) -> float:
        """How many times the error of an output a gradient may have: 1e-10 for 1e-12, 1e-4 for 1e-5."""
        return 100.0 if self.dtype == torch.float64 else 10.0

    def begin(self, case: Case) -> None:
        self.random = torch.Generator().manual_seed(case.get("seed", 0))

    def randn(self, *shape: int) -> Float[Tensor, "..."]:
        return self.here(torch.randn(*shape, dtype=torch.float64, generator=self.random))

    def rand(self, *shape: int) -> Float[Tensor, "..."]:
        return torch.rand(*shape, dtype=torch.float64, generator=self.random).to(self.device)

    def below(self, high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, high, shape, generator=self.random).to(self.device)

    def shuffled(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.random).to(self.device)

    def here(self, x: Tensor) -> Tensor:
        """x where the target computes, in its dtype if x is a float."""
        return x.to(self.device, self.dtype) if x.is_floating_point() else x.to(self.device)

    # Functions

    @property
    def function(self) -> Function:
        assert isinstance(self.target, Function)
        return self.target

    def space(self, **fields: Any) -> Space:
        """The sizes of an attention call as this target takes them, and further fields. None leaves one out."""
        sizes: dict[str, Any] = dict(SMALL)
        if self.takes("n≠m"):
            sizes["m"] = SMALL["n"]
        if not self.takes("d_v≠d_k"):
            del sizes["d_v"]
        sizes |= fields
        if isinstance(self.target, Function):
            for name, only in self.target.sizes.items():
                if sizes.get(name) is not None:
                    sizes[name] = only
        return {name: values for name, values in sizes.items() if values is not None}

    def qkv(self, c: Case, learn: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Standard normal q, k, v of the sizes of a case."""
        kv, m = c.get("h_kv", c.h), c.get("m", c.n)
        q, k = self.randn(c.b, c.h, c.n, c.d_k), self.randn(c.b, kv, m, c.d_k)
        v = self.randn(c.b, kv, m, c.get("d_v", c.d_k))
        return (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()) if learn else (q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **asked: Any) -> Tensor:
        """o, of the shape and dtype it must have."""
        self.calls += 1
        out = self.function.call(q, k, v, **asked)
        o = out[0] if isinstance(out, tuple) else out
        owed = (*q.shape[:-1], v.shape[-1])
        if not isinstance(o, Tensor) or tuple(o.shape) != owed:
            got = f"shape {tuple(o.shape)}" if isinstance(o, Tensor) else type(o).__name__
            raise WrongShape(f"gave {got}; q {tuple(q.shape)} over v {tuple(v.shape)} owe {owed}")
        if o.dtype != q.dtype:
            raise WrongShape(f"gave {o.dtype} for {q.dtype}")
        return o

    def attend_lse(self, q: Tensor, k: Tensor, v: Tensor, **asked: Any) -> tuple[Tensor, Tensor]:
        self.calls += 1
        out = self.function.call(q, k, v, lse=True, **asked)
        if not isinstance(out, tuple) or len(out) != 2:
            raise WrongShape(f"lse=True owes a pair (o, lse); it gave {type(out).__name__}")
        o, lse = out
        if tuple(lse.shape) != tuple(q.shape[:-1]):
            raise WrongShape(
                f"lse has shape {tuple(lse.shape)}; q {tuple(q.shape)} owes {tuple(q.shape[:-1])}"
            )
        return o, lse

    def weights(self, q: Tensor, k: Tensor, **asked: Any) -> Float[Tensor, "b h n m"]:
        """The weights, seen from outside: o is linear in v, so values e_1 … e_m give one column each."""
        m, wide = (
            k.shape[-2],
            k.shape[-2] if self.takes("d_v≠d_k") and not self._fixed("d_v") else q.shape[-1],
        )
        eye = torch.eye(m, device=q.device, dtype=q.dtype)
        columns = []
        for j in range(0, m, wide):
            e = torch.zeros(m, wide, device=q.device, dtype=q.dtype)
            e[:, : min(wide, m - j)] = eye[:, j : j + wide]
            o = self.attend(q, k, e.expand(*k.shape[:-1], wide).contiguous(), **asked)
            columns.append(o[..., : min(wide, m - j)])
        return torch.cat(columns, -1)

    def _fixed(self, size: str) -> bool:
        return size in self.function.sizes

    def formula(self, q, k, v, allowed=None, *, bias=None, scale=None) -> reference.Attended:
        """What the reference gives, in float64, for the same numbers."""
        q, k, v = (x.double() for x in (q, k, v))
        k, v = (reference.repeat_heads(x, q.shape[1]) for x in (k, v))
        bias = None if bias is None else bias.double()
        return reference.attend(q, k, v, allowed, bias=bias, scale=scale)

    def standing(self, n: int, m: int) -> int:
        """Where query 0 stands, by the target's alignment."""
        return m - n if self.target.alignment == "bottom-right" else 0

    def hidings(self, *, some: bool = False) -> tuple[str, ...]:
        """The ways to hide pairs that this target knows; without `some`, nothing hidden is one."""
        by_claim = {
            "causal": ("causal",),
            "mask": ("random", "band", "columns", "per head"),
            "lengths": ("lengths",),
            "window": ("window",),
            "documents": ("documents",),
        }
        ways = [way for claim, ways in by_claim.items() if self.takes(claim) for way in ways]
        return (*(() if some else ("nothing",)), *ways)

    def hide(self, way: str, b: int, h: int, n: int, m: int) -> Asked:
        """How to ask for this way of hiding, and its table; each query keeps at least one key."""
        i = torch.arange(n, device=self.device)[:, None]
        j = torch.arange(m, device=self.device)
        match way:
            case "nothing":
                return Asked({}, None)
            case "causal":
                table = causal().allows(i + self.standing(n, m), j)
                return Asked({"causal": True}, table)
            case "random" | "per head":
                shape = (n, m) if way == "random" else (b, h, n, m)
                table = (self.rand(*shape) < 0.5) | (j == i % m)
            case "band":
                table = window(2).allows(i, j) | (j == i % m)
            case "columns":  # section 15.6, reading A
                table = window(2).allows(i, j) | every(4).allows(i, j)
            case "lengths":
                l = self.below(m + 1, b, low=1)
                return Asked({"lengths": l}, lengths(l).allows(i, j))
            case "window":
                reach = (int(self.below(4)), int(self.below(3)))
                return Asked({"window": reach}, window(*reach).allows(i + self.standing(n, m), j))
            case "documents":
                ids = (self.rand(b, n) < 0.4).long().cumsum(-1)
                return Asked({"documents": ids}, documents(ids).allows(i, j))
            case _:
                raise AssertionError(way)
        return Asked({"allowed": table}, table)

    def fits(self, c: Case) -> bool:
        """Whether a way of hiding makes sense for these sizes: each query must keep a key."""
        n, m, way = c.n, c.get("m", c.n), c.get("hide", "nothing")
        if c.get("h_kv") is not None and c.h % c.h_kv:
            return False
        if way in ("causal", "window") and n != m:
            ends = self.target.alignment
            return ends is not None and (n <= m if ends == "bottom-right" else way == "causal" or n <= m)
        return way != "documents" or n == m

    # Models

    @property
    def model(self) -> Model:
        assert isinstance(self.target, Model)
        return self.target

    def module(self, training: bool = False) -> nn.Module:
        """A copy of the module in this lab's dtype; in evaluation unless told."""
        if self.dtype not in self._modules:
            self._modules[self.dtype] = copy.deepcopy(self.model.module).to(self.device, self.dtype)
        return self._modules[self.dtype].train(training)

    def fresh(self) -> nn.Module:
        """A copy of one's own, to change."""
        return copy.deepcopy(self.module())

    def sequence(self, b: int, n: int) -> Tensor:
        """An input of n positions: token ids, vectors, or images (then n says nothing)."""
        if self.model.image is not None:
            return self.randn(b, *self.model.image)
        return self._draw(b, n, self.model.vocab, self.model.d_model)

    def context(self, b: int, m: int) -> Tensor | None:
        """The other sequence, of a model that cannot do without one."""
        return None if self.model.of == "attention" or not self.takes("context") else self.other(b, m)

    def other(self, b: int, m: int) -> Tensor:
        """Another sequence to look at."""
        if self.model.d_context is not None:
            return self.randn(b, m, self.model.d_context)
        return self._draw(b, m, self.model.vocab, self.model.d_model)

    def _draw(self, b: int, n: int, vocab: int | None, width: int | None) -> Tensor:
        if vocab is not None:
            return self.below(vocab, b, n, low=min(4, vocab - 2))  # 0 … 3 are often special
        assert width is not None
        return self.randn(b, n, width)

    def others(self, x: Tensor) -> Tensor:
        """An input of the same shape, different at every position."""
        if x.is_floating_point():
            return self.randn(*x.shape) * 3.0
        vocab = self.model.vocab
        assert vocab is not None
        low = min(4, vocab - 2)
        shift = self.below(vocab - low, *x.shape, low=1) if vocab - low > 1 else 1
        return low + (x - low + shift) % (vocab - low)

    def run(
        self, x: Tensor, context: Tensor | None = None, module: nn.Module | None = None, **asked: Any
    ) -> Tensor:
        """The outputs of an input: (b, n, d), or (b, d) where they are pooled."""
        self.calls += 1
        module = self.module() if module is None else module
        given = (x,) if context is None else (x, context)
        out = self.model.call(module, *given, **asked)
        o = out[0] if isinstance(out, tuple) else out
        if not isinstance(o, Tensor):
            raise WrongShape(f"gave {type(o).__name__}, no tensor")
        if self.model.image is None:
            owed = x.shape[:1] if self.takes("pooled") else x.shape[:2]
            if o.shape[:-1] != owed:
                kind = "one vector a sequence" if self.takes("pooled") else "one vector a position"
                raise WrongShape(f"gave shape {tuple(o.shape)} for {tuple(x.shape)}: {kind} is owed")
        return o

    @property
    def part(self) -> Part:
        assert isinstance(self.target, Part)
        return self.target


def probe(target: Target) -> tuple[dict[str, bool], dict[str, str]]:
    """What a target can do beyond what it says, found by calling it: word → yes or no, and in words why not."""
    found: dict[str, bool] = {"float64": True} if isinstance(target, Part) else {}
    why: dict[str, str] = {}
    probes = (
        FUNCTION_PROBES if isinstance(target, Function) else MODEL_PROBES if isinstance(target, Model) else {}
    )
    for word, attempt in probes.items():
        if target.says(word) is not None:
            continue
        try:
            attempt(Lab(target, found, torch.float32))
            found[word] = True
        except Exception as e:  # whatever a stranger's code raises
            found[word], why[word] = False, first_line(e)
    return found, why


def first_line(e: BaseException) -> str:
    text = str(e).strip().splitlines()
    return f"{type(e).__name__}: {text[0]}" if text else type(e).__name__


def sized(target: Function, **sizes: int) -> Case:
    """A case of these sizes, or the nearest ones that the target takes."""
    only = {
        name: min(values, key=lambda s: abs(s - sizes[name]))
        for name, values in target.sizes.items()
        if name in sizes
    }
    return Case({**sizes, **only, "seed": 0})


def plain_call(lab: Lab, dtype: torch.dtype | None = None, **more: int) -> Tensor:
    """One ordinary call: 7 positions, 2 heads of 5. That a NaN comes out is for the laws to say."""
    c = sized(lab.function, **{"b": 2, "h": 2, "n": 7, "d_k": 5, **more})
    lab.begin(c)
    q, k, v = (x.to(dtype or lab.dtype) for x in lab.qkv(c))
    return lab.attend(q, k, v)


def _gradients(lab: Lab) -> None:
    c = sized(lab.function, b=1, h=2, n=3, d_k=5)
    lab.begin(c)
    q, k, v = lab.qkv(c, learn=True)
    torch.autograd.grad(lab.attend(q, k, v).sum(), (q, k, v))


def _both(lab: Lab) -> None:
    if not (lab.takes("mask") and lab.takes("causal")):
        raise NotImplementedError("no mask and causal to be asked for")
    c = sized(lab.function, b=1, h=2, n=5, d_k=5)
    lab.begin(c)
    lab.attend(*lab.qkv(c), causal=True, allowed=torch.ones(c.n, c.n, dtype=torch.bool, device=lab.device))


FUNCTION_PROBES: dict[str, Callable[[Lab], Any]] = {
    "float32": lambda lab: plain_call(lab),
    "float64": lambda lab: plain_call(lab, torch.float64),
    "bfloat16": lambda lab: plain_call(lab, torch.bfloat16),
    "float16": lambda lab: plain_call(lab, torch.float16),
    "n≠m": lambda lab: plain_call(lab, n=7, m=11),
    "d_v≠d_k": lambda lab: plain_call(lab, d_k=5, d_v=3),
    "grouped": lambda lab: plain_call(lab, h=4, h_kv=2),
    "grad": _gradients,
    "mask and causal": _both,
}


def model_call(lab: Lab) -> Tensor:
    """One ordinary call of a model: 5 positions, a batch of 2."""
    lab.begin(Case(seed=0))
    n = min(5, lab.model.longest)
    with torch.no_grad():
        return lab.run(lab.sequence(2, n), lab.context(2, n))


def _in_float64(lab: Lab) -> None:
    out = model_call(Lab(lab.target, lab.found, torch.float64))
    if out.dtype != torch.float64:
        raise WrongShape(f"gave {out.dtype} for float64")


MODEL_PROBES: dict[str, Callable[[Lab], Any]] = {"float32": model_call, "float64": _in_float64}
