"""What can be checked: an attention function, a model (an attention module is one), or a part of one.

A target is a frozen value: what to call, and what it claims. The laws speak one language; an adapter's `call`
translates it. A new kernel takes ten lines:

    def call(q, k, v, *, allowed=None, scale=None):
        return my_kernel(q, k, v, mask=None if allowed is None else ~allowed, temperature=scale)

    mine = Function("my kernel", call, claims={"mask", "scale", "float64"})
    print(check(mine))

A word in `claims` is promised, a word in `lacks` denied; what stands in neither is found out by trying.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from jaxtyping import Float
from torch import Tensor, nn

from ..errors import SpecError, nearest

# What a call may be asked for. The word in `claims`, the keyword the adapter's call then takes, what it means.
OPTIONS: dict[str, tuple[str, str]] = {
    "mask": ("allowed", "bool, broadcasts to (b, h, n, m), for a model (b, n, m); True = may look"),
    "causal": ("causal", "True: no query looks at its future; n ≠ m by the target's alignment"),
    "scale": ("scale", "a float in place of 1/√d_k"),
    "bias": ("bias", "float, broadcasts to (b, h, n, m), added to the scores; may be −inf"),
    "lengths": ("lengths", "int (b,): keys at and past it are hidden; of a model, positions of x"),
    "context lengths": ("context_lengths", "int (b,): the same for the other sequence of a model"),
    "documents": ("documents", "int (b, n), rising: packed sequences that do not see one another"),
    "window": ("window", "(before, after): −after ≤ i − j ≤ before, i standing by the alignment"),
    "left padding": ("pads", "int (b,): this many positions at the start of x are padding"),
    "lse": ("lse", "True: also give ln Σ exp(scores), (b, h, n)"),
    "weights": ("weights", "True: also give the weights, (b, h, n, m)"),
    "dropout": ("dropout_p", "a float: the share of weights that is dropped"),
    "shift": ("shift", "int: all positions counted from there instead of 0 (relative kinds do not notice)"),
}

# What a target is able to do, or is like, without being asked by a keyword.
ABILITIES: dict[str, str] = {
    "float64": "takes float64",
    "float32": "takes float32",
    "float16": "takes float16",
    "bfloat16": "takes bfloat16",
    "grad": "gives gradients to q, k and v (a model: to its parameters)",
    "double backward": "its gradient can be differentiated again",
    "deterministic": "the same bits each time",
    "grouped": "fewer key/value heads than query heads, query head g·c+r sharing key/value head g",
    "n≠m": "another number of keys than of queries",
    "d_v≠d_k": "values of another width than keys",
    "mask and causal": "both at once",
    "empty rows": "zeros and finite gradients for a query that may look nowhere",
    "nan under mask": "NaN or infinity in what a mask hides changes nothing",
    "nan under lengths": "NaN or infinity past the lengths changes nothing",
    "compile": "gives the same under torch.compile",
    "always causal": "a model whose every attention looks at the past alone",
    "context": "a model that looks at a second sequence",
    "positions": "a model that sees the order of its input without a mask",
    "relative positions": "a model whose positions enter as differences alone",
    "cache": "a model that decodes step by step (fields start and step)",
    "pooled": "a model that gives one vector a sequence, (b, d), not one a position",
    "pre-norm": "a model of branches x + F(norm(x)) and nothing after them (field silence)",
    "xavier": "projections drawn as Xavier's rule says, each matrix by itself",
}
WORDS = {**{word: meaning for word, (_, meaning) in OPTIONS.items()}, **ABILITIES}
ALIGNMENTS = ("top-left", "bottom-right")
MODELS = ("attention", "encoder", "decoder", "encoder-decoder", "vision")
PARTS = ("norm", "batch norm", "feed-forward", "patches", "positions", "rotary", "schedule", "clip", "counts")

NAMED = {  # the kinds of target, in words
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
    "patches": "a cutter of patches",
    "positions": "sinusoids",
    "rotary": "rotary positions",
    "schedule": "a schedule",
    "clip": "gradient clipping",
    "counts": "declared counts",
}


class Projections(NamedTuple):
    """The matrices of a multi-head attention, head by head, as views of its parameters; x @ w."""

    w_q: Float[Tensor, "h d_model d_k"]
    w_k: Float[Tensor, "h_kv d_context d_k"]
    w_v: Float[Tensor, "h_kv d_context d_v"]
    w_o: Float[Tensor, "h d_v d_out"]
    b_q: Float[Tensor, "h d_k"] | None = None
    b_k: Float[Tensor, "h_kv d_k"] | None = None
    b_v: Float[Tensor, "h_kv d_v"] | None = None
    b_o: Float[Tensor, " d_out"] | None = None


@dataclass(frozen=True, kw_only=True)
class _Claiming:
    """What every target says about itself."""

    claims: Set[str] = frozenset()
    lacks: Set[str] = frozenset()
    alignment: str | None = None  # of causal and window where n ≠ m; None: not said
    device: str = "cpu"
    source: str | None = None  # a Python expression that gives this target again, for snippets
    imports: str = ""  # the lines it needs
    seconds: float | None = None  # a slow target may ask for more time a law

    def __post_init__(self):
        for given in ("claims", "lacks"):
            words = getattr(self, given)
            object.__setattr__(self, given, frozenset({words} if isinstance(words, str) else words))
            for word in getattr(self, given):
                if word not in WORDS:
                    raise SpecError(f"{given} has {word!r}; {nearest(word, WORDS)}")
        if both := self.claims & self.lacks:
            raise SpecError(f"{', '.join(sorted(both))}: claimed and denied at once")
        if self.alignment is not None and self.alignment not in ALIGNMENTS:
            raise SpecError(f"alignment={self.alignment!r}; {nearest(self.alignment, ALIGNMENTS)}")

    def says(self, word: str) -> bool | None:
        """True: claimed. False: denied. None: not said."""
        assert word in WORDS, word
        return True if word in self.claims else False if word in self.lacks else None

    def having(self, *claims: str, lacking: tuple[str, ...] = ()) -> Any:
        """The same with more said; a word moves from the one side to the other."""
        return replace(
            self,
            claims=(self.claims | set(claims)) - set(lacking),
            lacks=(self.lacks | set(lacking)) - set(claims),
        )


@dataclass(frozen=True)
class Function(_Claiming):
    """call(q, k, v, **asked) → o, shaped (b, h, n, d_k), (b, h_kv, m, d_k), (b, h_kv, m, d_v) → (b, h, n, d_v).

    Asked are keywords of OPTIONS, only those that are claimed. With lse=True or weights=True it gives a pair.
    sizes: the only values some sizes may take, for a kernel that is picky: {"d_k": (16, 32), "n": (64, 128)}.
    """

    name: str
    call: Callable[..., Any]
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    kind = "function"


@dataclass(frozen=True)
class Model(_Claiming):
    """call(module, x, context=None, **asked) → (b, n, d_out), or (b, d_out) if it claims "pooled".

    What x is: token ids below `vocab` (b, n); images (b, *image); else vectors (b, n, d_model).
    The module comes as an argument, since laws run copies of it: in float64, in training, compiled.
    """

    name: str
    module: nn.Module
    call: Callable[..., Any]
    of: str = "attention"  # one of MODELS
    d_model: int | None = None
    vocab: int | None = None
    image: tuple[int, int, int] | None = None  # channels, height, width
    d_context: int | None = None  # vectors of the other sequence; None: as x, tokens or vectors
    longest: int = 64  # positions it can hold
    layers: int | None = None
    window: tuple[int, int] | None = None  # (before, after) of every layer, where each looks no further
    heads: int | None = None
    projections: Callable[[nn.Module], Projections] | None = None  # of an attention module
    start: Callable[..., Any] | None = None  # start(module, b, context=None) → a cache
    step: Callable[..., Any] | None = (
        None  # step(module, x_new, cache, **asked) → outputs of x_new; the cache grows
    )
    silence: Callable[[nn.Module], None] | None = None  # set what every branch adds to 0, in place
    parts: Callable[[nn.Module], "tuple[Part, ...]"] | None = None  # beyond the norms that are found

    def __post_init__(self):
        super().__post_init__()
        if self.of not in MODELS:
            raise SpecError(f"of={self.of!r}; {nearest(self.of, MODELS)}")
        if sum(x is not None for x in (self.vocab, self.image)) == 0 and self.d_model is None:
            raise SpecError(f"{self.name}: say what it takes: vocab=, image= or d_model=")
        if (self.start is None) != (self.step is None):
            raise SpecError(f"{self.name}: a cache needs both start= and step=")

    @property
    def kind(self) -> str:
        return "model"


@dataclass(frozen=True)
class Part(_Claiming):
    """A piece that has laws of its own.

    norm          call(x) over the last axis, affine only by `gain` and `shift` tensors in facts, eps in facts
    batch norm    call(x, training) over the first axis of (b, d)
    feed-forward  call(x) at each position of (b, n, d); facts may hold w_1, b_1, w_2, b_2 for the ReLU kind
    patches       call(images) → (b, patches, d); facts: side, weight (d, c, p, p), bias, image (c, h, w)
    positions     call(positions, d) → (n, d), the sinusoids, columns interleaved
    rotary        call(x, positions) → x turned, (…, n, d)
    schedule      call(step) → rate; facts: lr_max, warmup, total
    clip          call(list of gradients, c) → the clipped ones
    counts        call() → a list of (what, declared, found), whole numbers
    """

    name: str
    of: str
    call: Callable[..., Any]
    facts: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        if self.of not in PARTS:
            raise SpecError(f"of={self.of!r}; {nearest(self.of, PARTS)}")

    @property
    def kind(self) -> str:
        return self.of


Target = Function | Model | Part
