"""The declarations of blocks, stacks and whole models."""

from dataclasses import KW_ONLY, dataclass
from math import prod

from ..pattern import causal, full
from ..position import Position, learned, shaw
from .attention import Attention
from .base import Number, Spec, require, require_known, require_positive_fields, require_probability

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu")
NORMS = ("layer", "rms", "batch", "none")
INITS = ("xavier", "xavier_packed", "normal", "depth_scaled", "torch")
POOLS = ("first", "last", "mean", "max")


@dataclass(frozen=True, repr=False)
class FeedForward(Spec):
    """max(0, x W₁ + b₁) W₂ + b₂, at each position alike; the gated kinds are (f(x W) ∘ x V) W₂."""

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
    """Attention, then (where declared) attention to a context, then feed-forward, each in a residual branch.

    post: LN(x + F(x)), as in the paper. pre: x + F(LN(x)), steadier in depth.
    """

    attention: Attention
    feed_forward: FeedForward | None
    _: KW_ONLY
    cross: Attention | None = None
    norm: str = "layer"
    norm_at: str = "post"
    norm_bias: bool = True
    eps: Number = 1e-5
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
                    f"{name} takes {part.d_model} and gives {part.sizes.d_out} wide vectors; "
                    f"a block of width {self.d_model} needs both to be {self.d_model}",
                )
        require(
            self.cross is None or isinstance(self.cross.pattern, full),
            "cross-attention compares positions of two sequences; its pattern needs to be full()",
        )

    @property
    def d_model(self) -> int:
        return self.attention.d_model


@dataclass(frozen=True, repr=False)
class Embedding(Spec):
    """A learned vector a token, plus its position; times √d_model where scaled."""

    vocab: int
    d_model: int
    _: KW_ONLY
    position: Position | None = None
    scaled: bool = False
    types: int = 0  # segment kinds, as in BERT; 0 for none
    norm: bool = False
    eps: Number = 1e-5
    dropout: Number = 0.0

    def __post_init__(self):
        require_positive_fields(self, "vocab", "d_model")
        require_probability(self, "dropout")
        require(self.types >= 0, f"types={self.types}: it cannot be below 0")
        if self.position is not None:
            require(
                self.position.acts == "input",
                f"position={self.position!r} acts inside attention; give it to the stack or to its attention",
            )


@dataclass(frozen=True, repr=False)
class LanguageHead(Spec):
    """Logits over the vocabulary; tied: the embedding's own vectors, as rows."""

    _: KW_ONLY
    tied: bool = True
    bias: bool = False
    scaled: bool = False  # states times d_model^−½ first, as T5 does


@dataclass(frozen=True, repr=False)
class ClassifierHead(Spec):
    """Class scores from one pooled state: linear, or an MLP with one hidden layer of tanh."""

    classes: int
    _: KW_ONLY
    pool: str = "mean"
    hidden: int | None = None

    def __post_init__(self):
        require_positive_fields(self, "classes", "hidden")
        require_known("pool", self.pool, POOLS)


@dataclass(frozen=True, repr=False)
class MaskedHead(Spec):
    """Logits for hidden tokens: linear, activation, norm, then the embedding's vectors and a bias, as BERT's."""

    _: KW_ONLY
    activation: str = "gelu"
    eps: Number = 1e-5

    def __post_init__(self):
        require_known("activation", self.activation, ACTIVATIONS[:4])


@dataclass(frozen=True, repr=False)
class Pooler(Spec):
    """tanh(W x₀ + b): the first state, made ready for a sentence task, as BERT's."""


Head = LanguageHead | ClassifierHead | MaskedHead | Pooler


@dataclass(frozen=True, repr=False)
class Encoder(Spec):
    """A stack of blocks that looks at one sequence. With a causal pattern and a LanguageHead it is a GPT."""

    block: Block
    layers: int
    _: KW_ONLY
    embedding: Embedding | None = None  # None: it is given vectors
    position: Position | None = None  # a position inside attention that all layers share, as T5's
    final_norm: bool | None = None  # None: where the blocks are pre-norm
    head: Head | None = None
    init: str = "xavier"
    checkpoint: bool = False  # recompute each block in the backward pass instead of keeping its insides

    def __post_init__(self):
        require_positive_fields(self, "layers")
        require_known("init", self.init, INITS)
        require(
            self.block.cross is None,
            "an Encoder has no context to look at; use a Decoder for a block with cross",
        )
        check_stack(self)

    @property
    def d_model(self) -> int:
        return self.block.d_model

    @property
    def has_final_norm(self) -> bool:
        return final_norm(self)


@dataclass(frozen=True, repr=False)
class Decoder(Spec):
    """A stack of blocks that looks at its own past and, where its block has cross, at a context."""

    block: Block
    layers: int
    _: KW_ONLY
    embedding: Embedding | None = None
    position: Position | None = None
    final_norm: bool | None = None
    head: Head | None = None
    init: str = "xavier"
    checkpoint: bool = False

    def __post_init__(self):
        require_positive_fields(self, "layers")
        require_known("init", self.init, INITS)
        check_stack(self)
        pattern = self.block.attention.pattern
        require(
            (pattern - causal()).count(64) == 0,
            f"a Decoder must not see what comes next, and pattern={pattern!r} does; use rg.causal() & it",
        )

    @property
    def d_model(self) -> int:
        return self.block.d_model

    @property
    def has_final_norm(self) -> bool:
        return final_norm(self)


def final_norm(stack: Encoder | Decoder) -> bool:
    return stack.block.norm_at == "pre" if stack.final_norm is None else stack.final_norm


def check_stack(stack: Encoder | Decoder) -> None:
    """The embedding is as wide as the block; a tied head has an embedding to tie to; positions act inside."""
    if stack.embedding is not None:
        require(
            stack.embedding.d_model == stack.d_model,
            f"an embedding {stack.embedding.d_model} wide and blocks {stack.d_model} wide; give both one d_model",
        )
    if isinstance(stack.head, LanguageHead | MaskedHead):
        require(
            stack.embedding is not None,
            f"{stack.head!r} gives logits over the vocabulary, and there is no embedding to say how many; give one",
        )
    if stack.position is not None:
        require(
            stack.position.acts != "input",
            f"position={stack.position!r} is added to the input; give it to the embedding",
        )
        require(
            not isinstance(stack.position, shaw),
            f"position={stack.position!r} scores each layer's own queries; give it to the attention of the block",
        )
        require(
            stack.block.attention.position is None,
            f"position={stack.position!r} for all layers and {stack.block.attention.position!r} in each; give one",
        )


@dataclass(frozen=True, repr=False)
class EncoderDecoder(Spec):
    """The Transformer: an encoder reads the source, a decoder writes the target looking at it."""

    encoder: Encoder
    decoder: Decoder
    _: KW_ONLY
    share_embedding: bool = False  # one table for source and target

    def __post_init__(self):
        require(
            self.encoder.head is None,
            "the encoder of an EncoderDecoder gives states; put the head on the decoder",
        )
        cross = self.decoder.block.cross
        require(
            cross is not None,
            "the decoder's block has no cross-attention; declare Block(..., cross=Attention(...))",
        )
        width = cross.sizes.d_context if cross else 0
        require(
            width == self.encoder.d_model,
            f"the encoder gives {self.encoder.d_model} wide states and cross-attention takes {width}; "
            f"set d_context={self.encoder.d_model} there",
        )
        if self.share_embedding:
            a, b = self.encoder.embedding, self.decoder.embedding
            require(
                a is not None and b is not None and (a.vocab, a.d_model) == (b.vocab, b.d_model),
                f"share_embedding needs two embeddings of one size, not {a!r} and {b!r}",
            )

    @property
    def d_model(self) -> int:
        return self.encoder.d_model


@dataclass(frozen=True, repr=False)
class Vision(Spec):
    """An encoder over image patches, read at the class token (or pooled)."""

    encoder: Encoder
    _: KW_ONLY
    image: tuple[int, int] = (224, 224)
    patch: tuple[int, int] = (16, 16)
    channels: int = 3
    class_token: bool = True
    position: Position | None = None  # None: learned, one vector a token, the class token too
    head: ClassifierHead | None = None
    dropout: Number = 0.0

    def __post_init__(self):
        require_positive_fields(self, "channels")
        require_probability(self, "dropout")
        (height, width), (p, q) = self.image, self.patch
        require(
            min(self.image + self.patch) > 0 and height % p == 0 and width % q == 0,
            f"patches of {p} × {q} do not tile an image of {height} × {width}; both sides need to divide",
        )
        require(
            self.encoder.embedding is None and self.encoder.head is None,
            "the encoder of a Vision is given patches; leave out its embedding and its head",
        )
        require(
            self.head is None or self.head.pool != "first" or self.class_token,
            "pool='first' reads the class token, and class_token is False; use pool='mean'",
        )
        inside = self.encoder.position or self.encoder.block.attention.position
        require(
            not self.class_token or getattr(inside, "grid", None) is None,
            f"position={inside!r} is of a grid, where the class token has no place; use class_token=False",
        )
        if self.position is not None:
            require(
                self.position.acts == "input",
                f"position={self.position!r} acts inside attention; give it to the encoder",
            )
            if isinstance(self.position, learned) and isinstance(self.position.table, int):
                require(
                    self.position.table >= self.tokens,
                    f"{self.position!r} is shorter than the {self.tokens} tokens of an image",
                )

    @property
    def grid(self) -> tuple[int, int]:
        return self.image[0] // self.patch[0], self.image[1] // self.patch[1]

    @property
    def tokens(self) -> int:
        return prod(self.grid) + self.class_token

    @property
    def d_model(self) -> int:
        return self.encoder.d_model
