"""A training step and a greedy decode in two source trees, in alternation: which one is faster, and by how much.

    python bench/compare_training.py OLD NEW [--rounds 12] [--threads 1] [--write]

OLD and NEW are repository roots. Each has its own worker process with the models; the rounds alternate between the
workers, and the order of the cases is shuffled in each round. Figures are medians of CPU time in
milliseconds; a ratio above 1 means that NEW is slower. Losses and decoded tokens of the two trees are compared first.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path

WORKER = """
import inspect, json, sys, time
import torch
import regard as rg

torch.set_num_threads(int(sys.argv[1]))


def translator(vocab=8000, d_model=256, layers=3):
    embedding = rg.Embedding(vocab, d_model, position=rg.sinusoidal(), scaled=True)
    mlp = rg.FeedForward(8 * round(d_model / 3), activation="swiglu", bias=False)
    own = rg.Attention(d_model, heads=8, biases="none")
    past = rg.Attention(d_model, heads=8, pattern=rg.causal(), biases="none")
    encoder = rg.Encoder(rg.Block(own, mlp, norm_at="pre"), layers, embedding=embedding)
    block = rg.Block(past, mlp, cross=own, norm_at="pre")
    decoder = rg.Decoder(block, layers, embedding=embedding, head=rg.LanguageHead())
    torch.manual_seed(0)
    return rg.EncoderDecoder(encoder, decoder, share_embedding=True).build()


def language_model(vocab=69, d_model=128):
    past = rg.Attention(
        d_model, heads=4, pattern=rg.causal(), position=rg.rope(pairing="interleaved"), biases="none"
    )
    block = rg.Block(past, rg.FeedForward(4 * d_model, bias=False), norm_at="pre", norm_bias=False)
    torch.manual_seed(0)
    embedding = rg.Embedding(vocab, d_model)
    return rg.Encoder(block, 4, embedding=embedding, head=rg.LanguageHead(), init="depth_scaled").build()


class Step:
    def __init__(self, model, *inputs, targets):
        self.model, self.inputs, self.targets = model, inputs, targets
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def __call__(self):
        logits = self.model(*self.inputs).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, self.targets.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


class Decode:
    def __init__(self, model, source):
        self.model, self.source = model.eval(), source
        new = "max_new_tokens" in inspect.signature(rg.generate).parameters
        self.options = {"max_new_tokens": 24, "return_log_probs": False} if new else {"most": 24, "log_p": False}

    def __call__(self):
        rows = rg.generate(self.model, [[1]] * len(self.source), source=self.source, **self.options).rows()
        return sum(map(sum, rows))


def ids(*shape, vocab):
    return torch.randint(4, vocab, shape, generator=torch.Generator().manual_seed(1))


text = ids(12, 65, vocab=69)
CASES = {
    "training step, translate": Step(
        translator(), ids(50, 13, vocab=8000), ids(50, 16, vocab=8000), targets=ids(50, 16, vocab=8000)
    ),
    "training step, language model": Step(language_model(), text[:, :-1], targets=text[:, 1:]),
    "greedy decoding, 64 sentences": Decode(translator(), ids(64, 13, vocab=8000)),
}
for line in sys.stdin:
    case = CASES[json.loads(line)]
    start = time.process_time()
    value = case()
    print(json.dumps({"ms": 1e3 * (time.process_time() - start), "value": value}), flush=True)
"""
NAMES = ("training step, translate", "training step, language model", "greedy decoding, 64 sentences")


class Worker:
    def __init__(self, root: Path, threads: int):
        env = {**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": str(threads)}
        command = [sys.executable, "-c", WORKER, str(threads)]
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, name: str) -> dict[str, float]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(name) + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


def main() -> None:
    ask = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    ask.add_argument("old", type=Path)
    ask.add_argument("new", type=Path)
    ask.add_argument("--rounds", type=int, default=12)
    ask.add_argument("--threads", type=int, default=1)
    ask.add_argument("--write", action="store_true")
    given = ask.parse_args()
    workers = {"old": Worker(given.old, given.threads), "new": Worker(given.new, given.threads)}
    for name in NAMES:  # also warms up
        old, new = (worker.run(name)["value"] for worker in workers.values())
        assert abs(old - new) <= 1e-4 * abs(old), f"{name}: {old} in the old tree, {new} in the new one"
    times: dict[str, dict[str, list[float]]] = {name: {side: [] for side in workers} for name in NAMES}
    for turn in range(given.rounds):
        for name in random.Random(turn).sample(NAMES, len(NAMES)):
            for side in sorted(workers, reverse=bool(turn % 2)):
                times[name][side].append(workers[side].run(name)["ms"])
    rows = {}
    for name, sides in times.items():
        old, new = (statistics.median(sides[side]) for side in ("old", "new"))
        rows[name] = {"old_ms": old, "new_ms": new, "ratio": new / old}
        print(f"{name:32} old {old:8.1f} ms   new {new:8.1f} ms   new / old {new / old:.3f}")
    if given.write:
        path = Path(__file__).parent / "results" / f"compare_training-{date.today()}.json"
        path.write_text(
            json.dumps({"threads": given.threads, "rounds": given.rounds, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
