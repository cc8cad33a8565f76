"""How weights start: bounds, deviations and what they make of the scores."""

import math

import pytest
import torch
from einops import rearrange
from torch import nn

from ledger_cases import agrees, cases
from regard.errors import SpecError
from regard.nn.initialization import NAMES, initialize, xavier_bound
from regard.nn.recurrent import RecurrentModel
from regard.position import learned
from regard.reference import dot_scores, softmax
from regard.spec import (
    Attention,
    Block,
    ClassifierHead,
    Embedding,
    Encoder,
    FeedForward,
    LanguageHead,
    Recurrent,
)

D, HEADS, VOCAB, LAYERS = 512, 8, 211, 3


class Heads(nn.Module):
    """The projections of one attention, by the names regard gives them."""

    def __init__(self, d_model, d_kv=None, d_source=None):
        super().__init__()
        d_kv, d_source = d_kv or d_model, d_source or d_model
        self.w_q = nn.Linear(d_model, d_model)
        self.w_k = nn.Linear(d_source, d_kv)
        self.w_v = nn.Linear(d_source, d_kv)
        self.w_o = nn.Linear(d_model, d_model)


class Forward(nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.w_in, self.w_out = nn.Linear(d_model, 4 * d_model), nn.Linear(4 * d_model, d_model)


class Declared:
    layers = LAYERS


class Stack(nn.Module):
    """A small language model: embeddings, blocks, norms, and a head tied to the embeddings."""

    def __init__(self, d_model=67, spec=None):
        super().__init__()
        self.spec = spec
        self.embedding = nn.Embedding(VOCAB, d_model, padding_idx=3)
        self.table = nn.Parameter(torch.full((5, d_model), 7.0))
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {"attention": Heads(d_model), "feed": Forward(d_model), "norm": nn.LayerNorm(d_model)}
            )
            for _ in range(LAYERS)
        )
        self.rms = nn.RMSNorm(d_model)
        self.head = nn.Linear(d_model, VOCAB)
        self.head.weight = self.embedding.weight


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def is_uniform_within(weight, bound):
    """The sample's extremes lie just within ± bound, its variance at bound²/3 to five standard errors."""
    n = weight.numel()
    widest = weight.abs().max()
    # the largest of n draws falls short by more than 12/n with chance e^-12; Var(x²) of a uniform is 4 b⁴/45
    error = 5 * bound**2 * math.sqrt(4 / 45 / n)
    return bound * (1 - 12 / n) < widest <= bound and abs(weight.square().mean() - bound**2 / 3) < error


def is_normal(weight, std):
    """Mean zero and the deviation, each to five standard errors; and tails that no uniform has."""
    n = weight.numel()
    return (
        abs(weight.mean()) < 5 * std / math.sqrt(n)
        and abs(weight.std() - std) < 5 * std / math.sqrt(2 * n)
        and weight.abs().max() > 2.5 * std
    )


@pytest.mark.ledger("S1.Q7b.3")
def test_the_bound_is_the_ledgers():
    for c in cases("init.xavier_uniform"):
        fan_in, fan_out = c["inputs"]["fan_in"], c["inputs"]["fan_out"]
        bound = xavier_bound(fan_in, fan_out)
        got = {
            "bound": bound,
            "variance": bound**2 / 3,
            "output_variance_for_unit_input": fan_in * bound**2 / 3,
        }
        assert agrees(got, c["expected"], c["compare"])


@pytest.mark.ledger("S1.Q7b.3")
def test_xavier_takes_each_projection_on_its_own_and_packed_takes_three_as_one():
    separate = initialize(Heads(D), "xavier", generator=seeded())
    packed = initialize(Heads(D), "xavier_packed", generator=seeded())
    for w in ("w_q", "w_k", "w_v"):
        assert is_uniform_within(getattr(separate, w).weight, 0.07654655446197431)
        assert is_uniform_within(getattr(packed, w).weight, 0.05412658773652741)
        assert not is_uniform_within(getattr(packed, w).weight, 0.07654655446197431)  # control
    assert is_uniform_within(packed.w_o.weight, 0.07654655446197431)


@pytest.mark.ledger("S1.Q7b.3")
def test_packed_is_what_pytorchs_own_module_does():
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(D, HEADS)
    assert is_uniform_within(theirs.in_proj_weight, xavier_bound(D, 3 * D))
    initialize(theirs, "xavier", generator=seeded())
    for block in theirs.in_proj_weight.chunk(3):
        assert is_uniform_within(block, xavier_bound(D, D))
    initialize(theirs, "xavier_packed", generator=seeded())
    assert is_uniform_within(theirs.in_proj_weight, xavier_bound(D, 3 * D))
    assert is_uniform_within(theirs.out_proj.weight, xavier_bound(D, D))
    assert theirs.in_proj_bias.eq(0).all() and theirs.out_proj.bias.eq(0).all()


def test_packed_counts_shared_heads_and_leaves_other_widths_apart():
    grouped = initialize(Heads(D, d_kv=128), "xavier_packed", generator=seeded())
    for w in (grouped.w_q, grouped.w_k, grouped.w_v):
        assert is_uniform_within(w.weight, xavier_bound(D, 512 + 128 + 128))
    crossed = initialize(
        Heads(D, d_source=256), "xavier_packed", generator=seeded()
    )  # no one matrix could be
    assert is_uniform_within(crossed.w_q.weight, xavier_bound(D, D))
    assert is_uniform_within(crossed.w_k.weight, xavier_bound(256, D))
    theirs = nn.MultiheadAttention(D, HEADS, kdim=256, vdim=128)
    initialize(theirs, "xavier_packed", generator=seeded())
    assert is_uniform_within(theirs.q_proj_weight, xavier_bound(D, D))
    assert is_uniform_within(theirs.k_proj_weight, xavier_bound(256, D))
    assert is_uniform_within(theirs.v_proj_weight, xavier_bound(128, D))


@pytest.mark.ledger("S1.Q7b.3")
@pytest.mark.parametrize(
    "name, q_variance, score_variance", [("xavier", 1.0, 1.0), ("xavier_packed", 0.5, 0.25)]
)
@pytest.mark.parametrize("heads", [1, HEADS])
def test_unit_inputs_meet_scores_of_the_ledgers_variance(name, q_variance, score_variance, heads):
    module = initialize(Heads(D), name, generator=seeded())
    x = torch.randn(1024, D, generator=seeded(1))
    q, k = (rearrange(w(x), "n (h d) -> h n d", h=heads) for w in (module.w_q, module.w_k))
    scores = dot_scores(q, k) / (D // heads) ** 0.5
    assert abs(q.var() / q_variance - 1) < 0.05 and abs(k.var() / q_variance - 1) < 0.05
    assert abs(scores.var() / score_variance - 1) < 0.05
    if name == "xavier":  # scores of variance s² cost s²/2 of the entropy
        weights = softmax(scores)
        entropy = -(weights * weights.log()).sum(-1).mean()
        assert abs(entropy - (math.log(1024) - 0.5)) < 0.1


@pytest.mark.parametrize("name", ["normal", "depth_scaled"])
def test_normal_starts_all_at_two_hundredths_save_what_depth_scales(name):
    model = initialize(Stack(), name, layers=LAYERS, generator=seeded())
    into_the_stream = 0.02 / math.sqrt(2 * LAYERS) if name == "depth_scaled" else 0.02
    for block in model.blocks:
        attention, forward = block["attention"], block["feed"]
        for inner in (attention.w_q, attention.w_k, attention.w_v, forward.w_in):
            assert is_normal(inner.weight, 0.02)
        for outer in (attention.w_o, forward.w_out):
            assert is_normal(outer.weight, into_the_stream)
    assert is_normal(model.embedding.weight[4:], 0.02)


def test_depth_scaling_keeps_the_variance_of_the_stream_whatever_the_depth():
    """2·layers additions of variance s²/(2·layers) each add up to s²."""
    for layers in (1, 4, 16):
        feed = nn.ModuleDict({"w_in": nn.Linear(D, D), "w_out": nn.Linear(D, D)})
        w = initialize(feed, "depth_scaled", layers, seeded())["w_out"]
        total = 2 * layers * w.weight.square().mean()
        assert abs(total / 0.02**2 - 1) < 5 * math.sqrt(2 / D**2)


def test_depth_is_read_off_the_nearest_spec_around():
    pair = nn.ModuleDict({"deep": Stack(spec=Declared()), "given": Stack()})
    initialized = initialize(pair, "depth_scaled", layers=12, generator=seeded())
    assert is_normal(initialized["deep"].blocks[0]["feed"].w_out.weight, 0.02 / math.sqrt(24))
    alone = initialize(pair["deep"], "depth_scaled", generator=seeded())
    assert is_normal(alone.blocks[0]["feed"].w_out.weight, 0.02 / math.sqrt(2 * LAYERS))
    with pytest.raises(SpecError) as e:
        initialize(pair, "depth_scaled")
    assert str(e.value) == (
        "depth_scaled divides given.blocks.0.attention.w_o by √(2·layers), but layers is None; "
        "give layers=, at least 1"
    )


def test_depth_scaling_knows_pytorchs_own_layers():
    theirs = nn.TransformerEncoderLayer(64, 4, 256)
    initialize(theirs, "depth_scaled", layers=8, generator=seeded())
    assert is_normal(theirs.self_attn.in_proj_weight, 0.02) and is_normal(theirs.linear1.weight, 0.02)
    assert is_normal(theirs.self_attn.out_proj.weight, 0.005) and is_normal(theirs.linear2.weight, 0.005)


@pytest.mark.parametrize("name", ["xavier", "xavier_packed"])
def test_scaled_embeddings_start_at_unit_size(name):
    model = initialize(Stack(), name, generator=seeded())
    table = model.embedding.weight
    d_model = table.shape[-1]
    assert is_normal(table[4:] * math.sqrt(d_model), 1.0)
    assert table[3].eq(0).all()  # padding_idx
    assert model.head.weight is table


@pytest.mark.parametrize("name", [n for n in NAMES if n != "torch"])
def test_biases_start_at_zero_norms_at_one_and_tables_stay(name):
    model = Stack()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)
    initialize(model, name, layers=LAYERS)
    for path, p in model.named_parameters():
        if path.endswith("bias"):
            assert p.eq(0).all()
        elif path.endswith(("norm.weight", "rms.weight")):
            assert p.eq(1).all()
        elif path == "table":
            assert p.eq(7).all()
        else:
            assert p.ne(7).all() and p.unique().numel() > p.numel() / 2


def test_convolutions_and_gates_count_their_own_fans():
    convolution = initialize(nn.Conv1d(64, 32, 5), "xavier", generator=seeded())
    assert is_uniform_within(convolution.weight, xavier_bound(64 * 5, 32 * 5))
    depthwise = initialize(nn.Conv1d(512, 512, 7, groups=512), "xavier", generator=seeded())
    assert is_uniform_within(depthwise.weight, xavier_bound(7, 7))
    model = RecurrentModel(Recurrent(VOCAB, 64, cell="lstm", layers=2))
    initialize(model, "xavier", generator=seeded())
    for layer in range(2):
        for gate in getattr(model.encoder, f"weight_ih_l{layer}").chunk(4):
            assert is_uniform_within(gate, xavier_bound(64, 64))
        assert getattr(model.decoder, f"bias_hh_l{layer}").eq(0).all()
    assert is_uniform_within(model.score.w_q.weight, xavier_bound(64, 64))


def small(head, **more):
    embedding = Embedding(VOCAB, 67, position=learned(5), types=41)
    block = Block(Attention(67, heads=1), FeedForward(268))
    return Encoder(block, LAYERS, embedding=embedding, head=head, **more)


@pytest.mark.parametrize("name", NAMES[:4])
def test_every_part_of_our_own_models_starts_by_its_rule(name):
    model = small(LanguageHead(tied=False, bias=True)).build()
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(7.0)
    initialize(model, name, generator=seeded())
    xavier = name.startswith("xavier")
    embedded = 67**-0.5 if xavier else 0.02
    stream = 0.02 / math.sqrt(2 * LAYERS) if name == "depth_scaled" else 0.02
    assert is_normal(model.embedding.table, embedded) and is_normal(model.embedding.types, embedded)
    assert model.embedding.position.table.eq(7).all()
    assert model.head.bias.eq(0).all()
    block = model.blocks[-1]
    qkv = xavier_bound(67, 3 * 67 if name == "xavier_packed" else 67)
    table = model.head.table
    if xavier:
        assert is_uniform_within(block.attention.w_k.weight, qkv) and is_uniform_within(
            table, xavier_bound(67, VOCAB)
        )
    else:
        assert is_normal(block.attention.w_k.weight, 0.02) and is_normal(table, 0.02)
        assert is_normal(block.attention.w_o.weight, stream)
        assert is_normal(block.feed_forward.w_out.weight, stream)


def test_a_classifiers_output_adds_to_no_stream():
    model = initialize(small(ClassifierHead(97)).build(), "depth_scaled", generator=seeded())
    assert is_normal(model.head.w_out.weight, 0.02)


def test_a_module_without_a_stream_is_normal_under_depth_scaling():
    assert is_normal(initialize(nn.Linear(97, 89), "depth_scaled", generator=seeded()).weight, 0.02)


def test_torch_leaves_everything_as_it_was_built():
    model = Stack()
    before = {path: p.clone() for path, p in model.named_parameters()}
    assert initialize(model, "torch") is model
    assert all(torch.equal(p, before[path]) for path, p in model.named_parameters())


@pytest.mark.parametrize("name", NAMES[:4])
def test_one_seed_gives_one_start(name):
    first, again, other = (initialize(Stack(), name, LAYERS, seeded(s)) for s in (5, 5, 6))
    pairs = list(zip(first.parameters(), again.parameters(), other.parameters()))
    assert all(torch.equal(a, b) for a, b, _ in pairs)
    assert not all(torch.equal(a, c) for a, _, c in pairs)


@pytest.mark.parametrize(
    "ask, message",
    [
        (
            lambda: initialize(nn.Linear(2, 2), "xaver"),
            "initialization 'xaver' is unknown; did you mean xavier?",
        ),
        (
            lambda: initialize(Heads(2), "depth_scaled", layers=0),
            "depth_scaled divides w_o by √(2·layers), but layers is 0; give layers=, at least 1",
        ),
    ],
)
def test_an_initialization_that_cannot_be_says_why(ask, message):
    with pytest.raises(SpecError) as e:
        ask()
    assert str(e.value) == message
