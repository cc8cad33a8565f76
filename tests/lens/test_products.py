"""Attention in plain tensor code: which axes are batch, heads, queries and keys, and what is no attention."""

import weakref
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import einsum, nn

import regard as rg
from long_cases import in_long, rows_in_long
from regard.lens.products import NO_QUERIES, NOT_POSITIONS, SUM_OF_SOFTMAXES
from regard.lens.view import look

DIFFERENT, EQUAL = (2, 3, 5, 7, 4), (3, 3, 3, 3, 3)  # b, h, n, m, d: shapes tell the axes apart, or do not


def weights(view, layer=0):
    call = view.calls[layer]
    return torch.stack([call.weights(batch=b) for b in range(call.b)])


class Letters(nn.Module):
    """Attention by einsum: the letters are the orders of axes of q, k, v, the scores and the output."""

    def __init__(self, sizes, q, k, v, scores, out, weights_first=True):
        super().__init__()
        torch.manual_seed(0)
        self.h = sizes[1]
        self.q, self.k, self.v = (nn.Linear(6, sizes[1] * sizes[4]) for _ in range(3))
        self.orders, self.weights_first, self.kept = (q, k, v, scores, out), weights_first, None

    def heads(self, w, x, letters, order):
        return einsum(f"{letters}->{order}", w(x).unflatten(-1, (self.h, -1))).contiguous()

    def forward(self, x, y):
        q, k, v, scores, out = self.orders
        w = einsum(f"{q},{k}->{scores}", self.heads(self.q, x, "bihd", q), self.heads(self.k, y, "bjhd", k))
        w = w.softmax(scores.index("j")) / 2
        given = (self.heads(self.v, y, "bjhd", v), w)
        o = (
            einsum(f"{scores},{v}->{out}", *given[::-1])
            if self.weights_first
            else einsum(f"{v},{scores}->{out}", *given)
        )
        return o if self.kept is None else o * self.kept.view([-1 if c == "h" else 1 for c in out])


LETTERS = [
    ("bhid", "bhjd", "bhjd", "bhij", "bihd", True),
    ("hbid", "hbjd", "hbjd", "hbij", "hbid", True),  # heads before the batch
    ("ibhd", "jbhd", "jbhd", "ijbh", "ibhd", True),  # the softmax runs over axis 1: Transformer-XL, labml.ai
    ("ibhd", "jbhd", "jbhd", "bhij", "ibhd", True),  # XLNet
    ("bihd", "bjhd", "bjhd", "bijh", "bihd", False),
    ("bdhi", "bdhj", "bdhj", "bhji", "bdhi", False),  # keys before queries, and values on the left
    ("dbhi", "jhdb", "hdjb", "jihb", "dbih", True),
]
ONE_ROW, ONE_HEAD = (1, 3, 1, 7, 4), (2, 1, 5, 7, 4)


@pytest.mark.parametrize(
    ("letters", "sizes"),
    [
        *product(LETTERS, (EQUAL,)),
        *product(LETTERS[::3], (DIFFERENT,)),
        *product(LETTERS[1::5], (ONE_ROW,)),
        *rows_in_long(*product(LETTERS, (ONE_HEAD,))),
        *rows_in_long(*((x, DIFFERENT) for i, x in enumerate(LETTERS) if i % 3)),
        *rows_in_long(*((x, ONE_ROW) for i, x in enumerate(LETTERS) if i % 5 != 1)),
    ],
)
def test_axes_are_told_apart_by_data_flow_and_not_by_size(letters, sizes):
    b, h, n, m, _ = sizes
    model = Letters(sizes, *letters).eval()
    g = torch.Generator().manual_seed(1)
    x, y = torch.randn(b, n, 6, generator=g), torch.randn(b, m, 6, generator=g)
    view = look(model, (x, y))
    q, k, v = (
        model.heads(w, given, "bjhd", "bhjd") for w, given in ((model.q, x), (model.k, y), (model.v, y))
    )
    call = view.calls[0]
    assert call.role == "cross" and view.missed == ()
    torch.testing.assert_close(weights(view), (q @ k.mT).softmax(-1) / 2)
    torch.testing.assert_close(torch.stack([call.values(batch=i) for i in range(b)]), v)
    if h > 1:  # a head is removed where the output has it
        whole, model.kept = model(x, y), torch.tensor([1.0, 0.0, 1.0])
        effect = ((model(x, y) - whole).norm() / whole.norm()).item()
        model.kept = None
        assert view.remove_heads().effects[0, 1] == pytest.approx(effect, rel=1e-4)


class Model(nn.Module):
    """Parts for the models below; each stores the weights that it computes, as (b, h, n, m), in `truth`."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(12, 12) for _ in range(3))
        self.narrow, self.scores, self.one = nn.Linear(12, 4), nn.Linear(12, 7), nn.Linear(12, 1)
        self.experts = nn.ModuleList(nn.Linear(12, 12) for _ in range(4))
        self.latents, self.expert = nn.Parameter(torch.randn(5, 12)), nn.Parameter(torch.randn(4, 12, 12))
        self.conv, self.along = nn.Conv1d(12, 36, 1), nn.Linear(7, 3)
        self.truth = None

    def qkv(self, x, order):
        return (einsum(f"bnhd->{order}", w(x).unflatten(-1, (3, 4))) for w in (self.q, self.k, self.v))


class FoldedHeadsFirst(Model):  # attention-is-all-you-need-pytorch: (n_head · batch, length, width)
    n_head = 3

    def forward(self, x):
        q, k, v = (z.reshape(-1, 7, 4) for z in self.qkv(x, "hbnd"))
        w = torch.bmm(q, k.mT).softmax(2)
        self.truth = w.unflatten(0, (3, -1)).transpose(0, 1)
        return torch.bmm(w, v)


class FoldedByBaddbmm(Model):  # BLOOM
    def forward(self, x):
        q, k, v = (z.reshape(-1, 7, 4) for z in self.qkv(x, "bhnd"))
        bias = torch.zeros(len(q), 1, 7)
        w = bias.baddbmm(q, k.mT, beta=1.0, alpha=0.5).softmax(-1)
        self.truth = w.unflatten(0, (-1, 3))
        return torch.bmm(w, v)


class JoinedChunks(Model):  # heads as chunks of the features, one after the other on the batch axis
    def forward(self, x):
        q, k, v = (torch.cat(w(x).split(4, 2), 0) for w in (self.q, self.k, self.v))
        w = (q @ k.mT).softmax(-1)
        self.truth = w.unflatten(0, (3, -1)).transpose(0, 1)
        return torch.cat((w @ v).chunk(3, 0), 2)


class ValuesOnTheLeft(Model):  # SAGAN, the autoencoders of diffusion models
    def forward(self, x):
        q, k, v = self.conv(x.mT).chunk(3, 1)
        w = torch.bmm(q.permute(0, 2, 1), k).softmax(2)
        self.truth = w[:, None]
        return torch.bmm(v, w.permute(0, 2, 1))


class Rotated(Model):  # complex rotary positions, heads first
    def forward(self, x):
        turn = torch.polar(torch.ones(7, 2), torch.arange(14.0).view(7, 2))
        q, k, v = self.qkv(x, "hbnd")
        q, k = (
            torch.view_as_real(torch.view_as_complex(z.unflatten(-1, (2, 2)).contiguous()) * turn).flatten(-2)
            for z in (q, k)
        )
        w = (q @ k.mT).softmax(-1)
        self.truth = w.transpose(0, 1)
        return w @ v


class Grouped(Model):  # two queries for one key head, without repeating keys
    def forward(self, x):
        q = self.q(x).unflatten(-1, (2, 3, 2))
        k, v = (self.narrow(z).unflatten(-1, (2, 2)) for z in (x, x + 1))
        w = einsum("bnhgd,bmhd->bhgnm", q, k).softmax(-1)
        self.truth = w.flatten(1, 2)
        return einsum("bhgnm,bmhd->bnhgd", w, v)


class OneQueryOfSharedKeys(Model):  # multi-query attention on the last token
    def forward(self, x):
        q = self.q(x[:, -1:]).unflatten(-1, (3, 4)).transpose(1, 2)
        k = v = self.narrow(x)
        self.truth = einsum("bhid,bjd->bhij", q, k).softmax(-1)
        return einsum("bhij,bjd->bhid", self.truth, v)


class Windows(Model):  # (batch, windows, heads, n, m)
    def forward(self, x):
        q, k, v = (w(x[:, :6]).view(-1, 2, 3, 3, 4).transpose(2, 3) for w in (self.q, self.k, self.v))
        w = (q @ k.mT).softmax(-1)
        self.truth = w.flatten(0, 1)
        return w @ v


class Additive(Model):  # Bahdanau's: the batch was shown as queries
    def forward(self, x):
        w = self.one(torch.tanh(self.q(x[:, -1])[:, None] + self.k(x)))[..., 0].softmax(-1)
        self.truth = w[:, None, None]
        return torch.bmm(w[:, None], x)


class HeadsOfScores(Model):  # pooling, one learned query per head
    def forward(self, x):
        w = self.narrow(x).softmax(1)
        self.truth = w.mT[:, :, None]
        return einsum("bnh,bnhd->bhd", w, self.v(x).unflatten(-1, (4, 3)))


class LayersPerHead(Model):  # heads are split before the linear layers
    def forward(self, x):
        x = self.q(x).unflatten(-1, (3, 4))
        project = self.narrow.weight[:, :4]
        q, k, v = (x @ (project + i).T for i in range(3))
        self.truth = einsum("bnhd,bmhd->hbnm", q, k).softmax(-1).transpose(0, 1)
        return einsum("hbnm,bmhd->bnhd", einsum("bnhd,bmhd->hbnm", q, k).softmax(-1), v)


class LearnedScores(Model):  # Synthesizer: a linear layer gives the scores, but the values have positions
    def forward(self, x):
        w = self.scores(x).softmax(-1)
        self.truth = w[:, None]
        return w @ self.v(x)


class ShortenedKeys(Model):  # Linformer
    def forward(self, x):
        k, v = (self.along(w(x).mT).mT for w in (self.k, self.v))
        w = (self.q(x) @ k.mT).softmax(-1)
        self.truth = w[:, None]
        return w @ v


class LearnedTokens(Model):  # the first layer of DETR's decoder: nothing but parameters
    def forward(self, x):
        q, k, v = self.qkv(self.latents[None], "bhnd")
        self.truth = (q @ k.mT).softmax(-1)
        return (q @ k.mT).softmax(-1) @ v + x.mean()


class SumOfWeights(Model):  # low-rank adaptation: each layer multiplies with w + a b
    def forward(self, x):
        update = self.latents.T @ self.latents
        q, k, v = (
            (x @ (w.weight + update).T).unflatten(-1, (3, 4)).permute(2, 0, 1, 3)
            for w in (self.q, self.k, self.v)
        )
        self.truth = (q @ k.mT).softmax(-1).transpose(0, 1)
        return (q @ k.mT).softmax(-1) @ v


SHOWN = [SumOfWeights, FoldedHeadsFirst,
         FoldedByBaddbmm, JoinedChunks, ValuesOnTheLeft, Rotated, Grouped, OneQueryOfSharedKeys,
         Windows, Additive, HeadsOfScores, LayersPerHead, LearnedScores, ShortenedKeys, LearnedTokens]  # fmt: skip


@pytest.mark.parametrize("batch", [3, 7, *in_long(1)])
@pytest.mark.parametrize("kind", SHOWN)
def test_attention_as_others_write_it_is_shown_as_they_compute_it(kind, batch):
    """3 and 7 are also the numbers of heads and of positions."""
    model = kind().eval()
    view = look(model, torch.randn(batch, 7, 12, generator=torch.Generator().manual_seed(2)))
    assert len(view.calls) == 1 and view.missed == ()
    torch.testing.assert_close(weights(view), model.truth)


class HeadByHead(Model):  # a loop over heads, as lectures write it
    num_heads = 3

    def forward(self, x):
        q, k, v = (w(x).split(4, -1) for w in (self.q, self.k, self.v))
        self.truth, outputs = [], []
        for i in range(3):
            w = (q[i] @ k[i].mT).softmax(-1)
            self.truth.append(w[:, None])
            outputs.append(w @ v[i])
        return torch.cat(outputs, -1)


@pytest.mark.parametrize("batch", [1, 3, 6])
def test_the_batch_of_a_loop_over_heads_is_not_read_as_heads(batch):
    """A batch of three was shown as the three heads that the module says it has."""
    model = HeadByHead().eval()
    view = look(model, torch.randn(batch, 7, 12, generator=torch.Generator().manual_seed(2)))
    assert [call.shape for call in view.calls] == [(batch, 1, 7, 7)] * 3
    for layer, truth in enumerate(model.truth):
        torch.testing.assert_close(weights(view, layer), truth)


class FeatureSoftmax(Model):  # efficient attention: softmax of q over features, of k over positions
    def forward(self, x):
        q, k, v = self.qkv(x, "bhnd")
        return q.softmax(-1) @ (k.softmax(-2).mT @ v)


class LinearConvolution(Model):  # LinearAttention of denoising-diffusion-pytorch
    def forward(self, x):
        q, k, v = (z.unflatten(1, (3, 4)) for z in self.conv(x.mT).chunk(3, 1))
        context = einsum("bhdn,bhen->bhde", k.softmax(-1), v)
        return einsum("bhde,bhdn->bhen", context, q.softmax(-2))


class CrossCovariance(Model):  # XCiT: which channels of the keys a channel of the queries is like
    def forward(self, x):
        q, k, v = self.qkv(x, "bhdn")
        return (q @ k.mT).softmax(-1) @ v


class Router(Model):
    def forward(self, x):
        w = self.narrow(x).softmax(-1)
        return einsum("bne,bned->bnd", w, torch.stack([expert(x) for expert in self.experts], 2))


class RouterByEinsum(Model):
    def forward(self, x):
        w = einsum("ed,bnd->bne", self.latents[:4], x).softmax(-1)
        return einsum("bne,bned->bnd", w, einsum("bnd,edf->bnef", x, self.expert))


@pytest.mark.parametrize("kind", [FeatureSoftmax, LinearConvolution, CrossCovariance, Router, RouterByEinsum])
@pytest.mark.parametrize("batch", [1, 4])
def test_a_softmax_that_is_not_over_positions_is_not_shown_but_named(kind, batch):
    """They were shown as cross-attention of as many keys as there are features or experts."""
    x = torch.randn(batch, 7, 12, generator=torch.Generator().manual_seed(2))
    view = look(nn.Sequential(rg.Attention(12, heads=3).build(), kind()), x)
    assert [c.name for c in view.calls] == ["0"]
    assert view.missed == (f"1: {NOT_POSITIONS}",)
    with pytest.raises(
        rg.RegardError, match=r"no attention call was found .*: a softmax over features or experts"
    ):
        look(kind(), x)


def test_a_linear_layer_that_reads_probabilities_is_no_attention():
    """As in self-conditioned CTC."""
    model = nn.Sequential(nn.Linear(12, 7), nn.Softmax(-1), nn.Linear(7, 12), FoldedHeadsFirst())
    view = look(model, torch.randn(2, 7, 12))
    assert [c.name for c in view.calls] == ["3"] and view.missed == ()


class LearnedQueries(
    Model
):  # pooling by several learned scores; linear attention of one head has the same product
    def forward(self, x):
        w = self.narrow(x).mT.softmax(-1)
        self.truth = w[:, None]
        return torch.bmm(w, self.v(x))


def test_rows_that_are_no_positions_are_named():
    model = LearnedQueries()
    view = look(model, torch.randn(2, 7, 12))
    assert torch.equal(weights(view), model.truth) and view.missed == (f"LearnedQueries: {NO_QUERIES}",)


class SummedHeads(Model):
    def forward(self, x):
        q, k, v = self.qkv(x, "bhnd")
        return einsum("bhnm,bhmd->bnd", (q @ k.mT).softmax(-1), v)


def test_heads_that_are_summed_cannot_be_removed():
    view = look(SummedHeads().eval(), torch.randn(2, 7, 12))
    assert view.calls[0].shape == (2, 3, 7, 7)
    for remove in (view.remove_heads, lambda: view.remove_key(2)):
        with pytest.raises(
            rg.RegardError, match="summed over its heads, so neither a head nor a key can be removed"
        ):
            remove()


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.v = (nn.Linear(6, 6) for _ in range(3))
        self.drop = nn.Dropout(0.1)

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (2, 3)).transpose(1, 2) for w in (self.q, self.k, self.v))
        return self.drop((q @ k.mT).softmax(-1)) @ v


def test_attention_in_inference_mode_is_that_without_it():
    """There, a product of tables arrives as one operator, which is not divided into others."""
    model, x = Plain().eval(), torch.randn(2, 5, 6)
    expected = look(model, x)
    with torch.inference_mode():
        found = look(model, x)
    assert torch.equal(weights(found), weights(expected)) and found.missed == expected.missed
    assert found.calls[0].role == expected.calls[0].role == "self"


def test_weights_of_many_heads_may_be_computed_before_the_first_is_used():
    def heads(x):
        made = [(x @ x.mT * (h + 1)).softmax(-1) for h in range(7)]
        return sum(w @ x for w in made)

    x = torch.randn(2, 5, 4)
    view = look(heads, x)
    assert len(view.calls) == 7
    for h in range(7):
        assert torch.allclose(weights(view, h)[:, 0], (x @ x.mT * (h + 1)).softmax(-1))


def test_large_weights_that_no_product_uses_are_not_held():
    """Of tables of 16 MB, the last two and as many as fit into 64 MB."""
    x, held = torch.randn(1, 2048, 2), []

    def tables(x):
        for _ in range(8):
            table = (x @ x.mT).softmax(-1)
            held.append(weakref.ref(table))
            del table
        live.append(sum(one() is not None for one in held))
        return (x @ x.mT).softmax(-1) @ x

    live: list[int] = []
    look(tables, x)
    assert live == [4]


class DifferentialByParts(Model):  # the two maps of a head are neighbors, as in the authors' code
    strength = 0.3

    def forward(self, x):
        q, k = (w(x).unflatten(-1, (6, 2)).transpose(1, 2) for w in (self.q, self.k))
        w = (q @ k.mT).softmax(-1).unflatten(1, (3, 2))
        self.truth = w[:, :, 0] - self.strength * w[:, :, 1]
        return self.truth @ self.v(x).unflatten(-1, (3, 4)).transpose(1, 2)


class DifferentialStacked(Model):  # the two maps come first
    def forward(self, x):
        q, k = (w(x).unflatten(-1, (2, 3, 2)).permute(0, 2, 3, 1, 4) for w in (self.q, self.k))
        w = (q @ k.mT).softmax(-1)
        self.truth = w[:, 0] - 0.3 * w[:, 1]
        return self.truth @ self.v(x).unflatten(-1, (3, 4)).transpose(1, 2)


class DifferentialOfTwo(Model):  # two softmaxes, one of them scaled in place
    def forward(self, x):
        q, k, v = self.qkv(x, "bhnd")
        first, second = ((q[..., i : i + 2] @ k[..., i : i + 2].mT).softmax(-1) for i in (0, 2))
        self.truth = first - second.mul_(0.3)
        return nn.functional.dropout(self.truth, 0.5, self.training) @ v


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("batch", [3, 7, *in_long(1)])
@pytest.mark.parametrize("kind", [DifferentialByParts, DifferentialStacked, DifferentialOfTwo])
def test_a_difference_of_softmaxes_is_shown_as_it_multiplies_the_values(kind, batch, training):
    """No attention call was found."""
    model = kind().train(training)
    view = look(model, torch.randn(batch, 7, 12, generator=torch.Generator().manual_seed(2)))
    assert len(view.calls) == 1 and view.calls[0].role == "self"
    torch.testing.assert_close(weights(view), model.truth)
    assert view.missed == (f"{kind.__name__}: {SUM_OF_SOFTMAXES.format(terms=2)}",)
    assert len(view.rows()) == 3


def test_softmaxes_that_are_compared_and_used_alone_are_shown_alone():
    def compared(x):
        first, second = ((x @ x.mT * s).softmax(-1) for s in (1, 2))
        distance = (first - second).square().sum()
        return first @ x + second @ x + distance

    view = look(compared, torch.randn(2, 7, 4))
    assert len(view.calls) == 2 and view.missed == ()


class Pooled(Model):
    """Queries or keys that `pool` makes of positions."""

    def __init__(self, pool, fused, of_keys):
        super().__init__()
        self.pool, self.fused, self.of_keys = pool, fused, of_keys

    def forward(self, x):
        x = self.experts[0](x)
        pooled = self.pool(x)
        given = (x, pooled, pooled) if self.of_keys else (pooled, x, x)
        q, k, v = (
            w(z).unflatten(-1, (3, 4)).transpose(1, 2) for w, z in zip((self.q, self.k, self.v), given)
        )
        return F.scaled_dot_product_attention(q, k, v) if self.fused else (q @ k.mT).softmax(-1) @ v


ALONG = nn.Parameter(torch.randn(8, 8, generator=torch.Generator().manual_seed(0)))
POOLS = {
    "means": lambda x: F.avg_pool1d(x.mT, 2).mT,
    "maxima": lambda x: x.unflatten(1, (2, 4)).amax(1),
    "every second": lambda x: x[:, ::2],
    "chosen": lambda x: x[:, torch.tensor([1, 5])],
    "a product along the positions": lambda x: ALONG[:3] @ x,
    "a layer along the positions": lambda x: F.linear(x.mT, ALONG[:3]).mT,
    "as many by a layer": lambda x: F.linear(x.mT, ALONG).mT,
    "a strided convolution": lambda x: F.conv1d(x.mT, torch.ones(12, 12, 2), stride=2).mT,
}


@pytest.mark.parametrize(
    ("fused", "of_keys"), [(False, False), (True, True), *rows_in_long((False, True), (True, False))]
)
@pytest.mark.parametrize("name", POOLS)
def test_pooled_queries_or_keys_have_no_offset(name, fused, of_keys):
    """They were shown as the last positions of the sequence: the offsets of all weights were wrong."""
    view = look(Pooled(POOLS[name], fused, of_keys), torch.randn(2, 8, 12))
    assert (view.calls[0].role, view.calls[0].query_offset, view.missed) == ("cross", 0, ())


@pytest.mark.parametrize("fused", [False, True])
def test_a_mean_of_all_positions_is_no_position_and_consecutive_queries_are(fused):
    x = torch.randn(2, 8, 12)
    for mean in (lambda x: x.mean(1, keepdim=True), lambda x: x.mean(1)[:, None]):
        assert look(Pooled(mean, fused, False), x).calls[0].role == "cross"
    for start, stop in ((0, 1), (2, 4), (6, 8)):
        call = look(Pooled(lambda x, a=start, b=stop: x[:, a:b], fused, False), x).calls[0]
        assert (call.role, call.query_offset) == ("self", start)


@pytest.mark.parametrize("sizes", [(2, 3, 5, 1, 4), (1, 3, 5, 1, 4), (2, 3, 1, 1, 4), (2, 1, 5, 1, 4)])
@pytest.mark.parametrize("weights_first", [True, False])
def test_attention_to_one_key_by_einsum_is_found(sizes, weights_first):
    """With one key, einsum multiplies elementwise."""
    b, h, n, _, _ = sizes
    model = Letters(sizes, "bihd", "bjhd", "bjhd", "bhij", "bihd", weights_first).eval()
    view = look(model, (torch.randn(b, n, 6), torch.randn(b, 1, 6)))
    assert [call.shape for call in view.calls] == [(b, h, n, 1)] and view.missed == ()
    assert torch.equal(weights(view), torch.full((b, h, n, 1), 0.5))


class Blocks(Model):
    """Attention of blocks of four queries; the last block is empty where four divides the length."""

    def __init__(self, kernel):
        super().__init__()
        self.kernel = kernel

    def forward(self, x):
        q, k, v = self.qkv(x, "bhnd")
        return torch.cat([self.kernel(q[:, :, i : i + 4], k, v) for i in (0, 4, 8)], 2)


KERNELS = {
    "eager": lambda q, k, v: (q @ k.mT).softmax(-1) @ v,
    "sdpa": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "regard": lambda q, k, v: rg.attention(q, k, v),
}


@pytest.mark.parametrize("name", KERNELS)
def test_an_empty_block_of_queries_does_not_stop_a_look(name):
    model = Blocks(KERNELS[name]).eval()
    view = look(model, torch.randn(2, 8, 12))
    assert [(c.n, c.query_offset) for c in view.calls] == [(4, 0), (4, 4)] and view.missed == ()
    assert len(view.remove_heads().effects) == 6
