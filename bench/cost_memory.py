"""Is the predicted memory the memory used? Training steps of real models against `torch.cuda.max_memory_allocated`.

`PYTHONPATH=src python3 bench/cost_memory.py --measure rows.json` runs the steps on the GPU and writes what the
allocator counted; `--report rows.json` predicts the same steps (on any machine) and prints both, row by row.
"""

import argparse
import dataclasses
import gc
import json
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F

import regard as rg
from regard import spec
from regard.costs.entry import cost
from regard.costs.memory import Memory, TrainingStep

MIB = 1 << 20

# name: (n, two batch sizes). The rules come from other batch sizes: 32 and 128, 4 and 16, 32 and 128, 8 and 32.
MODELS = {
    "transformer-base": (100, (24, 80)),
    "gpt2": (1000, (6, 12)),
    "vit-b16": (197, (48, 96)),
    "bert-base": (384, (12, 24)),
    "transformer-big": (120, (40,)),  # not used to derive the rules
}


def checkpointed(declared: spec.Spec, on: bool) -> spec.Spec:
    """The same model with each block recomputed in the backward pass, or not."""
    match declared:
        case spec.EncoderDecoder():
            return dataclasses.replace(
                declared,
                encoder=dataclasses.replace(declared.encoder, checkpoint=on),
                decoder=dataclasses.replace(declared.decoder, checkpoint=on),
            )
        case spec.Vision():
            return dataclasses.replace(declared, encoder=dataclasses.replace(declared.encoder, checkpoint=on))
    return dataclasses.replace(declared, checkpoint=on)


def inputs_of(declared: spec.Spec, b: int, n: int, device: str) -> list[torch.Tensor]:
    def ids(embedding: spec.Embedding) -> torch.Tensor:
        return torch.randint(0, embedding.vocab, (b, n), device=device)

    match declared:
        case spec.EncoderDecoder():
            return [ids(declared.encoder.embedding), ids(declared.decoder.embedding)]
        case spec.Vision():
            return [torch.randn(b, declared.channels, *declared.image, device=device)]
    return [ids(declared.embedding)]


def targets_of(declared: spec.Spec, b: int, n: int, device: str) -> torch.Tensor | None:
    """Class numbers where the model gives scores of classes or tokens."""
    inner = declared.decoder if isinstance(declared, spec.EncoderDecoder) else declared
    match inner.head:
        case spec.ClassifierHead(classes):
            return torch.randint(0, classes, (b,), device=device)
        case spec.LanguageHead() | spec.MaskedHead():
            return torch.randint(0, inner.embedding.vocab, (b * n,), device=device)
    return None


def loss_of(model, given, targets, low, device: str) -> torch.Tensor:
    with torch.autocast(device, dtype=low or torch.bfloat16, enabled=low is not None):
        out = model(*given)
        if targets is None:
            return out.square().mean()
        return F.cross_entropy(out.flatten(0, -2), targets)


def steps_of(name: str, b: int, n: int, low, checkpoint: bool, implementation: str = "auto"):
    """Peak of the third step, and bytes after the forward pass; two steps before it allocate optimizer state."""
    declared = checkpointed(rg.preset(name), checkpoint)
    device, options = "cuda", {}
    with torch.device(device):
        model = declared.build()
    given, targets = inputs_of(declared, b, n, device), targets_of(declared, b, n, device)
    if implementation != "auto":
        options = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
    optimizer = torch.optim.AdamW(model.parameters(), **options)

    def step() -> None:
        loss_of(model, given, targets, low, device).backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2):
        step()
    base = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    peak, requested = torch.cuda.max_memory_allocated(), torch.cuda.memory_stats()["requested_bytes.all.peak"]
    loss = loss_of(model, given, targets, low, device)
    kept = torch.cuda.memory_allocated() - base
    del loss
    torch.cuda.reset_peak_memory_stats()
    with torch.no_grad():
        model.eval()
        with torch.autocast(device, dtype=low or torch.bfloat16, enabled=low is not None):
            model(*given)
    return {
        "base": base,
        "peak": peak,
        "requested": requested,
        "kept": kept,
        "reserved": torch.cuda.max_memory_reserved(),
        "inference": torch.cuda.max_memory_allocated(),
    }


def measure() -> list[dict]:
    rows = []
    for name, (n, batches) in MODELS.items():
        for b in batches:
            for low in (None, torch.bfloat16):
                for checkpoint in (False, True):
                    row = {
                        "model": name,
                        "n": n,
                        "batch": b,
                        "autocast": low and str(low)[6:],
                        "checkpointing": checkpoint,
                        "implementation": "auto",
                    }
                    start = time.perf_counter()
                    row |= steps_of(name, b, n, low, checkpoint)
                    row["seconds"] = round(time.perf_counter() - start, 2)
                    gc.collect()
                    torch.cuda.empty_cache()
                    rows.append(row)
                    print(json.dumps(row), flush=True)
    for implementation in ("for_loop", "fused"):
        row = {
            "model": "bert-base",
            "n": 512,
            "batch": 1,
            "autocast": None,
            "checkpointing": True,
            "implementation": implementation,
        }
        rows.append(row | steps_of("bert-base", 1, 512, None, True, implementation))
        print(json.dumps(rows[-1]), flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    return rows


def predicted(row: dict) -> Memory:
    declared = rg.preset(row["model"])
    training = TrainingStep(
        implementation=row["implementation"], autocast=row["autocast"], checkpointing=row["checkpointing"]
    )
    priced = cost(declared, n=row["n"], batch=row["batch"], train=training, device="cuda")
    return priced.memory


def report(rows: list[dict]) -> None:
    """Each row, then the errors together. `requested`: the bytes of the tensors, before the allocator rounds up."""
    print(
        "| model | n | batch | autocast | checkpointing | predicted, MiB | measured, MiB | error | of requested |"
    )
    print("|---|--:|--:|---|---|--:|--:|--:|--:|")
    errors, exact = [], []
    for row in rows:
        predicted_peak, peak = predicted(row).training_peak, row["peak"]
        errors.append(predicted_peak / peak - 1)
        exact.append(predicted_peak / row["requested"] - 1)
        options = f"{row['autocast'] or 'no'} | {'yes' if row['checkpointing'] else 'no'}"
        optimizer = "" if row["implementation"] == "auto" else f", AdamW {row['implementation']}"
        print(
            f"| {row['model']}{optimizer} | {row['n']} | {row['batch']} | {options} "
            f"| {predicted_peak / MIB:,.1f} | {peak / MIB:,.1f} | {errors[-1]:+.2%} | {exact[-1]:+.3%} |"
        )
    print(
        f"\n{len(rows)} rows: median error {statistics.median(map(abs, errors)):.2%}, "
        f"worst {max(map(abs, errors)):.2%}; of what was requested, median "
        f"{statistics.median(map(abs, exact)):.3%}, worst {max(map(abs, exact)):.3%}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--measure", type=Path)
    parser.add_argument("--report", type=Path)
    options = parser.parse_args()
    if options.measure:
        options.measure.write_text(json.dumps(measure()))
    if options.report:
        report(json.loads(options.report.read_text()))


if __name__ == "__main__":
    main()
