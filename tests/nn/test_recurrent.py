"""The recurrent rival against its own formula, step by step and row by row."""

import pytest
import torch
from einops import rearrange

from ledger_cases import cases
from regard.errors import ShapeError, SpecError
from regard.nn.recurrent import AdditiveScore, MultiplicativeScore, RecurrentModel
from regard.spec import Recurrent

B, M, N, D_MODEL, VOCAB, TARGET = 4, 11, 7, 6, 13, 17
LENGTHS = torch.tensor([11, 3, 1, 0])
KINDS = [
    Recurrent(
        VOCAB, D_MODEL, target_vocab=TARGET, cell=cell, layers=layers, attention=how, bidirectional=both
    )
    for cell, layers, both in [("rnn", 1, False), ("gru", 2, True), ("lstm", 2, False), ("lstm", 1, True)]
    for how in ("none", "additive", "multiplicative")
]
every_kind = pytest.mark.parametrize("spec", KINDS, ids=repr)
attending = pytest.mark.parametrize("spec", [s for s in KINDS if s.attention != "none"], ids=repr)


def built(spec):
    torch.manual_seed(0)
    return RecurrentModel(spec).double().eval()


def ids(*shape, vocab, seed=0):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


SOURCE, TOKENS = ids(B, M, vocab=VOCAB), ids(B, N, vocab=TARGET, seed=1)


def sigmoid_gate(x):
    return 1 / (1 + torch.exp(-x))


def cell_step(cell, mode, l, x, h, c):
    """One step of one layer by its equations: h' (and c') from x, h (and c)."""
    w_x, w_h = getattr(cell, f"weight_ih_l{l}"), getattr(cell, f"weight_hh_l{l}")
    a = x @ w_x.T + getattr(cell, f"bias_ih_l{l}")
    r = h @ w_h.T + getattr(cell, f"bias_hh_l{l}")
    if mode == "rnn":
        return torch.tanh(a + r), c
    if mode == "gru":
        (reset_a, update_a, new_a), (reset_r, update_r, new_r) = a.chunk(3, -1), r.chunk(3, -1)
        reset, update = sigmoid_gate(reset_a + reset_r), sigmoid_gate(update_a + update_r)
        return (1 - update) * torch.tanh(new_a + reset * new_r) + update * h, c
    take, forget, new, show = (a + r).chunk(4, -1)
    c = sigmoid_gate(forget) * c + sigmoid_gate(take) * torch.tanh(new)
    return sigmoid_gate(show) * torch.tanh(c), c


def unrolled(cell, mode, xs, state):
    """All top states of one sequence (n, d), and the last state of each layer."""
    states = [list(s) for s in state]
    tops = []
    for x in xs:
        for l in range(len(states)):
            states[l] = list(cell_step(cell, mode, l, x, *states[l]))
            x = states[l][0]
        tops.append(x)
    return torch.stack(tops), states


@pytest.mark.ledger("S1.Q1a.2", "S1.Q6b.3")
@pytest.mark.parametrize("cell", ["rnn", "gru", "lstm"])
@pytest.mark.parametrize("how", ["none", "additive", "multiplicative"])
def test_it_is_its_equations_written_out_for_one_sequence(cell, how):
    spec = Recurrent(VOCAB, D_MODEL, cell=cell, layers=2, attention=how)
    model = built(spec)
    source, target = ids(5, vocab=VOCAB, seed=2), ids(N, vocab=VOCAB, seed=3)
    zero = [(torch.zeros(D_MODEL).double(), torch.zeros(D_MODEL).double()) for _ in range(2)]
    memory, state = unrolled(model.encoder, cell, model.embed_source.weight[source], zero)
    states, _ = unrolled(model.decoder, cell, model.embed_target.weight[target], state)
    rows = []
    for s in states:
        if how == "none":
            rows.append(model.head.weight @ s + model.head.bias)
            continue
        if how == "additive":
            w_q, w_k, v = model.score.w_q.weight, model.score.w_k.weight, model.score.v.weight[0]
            scores = torch.stack([v @ torch.tanh(w_q @ s + w_k @ k) for k in memory])
        else:
            scores = torch.stack([s @ model.score.w_q.weight.T @ k for k in memory])
        weights = scores.exp() / scores.exp().sum()
        context = sum(a * k for a, k in zip(weights, memory))
        rows.append(model.head.weight @ torch.cat([s, context]) + model.head.bias)
    logits = model(source[None], target[None])
    assert (logits[0] - torch.stack(rows)).abs().max() < 1e-12


@pytest.mark.ledger("S1.Q1a.2")
@every_kind
def test_rows_of_different_lengths_equal_each_alone(spec):
    model = built(spec)
    logits = model(SOURCE, TOKENS, LENGTHS)
    assert logits.shape == (B, N, TARGET)
    for row, length in enumerate(LENGTHS.tolist()[:3]):
        alone = model(SOURCE[row : row + 1, :length], TOKENS[row : row + 1])
        assert (logits[row] - alone[0]).abs().max() < 1e-12


@every_kind
def test_what_padding_holds_does_not_matter(spec):
    model = built(spec)
    padding = torch.arange(M) >= LENGTHS[:, None]
    for token in (VOCAB - 1, -100):  # another token, and one that is none
        other = SOURCE.masked_fill(padding, token)
        assert torch.equal(model(other, TOKENS, LENGTHS), model(SOURCE, TOKENS, LENGTHS))
    assert not torch.equal(model(SOURCE, TOKENS), model(SOURCE, TOKENS, LENGTHS))  # control: lengths count


@pytest.mark.ledger("S1.Q1a.2")
@every_kind
def test_a_source_of_length_zero_gives_a_zero_state_and_a_zero_context(spec):
    model = built(spec)
    encoded = model.encode(SOURCE, LENGTHS)
    state = encoded.state if isinstance(encoded.state, tuple) else (encoded.state,)
    assert all(s[:, 3].eq(0).all() and s[:, 2].ne(0).all() for s in state)
    states, _ = model.decoder(model.embed_target(TOKENS[3:]), None)
    context = torch.zeros_like(states) if spec.attention != "none" else states[..., :0]
    expected = model.head(torch.cat([states, context], -1))
    logits = model(SOURCE, TOKENS, LENGTHS)
    assert (logits[3] - expected[0]).abs().max() < 1e-12
    logits.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("spec", [s for s in KINDS if s.bidirectional], ids=repr)
def test_the_decoder_starts_where_both_directions_of_a_layer_ended(spec):
    encoded = built(spec).encode(SOURCE, LENGTHS)
    hidden = encoded.state[0] if spec.cell == "lstm" else encoded.state
    half = D_MODEL // 2
    for row, length in enumerate(LENGTHS.tolist()[:3]):
        last, first = encoded.memory[row, length - 1, :half], encoded.memory[row, 0, half:]
        assert torch.equal(hidden[-1, row], torch.cat([last, first]))


@pytest.mark.ledger("S1.Q1a.2")
@attending
def test_weights_are_a_distribution_over_the_true_source(spec):
    model = built(spec)
    logits, weights = model(SOURCE, TOKENS, LENGTHS, return_weights=True)
    assert weights.shape == (B, N, M) and (weights >= 0).all()
    assert (weights[:3].sum(-1) - 1).abs().max() < 1e-12
    assert weights[3].eq(0).all()
    assert weights.masked_select((torch.arange(M) >= LENGTHS[:, None])[:, None]).eq(0).all()
    assert (logits - model(SOURCE, TOKENS, LENGTHS)).abs().max() < 1e-12  # the fused way agrees


@attending
def test_every_decoder_step_mixes_the_source_anew(spec):
    _, weights = built(spec)(SOURCE, TOKENS, return_weights=True)
    assert (weights[:, 1:] - weights[:, :-1]).abs().amax(-1).min() > 1e-9  # far above rounding, 1e-16


@pytest.mark.ledger("S4.1.4a.1")
@every_kind
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_step_by_step_equals_the_full_pass(spec, lengths):
    model = built(spec)
    encoded = model.encode(SOURCE, lengths)
    rows = []
    for token in TOKENS.unbind(1):
        logits, encoded = model.step(token, encoded)
        rows.append(logits)
    full = model(SOURCE, TOKENS, lengths)
    assert (rearrange(rows, "n b v -> b n v") - full).abs().max() < 1e-12


@every_kind
def test_selected_rows_decode_as_they_would_in_their_own_batch(spec):
    model = built(spec)
    rows = torch.tensor([2, 0, 0])
    logits, after = model.step(TOKENS[rows, 0], model.encode(SOURCE, LENGTHS).select(rows))
    expected, _ = model.step(TOKENS[:, 0], model.encode(SOURCE, LENGTHS))
    assert (logits - expected[rows]).abs().max() < 1e-12
    assert torch.equal(after.lengths, LENGTHS[rows])


@pytest.mark.ledger("S1.Q1a.2", "S4.1.4b.3")
@every_kind
def test_the_past_does_not_depend_on_later_target_tokens(spec):
    model = built(spec)
    for t in range(N):
        changed = TOKENS.clone()
        changed[:, t] = (changed[:, t] + 1) % TARGET
        before, after = model(SOURCE, TOKENS), model(SOURCE, changed)
        assert torch.equal(before[:, :t], after[:, :t])
        assert not torch.equal(before[:, t], after[:, t])


@pytest.mark.ledger("S1.Q1a.2")
def test_without_attention_the_source_is_one_vector_of_fixed_size():
    """Two sources with one last state decode alike without attention, and not alike with it."""
    for how, alike in (("none", True), ("additive", False), ("multiplicative", False)):
        model = built(Recurrent(VOCAB, D_MODEL, attention=how))
        encoded = model.encode(ids(1, 5, vocab=VOCAB, seed=4))
        other = encoded._replace(memory=model.encode(ids(1, 9, vocab=VOCAB, seed=5)).memory)
        token = torch.tensor([3])
        assert torch.equal(model.step(token, encoded)[0], model.step(token, other)[0]) == alike


@pytest.mark.ledger("S1.Q6b.3")
def test_the_scores_have_the_parameters_of_the_ledger():
    kinds = {"additive": AdditiveScore, "bilinear": MultiplicativeScore}
    checked = 0
    for c in cases("params.score"):
        given = c["inputs"]
        if given["form"] in kinds and given["d_q"] == given["d_k"]:
            score = kinds[given["form"]](given["d_q"])
            assert sum(p.numel() for p in score.parameters()) == c["expected"]["total"]
            checked += 1
    assert checked == 3


@every_kind
def test_the_target_vocabulary_is_the_sources_unless_given(spec):
    model = RecurrentModel(Recurrent(VOCAB, D_MODEL, attention=spec.attention))
    assert model.embed_target.num_embeddings == model.head.out_features == VOCAB
    assert RecurrentModel(spec).head.out_features == TARGET


@pytest.mark.parametrize("layers", [1, 2])
def test_dropout_acts_in_training_alone_and_warns_of_nothing(layers):
    model = built(Recurrent(VOCAB, D_MODEL, target_vocab=TARGET, layers=layers, dropout=0.5))
    assert torch.equal(model(SOURCE, TOKENS), model(SOURCE, TOKENS))
    model.train()
    assert not torch.equal(model(SOURCE, TOKENS), model(SOURCE, TOKENS))


def test_weights_that_do_not_exist_cannot_be_requested():
    model = RecurrentModel(Recurrent(VOCAB, D_MODEL, attention="none"))
    with pytest.raises(SpecError) as e:
        model(SOURCE, SOURCE, return_weights=True)
    assert str(e.value) == (
        "Recurrent(13, 6, attention='none') has no attention, so it has no weights; call it without return_weights"
    )


@pytest.mark.parametrize(
    "lengths, message",
    [
        ([12, 1, 1, 1], "source_lengths from 1 to 12 for a source of 11 tokens; use 0 … 11"),
        ([3, -1, 1, 1], "source_lengths from -1 to 3 for a source of 11 tokens; use 0 … 11"),
    ],
)
def test_lengths_past_the_source_are_refused(lengths, message):
    with pytest.raises(ShapeError) as e:
        built(KINDS[0])(SOURCE, TOKENS, torch.tensor(lengths))
    assert str(e.value) == message
