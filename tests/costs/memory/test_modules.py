"""Modules of many forms: predicted memory against the CPU allocator, inputs and outputs of any type, refusals."""

from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard as rg
from memory_witness import counted
from regard.errors import ShapeError

B, N, D = 2, 64, 32


class Function(nn.Module):
    """A function of the module's layers and its inputs."""

    def __init__(self, run, **layers):
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *given):
        return self.run(self, *given)


def heads(x):
    return x.unflatten(-1, (4, -1)).transpose(1, 2)


def latents(s, x):
    return s.attend(s.queries.expand(len(x), -1, -1), x, x, need_weights=False)[0]


def only_attention(s, x):
    return F.scaled_dot_product_attention(heads(s.q(x)), heads(s.k(x)), heads(s.v(x)))


class TwiceThenSum(torch.autograd.Function):
    """Its backward pass adds two tensors by Python code, which needs memory for the sum."""

    @staticmethod
    def forward(ctx, x):
        return 3 * x

    @staticmethod
    def backward(ctx, grad):
        once, twice = grad.clone(), 2 * grad
        return once + twice


def projections(*names):
    return {name: nn.Linear(D, D) for name in names}


def of(function):
    """A module that applies this function to a linear layer."""
    return lambda: Function(lambda s, x: function(s.a(x)), **projections("a"))


def image(y):
    return y.mT.unflatten(-1, (8, -1))


def groups(y):
    """Nine groups of positions, for each entry of y."""
    return (torch.arange(N) % 9)[None, :, None].expand(y.shape)


TRAINED = {
    "gradients that are added in place": lambda: Function(
        latents, attend=nn.MultiheadAttention(D, 4, batch_first=True), queries=nn.Parameter(torch.randn(4, D))
    ),
    "a gradient with the heads apart": lambda: Function(only_attention, **projections("q", "k", "v")),
    "a sum in a function of its own": lambda: Function(
        lambda s, x: TwiceThenSum.apply(s.a(x)), **projections("a")
    ),
    "a cumulative product": of(lambda y: y.cumprod(1)),
    "a cumulative product by name": of(lambda y: torch.cumprod(input=y, dim=-1)),
    "powers": of(lambda y: torch.linalg.vander(y, N=5)),
    "a Fourier transform of a middle axis": of(lambda y: torch.fft.rfft(y, dim=1).abs()),
    "an inverse Fourier transform": of(lambda y: torch.fft.irfft(torch.fft.rfft(y, dim=1), dim=1)),
    "maxima with the channels last": of(lambda y: F.max_pool1d(y.mT, 4)),
    "averages with the channels last": of(lambda y: F.avg_pool2d(image(y), 2)),
    "adaptive averages": of(lambda y: F.adaptive_avg_pool1d(y.mT, 7)),
    "rows that are selected": of(lambda y: y.index_select(1, torch.arange(0, N, 3))),
    "a bilinear layer": lambda: Function(
        lambda s, x: s.both(s.a(x), s.b(x)), both=nn.Bilinear(D, D, 5), **projections("a", "b")
    ),
    "columns of patches that are added up": of(lambda y: F.fold(F.unfold(y[:, None], 3), (N, D), 3)),
    "a soft margin loss": of(lambda y: F.soft_margin_loss(y, torch.ones_like(y))),
    "maxima by index": of(lambda y: torch.zeros(B, 9, D).scatter_reduce(1, groups(y), y, "amax")),
    "entries by one index": of(lambda y: y.take(torch.arange(0, B * N * D, 3))),
    "a Gaussian loss of predicted variances": lambda: Function(
        lambda s, x: F.gaussian_nll_loss(s.a(x), x, s.b(x).square()), **projections("a", "b")
    ),
    "the old weight norm": lambda: Function(lambda s, x: s.a(x), a=nn.utils.weight_norm(nn.Linear(D, 9 * D))),
    "the old spectral norm": lambda: Function(
        lambda s, x: s.a(x), a=nn.utils.spectral_norm(nn.Linear(D, 9 * D))
    ),
}
INFERRED = {
    "distances": lambda: Function(lambda s, x: torch.cdist(s.a(x), s.b(x)), **projections("a", "b")),
    "a softmax of a transposed table": lambda: Function(
        lambda s, x: s.a(x).mT.softmax(-1), **projections("a")
    ),
    "magnitudes of complex numbers": lambda: Function(
        lambda s, x: (x.to(torch.cfloat) @ s.a).abs(),
        a=nn.Parameter(torch.randn(D, 4 * D, dtype=torch.cfloat)),
    ),
}
EXACT = {
    "maxima without their positions": of(lambda y: F.max_pool1d(y.mT.contiguous(), 4)),
    "maxima by a layer": of(nn.MaxPool1d(4)),
    "maxima with the channels last": of(lambda y: F.max_pool1d(y.mT, 4)),
    "maxima and their positions": of(lambda y: F.max_pool1d(y, 4, return_indices=True)[0]),
    "maxima of a volume": of(lambda y: F.max_pool3d(image(y)[:, None], 2)),
    "maxima of every other column": of(lambda y: F.max_pool2d(y[:, None, :, ::2], 2)),
    "a Fourier transform of the first axis": of(lambda y: torch.fft.fft(y, dim=0).real),
    "a Fourier transform of a middle axis": of(lambda y: torch.fft.fft(y, dim=1).real),
    "a Fourier transform of a transposed table": of(lambda y: torch.fft.rfft(y.mT).real),
    "an inverse transform of two axes": of(lambda y: torch.fft.irfft2(torch.fft.rfft2(y))),
    "reflected edges": of(lambda y: F.pad(y.mT, (3, 3), mode="reflect")),
    "medians of columns": of(lambda y: y.median(1)[0]),
    "medians of rows": of(lambda y: y.median(-1)[0]),
    "the median of everything": of(lambda y: y.median()),
    "an enlarged image": of(lambda y: F.interpolate(image(y), scale_factor=2)),
    **{
        f"{name}, {mode}": of(
            lambda y, make=make, mode=mode: F.interpolate(make(y), scale_factor=2, mode=mode)
        )
        for name, make, modes in (
            ("an image with its channels first", lambda y: image(y).contiguous(), "nearest bilinear bicubic"),
            ("a larger image", lambda y: y.repeat(1, 1, 3)[:, None], "nearest-exact bilinear bicubic"),
            (
                "a larger image of three channels",
                lambda y: y.repeat(1, 1, 3)[:, None].repeat(1, 3, 1, 1),
                "bilinear",
            ),
            (
                "a larger image with its channels last",
                lambda y: y.unflatten(1, (16, 4)).movedim(2, 1),
                "bilinear",
            ),
            ("a sequence", lambda y: y, "nearest linear"),
            ("a volume", lambda y: y.view(B, 2, 8, 8, -1), "nearest trilinear"),
        )
        for mode in modes.split()
    },
    "means in 16 bits": of(lambda y: y.bfloat16().mean(-1)),
    "the mean of everything in 16 bits": of(lambda y: y.bfloat16().mean()),
    "cross-entropy of logits": of(lambda y: F.binary_cross_entropy_with_logits(y, torch.zeros_like(y))),
    "a Huber loss": of(lambda y: F.huber_loss(y, torch.zeros_like(y))),
    "the old weight norm": TRAINED["the old weight norm"],
    "a bilinear layer": TRAINED["a bilinear layer"],
    "cross-entropy of probabilities": of(lambda y: F.binary_cross_entropy(y.sigmoid(), torch.zeros_like(y))),
    "a soft margin loss": TRAINED["a soft margin loss"],
    "columns of patches": of(lambda y: F.unfold(y[:, None], 3)),
    "columns of patches with the channels last": of(lambda y: F.unfold(image(y), 3)),
    "columns of patches that are added up": TRAINED["columns of patches that are added up"],
    "means by index": of(lambda y: torch.zeros(B, 9, D).scatter_reduce(1, groups(y), y, "mean")),
    "means of rows by index": of(
        lambda y: torch.zeros(B, 9, D).index_reduce(1, torch.arange(N) % 9, y, "mean")
    ),
    "products with conjugates": of(lambda y: torch.complex(y, y) @ torch.complex(y, y).mH),
    "a distance": lambda: Function(lambda s, x: torch.dist(s.a(x), x), **projections("a")),
    "a Gaussian loss": of(lambda y: F.gaussian_nll_loss(y, y, torch.ones_like(y))),
    "averages of a volume": of(lambda y: F.avg_pool3d(image(y)[:, None], 2)),
    "a grid": of(lambda y: F.affine_grid(y[:, :2, :3], (B, 2, 40, 40), align_corners=False)),
}


def allocated(model, x):
    return sum(p.nbytes for p in (*model.parameters(), *model.buffers())) + x.nbytes


def forget_old_weights(model):
    """Of a norm, the weight of the call before: the profiler counts its release only if it happens to know its
    address from an earlier measurement."""
    for layer in model.modules():
        vars(layer).pop("weight", None)


old_norms = pytest.mark.filterwarnings("ignore:.*weight_norm")  # deprecated, and in wide use


@old_norms
@pytest.mark.parametrize("name", TRAINED)
def test_the_peak_of_a_training_step_is_that_of_the_allocator(name):
    model, x = TRAINED[name](), torch.randn(B, N, D)

    def step():
        model(x).square().mean().backward()
        model.zero_grad()

    step()
    forget_old_weights(model)
    real = allocated(model, x) + counted(step)[0]
    without_optimizer = rg.TrainingStep(optimizer="sgd")
    assert abs(rg.cost(model, x, train=without_optimizer).memory.training_peak / real - 1) < 0.001


@pytest.mark.parametrize("name", INFERRED)
def test_the_peak_of_a_forward_pass_is_that_of_the_allocator(name):
    model, x = INFERRED[name](), torch.randn(B, N, D)
    with torch.no_grad():
        real = allocated(model, x) + counted(lambda: model(x))[0]
    assert abs(rg.cost(model, x).memory.inference_peak / real - 1) < 0.02


@old_norms
@pytest.mark.filterwarnings("ignore:index_reduce")  # in beta
@pytest.mark.parametrize("name", EXACT)
def test_what_a_kernel_copies_or_leaves_out_is_part_of_the_peak(name):
    model, x = EXACT[name](), torch.randn(B, N, D)
    with torch.no_grad():
        model(x)
        forget_old_weights(model)
        real = allocated(model, x) + counted(lambda: model(x))[0]
    assert abs(rg.cost(model, x).memory.inference_peak / real - 1) < 0.001


def test_pooled_values_that_are_known_stay_known():
    def widened(s, x):
        near = F.max_pool1d((torch.arange(N) == 3).float()[None], 3, 1, 1)[0]
        return s.a(x[:, near.nonzero().flatten()])

    assert rg.cost(Function(widened, **projections("a")), torch.randn(B, N, D)).flops == 2 * B * 3 * D * D


def test_distances_are_counted_as_products():
    cost = rg.cost(INFERRED["distances"](), torch.zeros(B, N, D))
    assert cost.flops == 2 * 2 * B * N * D * D + 2 * B * N * N * D


def test_multi_head_attention_in_evaluation_is_noted():
    x = torch.zeros(B, N, D)
    attend = nn.MultiheadAttention(D, 4, batch_first=True).eval()
    alone, across = (Function(lambda s, q, k: s.attend(q, k, k), attend=attend) for _ in range(2))
    assert "fast path" in str(
        rg.cost(Function(lambda s, q: s.attend(q, q, q), attend=attend).eval(), x).notes
    )
    assert (
        not rg.cost(across.eval(), x, x.clone()).notes and not rg.cost(alone, x, x.clone(), train=True).notes
    )


@dataclass
class Batch:
    x: Tensor
    hidden: Tensor


@dataclass(frozen=True)
class Result:
    logits: Tensor
    more: dict


class TakesADictionary(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, D)

    def forward(self, batch):
        return Result(self.layer(batch["x"]) * batch["scale"], {})


class TakesADataclass(TakesADictionary):
    def forward(self, batch):
        return super().forward({"x": batch.x, "scale": batch.hidden})


def test_a_dictionary_or_a_dataclass_is_the_one_argument_of_a_model_and_a_dataclass_is_its_output():
    x, scale = torch.randn(B, N, D), torch.randn(B, N, D)
    plain = Function(lambda s, x, scale: s.layer(x) * scale, layer=nn.Linear(D, D))
    for model, given in (
        (TakesADictionary(), {"x": x, "scale": scale}),
        (TakesADataclass(), Batch(x, scale)),
    ):
        cost, expected = (rg.cost(m, *a, train=True) for m, a in ((model, (given,)), (plain, (x, scale))))
        assert cost.flops == expected.flops == 2 * B * N * D * D
        assert cost.memory.training_peak == expected.memory.training_peak
        assert cost.sizes["input 1"] == f"{B}×{N}×{D}"


def test_a_dictionary_with_names_of_arguments_is_named_arguments():
    plain = Function(lambda s, x: s.layer(x), layer=nn.Linear(D, D))
    layer = nn.Linear(D, D)
    assert rg.cost(layer, {"input": torch.zeros(3, D)}).flops == rg.cost(plain, torch.zeros(3, D)).flops
    with pytest.raises(ShapeError, match="Bilinear is missing input2"):
        rg.cost(nn.Bilinear(D, D, D), {"input1": torch.zeros(3, D)})


def test_what_cannot_be_traced_is_refused_in_words():
    rows = [torch.randn(3, D), torch.randn(5, D)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged)
    layer = Function(lambda s, x: s.layer(x), layer=nn.Linear(D, D))
    inside = Function(
        lambda s, x: s.layer(torch.nested.as_nested_tensor([*x], layout=torch.jagged)).values(),
        layer=nn.Linear(D, D),
    )
    for model, given in ((layer, jagged), (inside, torch.randn(2, 5, D))):
        with pytest.raises(
            ShapeError, match="nested tensors have no meta form; pass padded ones; still known"
        ):
            rg.cost(model, given)
    sparse = nn.Embedding(50, D, sparse=True)
    with pytest.raises(ShapeError, match=r"sparse tensors have no meta form.*sparse=False"):
        rg.cost(sparse, torch.zeros(2, 3, dtype=torch.long), train=rg.TrainingStep(optimizer="sgd"))

    def packed(s, x):
        return s.layer(nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3]), batch_first=True))[1]

    with pytest.raises(ShapeError, match="packed sequences have no meta form; pass padded ones"):
        rg.cost(Function(packed, layer=nn.GRU(D, D, batch_first=True)), torch.randn(2, 5, D))


@pytest.mark.parametrize(
    "message", ["SparseAttention: block 3", "Nested config", "the 'lengths' argument is missing"]
)
def test_the_words_of_a_model_that_fails_are_its_own(message):
    def fails(s, x):
        raise ValueError(message)

    with pytest.raises(ShapeError, match=f"fails on inputs of these shapes: ValueError: {message}; still"):
        rg.cost(Function(fails, layer=nn.Linear(D, D)), torch.randn(2, D))


def test_a_wrapper_that_marks_its_calls_for_the_profiler_has_nothing_uncounted():
    assert not rg.cost(nn.DataParallel(nn.Linear(D, D)), torch.zeros(3, D)).uncounted


@pytest.mark.parametrize("name", ["logsumexp", "kthvalue"])
def test_what_an_operation_copies_is_part_of_the_peak(name):
    """ln Σ exp of a table holds the exponentials, the k-th value the values and their positions."""
    runs = {
        "logsumexp": lambda s, x: (s.a(x) @ x.mT).logsumexp(-1),
        "kthvalue": lambda s, x: s.a(x).kthvalue(3)[0],
    }
    model, x = Function(runs[name], **projections("a")), torch.randn(B, N, D)
    with torch.no_grad():
        model(x)
        real = allocated(model, x) + counted(lambda: model(x))[0]
    assert abs(rg.cost(model, x).memory.inference_peak / real - 1) < 0.001


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_a_training_step_of_torchscript_is_refused_with_what_to_pass():
    scripted, x = torch.jit.script(nn.Linear(D, D)), torch.randn(B, N, D)
    assert rg.cost(scripted, x).flops == 2 * B * N * D * D
    with pytest.raises(
        ShapeError, match="TorchScript does not train on meta tensors; pass the module it was made of"
    ):
        rg.cost(scripted, x, train=True)


def test_the_products_of_a_bilinear_layer_are_counted():
    cost = rg.cost(nn.Bilinear(D, D, 5), torch.zeros(N, D), torch.zeros(N, D))
    assert cost.flops == 5 * (2 * N * D * D + 2 * N * D) and not cost.uncounted


def test_the_check_of_a_gaussian_loss_is_noted():
    """A variance that the model predicts was refused as a value that a meta tensor does not have."""
    cost = rg.cost(TRAINED["a Gaussian loss of predicted variances"](), torch.zeros(B, N, D))
    assert cost.notes == ("checks of values are taken to pass",)
