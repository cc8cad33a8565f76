"""Declarations: values that check themselves, print as source and travel as JSON."""

import dataclasses
import json
from math import inf

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard as rg
from regard import Attention, Block, Decoder, Embedding, Encoder, EncoderDecoder, FeedForward, Vision
from regard.errors import FormatError, SpecError

ALL = {name: getattr(rg, name) for name in rg.__all__} | {"inf": inf}


@pytest.mark.parametrize("name", rg.presets())
def test_a_preset_is_its_source_and_its_json(name):
    declared = rg.preset(name)
    assert eval(repr(declared), ALL) == declared
    assert rg.from_json(declared.json()) == declared
    assert rg.from_json(json.dumps(json.loads(declared.json(indent=2)))) == declared


heads_and_widths = st.tuples(st.integers(1, 6), st.integers(1, 9))


@given(
    heads_and_widths,
    st.sampled_from(["none", "output", "all"]),
    st.one_of(st.none(), st.floats(0, 9, allow_nan=False), st.just(inf)),
    st.sampled_from([None, rg.rope(pairing="interleaved"), rg.alibi(), rg.shaw(3, values=True)]),
)
def test_a_declared_attention_round_trips(sizes, biases, scale, position):
    heads, width = sizes
    declared = Attention(heads * 2 * width, heads=heads, biases=biases, scale=scale, position=position)
    assert rg.from_json(declared.json()) == declared == eval(repr(declared), ALL)
    assert declared.sizes.d_k == 2 * width == declared.sizes.d_v


@pytest.mark.ledger("S2.1.2.1", "S0.Q2a.1", "S0.Q2b.2")
def test_all_five_sizes_are_free_and_default_to_equal_shares():
    assert Attention(512, heads=8).sizes.d_k == 64
    free = Attention(3, heads=9, d_k=4, d_v=5, d_out=6).sizes
    assert (free.heads, free.d_model, free.d_k, free.d_v, free.d_out) == (9, 3, 4, 5, 6)
    with pytest.raises(SpecError, match="heads=9 does not divide d_model=3"):
        Attention(3, heads=9)


def test_variants_by_replace():
    base = Attention(64, heads=4)
    assert dataclasses.replace(base, pattern=rg.causal()).pattern == rg.causal()
    with pytest.raises(SpecError, match="heads=5 does not divide"):
        dataclasses.replace(base, heads=5)


@pytest.mark.ledger("S2.4.1.2")
def test_temperature_is_the_inverse_of_the_scale():
    assert Attention(8, heads=2, temperature=4.0).factor == 0.25
    assert Attention(8, heads=2, temperature=0).factor == inf
    assert Attention(8, heads=2, scale=0.5).factor == 0.5
    assert Attention(8, heads=2).factor is None


def block(**changed):
    return Block(Attention(8, heads=2), FeedForward(16), **changed)


def causal_block(**changed):
    return Block(Attention(8, heads=2, pattern=rg.causal()), FeedForward(16), **changed)


WRONG = [
    (
        lambda: Attention(512, heads=7),
        "heads=7 does not divide d_model=512; use 1, 2, 4 or 8 heads, or set d_k and d_v",
    ),
    (lambda: Attention(64, heads=8, kv_heads=3), "kv_heads=3 does not divide heads=8; use 1, 2, 4 or 8"),
    (lambda: Attention(64, heads=0), "heads=0 is not a positive integer"),
    (lambda: Attention(64, heads=8, d_k=-2), "d_k=-2 is not a positive integer"),
    (
        lambda: Attention(64, pattern="causal()"),
        "pattern='causal()' is not a pattern; use rg.causal(), rg.window(2), …; of a text, "
        "rg.Pattern.from_text('causal()')",
    ),
    (
        lambda: Attention(64, position="rope"),
        "position='rope' is not a position; use rg.rope(), rg.alibi(), …",
    ),
    (
        lambda: Embedding(9, 8, position=16),
        "position=16 is not a position; use rg.sinusoidal(), rg.learned(64), …",
    ),
    (lambda: Attention(64, dropout=1.0), "dropout=1.0 is not in [0, 1)"),
    (lambda: Attention(64, dropout="0.1"), "dropout='0.1' is not in [0, 1)"),
    (lambda: Attention(64, score="dott"), "score='dott' is unknown; did you mean dot?"),
    (lambda: Attention(64, biases="some"), "biases='some' is unknown; known: all, none, output"),
    (
        lambda: Attention(64, scale=1.0, temperature=1.0),
        "scale and temperature (1/scale) exclude each other; set one of them",
    ),
    (
        lambda: Attention(64, temperature=-1.0),
        "temperature=-1.0 is negative; use 0 for hard attention, or a positive number",
    ),
    (
        lambda: Attention(64, scale=-1.0),
        "scale=-1.0 is negative; use a positive number, or inf for hard attention",
    ),
    (
        lambda: Attention(64, d_out=32, output=False),
        "d_out=32 has no effect with output=False; leave it out",
    ),
    (
        lambda: Attention(64, position=rg.sinusoidal()),
        "position=sinusoidal() is added to the input; pass it to the Embedding of a model",
    ),
    (
        lambda: Attention(64, score="position"),
        "score='position' needs a position that acts on scores, such as rg.quadratic() or rg.alibi()",
    ),
    (
        lambda: Attention(64, score="bilinear", d_k=8),
        "d_k=8: in a bilinear score q·W·k the keys are the inputs, of width d_context; leave d_k out",
    ),
    (
        lambda: Attention(64, score="additive", position=rg.rope()),
        "score='additive' cannot be combined with position=rope(); use score='dot'",
    ),
    (
        lambda: Attention(64, pattern=rg.where(max)),
        "pattern=where(max) carries data, which a declaration cannot contain; "
        "pass it in the call instead: layer(x, pattern=...)",
    ),
    (lambda: FeedForward(0), "d_ff=0 is not a positive integer"),
    (lambda: FeedForward(8, activation="rellu"), "activation='rellu' is unknown; did you mean relu?"),
    (lambda: block(norm="lay"), "norm='lay' is unknown; did you mean layer?"),
    (lambda: block(norm_at="middle"), "norm_at='middle' is unknown; known: post, pre"),
    (
        lambda: Block(Attention(8, heads=2, d_out=9), None),
        "attention maps width 8 to 9; in a block of width 8 both must be 8",
    ),
    (
        lambda: block(cross=Attention(8, heads=2, pattern=rg.causal())),
        "cross-attention relates positions of two sequences; its pattern must be full()",
    ),
    (
        lambda: Embedding(10, 8, position=rg.rope()),
        "position=rope() acts inside attention; pass it to the stack or to its attention",
    ),
    (lambda: Embedding(10, 8, types=-1), "types=-1 is negative; use 0 for no segment types"),
    (
        lambda: Encoder(block(cross=Attention(8, heads=2)), 2),
        "an Encoder has no context for cross-attention; use a Decoder for a block with cross",
    ),
    (
        lambda: Encoder(block(), 2, embedding=Embedding(10, 9)),
        "the embedding has width 9 and the blocks 8; use the same d_model",
    ),
    (
        lambda: Encoder(block(), 2, head=rg.LanguageHead()),
        "LanguageHead() needs the vocabulary of an embedding; set embedding=Embedding(vocab, d_model)",
    ),
    (
        lambda: Encoder(block(), 2, position=rg.sinusoidal()),
        "position=sinusoidal() is added to the input; pass it to the embedding",
    ),
    (
        lambda: Encoder(Block(Attention(8, heads=2, position=rg.rope()), None), 2, position=rg.alibi()),
        "position=alibi() in the stack and rope() in its block; use one",
    ),
    (
        lambda: Encoder(block(), 2, position=rg.shaw(3)),
        "position=shaw(3) depends on the queries of each layer; pass it to the block's attention",
    ),
    (
        lambda: Decoder(block(), 2, embedding=Embedding(5, block().d_model)),
        "a Decoder must be causal, and pattern=full() allows later keys; use rg.causal() & full()",
    ),
    (
        lambda: EncoderDecoder(Encoder(block(), 1), Decoder(causal_block(), 1)),
        "the decoder's block has no cross-attention; declare Block(..., cross=Attention(...))",
    ),
    (
        lambda: EncoderDecoder(
            Encoder(block(), 1), Decoder(causal_block(cross=Attention(8, heads=2, d_context=9)), 1)
        ),
        "the encoder has width 8 and cross-attention expects 9; set d_context=8 in the "
        "decoder's cross-attention",
    ),
    (
        lambda: EncoderDecoder(
            Encoder(block(), 1), Decoder(causal_block(cross=Attention(8, heads=2)), 1), share_embedding=True
        ),
        "share_embedding=True needs two embeddings of the same size, not None and None",
    ),
    (
        lambda: EncoderDecoder(
            Encoder(block(), 1, head=rg.Pooler()), Decoder(causal_block(cross=Attention(8, heads=2)), 1)
        ),
        "the encoder of an EncoderDecoder takes no head; put the head on the decoder",
    ),
    (
        lambda: Vision(Encoder(block(), 1), image=(9, 8), patch=(2, 2)),
        "patches of 2 × 2 do not divide an image of 9 × 8; choose sides that do",
    ),
    (
        lambda: Vision(Encoder(block(), 1, embedding=Embedding(9, 8)), image=(8, 8), patch=(2, 2)),
        "the encoder of a Vision receives patches; leave out its embedding and its head",
    ),
    (
        lambda: Vision(
            Encoder(block(), 1),
            class_token=False,
            head=rg.ClassifierHead(3, pool="first"),
            image=(8, 8),
            patch=(2, 2),
        ),
        "pool='first' reads the class token, but class_token=False; use pool='mean'",
    ),
    (
        lambda: Vision(Encoder(block(), 1), image=(8, 8), patch=(2, 2), position=rg.learned(16)),
        "learned(16) has fewer vectors than the image has tokens; use learned(17)",
    ),
    (
        lambda: Vision(Encoder(block(), 1, position=rg.quadratic(grid=(4, 4))), image=(8, 8), patch=(2, 2)),
        "position=quadratic(grid=(4, 4)) is on a grid, where the class token has no "
        "position; use class_token=False",
    ),
    (lambda: rg.Recurrent(10, 8, cell="gur"), "cell='gur' is unknown; did you mean gru?"),
    (
        lambda: rg.Recurrent(10, 7, bidirectional=True),
        "d_model=7 is odd; a bidirectional encoder needs an even width",
    ),
    (
        lambda: rg.Convolutional(8, kernel=4),
        "kernel=4 is even and has no center; use an odd kernel, or causal=True",
    ),
    (
        lambda: rg.Mixing("average", index=(0,)),
        "how='average' with index=(0,): index is required for how='select' and for nothing else",
    ),
    (
        lambda: rg.preset("transformer-bas"),
        "unknown preset 'transformer-bas'; did you mean transformer-base?",
    ),
]


@pytest.mark.parametrize("wrong, message", WRONG, ids=[m[:40] for _, m in WRONG])
def test_a_wrong_declaration_says_what_conflicts_and_what_would_work(wrong, message):
    with pytest.raises(SpecError) as e:
        wrong()
    assert str(e.value) == message


def test_a_json_spec_with_a_wrong_field_names_it():
    text = Attention(8, heads=2).json()
    with pytest.raises(FormatError) as e:
        rg.from_json(text.replace('"kv_heads"', '"kvheads"'))
    assert str(e.value) == "Attention has no field 'kvheads'; did you mean kv_heads?"
    with pytest.raises(FormatError) as e:
        rg.from_json('{"kind": "Attention", "heads": 2}')
    assert str(e.value) == "Attention needs 'd_model', which the JSON does not give"
    with pytest.raises(FormatError) as e:
        rg.from_json('{"kind": "Attentoin", "d_model": 2}')
    assert str(e.value) == "unknown kind 'Attentoin'; did you mean Attention?"


@pytest.mark.parametrize(
    "pattern, none",
    [
        (rg.causal() - rg.window(0), "query 0 has"),
        (rg.causal() - rg.window(1), "queries 0, 1 have"),
        (rg.prefix(3), "queries 3, 4, 5, … have"),
    ],
    ids=repr,
)
def test_a_pattern_with_empty_rows_warns_at_declaration(pattern, none):
    """A single query 0 read as "0 have no allowed key", that is none."""
    with pytest.warns(rg.EmptyRowWarning) as w:
        Attention(8, heads=2, pattern=pattern)
    text = f"{pattern!r}: with 64 positions, {none} no allowed key; the output there is zero"
    assert str(w[0].message) == text


HEADS = [rg.causal(), rg.causal() & rg.window(2), rg.causal(), rg.causal() & (rg.window(0) | rg.every(3))]


@pytest.mark.parametrize("given", [HEADS, tuple(HEADS), rg.per_head(HEADS)], ids=["list", "tuple", "value"])
def test_a_declaration_takes_a_pattern_for_each_head(given):
    declared = Attention(8, heads=4, pattern=given)
    assert declared.pattern == rg.per_head(HEADS)
    assert rg.from_json(declared.json()) == declared == eval(repr(declared), ALL)
    model = Encoder(Block(declared, FeedForward(8)), 2)
    assert rg.from_json(model.json()) == model == eval(repr(model), ALL)
    assert "heads 0, 2: causal()\n■ · ·\n■ ■ ·\n■ ■ ■" in declared.pattern.draw(3)


def test_equal_patterns_of_all_heads_are_declared_as_one():
    declared = Attention(8, heads=4, pattern=[rg.causal()] * 4)
    assert declared == Attention(8, heads=4, pattern=rg.causal())
    assert dataclasses.replace(declared, heads=2).pattern == rg.causal()
    Block(declared, None, cross=Attention(8, heads=2, pattern=[rg.full()] * 2))


@pytest.mark.parametrize(
    "written",
    [
        [json.loads(pattern.json()) for pattern in HEADS],
        [repr(pattern) for pattern in HEADS],
        repr(rg.per_head(HEADS)),
    ],
    ids=["kinds", "texts", "text"],
)
def test_json_may_list_the_patterns_of_heads(written):
    data = {"kind": "Attention", "d_model": 8, "heads": 4, "pattern": written}
    assert rg.from_json(json.dumps(data)) == Attention(8, heads=4, pattern=HEADS)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (HEADS[:3], "pattern has 3 patterns for heads=4; give one for each query head"),
        ([rg.causal()] * 2, "pattern has 2 patterns for heads=4; give one for each query head"),
        ([], "per_head([]) has no head; give one pattern for each query head"),
        ([*HEADS[:3], 5], "per_head: head 3: 5 is not a pattern; use rg.causal(), rg.window(2), …"),
        (
            [*HEADS[:3], rg.documents(torch.zeros(5, dtype=torch.long))],
            f"pattern=per_head([{', '.join(map(repr, HEADS[:3]))}, documents(<5 ids>)]) carries data, which a "
            "declaration cannot contain; pass it in the call instead: layer(x, pattern=...)",
        ),
    ],
    ids=["3 of 4", "2 of 4", "none", "no pattern", "data"],
)
def test_patterns_of_heads_that_cannot_be_declared_are_refused(given, text):
    with pytest.raises(SpecError) as refused:
        Attention(8, heads=4, pattern=given)
    assert str(refused.value) == text


def test_a_decoder_is_causal_in_every_head():
    block = Block(Attention(8, heads=4, pattern=[*HEADS[:3], rg.window(1)]), None)
    with pytest.raises(SpecError, match=r"a Decoder must be causal, and pattern=per_head.*allows later keys"):
        Decoder(block, 1, embedding=Embedding(9, 8))


def test_the_warning_of_empty_rows_names_the_heads():
    with pytest.warns(rg.EmptyRowWarning) as w:
        Attention(8, heads=4, pattern=[rg.causal() - rg.window(0), rg.causal(), rg.prefix(3), rg.prefix(3)])
    later = "no allowed key; the output there is zero"
    assert [str(x.message) for x in w] == [
        f"causal() & ~window(0) of head 0: with 64 positions, query 0 has {later}",
        f"prefix(3) of heads 2, 3: with 64 positions, queries 3, 4, 5, … have {later}",
    ]


def test_a_part_is_not_built_alone():
    with pytest.raises(SpecError) as e:
        FeedForward(8).build()
    assert (
        str(e.value)
        == "FeedForward is a part of a model; it is built by the block or the model that contains it"
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"softcap": "x"}, r"^softcap='x' is not a number; leave it out for the default$"),
        ({"softcap": True}, r"^softcap=True is not a number"),
        ({"scale": [1.0]}, r"^scale=\[1\.0\] is not a number"),
        ({"temperature": "low"}, r"^temperature='low' is not a number"),
        (
            {"sink_logits": torch.zeros(2)},
            r"^sink_logits=tensor\(\[0\., 0\.\]\): a declaration says True or False",
        ),
        ({"sink_logits": "yes"}, r"^sink_logits='yes': a declaration says True or False"),
    ],
)
def test_terms_of_the_softmax_of_another_kind_are_refused_in_words(options, message):
    with pytest.raises(rg.SpecError, match=message):
        rg.Attention(8, heads=2, **options)
