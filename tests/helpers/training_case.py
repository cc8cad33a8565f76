"""A small training that takes a second: a copying task. Run as a program it trains in the folder it is given."""

import sys
from dataclasses import replace

import torch

import regard as rg
from regard.schedule import warmup_cosine
from regard.training.data.ragged import Ragged
from regard.training.data.rows import Pairs
from regard.training.loop.averaging import ema
from regard.training.loop.settings import Settings
from regard.training.loop.trainer import Trainer
from regard.training.recipes.tasks import Translation

VOCAB = 13
SETTINGS = Settings(
    24,
    96,
    warmup_cosine(0.01, 6, 24),
    average=ema(0.9),
    save_every=4,
    keep=3,
    log_every=2,
    valid_every=8,
    seed=3,
)


def model(vocab: int = VOCAB, dropout: float = 0.1, checkpoint: bool = False):
    torch.manual_seed(0)
    embedding = rg.Embedding(vocab, 16, position=rg.sinusoidal(), dropout=dropout)
    attention, past = rg.Attention(16, heads=2), rg.Attention(16, heads=2, pattern=rg.causal())
    block = rg.Block(attention, rg.FeedForward(16), dropout=dropout)
    encoder = rg.Encoder(block, 1, embedding=embedding, checkpoint=checkpoint)
    block = rg.Block(past, rg.FeedForward(16), cross=attention, dropout=dropout)
    decoder = rg.Decoder(block, 1, embedding=embedding, head=rg.LanguageHead(), checkpoint=checkpoint)
    return rg.EncoderDecoder(encoder, decoder, share_embedding=True).build()


def pairs(rows: int, seed: int) -> Pairs:
    noise = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 8, (rows,), generator=noise).tolist()
    copied = Ragged.of([torch.randint(4, VOCAB, (n,), generator=noise).tolist() for n in lengths])
    return Pairs(copied, copied)


def trainer(folder, **other) -> Trainer:
    built = {name: other.pop(name) for name in ("vocab", "dropout", "checkpoint") if name in other}
    task = Translation(model(**built), other.pop("smoothing", 0.1))
    return Trainer(task, pairs(60, 1), pairs(20, 2), replace(SETTINGS, **other), folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    trainer(sys.argv[1]).run(lambda event: print(event["event"], event["step"], flush=True))
