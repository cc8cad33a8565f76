"""Random declarations, small and of every kind, for the tests that price them."""

from hypothesis import strategies as st

import regard as rg

PATTERNS = (rg.full(), rg.causal(), rg.window(2), rg.causal() & (rg.window(1) | rg.every(3)), rg.blocks(4))
INSIDE = (
    rg.rope(),
    rg.alibi(),
    rg.t5_buckets(8, 16),
    rg.relative_table(3),
    rg.shaw(2),
    rg.shaw(2, values=True),
    rg.quadratic(),
)
SHARED = (rg.rope(), rg.alibi(), rg.t5_buckets(8, 16), rg.relative_table(3), rg.quadratic())
biases = st.sampled_from(["none", "output", "all"])


@st.composite
def attentions(draw, d_model=None, closed=False, patterns=PATTERNS, d_context=None, positions=True):
    """closed: as wide at the end as at the start, as a block needs it."""
    d_model = d_model or 4 * draw(st.integers(1, 6))
    heads = draw(st.sampled_from([h for h in (1, 2, 4) if d_model % (2 * h) == 0] or [1]))
    kv_heads = draw(st.sampled_from([None, *(k for k in (1, 2) if heads % k == 0)]))
    score = draw(st.sampled_from(["dot", "dot", "dot", "bilinear", "additive", "position"]))
    position = None
    if score in ("dot", "position") and positions:
        layer_kinds = [
            p for p in INSIDE if score == "dot" or (p.acts == "score" and not isinstance(p, rg.shaw))
        ]
        position = draw(st.sampled_from(layer_kinds if score == "position" else [None, *layer_kinds]))
    elif score == "position":
        score = "dot"
    each = st.sampled_from(patterns)
    one_per_head = st.lists(each, min_size=heads, max_size=heads)
    own = not isinstance(position, rg.rope) and score != "bilinear"
    output = closed or draw(st.booleans())
    return rg.Attention(
        d_model,
        heads=heads,
        kv_heads=kv_heads,
        d_k=draw(st.sampled_from([None, 5])) if own else None,
        d_v=draw(st.sampled_from([None, 3])),
        d_out=None if closed or not output else draw(st.sampled_from([None, 7])),
        d_context=d_context,
        pattern=draw(st.one_of(each, one_per_head)),
        position=position,
        score=score,
        scale=draw(st.sampled_from([None, None, 0.5, float("inf")])),
        biases=draw(biases),
        output=output,
    )


@st.composite
def blocks(draw, d_model=None, patterns=PATTERNS, cross=False, positions=True):
    d_model = d_model or 4 * draw(st.integers(1, 6))
    look = (
        draw(attentions(d_model, True, (rg.full(),), draw(st.sampled_from([None, d_model])), False))
        if cross
        else None
    )
    gate = st.sampled_from(["relu", "gelu", "gelu_tanh", "silu", "swiglu", "geglu"])
    hidden = st.builds(rg.FeedForward, st.integers(1, 40), activation=gate, bias=st.booleans())
    return rg.Block(
        draw(attentions(d_model, True, patterns, positions=positions)),
        draw(st.one_of(st.none(), hidden)),
        cross=look,
        norm=draw(st.sampled_from(["layer", "rms", "batch", "none"])),
        norm_at=draw(st.sampled_from(["pre", "post"])),
        norm_bias=draw(st.booleans()),
        # without a residual nothing learns below a hard look elsewhere: its queries get no gradient
        residual=(look is not None and look.scale == float("inf")) or draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.1])),
    )


@st.composite
def embeddings(draw, d_model):
    position = draw(st.sampled_from([None, rg.learned(32), rg.sinusoidal()]))
    return rg.Embedding(
        draw(st.integers(2, 50)), d_model, position=position, scaled=draw(st.booleans()),
        types=draw(st.integers(0, 3)), norm=draw(st.booleans()),
    )  # fmt: skip


def heads(embedded):
    plain = [
        st.none(),
        st.builds(rg.Pooler),
        st.builds(
            rg.ClassifierHead,
            st.integers(1, 9),
            pool=st.sampled_from(["first", "last", "mean", "max"]),
            hidden=st.sampled_from([None, 6]),
        ),
    ]
    words = [
        st.builds(rg.LanguageHead, tied=st.booleans(), bias=st.booleans(), scaled=st.booleans()),
        st.builds(rg.MaskedHead),
    ]
    return st.one_of(*plain, *(words if embedded else []))


@st.composite
def stacks(draw, kind=rg.Encoder, cross=False, patterns=PATTERNS, embedded=None, headed=True, d_model=None):
    shared = draw(st.sampled_from([None, None, *SHARED]))
    block = draw(blocks(d_model, patterns, cross, positions=shared is None))
    if shared is not None and (block.attention.score != "dot" or block.d_model // block.attention.heads % 2):
        shared = None
    if isinstance(shared, rg.rope) and block.attention.sizes.d_k % 2:
        shared = None
    embedded = draw(st.booleans()) if embedded is None else embedded
    return kind(
        block,
        draw(st.integers(1, 3)),
        embedding=draw(embeddings(block.d_model)) if embedded else None,
        position=shared,
        final_norm=draw(st.sampled_from([None, True, False])),
        head=draw(heads(embedded)) if headed else None,
        checkpoint=draw(st.booleans()),
    )


@st.composite
def encoder_decoders(draw):
    d_model = 4 * draw(st.integers(1, 6))
    past = (rg.causal(), rg.causal() & rg.window(2))
    encoder = draw(stacks(rg.Encoder, embedded=True, headed=False, d_model=d_model))
    decoder = draw(stacks(rg.Decoder, True, past, True, d_model=d_model))
    same = encoder.embedding.vocab == decoder.embedding.vocab
    return rg.EncoderDecoder(encoder, decoder, share_embedding=same and draw(st.booleans()))


@st.composite
def visions(draw):
    encoder = draw(stacks(embedded=False, headed=False, patterns=(rg.full(),)))
    first = draw(st.booleans())
    pools = st.sampled_from(["mean", "first"] if first else ["mean"])
    head = st.builds(rg.ClassifierHead, st.integers(1, 9), pool=pools, hidden=st.sampled_from([None, 6]))
    return rg.Vision(
        encoder,
        image=(8, 12),
        patch=(4, 4),
        channels=draw(st.integers(1, 3)),
        class_token=first,
        head=draw(st.one_of(st.none(), head)),
    )


recurrents = st.builds(
    rg.Recurrent, st.integers(1, 30), st.integers(1, 8).map(lambda k: 2 * k),
    cell=st.sampled_from(["rnn", "gru", "lstm"]), layers=st.integers(1, 3),
    attention=st.sampled_from(["none", "additive", "multiplicative"]),
    target_vocab=st.sampled_from([None, 13]), bidirectional=st.booleans(),
)  # fmt: skip
convolutionals = st.builds(
    rg.Convolutional, st.integers(1, 12), layers=st.integers(1, 3), kernel=st.sampled_from([1, 3, 5]),
    dilation=st.integers(1, 3), causal=st.booleans(), separable=st.booleans(), vocab=st.sampled_from([None, 11]),
)  # fmt: skip
specs = st.one_of(
    attentions(), blocks(), blocks(cross=True), stacks(), stacks(rg.Decoder, patterns=(rg.causal(),)),
    stacks(rg.Decoder, True, (rg.causal(),)), encoder_decoders(), visions(), recurrents, convolutionals,
    st.integers(1, 6).flatmap(lambda k: embeddings(4 * k)),
)  # fmt: skip
