"""Runs one target: samples inputs that it accepts, calls it, and checks the shape and dtype of what it returns."""

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from .. import reference
from ..pattern import causal, documents, every, lengths, window
from ..position import alibi_slopes, rotate
from . import search
from .law import Case, Space
from .target import Function, Model, Part, Target

DTYPES = {name: getattr(torch, name) for name in ("float64", "float32", "bfloat16", "float16")}
SIZES = {
    "b": (1, 2, 3),
    "h": (1, 2, 3),
    "n": (1, 2, 3, 5, 7, 11),
    "d_k": (1, 2, 3, 5, 8),
    "d_v": (1, 2, 3, 5),
}
MASK_KINDS = {  # capability → the masks that it makes possible
    "causal": ("causal",),
    "mask": ("random", "band", "strided", "per head"),
    "lengths": ("lengths",),
    "window": ("window",),
    "documents": ("documents",),
}


FIRST_CALL = 3  # how many times the limit of a call the first one may take


class WrongOutput(Exception):
    """A target did not return a tensor of the expected shape and dtype."""


class Inexpressible(Exception):
    """A case that the target's arguments cannot express, such as a mask per head in a mask of shape (n, m)."""


class Masking(NamedTuple):
    """A mask as options of a call and as a table: True = may attend; None = every pair."""

    options: dict[str, Any]
    allowed: Bool[Tensor, "..."] | None


class Harness:
    """One target in one dtype. `seed(case)` resets the random numbers, so that a case is always the same."""

    def __init__(
        self,
        target: Target,
        probed: dict[str, bool] | None = None,
        dtype: torch.dtype | None = None,
        cache: dict[str, Any] | None = None,
    ):
        self.target = target
        self.probed = {} if probed is None else probed
        self.device = torch.device(target.device)
        self.dtype = dtype or next((DTYPES[name] for name in DTYPES if self.supports(name)), torch.float32)
        self.random = torch.Generator().manual_seed(0)
        self.cache = {} if cache is None else cache  # results that several laws of one check share
        self.calls = 0
        self._modules: dict[torch.dtype, nn.Module] = {}

    def supports(self, capability: str) -> bool:
        """Whether the target claims it or, if it neither claims nor lacks it, whether probing showed it."""
        declared = self.target.declares(capability)
        return bool(self.probed.get(capability, False) if declared is None else declared)

    @property
    def per_head_masks(self) -> bool:
        return isinstance(self.target, Function) and self.target.per_head_masks

    def _timed(self, call: Callable[..., Any], *inputs: Any, **options: Any) -> Any:
        """One call of the target, within the time limit of a call."""
        self.calls += 1
        first = not self.cache.setdefault("called", False)  # a first call may import or compile
        with search.call_limit(search.CALL_SECONDS * (FIRST_CALL if first else 1)):
            out = call(*inputs, **options)
        self.cache["called"] = True
        return out

    @property
    def slack(self) -> float:
        """The tolerance of a gradient relative to that of an output: 1e-10 for 1e-12, 1e-4 for 1e-5."""
        return 100.0 if self.dtype == torch.float64 else 10.0

    def seed(self, case: Case) -> None:
        self.random = torch.Generator().manual_seed(case.get("seed", 0))

    def randn(self, *shape: int) -> Float[Tensor, "..."]:
        return self.to_target(torch.randn(*shape, dtype=torch.float64, generator=self.random))

    def rand(self, *shape: int) -> Float[Tensor, "..."]:
        return torch.rand(*shape, dtype=torch.float64, generator=self.random).to(self.device)

    def randint(self, high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, high, shape, generator=self.random).to(self.device)

    def randperm(self, n: int) -> Tensor:
        return torch.randperm(n, generator=self.random).to(self.device)

    def to_target(self, x: Tensor) -> Tensor:
        """x on the target's device, in its dtype if x is a float."""
        return x.to(self.device, self.dtype) if x.is_floating_point() else x.to(self.device)

    # Functions

    @property
    def function(self) -> Function:
        assert isinstance(self.target, Function)
        return self.target

    def space(self, **fields: Any) -> Space:
        """The sizes of an attention call that this target accepts, and further fields. None leaves a field out."""
        sizes: dict[str, Any] = dict(SIZES)
        if self.supports("n≠m"):
            sizes["m"] = SIZES["n"]
        if not self.supports("d_v≠d_k"):
            del sizes["d_v"]
        sizes |= fields
        if isinstance(self.target, Function):
            for name, values in self.target.sizes.items():
                if sizes.get(name) is not None:
                    sizes[name] = values
        return {name: values for name, values in sizes.items() if values is not None}

    def qkv(self, c: Case, requires_grad: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Standard normal q, k, v of the sizes of a case."""
        kv, m = c.get("h_kv", c.h), c.get("m", c.n)
        q, k = self.randn(c.b, c.h, c.n, c.d_k), self.randn(c.b, kv, m, c.d_k)
        v = self.randn(c.b, kv, m, c.get("d_v", c.d_k))
        return (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()) if requires_grad else (q, k, v)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        """The target's output, after a check of its shape and dtype."""
        out = self._timed(self.function.call, q, k, v, **options)
        o = out[0] if isinstance(out, tuple) else out
        expected = (*q.shape[:-1], v.shape[-1])
        if not isinstance(o, Tensor) or tuple(o.shape) != expected:
            got = f"shape {tuple(o.shape)}" if isinstance(o, Tensor) else type(o).__name__
            shapes = f"q {tuple(q.shape)} and v {tuple(v.shape)}"
            raise WrongOutput(f"returned {got}, expected shape {expected} for {shapes}")
        if o.dtype != q.dtype:
            raise WrongOutput(f"returned {o.dtype}, expected {q.dtype} as the inputs")
        return o

    def attend_lse(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        out = self._timed(self.function.call, q, k, v, lse=True, **options)
        if not isinstance(out, tuple) or len(out) != 2:
            raise WrongOutput(f"returned {type(out).__name__}, expected a pair (o, lse) for lse=True")
        o, lse = out
        if tuple(lse.shape) != tuple(q.shape[:-1]):
            shapes = f"{tuple(lse.shape)}, expected {tuple(q.shape[:-1])} for q {tuple(q.shape)}"
            raise WrongOutput(f"returned lse of shape {shapes}")
        return o, lse

    def weights(self, q: Tensor, k: Tensor, **options: Any) -> Float[Tensor, "b h n m"]:
        """The attention weights, from outputs alone: o is linear in v, so the values e_1 … e_m give its columns."""
        m, width = k.shape[-2], q.shape[-1]
        if self.supports("d_v≠d_k") and "d_v" not in self.function.sizes:
            width = m
        eye = torch.eye(m, device=q.device, dtype=q.dtype)
        columns = []
        for j in range(0, m, width):
            e = torch.zeros(m, width, device=q.device, dtype=q.dtype)
            e[:, : min(width, m - j)] = eye[:, j : j + width]
            o = self.attend(q, k, e.expand(*k.shape[:-1], width).contiguous(), **options)
            columns.append(o[..., : min(width, m - j)])
        return torch.cat(columns, -1)

    def reference(self, q, k, v, allowed=None, *, bias=None, **terms: Any) -> reference.AttentionOutput:
        """The output of reference.py for the same inputs, in float64. terms: scale, softcap, sink_logits."""
        q, k, v = (x.double() for x in (q, k, v))
        if self.supports("always causal"):
            past = self.make_mask("causal", 1, 1, q.shape[-2], k.shape[-2]).allowed
            allowed = past if allowed is None else allowed & past
        if self.fixed_window is not None:
            i, j = (
                torch.arange(q.shape[-2], device=q.device)[:, None],
                torch.arange(k.shape[-2], device=q.device),
            )
            near = window(*self.fixed_window).allows(i + self.query_offset(q.shape[-2], k.shape[-2]), j)
            allowed = near if allowed is None else allowed & near
        k, v = (reference.repeat_heads(x, q.shape[1]) for x in (k, v))
        bias = None if bias is None else bias.double()
        q, k, bias = self._positioned(q, k, bias)
        return reference.attend(q, k, v, allowed, bias=bias, **terms)

    def _positioned(self, q: Tensor, k: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """q, k and the bias with the positions that a function applies in every call."""
        words = self.target.positions if isinstance(self.target, Function) else ""
        if not words:
            return q, k, bias
        offset = self.query_offset(q.shape[-2], k.shape[-2])
        i, j = (torch.arange(x.shape[-2], device=q.device) for x in (q, k))
        if words == "alibi":
            slopes = alibi_slopes(q.shape[1]).to(q)[:, None, None]
            near = -slopes * (i[:, None] + offset - j).abs()
            return q, k, near if bias is None else bias + near
        pairing = words.removeprefix("rotary ")
        return rotate(q, i + offset, pairing=pairing), rotate(k, j, pairing=pairing), bias

    @property
    def fixed_window(self) -> tuple[int, int] | None:
        """The window of every call of a function; None if there is none."""
        return self.target.window if isinstance(self.target, Function) else None

    def query_offset(self, n: int, m: int) -> int:
        """The position of query 0 among the keys, by the target's alignment."""
        return m - n if self.target.alignment == "bottom-right" else 0

    def mask_kinds(self, *, none: bool = True) -> tuple[str, ...]:
        """The kinds of mask that this target supports; "none", no mask at all, is one of them unless excluded."""
        kinds = [kind for claim, kinds in MASK_KINDS.items() if self.supports(claim) for kind in kinds]
        if isinstance(self.target, Function) and not self.per_head_masks:
            kinds = [kind for kind in kinds if kind != "per head"]
        return (*(("none",) if none else ()), *kinds)

    def make_mask(self, kind: str, b: int, h: int, n: int, m: int) -> Masking:
        """A random mask of this kind; each query has at least one allowed key."""
        i = torch.arange(n, device=self.device)[:, None]
        j = torch.arange(m, device=self.device)
        match kind:
            case "none":
                return Masking({}, None)
            case "causal":
                table = causal().allows(i + self.query_offset(n, m), j)
                return Masking({"causal": True}, table)
            case "random" | "per head":
                shape = (n, m) if kind == "random" else (b, h, n, m)
                table = (self.rand(*shape) < 0.5) | (j == i % m)
            case "band":
                table = window(2).allows(i, j) | (j == i % m)
            case "strided":
                table = window(2).allows(i, j) | every(4).allows(i, j)
            case "lengths":
                l = self.randint(m + 1, b, low=1)
                return Masking({"lengths": l}, lengths(l).allows(i, j))
            case "window":
                reach = (int(self.randint(4)), int(self.randint(3)))
                return Masking({"window": reach}, window(*reach).allows(i + self.query_offset(n, m), j))
            case "documents":
                ids = (self.rand(b, n) < 0.4).long().cumsum(-1)
                return Masking({"documents": ids}, documents(ids).allows(i, j))
            case _:
                raise AssertionError(kind)
        return Masking({"allowed": table}, table)

    def fits(self, c: Case) -> bool:
        """Whether the mask of a case is possible for its sizes: each query must have an allowed key."""
        n, m, kind = c.n, c.get("m", c.n), c.get("mask", "none")
        if c.get("h_kv") is not None and c.h % c.h_kv:
            return False
        if kind == "none" and self.supports("always causal") and isinstance(self.target, Function):
            kind = "causal"
        if kind in ("causal", "window") and n != m:
            corner = self.target.alignment
            return corner is not None and (n <= m if corner == "bottom-right" else kind == "causal" or n <= m)
        return kind != "documents" or n == m

    # Models

    @property
    def model(self) -> Model:
        assert isinstance(self.target, Model)
        return self.target

    def module(self, training: bool = False) -> nn.Module:
        """A copy of the module in this harness's dtype, in evaluation mode unless `training`."""
        if self.dtype not in self._modules:
            self._modules[self.dtype] = copy.deepcopy(self.model.module).to(self.device, self.dtype)
        return self._modules[self.dtype].train(training)

    def module_copy(self) -> nn.Module:
        """A separate copy, which a law may modify."""
        return copy.deepcopy(self.module())

    def sequence(self, b: int, n: int) -> Tensor:
        """An input of n positions, token ids or vectors; n is ignored for images and modules of a fixed length."""
        if self.model.image is not None:
            return self.randn(b, *self.model.image)
        return self._sample(b, self.model.length or n, self.model.vocab, self.model.d_model)

    def context(self, b: int, m: int) -> Tensor | None:
        """A second sequence for a model that needs one. An attention module is called without it."""
        if self.model.architecture == "attention" or not self.supports("context"):
            return None
        return self.second_sequence(b, m)

    def second_sequence(self, b: int, m: int) -> Tensor:
        """A sequence to attend to."""
        if self.model.d_context is not None:
            return self.randn(b, m, self.model.d_context)
        return self._sample(b, m, self.model.vocab, self.model.d_model)

    def _sample(self, b: int, n: int, vocab: int | None, width: int | None) -> Tensor:
        if vocab is not None:
            return self.randint(vocab, b, n, low=min(4, vocab - 2))  # ids 0 to 3 are often special tokens
        assert width is not None
        return self.randn(b, n, width)

    def changed(self, x: Tensor) -> Tensor:
        """An input of the same shape that differs from x at every position."""
        if x.is_floating_point():
            return self.randn(*x.shape) * 3.0
        vocab = self.model.vocab
        assert vocab is not None
        low = min(4, vocab - 2)
        shift = self.randint(vocab - low, *x.shape, low=1) if vocab - low > 1 else 1
        return low + (x - low + shift) % (vocab - low)

    def run(
        self, x: Tensor, context: Tensor | None = None, module: nn.Module | None = None, **options: Any
    ) -> Tensor:
        """The outputs of the model: (b, n, d), or (b, d) if it claims "pooled"."""
        module = self.module() if module is None else module
        inputs = (x,) if context is None else (x, context)
        out = self._timed(self.model.call, module, *inputs, **options)
        o = out[0] if isinstance(out, tuple) else out
        if not isinstance(o, Tensor):
            raise WrongOutput(f"returned {type(o).__name__}, expected a tensor")
        if self.model.image is None:
            pooled = self.supports("pooled")
            if o.shape[:-1] != (x.shape[:1] if pooled else x.shape[:2]):
                per = "sequence" if pooled else "position"
                message = f"expected one vector per {per} for an input of shape {tuple(x.shape)}"
                raise WrongOutput(f"returned shape {tuple(o.shape)}, {message}")
        return o

    @property
    def part(self) -> Part:
        assert isinstance(self.target, Part)
        return self.target
