"""Small configurations for families of transformers whose tests are not available: defaults with every size reduced.

Layers are chosen so that each kind of layer occurs (`layer_types`, `mlp_layer_types`, …). Inputs follow from the
names of the arguments of a model's forward. Used by huggingface_census.py.
"""

import importlib
import inspect
from pathlib import Path
from typing import Any

MAX_PARAMETERS = 30_000_000
# Exact names, then parts of names; sizes are limited to the value, smaller ones are left as they are.
NAMES = {
    "num_key_value_heads": 2, "qk_rope_head_dim": 4, "num_hidden_layers": 2, "n_group": 1, "num_expert_group": 1,
    "topk_group": 1, "num_experts_per_tok": 2, "num_experts_per_token": 2, "index_topk": 4,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 16, "image_size": 32, "patch_size": 8, "spatial_patch_size": 8, "window_size": 4,
    "sliding_window": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "ngram_vocab_size_base": 128, "depth": 2,
    "make_ngram_vocab_size_divisible_by": 8, "split_ngram_parts": 4, "layer_group_size": 2, "num_mel_bins": 16,
    "num_shared_experts": 1, "n_shared_experts": 1, "ple_embed_dim": 8, "hc_lowrank": 8,
    "position_embedding_size": 64,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 61, "model_max_length": 64, "mlp_ratio": 2,
    "num_nextn_predict_layers": 0, "feature_size": 16, "output_dim": 32, "num_codebooks": 2, "codebook_size": 16,
    "upsampling_ratio": 2, "max_source_positions": 32, "max_target_positions": 64, "num_position_embeddings": 64,
}  # fmt: skip
PARTS = {
    "vocab": 61, "lora_rank": 8, "head_dim": 8, "n_heads": 2, "num_heads": 4, "attention_heads": 4, "key_heads": 2,
    "value_heads": 4, "experts": 4, "layers": 2, "blocks": 2, "intermediate": 48, "ffn": 48, "ff_dim": 48,
    "dim_ff": 48, "mlp_dim": 48, "hidden": 32, "d_model": 32, "embed": 32, "rank": 8, "channels": 32, "width": 32,
    "max_position": 64, "dim": 32,
}  # fmt: skip
FOLLOWS = ("qk_head_dim", "transformers_version", "_name_or_path", "model_type")  # derived from other fields
KEPT = ("kernel", "stride", "ratio", "factor", "multiplier", "layer_types", "token", "context_size")
LAYER_COUNTS = ("num_hidden_layers", "num_layers", "depth", "encoder_layers", "n_layers")


def limited(name: str, value: Any) -> Any:
    if name in NAMES and value is not None:
        return min(value, NAMES[name])
    if value is None or any(part in name for part in KEPT) or name.endswith(("_id", "_index", "_indices")):
        return value
    return next((min(value, limit) for part, limit in PARTS.items() if part in name), value)


def reduced(fields: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """The fields of a configuration with small sizes."""
    made: dict[str, Any] = {}
    count = next((fields[n] for n in LAYER_COUNTS if isinstance(fields.get(n), int)), 0)
    layers = _chosen_layers(fields, count)
    vocab = 61
    for name, value in fields.items():
        if name in FOLLOWS or name in ("id2label", "label2id"):
            continue
        if isinstance(value, bool) or value is None or isinstance(value, str):
            made[name] = value
        elif isinstance(value, float):
            made[name] = 0.0 if "drop" in name else value
        elif isinstance(value, int):
            if name.endswith(("_token_id", "_token_index", "token_id")) and value >= vocab:
                value = 3 + sum(map(ord, name)) % 50 if "pad" not in name else 0
            made[name] = (
                len(layers) if name in LAYER_COUNTS and count == value and layers else limited(name, value)
            )
        elif isinstance(value, list | tuple) and count and len(value) == count and layers:
            made[name] = [value[k] if k < len(value) else value[-1] for k in layers]
            if name == "kv_source_layers":
                made[name] = list(range(len(layers)))
        elif isinstance(value, dict) and name == "per_layer_config":
            made[name] = {
                f"{place}": {k: limited(k, v) for k, v in value[key].items()}
                for place, k0 in enumerate(layers)
                for key in value
                if int(key) == k0
            }
        elif isinstance(value, dict) and ("model_type" in value or name.endswith("_config")):
            made[name] = reduced(value, overrides)
        else:
            made[name] = value
    heads = made.get("num_attention_heads")
    if heads and fields.get("num_key_value_heads") == fields.get("num_attention_heads"):
        made["num_key_value_heads"] = heads
    if "model_type" in fields and isinstance(fields["model_type"], str):
        made["model_type"] = fields["model_type"]
    made.update({k: v for k, v in overrides.items() if k in fields})
    return made


def _chosen_layers(fields: dict[str, Any], count: int) -> list[int]:
    """The first two layers, and the first of each other kind, at most six."""
    if not count:
        return []
    lists = [v for k, v in fields.items() if isinstance(v, list | tuple) and len(v) == count and "types" in k]
    seen, chosen = set(), []
    for place in range(count):
        kind = tuple(v[place] for v in lists)
        if place < 2 or kind not in seen:
            chosen.append(place)
        seen.add(kind)
    return chosen[:6]


# What the rules do not find, by family.
OVERRIDES: dict[str, dict[str, Any]] = {
    "molmo2": {"vision_feature_layer": [1, 0], "image_size": [32, 32], "patch_size": 8},
    "granite_speech5": {"context_size": 16, "max_position_embeddings": 32},
    "pp_doclayout_v4": {"num_queries": 8, "num_denoising": 0},
    "qwen4_exp": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "glm5_next": {"index_kpool": 2},
    "neomme": {"head_dim": 16},
    "fun_asr_nano": {"intermediate_size": 8},
}
STACKED_FRAMES = {"granite_speech5": 4, "fun_asr_nano": 7}  # a step of the input features is so many frames


# Their queries at padding have no key at all: zeros from regard and from sdpa, the mean of all values from eager.
UNPADDED = ("glm5_next",)


class SmallCase:
    """The model classes of a family that can be made from its default configuration with small sizes."""

    def __init__(self, folder: str):
        self.folder = folder
        self.all_generative_model_classes: tuple = ()
        self.model_tester = self
        root = Path(importlib.import_module("transformers").__file__).parent / "models" / folder
        modules = [
            importlib.import_module(f"transformers.models.{folder}.{f.stem}")
            for f in sorted(root.glob("modeling_*.py"))
        ]
        self.all_model_classes = tuple(
            c for m in modules for c in vars(m).values() if inspect.isclass(c) and self._usable(c, m.__name__)
        )

    @staticmethod
    def _usable(cls: Any, module: str) -> bool:
        from transformers import PreTrainedModel

        names = set(inspect.signature(cls.forward).parameters) if hasattr(cls, "forward") else set()
        return (
            issubclass(cls, PreTrainedModel)
            and cls.__module__ == module
            and cls.config_class is not None
            and "PreTrained" not in cls.__name__
            and bool(names & {"input_ids", "pixel_values", "input_features", "input_values", "hidden_states"})
        )

    def config_for(self, cls: Any) -> Any:
        import torch

        kind = cls.config_class
        if kind is not None and "config" in (hints := inspect.signature(cls.__init__).parameters):
            given = hints["config"].annotation
            kind = given if hasattr(given, "to_dict") else kind
        config = kind(**reduced(kind().to_dict(), OVERRIDES.get(self.folder, {})))
        with torch.device("meta"):
            size = sum(p.numel() for p in cls._from_config(config, attn_implementation="eager").parameters())
        if size > MAX_PARAMETERS:
            raise ValueError(f"the smallest configuration still has {size:,} parameters")
        return config

    def inputs_for(self, cls: Any, config: Any) -> dict[str, Any]:
        import torch

        names = set(inspect.signature(cls.forward).parameters)
        made = torch.Generator().manual_seed(0)
        if "input_ids" in names:
            text = config.get_text_config()
            ids = torch.randint(1, 3, (2, 9), generator=made) + 55
            mask = torch.ones_like(ids)
            if self.folder not in UNPADDED:
                mask[1, 7:] = 0
            if getattr(text, "pad_token_id", None) is not None:
                ids[mask == 0] = text.pad_token_id
            given = {"input_ids": ids, "attention_mask": mask}
            if "decoder_input_ids" in names and getattr(config, "is_encoder_decoder", False):
                given["decoder_input_ids"] = ids[:, :5]
            return given
        vision = getattr(config, "vision_config", config)
        if "grid_thw" in names or "image_grid_thw" in names:
            patch = vision.patch_size * vision.patch_size * getattr(vision, "temporal_patch_size", 1)
            rows = torch.randn(2 * 16, patch * getattr(vision, "in_channels", 3), generator=made)
            name = "grid_thw" if "grid_thw" in names else "image_grid_thw"
            first = "hidden_states" if "hidden_states" in names else "pixel_values"
            return {first: rows, name: torch.tensor([[1, 4, 4], [1, 4, 4]])}
        if "pixel_values" in names:
            size = getattr(vision, "image_size", 32)
            size = size if isinstance(size, int) else size[0]
            return {
                "pixel_values": torch.randn(2, getattr(vision, "num_channels", 3), size, size, generator=made)
            }
        audio = getattr(config, "audio_config", config)
        if "input_features" in names:
            more = {}
            if "input_features_mask" in names:
                more["input_features_mask"] = torch.ones(2, 40, dtype=torch.long)
            if "decoder_input_ids" in names:
                more["decoder_input_ids"] = torch.randint(1, 61, (2, 5), generator=made)
            bins = next(
                (
                    getattr(audio, n)
                    for n in ("num_mel_bins", "feature_size", "input_dim")
                    if hasattr(audio, n)
                ),
                16,
            )
            bins *= STACKED_FRAMES.get(self.folder, 1)
            shape = (2, bins, 64) if "max_source_positions" in vars(audio) else (2, 40, bins)
            return {"input_features": torch.randn(*shape, generator=made), **more}
        if "input_values" in names:
            return {"input_values": torch.randn(2, 1, 640, generator=made)}
        raise ValueError(f"no inputs are known for {sorted(names)}")

    def _prepare_for_class(
        self, inputs: dict[str, Any], cls: Any, return_labels: bool = False
    ) -> dict[str, Any]:
        return inputs

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        return None, {}
