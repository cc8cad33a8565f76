"""Greedy translation of 64 sentences on a CPU: `rg.generate` against Hugging Face's `generate` and CTranslate2.

    PYTHONPATH=src python bench/decode_translate.py [--run runs/translate] [--write]

All three have the same weights, 3 + 3 layers of 256, float32 and the same number of threads, and must produce the
same tokens before they are timed; interleaved rounds, medians. Hugging Face's model is Marian for post-norm blocks
and Pegasus, which is Marian with pre-norm, for pre-norm blocks. Neither has gated networks; compared with a gated
model it has random weights and has to produce as many tokens as our longest row. ratio = their time / ours. With
--run the model is a trained one and the sentences are those of the test split; without, weights and sentences are
random and every translation has --tokens tokens, so that only the steps are measured.
"""

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import ctranslate2
import torch
import transformers
from torch import Tensor, nn

import regard as rg
from regard.generation import generate
from regard.interop.ctranslate2 import to_ctranslate2
from regard.nn.stack import EncoderDecoder, Stack
from regard.position import sinusoid
from regard.training.data.tokens import END, PAD, SPECIAL, START
from regard.training.recipes.translation import max_target_tokens as limit

POSITIONS = 512


def random_model(norm_at: str, vocab: int = 8000, d_model: int = 256) -> EncoderDecoder:
    """Marian's shape, its norms before or after, and sentences without an end: the end's logit is always 0."""
    torch.manual_seed(0)
    embedding = rg.Embedding(vocab, d_model, position=rg.sinusoidal(), scaled=True)
    own, mlp = rg.Attention(d_model, heads=4), rg.FeedForward(4 * d_model)
    past = replace(own, pattern=rg.causal())
    declared = rg.EncoderDecoder(
        rg.Encoder(rg.Block(own, mlp, norm_at=norm_at), 3, embedding=embedding),
        rg.Decoder(
            rg.Block(past, mlp, cross=own, norm_at=norm_at), 3, embedding=embedding, head=rg.LanguageHead()
        ),
        share_embedding=True,
    )
    model = declared.build().eval()
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() > 1:
                p.mul_(2.0)  # so that a sentence is more than one word again and again
        model.encoder.embedding.table.normal_(std=0.06)
        model.encoder.embedding.table[[PAD, END]] = 0.0
    return model


def hugging_face(model: EncoderDecoder) -> nn.Module:
    """Their Marian or Pegasus with the same weights; of the same size, 4 · d_model inside, where ours is gated."""
    encoder, decoder = model.spec.encoder, model.spec.decoder
    gated = encoder.block.feed_forward.gated
    pre = decoder.block.norm_at == "pre"
    kind, config = (
        (transformers.PegasusForConditionalGeneration, transformers.PegasusConfig)
        if pre
        else (transformers.MarianMTModel, transformers.MarianConfig)
    )
    theirs = kind(
        config(
            vocab_size=encoder.embedding.vocab,
            d_model=encoder.d_model,
            encoder_layers=encoder.layers,
            decoder_layers=decoder.layers,
            encoder_attention_heads=encoder.block.attention.heads,
            decoder_attention_heads=decoder.block.attention.heads,
            encoder_ffn_dim=4 * encoder.d_model if gated else encoder.block.feed_forward.d_ff,
            decoder_ffn_dim=4 * encoder.d_model if gated else decoder.block.feed_forward.d_ff,
            activation_function="relu" if gated else encoder.block.feed_forward.activation,
            scale_embedding=encoder.embedding.scaled,
            max_position_embeddings=POSITIONS,
            pad_token_id=PAD,
            eos_token_id=END,
            decoder_start_token_id=START,
            forced_eos_token_id=None,
        )
    ).eval()
    if gated:
        return theirs
    with torch.no_grad():
        theirs.model.shared.weight.copy_(model.encoder.embedding.table)
        for side in ("encoder", "decoder"):
            carry(getattr(model, side), getattr(theirs.model, side), pre)
    return theirs


def carry(ours: Stack, theirs: Any, pre: bool) -> None:
    theirs.embed_positions.weight.copy_(positions(ours))
    if pre:
        theirs.layer_norm.load_state_dict(ours.norm.state_dict())
    for block, layer in zip(ours.blocks, theirs.layers, strict=True):
        pairs = [(block.attention, layer.self_attn, block.attention_norm, layer.self_attn_layer_norm)]
        if block.spec.cross is not None:
            pairs.append((block.cross, layer.encoder_attn, block.cross_norm, layer.encoder_attn_layer_norm))
        for a, b, norm, their_norm in pairs:
            for mine, their in (("w_q", "q_proj"), ("w_k", "k_proj"), ("w_v", "v_proj"), ("w_o", "out_proj")):
                getattr(b, their).load_state_dict(getattr(a, mine).state_dict())
            their_norm.load_state_dict(norm.state_dict())
        layer.fc1.load_state_dict(block.feed_forward.w_in.state_dict())
        layer.fc2.load_state_dict(block.feed_forward.w_out.state_dict())
        layer.final_layer_norm.load_state_dict(block.feed_forward_norm.state_dict())


def positions(stack: Stack) -> Tensor:
    declared = stack.spec.embedding
    return sinusoid(
        torch.arange(POSITIONS),
        declared.d_model,
        declared.position.base,
        declared.position.order,
        torch.float32,
    )


def methods(
    model: EncoderDecoder, rows: list[list[int]], most: int, threads: int, folder: Path
) -> dict[str, Callable[[], list[list[int]]]]:
    """Token ids in, token ids out, three times."""
    vocab = model.spec.encoder.embedding.vocab
    words = [*SPECIAL, *(f"w{i}" for i in range(4, vocab))]
    number = {w: i for i, w in enumerate(words)}
    lengths = torch.tensor([len(r) for r in rows])
    source = torch.tensor([r + [PAD] * (int(lengths.max()) - len(r)) for r in rows])
    mask = (torch.arange(source.shape[1]) < lengths[:, None]).long()
    theirs = hugging_face(model)
    to_ctranslate2(model, words, folder, positions=POSITIONS)
    open_run = ctranslate2.Translator(
        str(folder), device="cpu", compute_type="float32", inter_threads=1, intra_threads=threads
    )
    said = [[words[i] for i in r] for r in rows]

    def ours() -> list[list[int]]:
        given = {"source": source, "source_lengths": lengths, "max_new_tokens": most, "eos_id": END}
        return generate(model, [[START]] * len(rows), return_log_probs=False, **given).rows()

    forced = {}
    if model.spec.encoder.block.feed_forward.gated:  # other weights: it writes as long as our longest
        longest = max(map(len, ours())) + 1
        forced = {"min_new_tokens": longest, "max_new_tokens": longest}

    def hugging() -> list[list[int]]:
        given = {"max_new_tokens": most, "do_sample": False, "num_beams": 1, "use_cache": True, **forced}
        result = theirs.generate(source, attention_mask=mask, **given)
        return [row[1 : row.index(END, 1) if END in row[1:] else None] for row in result.tolist()]

    def ct2() -> list[list[int]]:
        result = open_run.translate_batch(
            said, beam_size=1, max_decoding_length=most, min_decoding_length=0, max_batch_size=len(rows)
        )
        return [[number[w] for w in t.hypotheses[0]] for t in result]

    return {"regard": ours, "hugging face": hugging, "ctranslate2": ct2}


def compared(name: str, model: EncoderDecoder, rows: list[list[int]], most: int, given: Any) -> dict:
    """Parity, then interleaved rounds."""
    with tempfile.TemporaryDirectory() as home:
        all_of_them = methods(model, rows, most, given.threads, Path(home) / "ct2")
        said = {method: run() for method, run in all_of_them.items()}
        gated = model.spec.encoder.block.feed_forward.gated
        for method, result in said.items():
            if gated and method == "hugging face":
                continue
            apart = [i for i, (a, b) in enumerate(zip(said["regard"], result, strict=True)) if a != b]
            assert not apart, f"{method} produces other tokens than regard in rows {apart}"
        taken: dict[str, list[float]] = {method: [] for method in all_of_them}
        for turn in range(given.rounds + 1):
            for method, run in all_of_them.items():
                begun = time.perf_counter()
                run()
                if turn:
                    taken[method].append((time.perf_counter() - begun) * 1e3)
    ms = {method: {"median": median(t), "least": min(t), "most": max(t)} for method, t in taken.items()}
    ratios = {
        f"{method} / regard": ms[method]["median"] / ms["regard"]["median"]
        for method in ms
        if method != "regard"
    }
    written = sum(len(r) for r in said["regard"])
    shown = ", ".join(f"{method} {t['median']:.0f} ms" for method, t in ms.items())
    compared = ", ".join(f"{method} {r:.2f} ×" for method, r in ratios.items())
    print(f"{name}: {len(rows)} sentences, {written} tokens; {shown}; {compared}", file=sys.stderr)
    same = ["ctranslate2"] if gated else ["hugging face", "ctranslate2"]
    sizes = {
        "same tokens as": same,
        "sentences": len(rows),
        "source tokens": sum(map(len, rows)),
        "written tokens": written,
    }
    return {"case": name, **sizes, "ms": ms, "ratios": ratios}


def cases(given: Any) -> list[tuple[str, EncoderDecoder, list[list[int]], int]]:
    noise = torch.Generator().manual_seed(given.seed)
    if given.run is None:
        lengths = torch.randint(8, 33, (given.rows,), generator=noise).tolist()
        rows = [torch.randint(4, 8000, (n,), generator=noise).tolist() for n in lengths]
        return [
            (
                f"random weights, {norm_at}-norm, {given.tokens} tokens each",
                random_model(norm_at),
                rows,
                given.tokens,
            )
            for norm_at in ("pre", "post")
        ]
    from regard.training.data import corpora, text
    from regard.training.recipes.run import open_run

    model, tokens, _ = open_run(given.run)
    pairs = text.pairs(corpora.folder("en-es") / "test.tsv")
    chosen = torch.randperm(len(pairs), generator=noise)[: given.rows].tolist()
    rows = tokens.encode([pairs[i][0] for i in chosen])
    return [(f"{given.run}, test sentences", model, rows, limit(max(map(len, rows))))]


@torch.no_grad()
def main() -> None:
    ask = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ask.add_argument("--run", type=Path, help="the folder of a trained run")
    ask.add_argument("--rows", type=int, default=64)
    ask.add_argument(
        "--tokens", type=int, default=24, help="how many tokens each translation has without --run"
    )
    ask.add_argument("--rounds", type=int, default=9)
    ask.add_argument("--threads", type=int, default=2)
    ask.add_argument("--seed", type=int, default=0)
    ask.add_argument("--write", action="store_true")
    given = ask.parse_args()
    torch.set_num_threads(given.threads)
    found: dict = {
        "date": str(date.today()),
        "versions": {m.__name__: m.__version__ for m in (rg, torch, transformers, ctranslate2)},
        "machine": processor(),
        "cores": os.cpu_count(),
        "threads": given.threads,
        "load": os.getloadavg()[0],
        "cases": [compared(*case, given) for case in cases(given)],
    }
    text = json.dumps(found, indent=1)
    print(text)
    if given.write:
        name = "decode_translate" if given.run is None else "decode_translate_trained"
        (Path(__file__).parent / "results" / f"{name}-{date.today()}.json").write_text(text + "\n")


def processor() -> str:
    processor = Path("/proc/cpuinfo")
    names = [
        x.split(":")[1].strip() for x in processor.read_text().splitlines() if x.startswith("model name")
    ]
    return names[0] if names else platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
