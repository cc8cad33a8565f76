"""Random models from a seeded generator, which no rule was tuned on, for bench/cost_memory.py and bench/cost_gpu.py.

Declarations over positions, grouped heads, patterns, norms, activations, dropout, tied or untied heads, and Hugging
Face models with their own losses; in float32 or with bfloat16 autocast, checkpointed or not, with frozen parts.
"""

import random
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import regard as rg
from regard.costs import TrainingStep, cost
from regard.engine import call
from regard.engine.backends import PREPARED
from regard.engine.cpu import gathered_layout, kernels, strided_layout
from regard.nn import cached_rotation
from regard.nn.example_inputs import example_inputs, example_targets
from regard.position import alibi, learned, relative_table, rope, sinusoidal

FAMILIES = ("Llama", "Mistral", "Qwen2", "GPT2", "Bert", "T5", "Marian", "ViT", "Gemma2")
OPTIMIZERS = ("adamw", "adamw", "adamw", "sgd", "momentum")


class Case(NamedTuple):
    name: str
    spec: Any  # a declaration, or None
    family: str | None  # of transformers
    config: dict[str, Any]
    n: int
    batch: int
    training: TrainingStep


def cases(seed: int, count: int, scale: int) -> list[Case]:
    """`scale`: 1 for the CPU; 8 multiplies widths, lengths and batches for a GPU."""
    r = random.Random(seed)
    made = []
    for index in range(count):
        declared = index % 2 == 0
        made.append(
            _declared(r, scale) if declared else _foreign(r, FAMILIES[index // 2 % len(FAMILIES)], scale)
        )
    return made


def _training(r: random.Random, frozen: tuple[str, ...]) -> TrainingStep:
    return TrainingStep(
        optimizer=r.choice(OPTIMIZERS),
        autocast=r.choice((None, "bfloat16")),
        checkpointing=r.random() < 0.3 or None,
        frozen=frozen if r.random() < 0.2 else (),
    )


def _declared(r: random.Random, scale: int) -> Case:
    kv_heads = r.choice((1, 2, 4))
    heads = kv_heads * r.choice((1, 2, 3, 5))
    d = heads * r.choice((8, 16, 20) if scale == 1 else (32, 40, 64, 64, 128))
    inside = r.choice((None, None, rope(), alibi(), relative_table(16 * scale)))
    outside = None if inside is not None else r.choice((sinusoidal(), learned(200 * scale), None))
    w = 8 * scale
    pattern = r.choice(
        (rg.causal(), rg.causal(), rg.causal() & rg.window(w), rg.causal() & (rg.window(w) | rg.every(2 * w)))
    )
    dropout = r.choice((0.0, 0.0, 0.1))
    attention = rg.Attention(
        d, heads=heads, kv_heads=kv_heads, pattern=pattern, position=inside, dropout=dropout,
        biases=r.choice(("all", "none", "output")),
    )  # fmt: skip
    block = rg.Block(
        attention,
        rg.FeedForward(
            r.choice((2, 3, 4)) * d, activation=r.choice(("relu", "gelu", "silu", "swiglu", "geglu"))
        ),
        norm=r.choice(("layer", "layer", "rms")),
        norm_at=r.choice(("pre", "pre", "post")),
        dropout=dropout,
    )
    model = rg.Decoder(
        block,
        r.randint(2, 3 if scale == 1 else 6),
        embedding=rg.Embedding(
            r.choice((211, 997) if scale == 1 else (5003, 16000, 32000)), d, position=outside
        ),
        head=rg.LanguageHead(tied=r.random() < 0.5),
    )
    n = r.randint(30, 150) if scale == 1 else r.randint(100, 1200)
    batch = r.randint(2, 9) if scale == 1 else max(1, r.randint(4000, 9000) // n)
    return Case(
        f"declared {heads}/{kv_heads} heads", model, None, {}, n, batch, _training(r, ("embedding*",))
    )


def _foreign(r: random.Random, family: str, scale: int) -> Case:
    heads = r.choice((4, 6, 8))
    d = heads * (8 if scale == 1 else r.choice((32, 64)))
    layers, vocab = r.randint(2, 3 if scale == 1 else 6), 500 if scale == 1 else r.choice((5003, 32000))
    ff = r.choice((2, 4)) * d
    common = {
        "hidden_size": d,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "intermediate_size": ff,
    }
    sides = {f"{s}_{k}": v for s in ("encoder", "decoder") for k, v in
             (("layers", layers), ("attention_heads", heads), ("ffn_dim", ff))}  # fmt: skip
    grouped = {**common, "vocab_size": vocab, "num_key_value_heads": heads // 2}
    window = {"sliding_window": 16 * scale}
    config = {
        "Llama": grouped,
        "Qwen2": grouped,
        "Mistral": {**grouped, **window},
        "Gemma2": {**grouped, **window, "head_dim": d // heads},
        "GPT2": {"n_layer": layers, "n_embd": d, "n_head": heads, "vocab_size": vocab, "n_positions": 2048},
        "Bert": {**common, "vocab_size": vocab, "max_position_embeddings": 2048},
        "T5": {"num_layers": layers, "d_model": d, "d_kv": d // heads, "num_heads": heads, "d_ff": ff,
               "vocab_size": vocab, "decoder_start_token_id": 0},
        "Marian": {"d_model": d, "vocab_size": vocab, "pad_token_id": 0, "decoder_start_token_id": 0,
                   "max_position_embeddings": 2048, **sides},
        "ViT": {**common, "image_size": 32 if scale == 1 else 224, "patch_size": 8 if scale == 1 else 16},
    }[family]  # fmt: skip
    n = r.randint(30, 150) if scale == 1 else r.randint(100, 900)
    batch = (
        r.randint(2, 9)
        if scale == 1
        else (r.randint(16, 48) if family == "ViT" else r.randint(3000, 7000) // n)
    )
    return Case(family, None, family, config, n, batch, _training(r, (EMBEDDINGS.get(family, "*embed*"),)))


EMBEDDINGS = {"GPT2": "*wte*", "T5": "shared*", "Marian": "*shared*"}  # of other families: *embed*
CLASSES = {
    "Llama": "LlamaForCausalLM", "Mistral": "MistralForCausalLM", "Qwen2": "Qwen2ForCausalLM",
    "GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM", "T5": "T5ForConditionalGeneration",
    "Marian": "MarianMTModel", "ViT": "ViTForImageClassification", "Gemma2": "Gemma2ForCausalLM",
}  # fmt: skip


def foreign(case: Case) -> torch.nn.Module:
    """The Hugging Face model of a case, on meta tensors."""
    import transformers

    config = getattr(transformers, f"{case.family}Config")(**case.config)
    with torch.device("meta"):
        return getattr(transformers, CLASSES[case.family])(config)


def built(case: Case, device: str) -> tuple[torch.nn.Module, tuple, dict, Any]:
    """The model on the device, its positional and named inputs, and targets."""
    if case.spec is not None:
        with torch.device(device):
            model = case.spec.build()
        given = tuple(x.to(device) for x in example_inputs(case.spec, case.n, case.n, case.batch))
        return model, given, {}, example_targets(case.spec, case.n, case.batch)
    import transformers

    config = getattr(transformers, f"{case.family}Config")(**case.config)
    with torch.device(device):
        model = getattr(transformers, CLASSES[case.family])(config)
    if case.family == "ViT":
        side = config.image_size
        pixels = torch.randn(case.batch, 3, side, side, device=device)
        return (
            model,
            (),
            {"pixel_values": pixels, "labels": torch.zeros(case.batch, dtype=torch.long, device=device)},
            None,
        )
    ids = torch.randint(3, config.vocab_size, (case.batch, case.n), device=device)
    return model, (), {"input_ids": ids, "labels": ids.clone()}, None


def predicted(case: Case, device: str) -> Any:
    """regard's cost of a training step; the model is built on meta tensors."""
    if case.spec is not None:
        return cost(case.spec, n=case.n, batch=case.batch, train=case.training, device=device)
    model: Any = foreign(case)
    if case.family == "ViT":
        side = model.config.image_size
        given = {"pixel_values": torch.empty(case.batch, 3, side, side, device="meta")}
        given["labels"] = torch.zeros(case.batch, dtype=torch.long)
    else:
        ids = torch.full((case.batch, case.n), 5)
        given = {"input_ids": ids, "labels": ids.clone()}
    return cost(model, given, train=case.training, device=device)


def stepping(case: Case, device: str) -> tuple[Any, Any, list[torch.Tensor]]:
    """() → one training step, the optimizer, and the tensors that exist before it, without optimizer state."""
    from regard.costs.memory.step import checkpoint, freeze

    t = case.training
    model, args, kwargs, targets = built(case, device)
    targets = None if targets is None else targets.to(device)
    model.train()
    checkpoint(model, t.checkpointing)
    freeze(model, t.frozen)
    trained = [p for p in model.parameters() if p.requires_grad]
    options = {"foreach": device == "cuda"}
    if t.optimizer == "adamw":
        optimizer = torch.optim.AdamW(trained, **options)
    else:
        optimizer = torch.optim.SGD(trained, lr=0.01, momentum=0.9 * (t.optimizer == "momentum"), **options)
    low = torch.bfloat16

    def step() -> None:
        with torch.autocast(device, dtype=low, enabled=t.autocast is not None):
            out = model(*args, **kwargs)
            loss = out.loss if targets is None else F.cross_entropy(out.flatten(0, -2), targets)
            del out
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    there = [
        *model.parameters(),
        *model.buffers(),
        *args,
        *kwargs.values(),
        *([] if targets is None else [targets]),
    ]
    return step, optimizer, there


def emptied() -> None:
    """Without what the engine keeps of earlier calls: tables, buffers, prepared calls."""
    PREPARED.clear()
    kernels._pool.clear()
    for module in (call, gathered_layout, strided_layout, cached_rotation):
        for made in vars(module).values():
            if hasattr(made, "cache_clear"):
                made.cache_clear()


def described(case: Case) -> str:
    t = case.training
    words = [t.autocast or "float32", t.optimizer]
    words += ["checkpointing"] if t.checkpointing else []
    words += ["frozen"] if t.frozen else []
    what = case.family or f"{case.spec.block.attention.pattern!r}"
    if case.spec is not None:
        a, b = case.spec.block.attention, case.spec.block
        inside = type(a.position or case.spec.embedding.position).__name__
        what = f"{case.spec.layers} × {a.d_model}, {a.heads}/{a.sizes.kv_heads} heads, {a.pattern!r}, {inside}, " \
               f"{b.norm} {b.norm_at}, {b.feed_forward.activation}, dropout {b.dropout}"  # fmt: skip
    return f"{what}; n = {case.n}, batch {case.batch}; {', '.join(words)}"
