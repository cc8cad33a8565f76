"""Every recipe trains on a GPU, in every dtype and execution mode, with the losses of the CPU.

    PYTHONPATH=src:tests/helpers python3 -m pytest tests/training/gpu -q                # about two minutes on an H200
    PYTHONPATH=src:tests/helpers python3 -m pytest tests/training/gpu -q -m compiled    # two more

Dropout is set to 0, because its random numbers differ between devices; data is sampled on the CPU, so both sides
read the same batches.
"""

import json
import os
import signal
import subprocess
import sys
import time
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

import regard as rg
from regard.nn import branch_end
from regard.nn.position import build
from regard.nn.stack import EncoderDecoder
from regard.schedule import constant
from regard.training.loop.consistency import consistent_cross_entropy
from regard.training.loop.ranks import ALONE
from regard.training.loop.trainer import Trainer
from regard.training.recipes import Recipe, recipe
from regard.training.recipes.tasks import Translation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

UPDATES = 8
WORDS = ("the", "a", "red", "old", "big", "cat", "dog", "bird", "house", "river", "sat", "ran", "near", "and")
ALLOWED = {None: 1e-3, "bfloat16": 3e-2, "float16": 1e-2}  # relative error of a loss, and of its fall


@pytest.fixture(scope="session")
def texts(tmp_path_factory) -> dict[str, str]:
    """Small files of sentences of 1 to 40 words: pairs, labeled texts, lines."""
    folder = tmp_path_factory.mktemp("texts")
    generator = torch.Generator().manual_seed(0)

    def sentence() -> list[str]:
        length = int(torch.randint(1, 41, (), generator=generator))
        return [WORDS[int(i)] for i in torch.randint(len(WORDS), (length,), generator=generator)]

    rows = [sentence() for _ in range(400)]
    lines = {
        "pairs": [" ".join(r) + "\t" + " ".join(w[::-1] for w in r[: 1 + len(r) // 2]) for r in rows],
        "labeled": [f"{len(r) % 3}\t{' '.join(r)}" for r in rows],
        "text": [" ".join(r) for r in rows],
    }
    for name, content in lines.items():
        (folder / name).write_text("\n".join(content) + "\n")
    return {name: str(folder / name) for name in lines}


def made(name: str, files: dict[str, str]) -> Recipe:
    """A small version of a recipe, by its name, with `-packed` or `-bucketed`."""
    pairs = rg.training.SentencePairs(train=files["pairs"], valid=files["pairs"], vocab=300)
    small = {"d_model": 64, "layers": 2, "heads": 2}
    match name.split("-")[0]:
        case "translate":
            chosen = recipe("translate", minutes=None, data=pairs, tokens=1500, **small)
        case "h200":
            parts = {"d_model": 64, "layers": (2, 2), "heads": 2, "d_ff": 128}
            chosen = recipe("translate-h200", minutes=None, data=pairs, tokens=1500, **parts)
        case "language":
            chosen = recipe("language-model", file=files["text"], context=48, **small)
        case "masked":
            chosen = recipe(
                "masked-language-model", train=files["text"], valid=files["text"], vocab=300, **small
            )
        case "classify":
            chosen = recipe("classify", train=files["labeled"], valid=files["labeled"], tokens=1500, **small)
        case "image":
            chosen = recipe("image", layers=2)
    settings = replace(
        chosen.settings,
        minutes=None,
        packed="packed" in name,
        bucketed="bucketed" in name,
        autocast=None,
        schedule=constant(1e-3),
    )
    plain = json.loads(replace(chosen, settings=settings).json())
    return Recipe.from_json(json.dumps(without_dropout(plain)))


def without_dropout(plain):
    if isinstance(plain, dict):
        return {k: 0.0 if k == "dropout" else without_dropout(v) for k, v in plain.items()}
    return [without_dropout(v) for v in plain] if isinstance(plain, list) else plain


def losses(chosen: Recipe, folder: Path, device: str, **settings) -> tuple[list[float], Trainer]:
    """The mean losses of the first updates, and the trainer."""
    data = chosen.data.load(folder)
    torch.manual_seed(0)
    model = chosen.model.build().to(device)
    task, chosen_settings = chosen.task(model), replace(chosen.settings, **settings)
    trainer = Trainer(task, data.train, data.valid, chosen_settings, folder, ALONE)
    if (
        trainer.scaler.is_enabled()
    ):  # at the default scale the first gradients overflow, and updates are skipped
        trainer.scaler = torch.amp.GradScaler(device, init_scale=128.0)
    torch.manual_seed(1)
    found = [trainer._update()[:2] for _ in range(UPDATES)]
    return [float(total) / predicted for total, predicted in found], trainer


NAMES = [
    "translate",
    "translate-bucketed",
    "h200-bucketed",
    "language",
    "masked",
    "masked-bucketed",
    "masked-packed",
    "classify",
    "classify-bucketed",
    "classify-packed",
    "image",
]


@pytest.fixture(scope="session")
def on_cpu(texts, tmp_path_factory):
    @cache
    def found(name: str) -> tuple[Recipe, Path, list[float]]:
        chosen, folder = made(name, texts), tmp_path_factory.mktemp(name)
        return chosen, folder, losses(chosen, folder, "cpu")[0]

    return found


@pytest.mark.parametrize("autocast", ALLOWED)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_has_the_losses_of_the_cpu(on_cpu, name, graphs, autocast):
    chosen, folder, expected = on_cpu(name)
    found, trainer = losses(chosen, folder, "cuda", graphs=graphs, autocast=autocast)
    assert (trainer.graphs is not None) == graphs
    assert graphs is False or "packed" in name or trainer.graphs.refused is None
    assert found == pytest.approx(expected, rel=ALLOWED[autocast])


@pytest.mark.compiled
@pytest.mark.filterwarnings("ignore:TensorFloat32")  # the compiler would rather have fewer bits
@pytest.mark.parametrize("autocast", ALLOWED)
@pytest.mark.parametrize("name", ["translate", "masked", "masked-packed", "image", "language"])
def test_a_compiled_recipe_has_the_losses_of_the_cpu(on_cpu, name, autocast):
    chosen, folder, expected = on_cpu(name)
    torch._dynamo.reset()
    found, _ = losses(chosen, folder, "cuda", compile=True, autocast=autocast)
    assert found == pytest.approx(expected, rel=ALLOWED[autocast])


def test_repeated_shapes_are_replayed_as_graphs_with_the_same_losses(on_cpu):
    """Images have one shape: the third update is captured, and the later ones replay it."""
    chosen, folder, expected = on_cpu("image")
    found, trainer = losses(chosen, folder, "cuda")
    assert len(trainer.graphs.graphs) == 1
    assert found == pytest.approx(expected, rel=ALLOWED[None])
    eager, _ = losses(chosen, folder, "cuda", graphs=False)
    assert found == pytest.approx(eager, rel=1e-5)


def test_graphs_use_new_dropout_masks_at_each_replay():
    """With dropout and a rate near 0 the same batch gives another loss each time, also when it is replayed."""
    chosen = recipe("image", layers=2)
    block = replace(chosen.model.encoder.block, dropout=0.5)
    model = replace(chosen.model, encoder=replace(chosen.model.encoder, block=block))
    data = replace(chosen.data, augmentation=None)
    chosen = replace(chosen, model=model, data=data)
    rows = data.load(Path()).train
    rows = replace(rows, inputs=rows.inputs[:64], labels=rows.labels[:64])
    settings = replace(chosen.settings, schedule=constant(1e-12), average=None)
    trainer = Trainer(chosen.task(model.build().cuda()), rows, rows, settings, Path(), ALONE)
    found = [float(trainer._update()[0]) for _ in range(8)]
    assert len(trainer.graphs.graphs) == 1 and len(set(found)) == 8


def test_an_update_that_samples_on_the_host_is_not_replayed():
    chosen = recipe("image", layers=1)
    rows = chosen.data.load(Path()).train
    trainer = Trainer(chosen.task(chosen.model.build().cuda()), rows, rows, chosen.settings, Path(), ALONE)
    inner = trainer.call

    def noisy(**inputs):
        loss, plain = inner(**inputs)
        return loss * (1 + 0.0 * float(torch.rand(()))), plain

    trainer.call = noisy
    for _ in range(4):
        trainer._update()
    assert trainer.graphs.refused == "an update samples random numbers on the host"
    assert not trainer.graphs.graphs


PAIRS = [(1, 1), (3, 50), (50, 3), (17, 33), (33, 17), (64, 20), (20, 64), (40, 100), (100, 40), (120, 121)]


@pytest.mark.parametrize("autocast", ALLOWED)
@pytest.mark.parametrize(("m", "n"), PAIRS)
def test_cross_attention_of_any_pair_of_lengths_has_the_gradients_of_the_cpu(m, n, autocast):
    chosen = recipe("translate", minutes=None, d_model=64, layers=1, heads=2)
    torch.manual_seed(0)
    model: EncoderDecoder = chosen.model.build()
    b = 5
    lengths = torch.randint(1, m + 1, (b,))
    lengths[0] = m
    source, target = torch.randint(4, 8000, (b, m)), torch.randint(4, 8000, (b, n))
    found = {}
    for device in ("cpu", "cuda"):
        task = Translation(model.to(device))
        task.zero_grad()
        with torch.autocast("cuda", getattr(torch, autocast or "float32"), enabled=autocast is not None):
            loss, _ = task(*(t.to(device) for t in (source, lengths, target, target)))
        (loss / target.numel()).backward()
        grads = torch.cat([p.grad.flatten().cpu() for p in task.parameters()])
        found[device] = float(loss.detach()), grads
    (loss, grads), (loss_gpu, grads_gpu) = found["cpu"], found["cuda"]
    assert loss_gpu == pytest.approx(loss, rel=ALLOWED[autocast])
    assert float((grads_gpu - grads).norm() / grads.norm()) < 3 * ALLOWED[autocast]


@pytest.mark.parametrize("vocab", [11, 5000, 8000])
def test_the_consistency_loss_has_the_gradients_of_float64(vocab):
    torch.manual_seed(0)
    states = (0.3 * torch.randn(6, 7, 16)).requires_grad_()
    table, bias = torch.randn(vocab, 16, requires_grad=True), torch.randn(vocab, requires_grad=True)
    y = torch.randint(vocab, (3, 7))
    y[0, 2] = -100
    found = []
    for device, dtype in (("cpu", torch.float64), ("cuda", torch.float32)):
        parts = [t.detach().to(device, dtype).requires_grad_() for t in (states, table, bias)]
        loss, plain = consistent_cross_entropy(
            parts[0], parts[1], y.to(device), parts[2], weight=2.5, smoothing=0.1, chunk=4
        )
        loss.backward()
        found.append([loss.detach(), plain, *(t.grad for t in parts)])
    for ours, exact in zip(found[1], found[0], strict=True):
        assert float((ours.cpu() - exact).abs().max()) <= 1e-4 * float(exact.abs().max())


KILLED = """
import sys
import torch
from copy import deepcopy
from dataclasses import replace
from regard.training.recipes import Recipe
from regard.training.recipes.run import Run
torch.use_deterministic_algorithms(True)
chosen = Recipe.from_json(open(sys.argv[1]).read())
Run(chosen, sys.argv[2], "cuda").train()
"""


def test_a_killed_run_resumes_bit_for_bit(texts, tmp_path):
    """kill -9 at different moments: in eager deterministic mode the weights are those of an uninterrupted run."""
    chosen = made("translate", texts)
    settings = replace(chosen.settings, steps=400, save_every=40, valid_every=400, graphs=False)
    (tmp_path / "recipe.json").write_text(replace(chosen, settings=settings).json())
    (tmp_path / "run.py").write_text(KILLED)
    package = str(Path(rg.__file__).parents[1])
    env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8", "PYTHONPATH": package}

    def start(folder: str) -> subprocess.Popen:
        command = [sys.executable, "run.py", "recipe.json", folder]
        return subprocess.Popen(command, cwd=tmp_path, env=env)

    whole = start("whole")
    for kill in range(4):
        process = start("killed")
        while process.poll() is None:
            steps = [int(p.name) for p in (tmp_path / "killed" / "checkpoints").glob("0*")]
            if steps and max(steps) >= 80 * (kill + 1):
                time.sleep(0.03 * kill)
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL  # it was still training
    assert start("killed").wait() == 0 and whole.wait() == 0
    one, other = (rg.load(tmp_path / folder / "model").state_dict() for folder in ("whole", "killed"))
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "norm"),
    [
        (1000, torch.nn.LayerNorm(384)),
        (77, torch.nn.LayerNorm(100, bias=False)),
        (5, torch.nn.RMSNorm(2048, 1e-5)),
    ],
    ids=["layer 384", "layer 100", "rms 2048"],
)
def test_a_fused_branch_end_has_the_values_and_gradients_of_float64(rows, norm, dtype):
    torch.manual_seed(0)
    width = norm.normalized_shape[0]
    norm = norm.cuda()
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x, y = (torch.randn(1, rows, width, device="cuda") for _ in range(2))
    x, y = x.requires_grad_(), y.to(dtype).requires_grad_()
    state = torch.cuda.get_rng_state()
    total, out = branch_end.branch_end(x, y, norm, 0.2, dtype)
    torch.cuda.set_rng_state(state)
    mask = (
        branch_end.branch_end(torch.zeros_like(x), torch.ones_like(y), norm, 0.2, dtype)[0].detach().double()
    )
    assert float((mask > 0).double().mean()) == pytest.approx(0.8, abs=4 * (0.16 / mask.numel()) ** 0.5)
    given = [x, y, *norm.parameters()]
    true = [t.detach().double().requires_grad_() for t in given]
    exact_total = true[0] + mask * true[1]
    exact_norm = deepcopy(norm).double()
    exact_out = torch.func.functional_call(
        exact_norm, dict(zip(dict(norm.named_parameters()), true[2:], strict=True)), (exact_total,)
    )
    grads = torch.randn_like(total), torch.randn_like(out)
    ours = torch.autograd.grad([total, out], given, grads)
    exact = torch.autograd.grad([exact_total, exact_out], true, [g.double() for g in grads])
    for a, b in [(total, exact_total), (out, exact_out), *zip(ours, exact, strict=True)]:
        allowed = 1e-5 if a.dtype == torch.float32 else 1e-2
        assert float((a - b).detach().abs().max()) <= allowed * float(b.detach().abs().max())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("pairing", "fraction"), [("interleaved", 0.5), ("halves", 1.0)])
def test_a_fused_rotation_has_the_values_and_gradients_of_float64(pairing, fraction, dtype):
    torch.manual_seed(0)
    module = build(rg.rope(pairing=pairing, fraction=fraction), d_k=64)
    module.fuses = True
    x = torch.randn(2, 3000, 3, 64, device="cuda", dtype=dtype).transpose(1, 2).requires_grad_()
    out = module.along(x, 7, 2)
    assert type(out.grad_fn).__name__ == "_RotationBackward"
    true = x.detach().double().requires_grad_()
    exact = module(true, 7 + 2 * torch.arange(3000, device="cuda"))
    grad = torch.randn_like(out)
    pairs = [(out, exact)]
    pairs += zip(
        torch.autograd.grad(out, x, grad), torch.autograd.grad(exact, true, grad.double()), strict=True
    )
    for a, b in pairs:
        assert float((a - b).detach().abs().max()) <= (4e-6 if dtype == torch.float32 else 1.6e-2)


def test_relu_with_dropout_on_a_gpu_keeps_its_share_and_its_gradient():
    x = torch.randn(3, 1000, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    out = branch_end.relu_dropout(x, 0.3)
    kept = out > 0
    assert float(kept[x > 0].double().mean()) == pytest.approx(0.7, abs=0.01) and not kept[x <= 0].any()
    assert torch.allclose(out[kept].float(), x[kept].float() / 0.7, rtol=1e-2)
    (dx,) = torch.autograd.grad(out, x, torch.ones_like(out))
    assert torch.allclose(dx.float(), kept.float() / 0.7, rtol=1e-2)


def test_training_on_a_gpu_fuses_the_ends_of_branches(texts, tmp_path, monkeypatch):
    """The kernel runs once per branch; the losses are compared by the tests of the recipes."""
    from regard.nn import branch_kernel

    calls = []
    real = branch_kernel.branch_end
    monkeypatch.setattr(branch_kernel, "branch_end", lambda *given: calls.append(1) or real(*given))
    losses(made("translate", texts), tmp_path, "cuda", graphs=False)
    assert len(calls) == UPDATES * (2 * 2 + 3 * 2 + 2)  # and where a stack begins
