"""Training speed of translators: real tokens per second of a training step, ours against three peers.

    python bench/train_translate.py                  # about four minutes on two idle cores
    python bench/train_translate.py --rounds 2       # a quick look

Every side: 3 + 3 layers of 256, 4 heads, feed-forward 1024, one table of embeddings for all, dropout 0.1 on
embeddings and branches, label smoothing 0.1, fused AdamW, clipping at 1, float32, the same tokenizer and rows.
A real token is one of a source, or of a target with its end; padding does not count. All sides get batches of as
many padded tokens on average. `group_by_length` is transformers' own sampler (it sorts by the source); "plain" is a
random order. The rounds alternate; each side's figure is the number of real tokens of all its rounds over their time.
"""

import argparse
import datetime
import json
import os
import platform
import time
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import regard as rg
from regard.training import recipes
from regard.training.data.rows import Pairs
from regard.training.data.tokens import PAD
from regard.training.loop.trainer import Trainer

RESULTS = Path(__file__).parent / "results"


class Peer:
    """Somebody else's model in a plain PyTorch loop: loss over all logits, mean over the real targets."""

    def __init__(self, model: nn.Module, rows: Pairs, order: list[int], size: int, rate: float = 1e-3):
        self.model, self.rows = model.train(), rows
        self.batches = [order[i : i + size] for i in range(0, len(order) - size + 1, size)]
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), fused=True)
        self.index = 0

    def step(self) -> int:
        """One update; returns the number of real tokens."""
        picked = torch.tensor(self.batches[self.index % len(self.batches)])
        self.index += 1
        given, predicted = self.rows.batch(picked)
        logits = self.model(given["source"], given["target"])
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), given["targets"].flatten(), label_smoothing=0.1
        )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return int(given["source_lengths"].sum()) + predicted


class Ours:
    """The trainer's own update."""

    def __init__(self, trainer: Trainer):
        self.trainer = trainer

    def step(self) -> int:
        index, epoch = self.trainer.stream.index, self.trainer.stream.epoch
        _, predicted, _ = self.trainer._update()
        plan = self.trainer.stream.plan
        assert plan is not None and epoch == self.trainer.stream.epoch
        return int(self.trainer.train.source.lengths[plan[index]].sum()) + predicted


class Marian(nn.Module):
    def __init__(self, vocab: int, dropout: float = 0.1):
        super().__init__()
        from transformers import MarianConfig, MarianMTModel

        config = MarianConfig(
            vocab_size=vocab,
            d_model=256,
            encoder_layers=3,
            decoder_layers=3,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=1024,
            decoder_ffn_dim=1024,
            activation_function="relu",
            dropout=dropout,
            attention_dropout=0.0,
            activation_dropout=0.0,
            max_position_embeddings=256,
            pad_token_id=PAD,
            decoder_start_token_id=1,
            eos_token_id=2,
            forced_eos_token_id=None,
            scale_embedding=True,
            use_cache=False,
        )
        self.inner = MarianMTModel(config)

    def forward(self, source, target):
        return self.inner(
            input_ids=source, attention_mask=(source != PAD).long(), decoder_input_ids=target
        ).logits


class Torch(nn.Module):
    """nn.Transformer as its tutorial uses it, with a tied head."""

    def __init__(self, vocab: int):
        super().__init__()
        self.table = nn.Embedding(vocab, 256)
        nn.init.normal_(self.table.weight, std=256**-0.5)
        at, along = torch.arange(256.0)[:, None], torch.arange(0, 256, 2)
        angles = at / 10000 ** (along / 256)
        self.register_buffer("positions", torch.stack([angles.sin(), angles.cos()], -1).flatten(1))
        self.drop = nn.Dropout(0.1)
        self.inner = nn.Transformer(256, 4, 3, 3, 1024, dropout=0.1, batch_first=True, norm_first=True)

    def embed(self, ids):
        return self.drop(self.table(ids) * 16 + self.positions[: ids.shape[1]])

    def forward(self, source, target):
        hidden = source == PAD
        past = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        states = self.inner(
            self.embed(source),
            self.embed(target),
            tgt_mask=past,
            tgt_is_causal=True,
            src_key_padding_mask=hidden,
            memory_key_padding_mask=hidden,
        )
        return states @ self.table.weight.T


def grouped(lengths: list[int], size: int, seed: int = 0) -> list[int]:
    from transformers.trainer_pt_utils import LengthGroupedSampler

    noise = torch.Generator().manual_seed(seed)
    return list(LengthGroupedSampler(size, lengths=lengths, generator=noise))


def padded(rows: Pairs, order: list[int], size: int) -> float:
    """Padded tokens a batch, on average."""
    sizes = rows.sizes[order[: len(order) // size * size]].unflatten(0, (-1, size))
    return float(sizes.amax(1).sum(1).double().mean() * size)


def sized(rows: Pairs, order_of, tokens: float) -> tuple[list[int], int]:
    """An order, and rows a batch, whose padded tokens are nearest to these."""
    low, high = 1, 1024
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if padded(rows, order_of(middle), middle) <= tokens else (low, middle)
    return order_of(low), low


def alike(recipe: recipes.Recipe) -> recipes.Recipe:
    """Ours with the peers' layers: 4 heads, a plain network of 1024, dropout 0.1."""
    vocab = recipe.data.vocab
    embedding = rg.Embedding(vocab, 256, position=rg.sinusoidal(), scaled=True, dropout=0.1)
    own, past = rg.Attention(256, heads=4), rg.Attention(256, heads=4, pattern=rg.causal())
    encoder = rg.Block(own, rg.FeedForward(1024), norm_at="pre", dropout=0.1)
    decoder = rg.Block(past, rg.FeedForward(1024), cross=own, norm_at="pre", dropout=0.1)
    model = rg.EncoderDecoder(
        rg.Encoder(encoder, 3, embedding=embedding),
        rg.Decoder(decoder, 3, embedding=embedding, head=rg.LanguageHead()),
        share_embedding=True,
    )
    return replace(recipe, model=model)


def sides(folder: Path) -> dict[str, "Ours | Peer"]:
    recipe = alike(recipes.translate(tokens=6000))
    ready = recipe.data.load(folder)
    torch.manual_seed(0)
    model = recipe.model.build()
    trainer = Trainer(recipe.task(model), ready.train, ready.valid, recipe.settings, folder)
    first = trainer.stream.next()
    trainer.stream.index = 0
    plan = trainer.stream.plan
    assert plan is not None and len(first)
    tokens = plan.padded / len(plan)
    print(
        f"ours: {len(plan)} batches of {tokens:.0f} padded tokens, {100 * plan.padding_share:.1f} % padding"
    )
    lengths = ready.train.source.lengths.tolist()
    vocab = recipe.data.vocab
    out: dict[str, Ours | Peer] = {"ours": Ours(trainer)}
    by_length = sized(ready.train, lambda size: grouped(lengths, size), tokens)
    noise = torch.Generator().manual_seed(1)
    shuffled = torch.randperm(len(lengths), generator=noise).tolist()
    plain = sized(ready.train, lambda size: shuffled, tokens)
    for name, made, (order, size) in (
        ("Marian, group_by_length", Marian, by_length),
        ("Marian, plain", Marian, plain),
        ("nn.Transformer, group_by_length", Torch, by_length),
    ):
        torch.manual_seed(0)
        out[name] = Peer(made(vocab), ready.train, order, size)
        real = float(ready.train.sizes.sum()) / len(lengths) * size
        print(
            f"{name}: batches of {size} rows, {100 * (1 - real / padded(ready.train, order, size)):.1f} % padding"
        )
    for name, side in out.items():
        inner = side.trainer.task if isinstance(side, Ours) else side.model
        print(f"{name}: {sum(p.numel() for p in inner.parameters()):,} parameters")
    return out


def main() -> None:
    asked = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    asked.add_argument("--rounds", type=int, default=8)
    asked.add_argument("--updates", type=int, default=6, help="a side and round")
    asked.add_argument("--folder", type=Path, default=Path("runs/bench-translate"))
    asked.add_argument("--store", action="store_true")
    given = asked.parse_args()
    torch.set_num_threads(2)
    running = sides(given.folder)
    for side in running.values():
        side.step()
    tokens = dict.fromkeys(running, 0)
    seconds = dict.fromkeys(running, 0.0)
    rates: dict[str, list[float]] = {name: [] for name in running}
    for _ in range(given.rounds):
        for name, side in running.items():
            began = time.perf_counter()
            seen = sum(side.step() for _ in range(given.updates))
            took = time.perf_counter() - began
            tokens[name] += seen
            seconds[name] += took
            rates[name].append(seen / took)
    result = {name: tokens[name] / seconds[name] for name in running}
    for name, rate in result.items():
        spread = f"{min(rates[name]):,.0f} to {max(rates[name]):,.0f}"
        print(f"{name:34} {rate:8,.0f} real tokens/s ({spread})   ours is {result['ours'] / rate:.2f} ×")
    if given.store:
        import transformers

        kept = {
            "date": str(datetime.date.today()),
            "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, 2 threads",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "real_tokens_per_second": result,
            "ratios": {name: result["ours"] / rate for name, rate in result.items()},
            "rounds": rates,
        }
        RESULTS.mkdir(exist_ok=True)
        path = RESULTS / f"train_translate-{datetime.date.today()}.json"
        path.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
