"""Without a causal mask a model reads the next token in training; when it generates there is none to read."""

import pytest
import torch
import torch.nn.functional as F

import regard as rg
from regard.formulas import loss_floor
from regard.generation import Accuracy, next_token_accuracy

VOCAB, N = 8, 8


class Copies(torch.nn.Module):
    """Predicts the next input where there is one (a model without a mask), else token 0."""

    def forward(self, x):
        following = torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1)
        return F.one_hot(following, VOCAB).float()


class CountsUp(torch.nn.Module):
    """Predicts x + 1 mod VOCAB from the present alone (a model with a mask)."""

    def forward(self, x):
        return F.one_hot((x + 1) % VOCAB, VOCAB).float()


@pytest.mark.ledger("S1.Q5b.2")
def test_a_model_that_copies_the_future_generates_at_chance():
    text = torch.randint(0, VOCAB, (300, N + 1), generator=torch.Generator().manual_seed(0))
    leaky = next_token_accuracy(Copies(), text)
    truth = float((text[:, -1] == 0).float().mean())
    assert leaky.forced == pytest.approx((N - 1 + truth) / N)  # all targets but the last are inputs
    assert leaky.at_chance and leaky.chance == 1 / VOCAB and leaky.generated < 0.16
    counting = (torch.arange(VOCAB)[:, None] + torch.arange(N + 1)) % VOCAB
    honest, cheat = (next_token_accuracy(m, counting, prompt=2) for m in (CountsUp(), Copies()))
    assert (honest.forced, honest.generated) == (1, 1) and not honest.at_chance
    assert cheat.forced > 0.8 and cheat.generated == pytest.approx(1 / VOCAB, abs=0.01) and cheat.at_chance
    assert not Accuracy(1.0, 0.2, 0.1, 0.03).at_chance and Accuracy(1.0, 0.2, 0.1, 0.034).at_chance
    with pytest.raises(rg.ShapeError, match=r"prompt=9 of texts of 9 tokens; use 1 to 8"):
        next_token_accuracy(Copies(), text, prompt=9)


def trained(pattern, steps=70):
    torch.manual_seed(0)
    block = rg.Block(rg.Attention(32, heads=2, pattern=pattern), rg.FeedForward(32), norm_at="pre")
    embedding = rg.Embedding(VOCAB, 32, position=rg.learned(N))
    model = rg.Encoder(block, 1, embedding=embedding, head=rg.LanguageHead(tied=False)).build()
    adam, g = torch.optim.Adam(model.parameters(), 0.01), torch.Generator().manual_seed(0)
    for _ in range(steps):
        x = torch.randint(0, VOCAB, (48, N + 1), generator=g)
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        adam.zero_grad()
        loss.backward()
        adam.step()
    return model, torch.randint(0, VOCAB, (500, N + 1), generator=g)


@pytest.mark.ledger("S1.Q5b.1", "S1.Q5b.2")
def test_trained_without_the_mask_it_reads_the_answer_and_generates_at_chance():
    model, text = trained(rg.full())
    got = next_token_accuracy(model, text)
    with torch.no_grad():
        loss = float(F.cross_entropy(model(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten()))
    assert loss == pytest.approx(loss_floor(VOCAB, N, rg.full()), abs=0.03)
    assert got.forced > 0.85 and got.at_chance
