"""Translation training on one GPU: real tokens per second of our trainer beside Hugging Face's Marian, compiled.

    PYTHONPATH=src python3 bench/train_marian.py --out FILE      # about two minutes on an H200, most of it compiling
    PYTHONPATH=src python3 bench/train_marian.py --tiny          # the same on a CPU, to see that it runs

Both sides: Marian's architecture with 4 + 3 layers of 384, 6 heads, feed-forward 1536 with ReLU, biases, norms after
the residual sums, one table of 8000 embeddings, dropout 0.1 on embeddings and branches, label smoothing 0.1, fused
AdamW, clipping at 1, bf16 autocast, the same tokenizer and sentence pairs; batches of as many padded tokens on
average. Theirs: torch.compile(dynamic=True), with room for a compilation of each layer, since the compiler takes them
one by one and would give up after eight; batches by transformers' LengthGroupedSampler. Ours: `Trainer` as
`regard train translate-h200` runs it (buckets of lengths, CUDA graphs); it also computes a moving average of the
weights. A real token is one of a source, or of a target with its end. The rounds alternate; a side's figure is all
its real tokens over all its time.
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

    def forward(self, source, target, targets):
        logits = self.inner(
            input_ids=source, attention_mask=(source != PAD).long(), decoder_input_ids=target
        ).logits
        return nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), label_smoothing=0.1
        )


class Theirs:
    def __init__(self, rows, vocab: int, size: dict, tokens: float, device: str, their_rows: int | None):
        torch.manual_seed(0)
        self.rows, self.device, self.autocast = rows, device, device == "cuda"
        self.model = Marian(vocab, size).to(device).train()
        torch._dynamo.config.recompile_limit = 64
        self.call = torch.compile(self.model, dynamic=True) if device == "cuda" else self.model
        lengths = rows.source.lengths.tolist()
        order, count = (
            sized(rows, lambda size: grouped(lengths, size), tokens)
            if their_rows is None
            else (grouped(lengths, their_rows), their_rows)
        )
        self.batches = [order[i : i + count] for i in range(0, len(order) - count + 1, count)]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.98), fused=True)
        self.index = 0

    def step(self) -> int:
        picked = torch.tensor(self.batches[self.index % len(self.batches)])
        self.index += 1
        batch = self.rows.batch(picked)
        inputs = batch.pinned().inputs if self.device == "cuda" else batch.inputs
        source, target, targets = (
            inputs[k].to(self.device, non_blocking=True) for k in ("source", "target", "targets")
        )
        with torch.autocast(self.device, torch.bfloat16, enabled=self.autocast):
            loss = self.call(source, target, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return int(inputs["source_lengths"].sum()) + batch.predicted


class Ours:
    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def step(self) -> int:
        index = self.trainer.stream.index
        _, predicted, _ = self.trainer._update()
        plan = self.trainer.stream.plan
        rows = plan[index] if index < len(plan) else plan[0]
        return int(self.trainer.train.source.lengths[rows].sum()) + predicted


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
        "--only-warm", action="store_true", help="compile theirs, so that a later run finds it cached"
    )
    parser.add_argument(
        "--their-rows", type=int, help="rows of their batches, where known; otherwise searched"
    )
    parser.add_argument("--after", type=Path, help="wait for this file before the timed rounds")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.tiny:
        given.warm, given.rounds, given.updates = 2, 1, 2
    return given


def main() -> None:
    given = options()
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
    trainer._update()
    plan = trainer.stream.plan
    padded = plan.padded / len(plan)
    theirs = Theirs(data.train, chosen.data.vocab, size, padded, device, given.their_rows)
    if given.only_warm:
        for _ in range(3):
            theirs.step()
        torch.cuda.synchronize()
        return
    sides = {"regard": Ours(trainer), "Marian, compiled, group_by_length": theirs}
    counts = {
        "regard": sum(p.numel() for p in task.parameters()),
        "Marian": sum(p.numel() for p in theirs.model.parameters()),
    }
    print(json.dumps({"padded tokens per batch": round(padded), "parameters": counts}), flush=True)
    for _ in range(given.warm):
        sides["regard"].step()
    for _ in range(20 if device == "cuda" else 1):
        theirs.step()
    print("warm", flush=True)
    while given.after and not given.after.exists():
        time.sleep(0.2)
    about = {
        "date": str(date.today()),
        "machine": machine(torch.device(device)),
        "launch_latency_us": round(launch_latency(device), 2) if device == "cuda" else None,
        "padded_tokens_per_batch": round(padded),
        "parameters": counts,
    }
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in sides}
    for _ in range(given.rounds):
        for name, side in sides.items():
            wait(device)
            began = time.perf_counter()
            tokens = sum(side.step() for _ in range(given.updates))
            wait(device)
            found[name].append((tokens, time.perf_counter() - began))
        result = about | summary(found, given.updates) | {"graphs": graphs(trainer)}
        print(json.dumps(result), flush=True)
        if given.out:  # after each round, so that a run that is cut off leaves its rounds
            given.out.write_text(json.dumps(result, indent=1) + "\n")


def summary(found: dict[str, list[tuple[int, float]]], updates: int) -> dict:
    rates = {name: sum(t for t, _ in r) / sum(s for _, s in r) for name, r in found.items()}
    ours, other = rates.values()
    return {
        "real_tokens_per_second": {k: round(v) for k, v in rates.items()},
        "rounds": {k: [round(t / s) for t, s in r] for k, r in found.items()},
        "ms_per_update": {
            k: round(1e3 * sum(s for _, s in r) / len(r) / updates, 2) for k, r in found.items()
        },
        "ratio": round(ours / other, 3),
    }


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
