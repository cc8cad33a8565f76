"""Translation training on one GPU: real tokens per second of our trainer against Hugging Face's Marian, compiled.

    PYTHONPATH=src python3 bench/train_marian.py --out FILE      # about two minutes on an H200, most of it compiling
    PYTHONPATH=src python3 bench/train_marian.py --tiny          # the same on a CPU, to see that it runs

Both sides: Marian's architecture with 4 + 3 layers of 384, 6 heads, feed-forward 1536 with ReLU, biases, norms after
the residual sums, one table of 8000 embeddings, dropout 0.1 on embeddings and branches, label smoothing 0.1, fused
AdamW, clipping at 1, bf16 autocast, the same tokenizer and sentence pairs; batches of as many padded tokens on
average.

Theirs: torch.compile(dynamic=True) of model and loss as one graph. Marian as it is breaks into a graph per layer,
because it samples a number for LayerDrop before each; this test is switched off, and with it the dropout of its
embeddings: both make it faster. Two kinds of batches: by transformers' LengthGroupedSampler, lengths padded to a
multiple of 8 (group_by_length and pad_to_multiple_of of its trainer); and the very batches of ours, padding included.

Ours: `Trainer` as `regard train translate-h200` runs it (buckets of lengths, CUDA graphs); it also computes a moving
average of the weights. A real token is one of a source, or of a target with its end. The rounds alternate; a side's
figure is all its real tokens over all its time.

With --side the two sides run in separate processes, so that one compiles while the other captures graphs; a round
then begins when the file AFTER-i appears, and AFTER-i.done marks its end. --merge combines their results.
"""

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import replace
from datetime import date
from pathlib import Path

import torch
from torch import nn
from train_gpu_updates import launch_latency
from train_long_context import graphs
from train_translate import grouped, sized

import regard as rg
from regard.training import models
from regard.training.data.rows import IGNORED, Batch, Pairs
from regard.training.data.tokens import PAD
from regard.training.loop.meter import machine
from regard.training.loop.ranks import ALONE
from regard.training.loop.trainer import Trainer
from regard.training.recipes import recipe

SIZE = {"d_model": 384, "layers": (4, 3), "heads": 6, "d_ff": 1536}
TINY = {"d_model": 32, "layers": (1, 1), "heads": 2, "d_ff": 64}


class Marian(nn.Module):
    def __init__(self, vocab: int, size: dict):
        super().__init__()
        from transformers import MarianConfig, MarianMTModel

        config = MarianConfig(
            vocab_size=vocab, d_model=size["d_model"], encoder_layers=size["layers"][0],
            decoder_layers=size["layers"][1], encoder_attention_heads=size["heads"],
            decoder_attention_heads=size["heads"], encoder_ffn_dim=size["d_ff"], decoder_ffn_dim=size["d_ff"],
            activation_function="relu", dropout=0.1, attention_dropout=0.0, activation_dropout=0.0,
            max_position_embeddings=256, pad_token_id=PAD, decoder_start_token_id=1, eos_token_id=2,
            forced_eos_token_id=None, scale_embedding=True, use_cache=False,
        )  # fmt: skip
        self.inner = MarianMTModel(config)

    def train(self, mode: bool = True) -> "Marian":
        """The two stacks, not their layers, stay in evaluation mode: so LayerDrop samples nothing."""
        super().train(mode)
        self.inner.model.encoder.training = self.inner.model.decoder.training = False
        return self

    def forward(self, source, source_lengths, target, targets):
        mask = torch.arange(source.shape[1], device=source.device) < source_lengths[:, None]
        logits = self.inner(input_ids=source, attention_mask=mask.long(), decoder_input_ids=target).logits
        return nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), label_smoothing=0.1
        )


class Theirs:
    def __init__(self, vocab: int, size: dict, device: str):
        torch.manual_seed(0)
        self.device, self.autocast = device, device == "cuda"
        self.model = Marian(vocab, size).to(device).train()
        self.call = torch.compile(self.model, dynamic=True) if device == "cuda" else self.model
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.98), fused=True)

    def update(self, batch: Batch) -> None:
        inputs = batch.to(torch.device(self.device)).inputs
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            loss = self.call(**inputs)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


class Grouped:
    """Theirs, with batches by its own sampler."""

    def __init__(self, theirs: Theirs, rows: Pairs, tokens: float, count: int | None):
        self.theirs, self.rows, self.index = theirs, rows, 0
        lengths = rows.source.lengths.tolist()
        if count is None:
            order, count = sized(rows, lambda size: grouped(lengths, size), tokens)
        else:
            order = grouped(lengths, count)
        self.batches = [order[i : i + count] for i in range(0, len(order) - count + 1, count)]

    def step(self) -> int:
        batch = self.rows.batch(torch.tensor(self.batches[self.index % len(self.batches)]))
        self.index += 1
        self.theirs.update(padded_to(batch, 8))
        return int(batch.inputs["source_lengths"].sum()) + batch.predicted


class SameBatches:
    """Theirs, with the batches of our trainer."""

    def __init__(self, theirs: Theirs, trainer: Trainer):
        self.theirs, self.trainer = theirs, trainer
        self.stream = replace(trainer.stream, epoch=0, index=0, plan=None)

    def step(self) -> int:
        rows = self.stream.next()
        self.theirs.update(self.trainer._batch(self.trainer.train, rows, self.trainer.settings.bucketed))
        return int(self.stream.lengths[rows].sum())


def padded_to(batch: Batch, multiple: int) -> Batch:
    """Lengths rounded up, as by pad_to_multiple_of of transformers' collators."""
    inputs = {}
    for name, t in batch.inputs.items():
        fill = IGNORED if name == "targets" else PAD
        inputs[name] = nn.functional.pad(t, (0, -t.shape[1] % multiple), value=fill) if t.dim() == 2 else t
    return Batch(inputs, batch.predicted)


class Ours:
    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def step(self) -> int:
        index, epoch = self.trainer.stream.index, self.trainer.stream.epoch
        self.trainer._update()
        same = epoch == self.trainer.stream.epoch
        rows = self.trainer.stream.plan[index if same else 0]
        return int(self.trainer.stream.lengths[rows].sum())


def declared(vocab: int, size: dict) -> rg.EncoderDecoder:
    d_model, heads = size["d_model"], size["heads"]
    embedding = rg.Embedding(vocab, d_model, position=rg.sinusoidal(), scaled=True, dropout=0.1)
    own, past = rg.Attention(d_model, heads=heads), rg.Attention(d_model, heads=heads, pattern=rg.causal())
    options = {"norm_at": "post", "dropout": 0.1}
    encoder = rg.Block(own, rg.FeedForward(size["d_ff"]), **options)
    decoder = rg.Block(past, rg.FeedForward(size["d_ff"]), cross=own, **options)
    return rg.EncoderDecoder(
        rg.Encoder(encoder, size["layers"][0], embedding=embedding),
        rg.Decoder(decoder, size["layers"][1], embedding=embedding, head=rg.LanguageHead()),
        share_embedding=True,
    )


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--warm", type=int, default=700, help="updates of ours before the timed ones")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--updates", type=int, default=80, help="per side and round")
    parser.add_argument(
        "--their-rows", type=int, help="rows of their batches, where known; otherwise searched"
    )
    parser.add_argument("--only-grouped", action="store_true", help="Marian only with batches by its sampler")
    parser.add_argument("--side", choices=("regard", "Marian"), help="only this one")
    parser.add_argument("--after", help="files to wait for before each round")
    parser.add_argument("--merge", type=Path, nargs=2, help="results of the two sides")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.tiny:
        given.warm, given.rounds, given.updates = 2, 1, 2
    return given


def main() -> None:
    given = options()
    if given.merge:
        merge(given)
        return
    device, size = ("cpu", TINY) if given.tiny else ("cuda", SIZE)
    folder = Path(tempfile.mkdtemp())
    shutil.copy(models.folder() / "tokens.json", folder / "tokens.json")
    chosen = recipe("translate-h200", consistency=0.0)
    model = declared(chosen.data.vocab, size)
    autocast = None if given.tiny else "bfloat16"
    settings = replace(
        chosen.settings, minutes=None, autocast=autocast, tokens=1500 if given.tiny else 16_000
    )
    data = chosen.data.load(folder)
    torch.manual_seed(0)
    task = replace(chosen, model=model).task(model.build().to(device))
    trainer = Trainer(task, data.train, data.valid, settings, folder, ALONE)
    trainer.stream.left()  # plans the first epoch
    plan = trainer.stream.plan
    padded = plan.padded / len(plan)
    sides: dict[str, Ours | Grouped | SameBatches] = {}
    counts = {}
    if given.side != "Marian":
        sides["regard"] = Ours(trainer)
        counts["regard"] = sum(p.numel() for p in task.parameters())
    if given.side != "regard":
        theirs = Theirs(chosen.data.vocab, size, device)
        sides["Marian, group_by_length"] = Grouped(theirs, data.train, padded, given.their_rows)
        if not given.only_grouped:
            sides["Marian, our batches"] = SameBatches(theirs, trainer)
        counts["Marian"] = sum(p.numel() for p in theirs.model.parameters())
    print(json.dumps({"padded tokens per batch": round(padded), "parameters": counts}), flush=True)
    warm(sides, given, device)
    about = {
        "date": str(date.today()),
        "machine": machine(torch.device(device)),
        "launch_latency_us": round(launch_latency(device), 2) if device == "cuda" else None,
        "padded_tokens_per_batch": round(padded),
        "parameters": counts,
        "updates_per_round": given.updates,
        "graphs": graphs(trainer),
    }
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in sides}
    for i in range(given.rounds):
        while given.after and not Path(f"{given.after}-{i}").exists():
            time.sleep(0.1)
        for name, side in sides.items():
            wait(device)
            began = time.perf_counter()
            tokens = sum(side.step() for _ in range(given.updates))
            wait(device)
            found[name].append((tokens, round(time.perf_counter() - began, 4)))
        result = about | {"tokens_and_seconds": found} | summary(found, given.updates)
        print(json.dumps(result), flush=True)
        if given.out:  # after each round, so that a run that is cut off leaves its rounds
            given.out.write_text(json.dumps(result, indent=1) + "\n")
        if given.after:
            Path(f"{given.after}-{i}.done").touch()


def warm(sides: dict, given: argparse.Namespace, device: str) -> None:
    """Updates that are not timed: ours captures graphs, theirs compiles."""
    began = time.perf_counter()
    for name, side in sides.items():
        for _ in range(given.warm if name == "regard" else min(given.warm, 25)):
            side.step()
        wait(device)
        print(f"{name}: warm after {time.perf_counter() - began:.0f} s", flush=True)
    print("warm", flush=True)


def merge(given: argparse.Namespace) -> None:
    one, other = (json.loads(file.read_text()) for file in given.merge)
    found = one["tokens_and_seconds"] | other["tokens_and_seconds"]
    parts = {"parameters": one["parameters"] | other["parameters"], "tokens_and_seconds": found}
    result = other | one | parts | summary(found, one["updates_per_round"])
    print(json.dumps(result["ratios"]))
    given.out.write_text(json.dumps(result, indent=1) + "\n")


def summary(found: dict[str, list[tuple[int, float]]], updates: int) -> dict:
    rates = {name: sum(t for t, _ in r) / sum(s for _, s in r) for name, r in found.items()}
    return {
        "real_tokens_per_second": {k: round(v) for k, v in rates.items()},
        "rounds": {k: [round(t / s) for t, s in r] for k, r in found.items()},
        "ms_per_update": {
            k: round(1e3 * sum(s for _, s in r) / len(r) / updates, 2) for k, r in found.items()
        },
        "ratios": {
            k: round(rates["regard"] / v, 3) for k, v in rates.items() if "regard" in rates and k != "regard"
        },
    }


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
