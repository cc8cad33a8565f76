"""Training tokens per second on one GPU: transformer-base with `Trainer`, against PyTorch's own `nn.Transformer`.

    PYTHONPATH=src python3 bench/train_h200.py                 # about two minutes on an H200, most of it compiling
    PYTHONPATH=src python3 bench/train_h200.py --tiny          # the same on a CPU, to see that it runs

Both sides: 6 + 6 layers of 512, 8 heads, feed-forward 2048, all biases, norms first and a last one, one table of
32000 for source, target and output; positions added to embeddings scaled by √512; dropout 0.1 on embeddings,
branches, inside the feed-forward and (unless changed by --attention-dropout) on attention weights; label smoothing
0.1; fused AdamW over float32 weights; bf16 autocast; torch.compile with its defaults; 512 pairs of 64 tokens.

Ours is replayed as a CUDA graph, with the ends of branches fused; "ours, not compiled" is that without the compiler.
A step is a whole update: forward, loss, backward, optimizer. Tokens are those of the source and of the target,
2 · 512 · 64 a step. Theirs has its batch on the GPU already; ours makes each batch from rows on the CPU, as
`Trainer.run` does. The rounds alternate; a side's figure is its median round.

--check      first compares our two kernels with float64
--profile    also writes a table of kernels for each side into this folder
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from train_gpu_updates import launch_latency

import regard as rg
from regard.schedule import constant
from regard.training.data.ragged import Ragged
from regard.training.data.rows import Pairs
from regard.training.loop.loss import cross_entropy
from regard.training.loop.meter import machine
from regard.training.loop.optimizer import AdamW
from regard.training.loop.settings import Settings
from regard.training.loop.trainer import Trainer
from regard.training.recipes.tasks import Translation

DROPOUT, SMOOTHING, RATE = 0.1, 0.1, 1e-4
BETAS, EPS = (0.9, 0.98), 1e-9


@dataclass(frozen=True)
class Size:
    vocab: int = 32000
    d_model: int = 512
    layers: int = 6
    heads: int = 8
    d_ff: int = 2048
    pairs: int = 512
    length: int = 64

    @property
    def tokens(self) -> int:
        """Of source and target, in a step."""
        return 2 * self.pairs * self.length

    @property
    def flops(self) -> int:
        """Of the products with weights, forward and backward: six a weight and token."""
        d, own, mlp = self.d_model, 4 * self.d_model**2, 2 * self.d_model * self.d_ff
        return 6 * self.pairs * self.length * (self.layers * (3 * own + 2 * mlp) + self.vocab * d)


TINY = Size(vocab=97, d_model=32, layers=2, heads=2, d_ff=64, pairs=4, length=8)


class Theirs(nn.Module):
    """nn.Transformer with what it leaves to its user: embeddings, positions, the head and the loss."""

    def __init__(self, size: Size, attention_dropout: float):
        super().__init__()
        self.size = size
        self.table = nn.Embedding(size.vocab, size.d_model)
        self.transformer = nn.Transformer(
            size.d_model, size.heads, size.layers, size.layers, size.d_ff, DROPOUT, batch_first=True, norm_first=True
        )  # fmt: skip
        for part in self.transformer.modules():
            if isinstance(part, nn.MultiheadAttention):
                part.dropout = attention_dropout
        self.out = nn.Linear(size.d_model, size.vocab, bias=False)
        self.out.weight = self.table.weight
        nn.init.normal_(self.table.weight, std=0.02)
        where = torch.arange(size.length)[:, None] / 10000 ** (
            torch.arange(0, size.d_model, 2) / size.d_model
        )
        self.register_buffer("places", torch.stack([where.sin(), where.cos()], -1).flatten(-2))

    def embed(self, ids: Tensor) -> Tensor:
        return F.dropout(self.table(ids) * self.size.d_model**0.5 + self.places, DROPOUT, self.training)

    def forward(self, source: Tensor, target: Tensor, wanted: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1], device=target.device)
        x, y = self.embed(source), self.embed(target)
        states = self.transformer(x, y, tgt_mask=mask, tgt_is_causal=True)
        logits = self.out(states).flatten(0, 1)
        return F.cross_entropy(logits, wanted.flatten(), label_smoothing=SMOOTHING)


def their_step(size: Size, attention_dropout: float, device: str) -> Callable[[], Tensor]:
    model = Theirs(size, attention_dropout).to(device).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=RATE, betas=BETAS, eps=EPS, weight_decay=0.0, fused=True
    )
    call = torch.compile(model)
    shape = (size.pairs, size.length)
    source, target, wanted = (torch.randint(4, size.vocab, shape, device=device) for _ in range(3))

    def step() -> Tensor:
        with torch.autocast(device, torch.bfloat16):
            loss = call(source, target, wanted)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    return step


def declared(size: Size, attention_dropout: float) -> rg.EncoderDecoder:
    embedding = rg.Embedding(size.vocab, size.d_model, position=rg.sinusoidal(), scaled=True, dropout=DROPOUT)
    mlp = rg.FeedForward(size.d_ff, dropout=DROPOUT)
    own = rg.Attention(size.d_model, heads=size.heads, dropout=attention_dropout)
    past = rg.Attention(size.d_model, heads=size.heads, dropout=attention_dropout, pattern=rg.causal())
    return rg.EncoderDecoder(
        rg.Encoder(rg.Block(own, mlp, norm_at="pre", dropout=DROPOUT), size.layers, embedding=embedding),
        rg.Decoder(
            rg.Block(past, mlp, cross=own, norm_at="pre", dropout=DROPOUT),
            size.layers,
            embedding=embedding,
            head=rg.LanguageHead(),
        ),
        share_embedding=True,
    )


def our_step(
    size: Size, attention_dropout: float, device: str, compiles: bool = True
) -> Callable[[], Tensor]:
    rows = 16 * size.pairs

    def sentences(length: int) -> Ragged:
        lengths = torch.full((rows,), length)
        ids = torch.randint(4, size.vocab, (rows * length,), dtype=torch.int32)
        return Ragged(ids, lengths.cumsum(0) - lengths, lengths)

    data = Pairs(sentences(size.length), sentences(size.length - 1))  # a start or an end joins the target
    settings = Settings(
        10**6,
        size.tokens,
        constant(RATE),
        optimizer=AdamW(betas=BETAS, eps=EPS),
        clip=None,
        autocast="bfloat16",
        compile=compiles,
    )
    task = Translation(declared(size, attention_dropout).build().to(device), SMOOTHING)
    trainer = Trainer(task, data, data, settings, tempfile.mkdtemp())

    def step() -> Tensor:
        loss, predicted, _ = trainer._update()
        return loss / predicted

    return step


def gpu_busy(step: Callable[[], Tensor], steps: int = 5) -> float:
    """Milliseconds per step in which a kernel runs, by the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    return sum(e.self_device_time_total for e in seen.key_averages()) / 1e3 / steps


SIDES: dict[str, Callable[[Size, float, str], Callable[[], Tensor]]] = {
    "theirs": their_step,
    "ours": our_step,
    "ours, not compiled": lambda *given: our_step(*given, compiles=False),
}


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def timed(step: Callable[[], Tensor], steps: int, device: str) -> tuple[float, float]:
    """Seconds a step, and those after which the CPU had asked for all of it."""
    wait(device)
    began = time.perf_counter()
    for _ in range(steps):
        step()
    asked = time.perf_counter()
    wait(device)
    return (time.perf_counter() - began) / steps, (asked - began) / steps


def profiled(name: str, step: Callable[[], Tensor], folder: Path, device: str) -> None:
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if device == "cuda" else []
    with torch.profiler.profile(activities=kinds) as seen:
        for _ in range(3):
            step()
        wait(device)
    by = "self_cuda_time_total" if device == "cuda" else "self_cpu_time_total"
    table = seen.key_averages().table(sort_by=by, row_limit=120, max_name_column_width=110)
    (folder / f"kernels-{name}.txt").write_text(table)


def off(*pairs: tuple[Tensor, Tensor]) -> list[float]:
    """The largest error of each over the largest number."""
    pairs = tuple((a.detach().double(), b.detach().double()) for a, b in pairs)
    return [float((a - b).abs().max() / b.abs().max()) for a, b in pairs]


def check(device: str) -> None:
    """The kernels of ours, in bf16 beside float64, values and gradients."""
    torch.manual_seed(0)
    with torch.autocast(device, torch.bfloat16):
        result = {"attention": check_attention(device), "loss": check_loss(device)}
    print(f"errors: {result}", flush=True)
    assert max(max(x) for x in result.values()) < 0.02


def check_attention(device: str) -> list[float]:
    """A layer over itself and over a context with hidden keys, beside the same layer in float64."""
    result = []
    for context in (False, True):
        layer = rg.Attention(512, heads=8, pattern=rg.full() if context else rg.causal()).build().to(device)
        x, c = torch.randn(3, 64, 512, device=device), torch.randn(3, 51, 512, device=device)
        given = (x, c) if context else (x,)
        lengths = torch.tensor([51, 9, 1], device=device) if context else None
        o = layer(*given, lengths=lengths)
        true = deepcopy(layer).double()
        with torch.autocast(device, enabled=False):
            wanted = true(*(t.double() for t in given), lengths=lengths)
        g = torch.randn_like(o)
        # The gradient of the keys' bias is 0: it moves all scores of a query alike.
        some, same = ([p for n, p in m.named_parameters() if n != "w_k.bias"] for m in (layer, true))
        ours, theirs = torch.autograd.grad(o, some, g), torch.autograd.grad(wanted, same, g.double())
        result += off((o, wanted), *zip(ours, theirs))
    return result


def check_loss(device: str) -> list[float]:
    states = (0.2 * torch.randn(3001, 64, device=device)).requires_grad_()
    table = torch.randn(32000, 64, device=device, requires_grad=True)
    y = torch.randint(32000, (3001,), device=device)
    y[::7] = -100
    loss, _ = cross_entropy(states, table, y, smoothing=SMOOTHING, chunk=1024)
    with torch.autocast(device, enabled=False):
        logits = states.double() @ table.double().T
        true = F.cross_entropy(logits, y, label_smoothing=SMOOTHING, reduction="sum")
    return off((loss, true), *zip(*(torch.autograd.grad(t, (states, table)) for t in (loss, true))))


def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ask.add_argument("--tiny", action="store_true")
    ask.add_argument("--check", action="store_true")
    ask.add_argument("--profile", type=Path)
    ask.add_argument("--rounds", type=int, default=5)
    ask.add_argument("--steps", type=int, default=20)
    ask.add_argument("--attention-dropout", type=float, nargs="*", default=[DROPOUT])
    ask.add_argument("--sides", nargs="*", default=list(SIDES))
    ask.add_argument("--after", type=Path, help="wait for this file before the timed rounds")
    ask.add_argument("--out", type=Path, help="a JSON file for the figures")
    given = ask.parse_args()
    size, device = (TINY, "cpu") if given.tiny else (Size(), "cuda")
    if given.check:
        check(device)
    result = [measured(p, size, device, given) for p in given.attention_dropout]
    about = {"date": str(date.today()), "machine": machine(torch.device(device)), "size": vars(size)}
    about["tokens"] = size.tokens
    if device == "cuda":
        about["launch_latency_us"] = round(launch_latency(device), 2)
    if given.out:
        given.out.write_text(json.dumps({**about, "figures": result}, indent=1) + "\n")


def measured(attention_dropout: float, size: Size, device: str, given: argparse.Namespace) -> dict:
    torch.manual_seed(0)
    torch._dynamo.reset()
    steps, row = {}, {"attention_dropout": attention_dropout}
    for name, make in SIDES.items():
        if name in given.sides:
            began = time.perf_counter()
            steps[name] = make(size, attention_dropout, device)
            for _ in range(5):
                loss = steps[name]()
            row[f"{name}_loss"] = float(loss.detach())
            print(
                f"{name}: ready in {time.perf_counter() - began:.0f} s, loss {float(loss.detach()):.3f}",
                flush=True,
            )
    print("warm", flush=True)
    while given.after and not given.after.exists():
        time.sleep(0.2)
    if given.profile:
        for name, step in steps.items():
            profiled(f"{name}-{attention_dropout}", step, given.profile, device)
    found = {name: [] for name in steps}
    for _ in range(given.rounds):
        for name, step in steps.items():
            found[name].append(timed(step, given.steps, device))
    for name, rounds in found.items():
        middle = statistics.median(s for s, _ in rounds)
        row[name] = {
            "ms": [round(1e3 * s, 3) for s, _ in rounds],
            "cpu_ms": [round(1e3 * s, 3) for _, s in rounds],
            "tokens_per_second": round(size.tokens / middle),
            "tflops": round(size.flops / middle / 1e12, 1),
        }
        if device == "cuda":
            row[name]["gpu_busy_ms"] = round(gpu_busy(steps[name]), 2)
            print(f"{name}: GPU busy {row[name]['gpu_busy_ms']} ms a step", flush=True)
        print(
            f"attention dropout {attention_dropout}, {name}: {1e3 * middle:.2f} ms a step, "
            f"{size.tokens / middle / 1e6:.3f} M tokens/s, {size.flops / middle / 1e12:.0f} TFLOP/s",
            flush=True,
        )
    if "theirs" in found:
        theirs = row["theirs"]["tokens_per_second"]
        row["ratios"] = {k: round(row[k]["tokens_per_second"] / theirs, 3) for k in found if k != "theirs"}
        print(f"ratios {row['ratios']}", flush=True)
    return row


if __name__ == "__main__":
    main()
