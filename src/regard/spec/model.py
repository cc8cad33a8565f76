"""The declarations of blocks, stacks and models."""

from dataclasses import KW_ONLY, dataclass, replace
from math import prod
from typing import Any

from ..errors import SpecError
from ..pattern import Pattern, causal, full
from ..position import Position, learned, shaw
from .attention import Attention
from .base import Number, Spec, require, require_known, require_positive_fields, require_probability

PLAIN = (
    *("relu", "gelu", "gelu_tanh", "silu", "tanh", "sigmoid"),
    *("leaky_relu", "relu6", "elu", "selu", "mish", "softplus", "hardswish"),
)
ACTIVATIONS = (*PLAIN, "swiglu", "geglu")
NORMS = ("layer", "rms", "batch", "none")
INITS = ("xavier", "xavier_packed", "normal", "depth_scaled", "torch")
POOLS = ("first", "last", "mean", "max")


@dataclass(frozen=True, repr=False)
class FeedForward(Spec):
    """f(x W₁ + b₁) W₂ + b₂ at each position; the gated activations are (f(x W) ∘ x V) W₂."""

    d_ff: int
    _: KW_ONLY
    activation: str = "relu"
    bias: bool = True
    dropout: Number = 0.0

    def __post_init__(self):
        require_positive_fields(self, "d_ff")
        require_probability(self, "dropout")
        require_known("activation", self.activation, ACTIVATIONS)

    @property
    def gated(self) -> bool:
        return self.activation in ("swiglu", "geglu")


@dataclass(frozen=True, repr=False)
class Block(Spec):
    """Attention, then (if declared) cross-attention, then feed-forward, each in a residual branch.

    norm_at="post": LN(x + F(x)), as in the original paper. norm_at="pre": x + F(LN(x)), more stable in deep models.
    """

    attention: Attention
    feed_forward: FeedForward | None
    _: KW_ONLY
    cross: Attention | None = None
    norm: str = "layer"
    norm_at: str = "post"
    norm_bias: bool = True
    eps: Number | tuple[Number, ...] = 1e-5  # of all norms, or one for each branch
    residual: bool = True
    dropout: Number = 0.0  # of each branch before it is added

    def __post_init__(self):
        require_known("norm", self.norm, NORMS)
        require_known("norm_at", self.norm_at, ("post", "pre"))
        require_probability(self, "dropout")
        for name in ("attention", "cross"):
            part = getattr(self, name)
            if part is not None:
                require(
                    part.sizes.d_out == self.d_model == part.d_model,
                    f"{name} maps width {part.d_model} to {part.sizes.d_out}; "
                    f"in a block of width {self.d_model} both must be {self.d_model}",
                )
                require(
                    part.d_values is None,
                    f"{name}.d_values={part.d_values}: a block has one context for keys and values; leave it out",
                )
        branches = 1 + (self.cross is not None) + (self.feed_forward is not None)
        require(
            not isinstance(self.eps, tuple) or len(self.eps) == branches,
            f"eps={self.eps} and {branches} branches with a norm; give one number, or one for each branch",
        )
        require(
            self.cross is None or isinstance(self.cross.pattern, full),
            "cross-attention relates positions of two sequences; its pattern must be full()",
        )

    @property
    def d_model(self) -> int:
        return self.attention.d_model

    @property
    def epsilons(self) -> tuple[Number, ...]:
        """The eps of the norms of attention, cross-attention and feed-forward, those that exist."""
        branches = 1 + (self.cross is not None) + (self.feed_forward is not None)
        return self.eps if isinstance(self.eps, tuple) else (self.eps,) * branches


@dataclass(frozen=True, repr=False)
class Embedding(Spec):
    """A learned vector per token, plus its position encoding; multiplied by √d_model if scaled."""

    vocab: int
    d_model: int
    _: KW_ONLY
    position: Position | None = None
    scaled: bool = False
    types: int = 0  # number of segment types, as in BERT; 0 for none
    norm: bool = False
    eps: Number = 1e-5
    dropout: Number = 0.0

    def __post_init__(self):
        require_positive_fields(self, "vocab", "d_model")
        require_probability(self, "dropout")
        require(self.types >= 0, f"types={self.types} is negative; use 0 for no segment types")
        require(
            self.position is None or isinstance(self.position, Position),
            f"position={self.position!r} is not a position; use rg.sinusoidal(), rg.learned(64), …",
        )
        if self.position is not None:
            require(
                self.position.acts == "input",
                f"position={self.position!r} acts inside attention; pass it to the stack or to its attention",
            )


@dataclass(frozen=True, repr=False)
class LanguageHead(Spec):
    """Logits over the vocabulary; if tied, with the weights of the embedding."""

    _: KW_ONLY
    tied: bool = True
    bias: bool = False
    scaled: bool = False  # multiplies the states by d_model^−½, as T5 does


@dataclass(frozen=True, repr=False)
class ClassifierHead(Spec):
    """Class logits from one pooled state: linear, or with one hidden tanh layer."""

    classes: int
    _: KW_ONLY
    pool: str = "mean"
    hidden: int | None = None

    def __post_init__(self):
        require_positive_fields(self, "classes", "hidden")
        require_known("pool", self.pool, POOLS)


@dataclass(frozen=True, repr=False)
class MaskedHead(Spec):
    """Logits for masked tokens: linear, activation, norm, then the tied embedding and a bias, as in BERT."""

    _: KW_ONLY
    activation: str = "gelu"
    eps: Number = 1e-5

    def __post_init__(self):
        require_known("activation", self.activation, PLAIN)


@dataclass(frozen=True, repr=False)
class Pooler(Spec):
    """tanh(W x₀ + b) of the first state, as in BERT."""


Head = LanguageHead | ClassifierHead | MaskedHead | Pooler


@dataclass(frozen=True, repr=False)
class Encoder(Spec):
    """A stack of blocks over one sequence. With a causal pattern and a LanguageHead it is a GPT."""

    block: Block
    layers: int
    _: KW_ONLY
    embedding: Embedding | None = None  # None: the inputs are vectors
    position: Position | None = None  # a position encoding inside attention that all layers share, as in T5
    final_norm: bool | None = None  # None: if the blocks are pre-norm
    final_eps: Number | None = None  # of the final norm; None: as in the last branch of a block
    head: Head | None = None
    init: str = "xavier"
    checkpoint: bool = False  # recompute each block in the backward pass instead of saving its activations

    def __post_init__(self):
        require_positive_fields(self, "layers")
        require_known("init", self.init, INITS)
        require(
            self.block.cross is None,
            "an Encoder has no context for cross-attention; use a Decoder for a block with cross",
        )
        check_stack(self)

    @property
    def d_model(self) -> int:
        return self.block.d_model

    @property
    def has_final_norm(self) -> bool:
        return final_norm(self)

    @property
    def norm_eps(self) -> Number:
        """Of the final norm."""
        return norm_eps(self)


@dataclass(frozen=True, repr=False)
class Decoder(Spec):
    """A stack of causal blocks; if the block has cross-attention, it also attends to a context.

    Over vectors, without an embedding or a head, it may also attend to later positions, as in object detection.
    """

    block: Block
    layers: int
    _: KW_ONLY
    embedding: Embedding | None = None
    position: Position | None = None
    final_norm: bool | None = None
    final_eps: Number | None = None
    head: Head | None = None
    init: str = "xavier"
    checkpoint: bool = False

    def __post_init__(self):
        require_positive_fields(self, "layers")
        require_known("init", self.init, INITS)
        check_stack(self)
        pattern = self.block.attention.pattern
        writes = self.embedding is not None or self.head is not None
        require(
            not writes or (pattern - causal()).count(64) == 0,
            f"a Decoder must be causal, and pattern={pattern!r} allows later keys; use rg.causal() & {pattern!r}",
        )

    @property
    def d_model(self) -> int:
        return self.block.d_model

    @property
    def has_final_norm(self) -> bool:
        return final_norm(self)

    @property
    def norm_eps(self) -> Number:
        """Of the final norm."""
        return norm_eps(self)


def final_norm(stack: Encoder | Decoder) -> bool:
    return stack.block.norm_at == "pre" if stack.final_norm is None else stack.final_norm


def norm_eps(stack: Encoder | Decoder) -> Number:
    return stack.block.epsilons[-1] if stack.final_eps is None else stack.final_eps


def check_stack(stack: Encoder | Decoder) -> None:
    """Embedding and blocks have one width; a head over the vocabulary has an embedding; positions act inside."""
    if stack.embedding is not None:
        require(
            stack.embedding.d_model == stack.d_model,
            f"the embedding has width {stack.embedding.d_model} and the blocks {stack.d_model}; use the same d_model",
        )
    if isinstance(stack.head, LanguageHead | MaskedHead):
        require(
            stack.embedding is not None,
            f"{stack.head!r} needs the vocabulary of an embedding; set embedding=Embedding(vocab, d_model)",
        )
    if stack.position is not None:
        require(
            stack.position.acts != "input",
            f"position={stack.position!r} is added to the input; pass it to the embedding",
        )
        require(
            not isinstance(stack.position, shaw),
            f"position={stack.position!r} depends on the queries of each layer; pass it to the block's attention",
        )
        require(
            stack.block.attention.position is None,
            f"position={stack.position!r} in the stack and {stack.block.attention.position!r} in its block; use one",
        )


@dataclass(frozen=True, repr=False)
class EncoderDecoder(Spec):
    """The Transformer: an encoder reads the source; a decoder generates the target and attends to the source."""

    encoder: Encoder
    decoder: Decoder
    _: KW_ONLY
    share_embedding: bool = False  # one table for source and target

    def __post_init__(self):
        require(
            self.encoder.head is None,
            "the encoder of an EncoderDecoder takes no head; put the head on the decoder",
        )
        cross = self.decoder.block.cross
        require(
            cross is not None,
            "the decoder's block has no cross-attention; declare Block(..., cross=Attention(...))",
        )
        width = cross.sizes.d_context if cross else 0
        require(
            width == self.encoder.d_model,
            f"the encoder has width {self.encoder.d_model} and cross-attention expects {width}; "
            f"set d_context={self.encoder.d_model} in the decoder's cross-attention",
        )
        if self.share_embedding:
            a, b = self.encoder.embedding, self.decoder.embedding
            require(
                a is not None and b is not None and (a.vocab, a.d_model) == (b.vocab, b.d_model),
                f"share_embedding=True needs two embeddings of the same size, not {a!r} and {b!r}",
            )

    @property
    def d_model(self) -> int:
        return self.encoder.d_model


@dataclass(frozen=True, repr=False)
class Vision(Spec):
    """An encoder over image patches, with a classifier on the class token or on pooled states."""

    encoder: Encoder
    _: KW_ONLY
    image: tuple[int, int] = (224, 224)
    patch: tuple[int, int] = (16, 16)
    channels: int = 3
    class_token: bool = True
    registers: int = 0  # learned tokens after the class token that no head reads (DeiT's distillation token)
    position: Position | None = None  # None: learned, one vector per token, including those in front
    head: ClassifierHead | None = None
    dropout: Number = 0.0

    def __post_init__(self):
        require_positive_fields(self, "channels")
        require_probability(self, "dropout")
        require(self.registers >= 0, f"registers={self.registers} is negative; use 0 for none")
        (height, width), (p, q) = self.image, self.patch
        require(
            min(self.image + self.patch) > 0 and height % p == 0 and width % q == 0,
            f"patches of {p} × {q} do not divide an image of {height} × {width}; choose sides that do",
        )
        require(
            self.encoder.embedding is None and self.encoder.head is None,
            "the encoder of a Vision receives patches; leave out its embedding and its head",
        )
        require(
            self.head is None or self.head.pool != "first" or self.class_token,
            "pool='first' reads the class token, but class_token=False; use pool='mean'",
        )
        inside = self.encoder.position or self.encoder.block.attention.position
        on_grid = getattr(inside, "grid", None) is not None
        require(
            not (self.class_token and on_grid),
            f"position={inside!r} is on a grid, where the class token has no position; use class_token=False",
        )
        require(
            not (self.registers and on_grid),
            f"position={inside!r} is on a grid, where registers have no position; use registers=0",
        )
        if self.position is not None:
            require(
                self.position.acts == "input",
                f"position={self.position!r} acts inside attention; pass it to the encoder",
            )
            if isinstance(self.position, learned) and isinstance(self.position.table, int):
                require(
                    self.position.table >= self.tokens,
                    f"{self.position!r} has fewer vectors than the image has tokens; use learned({self.tokens})",
                )

    @property
    def grid(self) -> tuple[int, int]:
        return self.image[0] // self.patch[0], self.image[1] // self.patch[1]

    @property
    def tokens(self) -> int:
        return prod(self.grid) + self.in_front

    @property
    def in_front(self) -> int:
        """Tokens before the patches: the class token and the registers."""
        return self.class_token + self.registers

    @property
    def d_model(self) -> int:
        return self.encoder.d_model


def with_pattern(declared: Any, pattern: Pattern) -> Any:
    """The same declaration with this pattern in its self-attention."""
    if hasattr(declared, "pattern"):
        return replace(declared, pattern=pattern)
    for name in ("attention", "block", "decoder", "encoder"):
        if getattr(declared, name, None) is not None:
            return replace(declared, **{name: with_pattern(getattr(declared, name), pattern)})
    raise SpecError(f"{type(declared).__name__} has no attention whose pattern could be replaced")
