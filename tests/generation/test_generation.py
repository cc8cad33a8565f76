"""Generation: each way against the full pass without a cache, or against every sentence there is."""

from dataclasses import replace
from itertools import product

import pytest
import torch

import regard as rg
from regard.generation import beam, generate, greedy, sample
from regard.generation.beam_search import _continuations
from regard.generation.strategies import pick, probabilities

VOCAB, END = 11, 3


def gpt(position=None, layers=2, vocab=VOCAB, inside=None, **given):
    torch.manual_seed(0)
    block = rg.Block(
        rg.Attention(12, heads=3, pattern=rg.causal(), position=inside, **given),
        rg.FeedForward(16),
        norm_at="pre",
        dropout=0.1,
    )
    where = rg.learned(24) if position is None else position
    embedding = rg.Embedding(vocab, 12, position=where)
    model = rg.Encoder(block, layers, embedding=embedding, head=rg.LanguageHead(tied=False)).build()
    return spread(model)


def looking_ahead(pattern):
    block = rg.Block(rg.Attention(12, heads=3, pattern=pattern), rg.FeedForward(16))
    return spread(
        rg.Encoder(block, 1, embedding=rg.Embedding(VOCAB, 12), head=rg.LanguageHead(tied=False)).build()
    )


def translator(vocab=VOCAB):
    torch.manual_seed(1)
    attention, mlp = rg.Attention(12, heads=3), rg.FeedForward(16)
    past = rg.Attention(12, heads=3, pattern=rg.causal())
    embedding = rg.Embedding(vocab, 12, position=rg.sinusoidal())
    head = rg.LanguageHead(tied=False)
    spec = rg.EncoderDecoder(
        rg.Encoder(rg.Block(attention, mlp), 2, embedding=embedding),
        rg.Decoder(rg.Block(past, mlp, cross=attention), 2, embedding=embedding, head=head),
    )
    return spread(spec.build())


def spread(model):
    """Float64, and logits far enough apart that rounding decides nothing."""
    for module in model.modules():
        if isinstance(module, rg.nn.embedding.LanguageHead):
            torch.nn.init.normal_(module.table, std=1.0)
        if isinstance(module, rg.nn.embedding.Embedding):
            torch.nn.init.normal_(module.table, std=1.0)
    return model.double().eval()


def sources(b=5, m=7, seed=0):
    noise = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCAB, (b, m), generator=noise), torch.randint(1, m + 1, (b,), generator=noise)


def greedily(logits_of, prompt, most, eos_id=END):
    """argmax of the whole pass, again for each token."""
    tokens = list(prompt)
    for _ in range(most):
        token = int(logits_of(torch.tensor([tokens]))[0, -1].argmax())
        if token == eos_id:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


PROMPTS = [[5], [4, 9, 2, 7], [6, 6, 1], [8, 5, 10, 2, 4], [9, 7]]


@pytest.mark.parametrize(
    "given",
    [{}, {"kv_heads": 1, "d_v": 5}, {"position": rg.rope()}],
    ids=["learned", "grouped", "rotary"],
)
@torch.no_grad()
def test_greedy_is_the_argmax_of_the_full_pass_at_every_step(given):
    position = given.pop("position", None)
    model = gpt(**given) if position is None else gpt(rg.sinusoidal(), inside=position)
    written = generate(model, PROMPTS, max_new_tokens=9, eos_id=END).rows()
    assert written == [greedily(model, p, 9) for p in PROMPTS]
    assert len({len(w) for w in written}) > 1, "rows that end at different steps are the point"


@torch.no_grad()
def test_a_translation_is_the_argmax_of_the_full_pass_at_every_step():
    model, (source, lengths) = translator(), sources(b=9)
    written = generate(
        model, [[1]] * 9, source=source, source_lengths=lengths, max_new_tokens=8, eos_id=END
    ).rows()
    alone = [
        greedily(lambda t, s=s, n=n: model(s[None, :n], t), [1], 8)
        for s, n in zip(source, lengths, strict=True)
    ]
    assert written == alone and len({len(w) for w in written}) > 1


@pytest.mark.parametrize("attention", ["none", "additive", "multiplicative"])
@torch.no_grad()
def test_recurrent_models_write_too(attention):
    torch.manual_seed(3)
    model = rg.Recurrent(VOCAB, 8, attention=attention).build().double().eval()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.8)
    source, lengths = sources(b=6)
    written = generate(
        model, [[1]] * 6, source=source, source_lengths=lengths, max_new_tokens=8, eos_id=END
    ).rows()
    assert written == [
        greedily(lambda t, s=s, n=n: model(s[None, :n], t), [1], 8)
        for s, n in zip(source, lengths, strict=True)
    ]


@pytest.mark.parametrize("strategy", [greedy(), sample(0.9, top_k=7, top_p=0.95, seed=5), beam(3)], ids=repr)
def test_padding_on_either_side_changes_nothing(strategy):
    model, longest = gpt(), max(map(len, PROMPTS))
    short = [longest - len(p) for p in PROMPTS]
    right = torch.tensor([p + [7] * s for p, s in zip(PROMPTS, short, strict=True)])
    left = torch.tensor([[7] * s + p for p, s in zip(PROMPTS, short, strict=True)])
    along = torch.arange(longest)
    at_end = along >= torch.tensor([len(p) for p in PROMPTS])[:, None]
    at_start = along < torch.tensor(short)[:, None]
    ragged = generate(model, PROMPTS, strategy, max_new_tokens=9, eos_id=END)
    for generated in (
        generate(model, right, strategy, padding=at_end, max_new_tokens=9, eos_id=END),
        generate(model, left, strategy, padding=at_start, max_new_tokens=9, eos_id=END),
    ):
        assert generated.rows() == ragged.rows() and torch.equal(generated.log_probs, ragged.log_probs)


@pytest.mark.parametrize("strategy", [greedy(), sample(0.9, seed=5), beam(3)], ids=repr)
def test_the_same_call_gives_the_same_and_leaves_the_model_as_it_was(strategy):
    model = gpt().train()
    once, again = (generate(model, PROMPTS, strategy, max_new_tokens=9, eos_id=END) for _ in range(2))
    assert once.rows() == again.rows() and torch.equal(once.log_probs, again.log_probs)
    assert model.training


def test_a_row_samples_the_same_whatever_other_rows_are_in_the_batch():
    model = gpt()
    strategy = sample(seed=5)
    all_end = generate(model, PROMPTS, strategy, max_new_tokens=12, eos_id=END)
    nobody_ends = generate(model, PROMPTS, strategy, max_new_tokens=12)
    for ended, went_on in zip(all_end.rows(), nobody_ends.rows(), strict=True):
        assert went_on[: len(ended)] == ended


@torch.no_grad()
def test_the_log_probability_is_that_of_the_tokens_and_their_end():
    model = gpt()
    for strategy in (greedy(), sample(seed=1), beam(3)):
        generated = generate(model, PROMPTS, strategy, max_new_tokens=9, eos_id=END)
        for prompt, row, log_p in zip(PROMPTS, generated.rows(), generated.log_probs.tolist(), strict=True):
            said = [*row, END] if len(row) < 9 else row
            logits = model(torch.tensor([prompt + said]))[0].log_softmax(-1)
            true = sum(float(logits[len(prompt) - 1 + i, t]) for i, t in enumerate(said))
            assert abs(true - log_p) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("length_penalty", [0.0, 0.6, 2.0])
def test_a_beam_as_wide_as_the_world_finds_the_best_sentence(length_penalty):
    vocab, most = 4, 4
    model = gpt(vocab=vocab)
    strategy = beam(vocab**most, length_penalty=length_penalty)
    for prompt in ([1], [2, 0], [1, 2, 2]):
        generated = generate(model, [prompt], strategy, max_new_tokens=most, eos_id=END)
        scored = {}
        for n in range(most + 1):
            texts = list(product([t for t in range(vocab) if t != END], repeat=n))
            ends = [[*said] if n == most else [*said, END] for said in texts]
            logits = model(torch.tensor([[*prompt, *full] for full in ends])).log_softmax(-1)
            for row, said, full in zip(logits[:, len(prompt) - 1 :], texts, ends, strict=True):
                scored[said] = sum(float(row[i, t]) for i, t in enumerate(full)) / strategy.penalty(len(full))
        best = max(scored, key=scored.get)
        assert tuple(generated.rows()[0]) == best
        assert (
            abs(float(generated.log_probs[0]) / strategy.penalty(min(len(best) + 1, most)) - scored[best])
            < 1e-5
        )


def test_a_wider_beam_is_never_less_likely_here_and_often_more():
    model, (source, lengths) = translator(), sources(b=16)
    together = {"source": source, "source_lengths": lengths, "max_new_tokens": 8, "eos_id": END}
    plain = generate(model, [[1]] * 16, beam(1, length_penalty=0.0), **together).log_probs
    wide = generate(model, [[1]] * 16, beam(8, length_penalty=0.0), **together).log_probs
    assert bool((wide >= plain - 1e-6).all()) and bool((wide > plain + 1e-3).any())


def test_beams_of_a_batch_are_those_of_each_row_alone():
    model, (source, lengths) = translator(), sources(b=6)
    together = generate(
        model, [[1]] * 6, beam(3), source=source, source_lengths=lengths, max_new_tokens=8, eos_id=END
    )
    alone = [
        generate(model, [[1]], beam(3), source=s[None, :n], max_new_tokens=8, eos_id=END).rows()[0]
        for s, n in zip(source, lengths, strict=True)
    ]
    assert together.rows() == alone


LOGITS = torch.tensor([[2.0, 1.0, 0.0, -1.0], [0.0, 0.0, 3.0, 0.0]])


def test_what_is_drawn_from_is_what_top_k_and_top_p_leave():
    p = LOGITS.softmax(-1)
    assert torch.allclose(probabilities(sample(), LOGITS), p)
    assert torch.allclose(probabilities(sample(0.5), LOGITS), (2 * LOGITS).softmax(-1))
    two = probabilities(sample(top_k=2), LOGITS)
    assert two[0].tolist() == pytest.approx([*(p[0, :2] / p[0, :2].sum()).tolist(), 0, 0], abs=1e-6)
    assert two[1].gt(0).tolist() == [True, False, True, False]  # of equals the first stays
    nucleus = probabilities(sample(top_p=0.7), LOGITS)  # 0.644 is not enough, 0.881 is
    assert nucleus[0].gt(0).tolist() == [True, True, False, False]
    assert nucleus.sum(-1).tolist() == pytest.approx([1, 1], abs=1e-6)
    assert probabilities(sample(top_p=1e-9), LOGITS).argmax(-1).tolist() == [0, 2]


def test_draws_follow_the_probabilities():
    drawn = torch.linspace(0, 1, 100_001, dtype=torch.float64)[:-1]
    tokens = pick(sample(), LOGITS[:1].expand(100_000, -1), drawn)
    shares = torch.bincount(tokens, minlength=4) / 100_000
    assert torch.allclose(shares, LOGITS[0].softmax(-1), atol=2e-5)
    edge = torch.full((1,), 1 - 2**-53, dtype=torch.float64)
    assert int(pick(sample(top_k=2), LOGITS[:1], edge)) == 1  # never one that is left out


@pytest.mark.parametrize("strategy", [greedy(), sample(seed=2), beam(2)], ids=repr)
def test_no_row_outgrows_the_table_of_positions(strategy):
    generated = generate(gpt(), [[5], [4] * 20], strategy, max_new_tokens=100)
    assert generated.tokens.shape[1] == 4 and generated.lengths.tolist() == [4, 4]  # 24 positions, 20 taken


@torch.no_grad()
def test_the_weights_are_those_of_the_full_pass():
    model, (source, lengths) = translator(), sources(b=3)
    generated = generate(
        model,
        [[1]] * 3,
        source=source,
        source_lengths=lengths,
        max_new_tokens=6,
        eos_id=END,
        return_weights=True,
    )
    cross = generated.weights["decoder"][1]["cross"]
    assert cross.shape == (3, 3, 1 + generated.tokens.shape[1], 7)
    assert torch.allclose(cross.sum(-1)[0, :, : 1 + int(generated.lengths[0])], torch.ones(()).double())
    assert bool((cross[0, :, :, int(lengths[0]) :] == 0).all())
    alone = generate(gpt(), PROMPTS, max_new_tokens=4, return_weights=True)
    assert alone.weights[0]["self"].shape == (5, 3, 9, 9)


REFUSED = {
    "max_new_tokens=0: it needs to be at least 1": lambda: generate(gpt(), [[1]], max_new_tokens=0),
    "max_new_tokens has 2 numbers for 1 prompts; give one, or one per prompt": lambda: generate(
        gpt(), [[1]], max_new_tokens=[3, 4]
    ),
    "every prompt needs at least one token, such as the start token": lambda: generate(gpt(), [[1], []]),
    "a prompt of 24 tokens fills a table of 24 positions; shorten it": lambda: generate(gpt(), [[1] * 24]),
    "EncoderDecoder reads a source; give source=": lambda: generate(translator(), [[1]]),
    "a decoder without cross-attention takes no source; give the tokens as prompt": lambda: generate(
        gpt(), [[1]], source=torch.ones(1, 2, dtype=torch.long)
    ),
    "Linear gives no logits for a next token; a model with rg.LanguageHead() is needed": lambda: generate(
        torch.nn.Linear(2, 2), [[1]]
    ),
    "after a prompt of 2 tokens, full() attends to tokens that are not generated yet; declare rg.causal() & full()": (
        lambda: generate(looking_ahead(rg.full()), [[1, 2]])
    ),
    "after a prompt of 3 tokens, causal() | prefix(4) attends to tokens that are not generated yet; declare "
    "rg.causal() & (causal() | prefix(4))": lambda: generate(
        looking_ahead(rg.causal() | rg.prefix(4)), [[1, 2, 3]]
    ),
    "strategy='beam' is not a strategy; use rg.greedy(), rg.sample(0.8) or rg.beam(4)": lambda: generate(
        gpt(), [[1]], "beam"
    ),
    "strategy=<class 'regard.generation.strategies.beam'> is not a strategy; use rg.greedy(), rg.sample(0.8) or "
    "rg.beam(4)": lambda: generate(gpt(), [[1]], beam),
    "max_new_tokens=2.5: a whole number is needed, or one per prompt": lambda: generate(
        gpt(), [[1]], max_new_tokens=2.5
    ),
    "prompt is one row; put it into a list, [[5, 6]]": lambda: generate(gpt(), [5, 6]),
    "prompt has shape (2,); (b, n) is needed, one row of ids per prompt": lambda: generate(
        gpt(), torch.tensor([5, 6])
    ),
    "prompt='Hello': token ids are needed, such as tokens.encode(['Hello'])": lambda: generate(
        gpt(), "Hello"
    ),
    "padding has shape (1, 2) and prompt (1, 1); they have to be equal": lambda: generate(
        gpt(), torch.ones(1, 1, dtype=torch.long), padding=torch.zeros(1, 2, dtype=torch.bool)
    ),
    "temperature=0: it needs to be above 0 and finite; for 0 use greedy()": lambda: sample(0),
    "eos_id=[3, 4]: one token id is needed, a whole number": lambda: generate(gpt(), [[1]], eos_id=[3, 4]),
    "prompt has the token 11; this model has the tokens 0 to 10": lambda: generate(gpt(), [[1], [2, 11]]),
    "temperature='hot': it needs to be above 0 and finite; for 0 use greedy()": lambda: sample("hot"),
    "seed=None: a whole number is needed, of at most 64 bits": lambda: sample(seed=None),
    "top_k=2.5: a whole number is needed, of at least 1": lambda: sample(top_k=2.5),
    "beam(2.5): the width needs to be a whole number of at least 1": lambda: beam(2.5),
    "top_k=0: a whole number is needed, of at least 1": lambda: sample(top_k=0),
    "top_p=0 is not in (0, 1]": lambda: sample(top_p=0),
    "beam(0): the width needs to be a whole number of at least 1": lambda: beam(0),
    "length_penalty=-1: it needs to be at least 0 and finite": lambda: beam(length_penalty=-1),
    "length_penalty=nan: it needs to be at least 0 and finite": lambda: beam(length_penalty=float("nan")),
    "eos_id=11: this model has the tokens 0 to 10; None ends no row": lambda: generate(
        gpt(), [[1]], eos_id=11
    ),
    "eos_id=-1: this model has the tokens 0 to 10; None ends no row": lambda: generate(
        gpt(), [[1]], eos_id=-1
    ),
    "generate needs a model, not Encoder; build it first: spec.build()": lambda: generate(gpt().spec, [[1]]),
    "generate needs a model, not NoneType": lambda: generate(None, [[1]]),
    "Identity gives no logits for a next token; a model with rg.LanguageHead() is needed": lambda: generate(
        torch.nn.Identity(), [[1]]
    ),
    "DataParallel wraps a model; give the model itself: model.module": lambda: generate(
        torch.nn.DataParallel(gpt()), [[1]]
    ),
    "tensors on the device meta have no values to generate from; use a CPU or a GPU": lambda: generate(
        gpt().to("meta"), [[1]]
    ),
    "source is of type list, not a tensor; pad its rows and give source_lengths": lambda: generate(
        translator(), [[1]], source=[[1, 2]]
    ),
    "source has shape (2, 3); (1, m) is needed, one row of ids per prompt": lambda: generate(
        translator(), [[1]], source=torch.ones(2, 3, dtype=torch.long)
    ),
    "source has the token -1; this model has the tokens 0 to 10": lambda: translated(source=((3, -1),)),
    "source has the token 11; this model has the tokens 0 to 10": lambda: translated(source=((11, 1),)),
    "source_lengths is of type list, not a tensor; use torch.as_tensor(source_lengths)": lambda: generate(
        translator(), [[1]], source=torch.ones(1, 3, dtype=torch.long), source_lengths=[2]
    ),
    "source_lengths belong to a source; give source= as well": lambda: generate(
        gpt(), [[1]], source_lengths=torch.tensor([2])
    ),
    "source_lengths has shape (2,); one per batch row is needed: (1,)": lambda: translated(lengths=[2, 2]),
    "source_lengths from 4 to 4 for a source of 3 tokens; use 0 … 3": lambda: translated(lengths=[4]),
    "source_lengths is torch.float32; whole numbers are needed: source_lengths.long()": lambda: translated(
        lengths=[2.0]
    ),
    "position 5 is past the learned table of 5: shorten the input, declare learned(8), or learned(5, "
    "beyond='resample')": lambda: translated(learned_translator(rg.learned(5)), [[1] * 6]),
}


def translated(model=None, source=((1, 2, 3),), lengths=None):
    """One row, from lists."""
    lengths = None if lengths is None else torch.tensor(lengths)
    model = translator() if model is None else model
    return generate(model, [[1]], source=torch.tensor(source), source_lengths=lengths, max_new_tokens=3)


def learned_translator(position):
    """The translator with this position in its encoder."""
    torch.manual_seed(2)
    declared = translator().spec
    embedding = replace(declared.encoder.embedding, position=position)
    return spread(replace(declared, encoder=replace(declared.encoder, embedding=embedding)).build())


def test_a_source_past_the_end_of_a_resampled_table_is_read_as_by_the_model():
    """The encoder that skips padding has the table as it is stored."""
    model, source = learned_translator(rg.learned(5, beyond="resample")), sources(1, 9)[0]
    expected = greedily(lambda target: model(source, target), [1], 6, eos_id=None)
    assert generate(model, [[1]], source=source, max_new_tokens=6).rows()[0] == expected


def test_a_compiled_model_generates_as_the_model_itself():
    """It was refused: OptimizedModule has no head."""
    model = gpt()
    compiled = torch.compile(model, backend="eager")
    assert (
        generate(compiled, PROMPTS, max_new_tokens=5).rows()
        == generate(model, PROMPTS, max_new_tokens=5).rows()
    )


def test_padding_of_a_source_may_hold_anything():
    model, source = translator(), torch.tensor([[3, 4, 99], [5, 6, 7]])
    padded = generate(model, [[1]] * 2, source=source, source_lengths=torch.tensor([2, 3]), max_new_tokens=4)
    assert padded.rows()[0] == generate(model, [[1]], source=source[:1, :2], max_new_tokens=4).rows()[0]


@pytest.mark.parametrize("message", REFUSED)
def test_what_cannot_be_generated_is_refused(message):
    with pytest.raises(rg.RegardError) as refused:
        REFUSED[message]()
    assert str(refused.value) == message


def test_a_prompt_that_covers_the_prefix_may_be_read_in_both_directions():
    """Each row's logits are those of the full pass, which a cache gives if no later token changes earlier ones."""
    model, prompt = looking_ahead(rg.causal() | rg.prefix(4)), [1, 2, 3, 4, 5]
    expected = greedily(model, prompt, 6, eos_id=None)
    assert generate(model, [prompt], max_new_tokens=6).rows()[0] == expected


@pytest.mark.parametrize("strategy", [greedy(), beam(3), sample(1.3, seed=4)], ids=repr)
def test_each_row_may_have_its_own_limit(strategy):
    """Rows of one call with limits of their own are those of calls with one limit."""
    model, limits = gpt(), [2, 9, 5]
    together = generate(model, PROMPTS[:3], strategy, max_new_tokens=limits, eos_id=END)
    assert [n <= most for n, most in zip(together.lengths.tolist(), limits, strict=True)] == [True] * 3
    for row, limit in enumerate(limits):
        same = generate(model, PROMPTS[:3], strategy, max_new_tokens=limit, eos_id=END)
        assert together.rows()[row] == same.rows()[row]
        assert float(together.log_probs[row]) == pytest.approx(float(same.log_probs[row]), abs=1e-4)


def test_the_likeliest_continuations_are_found_by_blocks():
    torch.manual_seed(0)
    total = torch.tensor([[0.0, -0.5, -9.0], [0.0, -torch.inf, -torch.inf], [-3.0, -3.1, -3.2]])
    for vocab in (4096, 8000, 8001):
        logits = torch.randn(3, 3, vocab)
        logits[0, 0, :40] += 9.0  # all in one block
        found, origin, token = _continuations(total, logits)
        every = total[..., None] + logits.log_softmax(-1)
        assert torch.equal(found, every.flatten(1).topk(6, dim=-1).values)
        assert torch.equal(every[torch.arange(3)[:, None], origin, token], found)
