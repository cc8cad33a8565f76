"""What can be checked: an attention function, a model (an attention module is one), or a part of a model.

A target is a frozen value: what to call, and what it claims to support. All laws use the same option names; an
adapter's `call` translates them. A new kernel takes ten lines:

    def call(q, k, v, *, allowed=None, scale=None):
        return my_kernel(q, k, v, mask=None if allowed is None else ~allowed, temperature=scale)

    mine = Function("my kernel", call, claims={"mask", "scale", "float64"})
    print(check(mine))

A capability in `claims` is promised, one in `lacks` is declared missing; the others are determined by probing.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from ..errors import SpecError, nearest

# Options of a call: the capability in `claims` → the keyword that the adapter's call takes, and what it means.
OPTIONS: dict[str, tuple[str, str]] = {
    "mask": ("allowed", "bool, broadcasts to (b, h, n, m), for a model (b, n, m); True = may attend"),
    "causal": ("causal", "True: no query attends to its future; if n ≠ m, aligned as the target declares"),
    "scale": ("scale", "float, replaces 1/√d_k"),
    "softcap": ("softcap", "float c: the scores become c · tanh(scores / c), before bias and mask"),
    "sink logits": ("sink_logits", "float (h,): an additional score in each head's softmax, without a value"),
    "bias": ("bias", "float, broadcasts to (b, h, n, m), added to the scores; may be −inf"),
    "integer mask": (
        "integer_mask",
        "True: the mask of this call is given as integers 0 and 1, not as bools",
    ),
    "lengths": ("lengths", "int (b,): keys at or after this index are masked (a model: positions of x)"),
    "context lengths": ("context_lengths", "int (b,): the same for the context of a model"),
    "documents": (
        "documents",
        "int (b, n), non-decreasing: packed sequences that do not attend to one another",
    ),
    "window": ("window", "(before, after): −after ≤ i − j ≤ before, with i offset by the alignment"),
    "left padding": ("left_padding", "int (b,): the number of padded positions at the start of x"),
    "lse": ("lse", "True: also return ln Σ exp(scores), (b, h, n)"),
    "weights": ("weights", "True: also return the attention weights, (b, h, n, m)"),
    "dropout": ("dropout_p", "float: the probability with which a weight is dropped"),
    "shift": ("shift", "int: positions start there instead of at 0 (relative positions are not affected)"),
}

# Properties of a target that no keyword switches on.
ABILITIES: dict[str, str] = {
    "float64": "supports float64",
    "float32": "supports float32",
    "float16": "supports float16",
    "bfloat16": "supports bfloat16",
    "grad": "gradients reach q, k and v (a model: its parameters)",
    "double backward": "its gradient is differentiable",
    "deterministic": "equal calls return equal bits",
    "grouped": "fewer key/value heads than query heads, query head g·c+r sharing key/value head g",
    "n≠m": "the number of keys may differ from the number of queries",
    "d_v≠d_k": "the width of values may differ from that of keys",
    "mask and causal": "a mask and causal in one call",
    "empty rows": "zeros and finite gradients for a query with no allowed key",
    "nan under mask": "NaN or infinity in a masked key or value has no effect",
    "nan under lengths": "NaN or infinity past the lengths has no effect",
    "float32 sums": "sums over the keys are accumulated in float32 or wider, also for 16-bit inputs",
    "float16 range": "products of q and k beyond the range of float16 do not overflow",
    "compile": "the same outputs under torch.compile",
    "always causal": "every self-attention of a model is causal; a function masks the future in every call",
    "context": "a model that attends to a second sequence",
    "separate values": "an attention module whose values may come from another sequence than its keys (values=…)",
    "positions": "a model with positions: it depends on the order of its input even without a mask",
    "relative positions": "a model whose positions enter only as differences",
    "cache": "a model that decodes step by step (fields make_cache and decode)",
    "pooled": "a model that returns one vector per sequence, (b, d), instead of one per position",
    "pre-norm": "a model of residual branches x + F(norm(x)), without a final norm (field zero_branches)",
    "xavier": "projections initialized by Xavier's rule, each matrix separately",
}
CAPABILITIES = {**{name: meaning for name, (_, meaning) in OPTIONS.items()}, **ABILITIES}
ALIGNMENTS = ("top-left", "bottom-right")
ARCHITECTURES = ("attention", "encoder", "decoder", "encoder-decoder", "vision")
PART_KINDS = (
    "norm",
    "batch norm",
    "feed-forward",
    "patches",
    "positions",
    "rotary",
    "schedule",
    "clip",
    "counts",
)

KIND_NAMES = {  # kinds of target, as they appear in messages
    "function": "an attention function",
    "model": "a module or a model",
    "attention": "an attention module",
    "encoder": "an encoder",
    "decoder": "a decoder",
    "encoder-decoder": "an encoder-decoder",
    "vision": "a vision model",
    "norm": "a norm",
    "batch norm": "a batch norm",
    "feed-forward": "a feed-forward network",
    "patches": "a patch embedding",
    "positions": "sinusoidal positions",
    "rotary": "rotary positions",
    "schedule": "a learning-rate schedule",
    "clip": "gradient clipping",
    "counts": "declared counts",
}


class Projections(NamedTuple):
    """The matrices of a multi-head attention per head, as views of its parameters, applied as x @ w."""

    w_q: Float[Tensor, "h d_model d_k"]
    w_k: Float[Tensor, "h_kv d_context d_k"]
    w_v: Float[Tensor, "h_kv d_context d_v"]
    w_o: Float[Tensor, "h d_v d_out"]
    b_q: Float[Tensor, "h d_k"] | None = None
    b_k: Float[Tensor, "h_kv d_k"] | None = None
    b_v: Float[Tensor, "h_kv d_v"] | None = None
    b_o: Float[Tensor, " d_out"] | None = None


@dataclass(frozen=True, kw_only=True)
class _Claims:
    """What every target declares about itself."""

    claims: Set[str] = frozenset()
    lacks: Set[str] = frozenset()
    alignment: str | None = None  # of causal and window where n ≠ m; None: not declared
    device: str = "cpu"
    source: str | None = None  # a Python expression that builds this target, for snippets
    imports: str = ""  # the import lines it needs
    seconds: float | None = None  # the time limit per law, for a slow target
    notes: tuple[str, ...] = ()  # what an adapter detected about the target, shown with the verdict

    def __post_init__(self):
        for field_name in ("claims", "lacks"):
            names = getattr(self, field_name)
            object.__setattr__(self, field_name, frozenset({names} if isinstance(names, str) else names))
            for name in getattr(self, field_name):
                if name not in CAPABILITIES:
                    raise SpecError(f"{field_name} has {name!r}; {nearest(name, CAPABILITIES)}")
        if both := self.claims & self.lacks:
            raise SpecError(f"{', '.join(sorted(both))}: in claims and in lacks at once")
        if self.alignment is not None and self.alignment not in ALIGNMENTS:
            raise SpecError(f"alignment={self.alignment!r}; {nearest(self.alignment, ALIGNMENTS)}")

    def declares(self, capability: str) -> bool | None:
        """True: in `claims`. False: in `lacks`. None: in neither."""
        assert capability in CAPABILITIES, capability
        return True if capability in self.claims else False if capability in self.lacks else None

    def with_claims(self, *claims: str, lacking: tuple[str, ...] = ()) -> Any:
        """The same target with further claims and lacks; a capability moves from one set to the other."""
        return replace(
            self,
            claims=(self.claims | set(claims)) - set(lacking),
            lacks=(self.lacks | set(lacking)) - set(claims),
        )


@dataclass(frozen=True)
class Function(_Claims):
    """call(q, k, v, **options) → o, shaped (b, h, n, d_k), (b, h_kv, m, d_k), (b, h_kv, m, d_v) → (b, h, n, d_v).

    The options are keywords of OPTIONS, only those that are claimed. With lse=True or weights=True it returns a pair.
    sizes: the only values that a size may take, for a kernel with restrictions: {"d_k": (16, 32), "n": (64, 128)}.
    """

    name: str
    call: Callable[..., Any]
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    per_head_masks: bool = True  # whether a mask may differ between heads
    window: tuple[int, int] | None = None  # (before, after), if every call has this window
    # The call with training=False, for a function that takes a dropout probability and a training flag.
    dropout_in_eval: Callable[..., Any] | None = None
    positions: str = ""  # "alibi", "rotary halves" or "rotary interleaved", if every call has them

    kind = "function"


@dataclass(frozen=True)
class Model(_Claims):
    """call(module, x, context=None, **options) → (b, n, d_out), or (b, d_out) if it claims "pooled".

    x is token ids below `vocab` (b, n), images (b, *image), or vectors (b, n, d_model).
    The module is an argument because laws run copies of it: in float64, in training mode, compiled.
    """

    name: str
    module: nn.Module
    call: Callable[..., Any]
    architecture: str = "attention"  # one of ARCHITECTURES
    d_model: int | None = None
    vocab: int | None = None
    image: tuple[int, int, int] | None = None  # channels, height, width
    # Width of the context vectors; None: the context is like x, tokens or vectors.
    d_context: int | None = None
    max_length: int = 64  # the longest sequence it accepts
    length: int | None = None  # the only length it accepts, as for attention within windows of a fixed size
    layers: int | None = None
    window: tuple[int, int] | None = None  # (before, after), if every layer has this window
    sinks: int = 0  # the first keys, which every query attends to besides its window
    heads: int | None = None
    projections: Callable[[nn.Module], Projections] | None = None  # of an attention module
    # A cache: make_cache(module, b, context=None) → an empty one; decode(module, x_new, cache) → outputs of x_new.
    make_cache: Callable[..., Any] | None = None
    decode: Callable[..., Any] | None = None
    # Sets the output of every residual branch to 0, in place.
    zero_branches: Callable[[nn.Module], None] | None = None
    # Parts to check in addition to the norms found inside the module.
    parts: Callable[[nn.Module], "tuple[Part, ...]"] | None = None

    def __post_init__(self):
        super().__post_init__()
        if self.architecture not in ARCHITECTURES:
            raise SpecError(
                f"architecture={self.architecture!r}; {nearest(self.architecture, ARCHITECTURES)}"
            )
        if sum(x is not None for x in (self.vocab, self.image)) == 0 and self.d_model is None:
            raise SpecError(f"{self.name}: declare its input: vocab=, image= or d_model=")
        if (self.make_cache is None) != (self.decode is None):
            raise SpecError(f"{self.name}: a cache needs both make_cache= and decode=")

    @property
    def kind(self) -> str:
        return "model"


@dataclass(frozen=True)
class Part(_Claims):
    """A part of a model that has laws of its own, such as a norm.

    norm          call(x) over the last axis, with `gain` and `shift` tensors and `eps` in facts
    batch norm    call(x, training) over the first axis of (b, d)
    feed-forward  call(x) at each position of (b, n, d); facts may hold w_1, b_1, w_2, b_2 for the ReLU kind
    patches       call(images) → (b, patches, d); facts: side, weight (d, c, p, p), bias, image (c, h, w)
    positions     call(positions, d) → (n, d), the sinusoids, columns interleaved
    rotary        call(x, positions) → x rotated, (…, n, d)
    schedule      call(step) → rate; facts: lr_max, warmup, total
    clip          call(list of gradients, c) → the clipped ones
    counts        call() → a list of (quantity, declared, actual), integers
    """

    name: str
    kind: str  # one of PART_KINDS
    call: Callable[..., Any]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        if self.kind not in PART_KINDS:
            raise SpecError(f"kind={self.kind!r}; {nearest(self.kind, PART_KINDS)}")


Target = Function | Model | Part
