"""The families that a spec can express: how each is declared, and how its parameters are named."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...errors import SpecError
from ...pattern import Pattern, causal, full, window
from ...position import learned, rope, sinusoidal, t5_buckets
from ...spec import (
    Attention,
    Block,
    ClassifierHead,
    Decoder,
    Embedding,
    Encoder,
    EncoderDecoder,
    FeedForward,
    LanguageHead,
    MaskedHead,
    Pooler,
    Spec,
    Vision,
)


class Link(NamedTuple):
    """One of our parameters and theirs; theirs None: it is zero there."""

    ours: str
    theirs: str | None
    how: str = "same"
    part: tuple[int, int] = (0, 1)  # of several of ours that one of theirs holds

    def read(self, x: Tensor) -> Tensor:
        return self._view(x).squeeze() if self.how == "flat" else self._view(x)

    def write(self, x: Tensor, value: Tensor) -> None:
        view = self._view(x)
        view.copy_(value.reshape(view.shape))

    def _view(self, x: Tensor) -> Tensor:
        """The part of their parameter that is ours, in our order of axes."""
        if self.how == "transpose" and x.dim() == 2:  # Conv1D
            x = x.T
        if self.how == "swap":
            x = x.T
        if self.how == "row":  # (1, 1, d)
            x = x[0]
        if self.how == "from 2":  # two positions that no token has
            x = x[2:]
        place, parts = self.part
        size = x.shape[0] // parts
        return x[place * size : (place + 1) * size] if parts > 1 else x


@dataclass(frozen=True)
class Family:
    declare: Callable[[Any], Spec]
    links: Callable[[Any], Iterator[Link]]
    ignored: tuple[str, ...] = ("inv_freq", "position_ids", "attn.bias")
    check: Callable[[dict[str, Tensor]], None] | None = None  # of what is ignored


ACTIVATIONS = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
}


def _activation(name: str) -> str:
    if name not in ACTIVATIONS:
        raise SpecError(f"activation {name!r} is not one of {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def _refuse(condition: Any, what: str) -> None:
    if condition:
        raise SpecError(f"this configuration has {what}, which a spec cannot express")


def _linear(ours: str, theirs: str, bias: bool = True, how: str = "same") -> Iterator[Link]:
    yield Link(f"{ours}.weight", f"{theirs}.weight", how)
    if bias:
        yield Link(f"{ours}.bias", f"{theirs}.bias")


# BERT and RoBERTa


def _bert(masked: bool) -> Callable[[Any], Spec]:
    def declare(config: Any) -> Spec:
        _refuse(config.is_decoder or config.add_cross_attention, "a decoder")
        rate, eps = config.hidden_dropout_prob, config.layer_norm_eps
        attention = Attention(
            config.hidden_size, heads=config.num_attention_heads, dropout=config.attention_probs_dropout_prob
        )
        hidden = FeedForward(config.intermediate_size, activation=_activation(config.hidden_act))
        skipped = 2 if config.model_type == "roberta" else 0
        position = learned(config.max_position_embeddings - skipped)
        types = config.type_vocab_size
        return Encoder(
            Block(attention, hidden, eps=eps, dropout=rate),
            config.num_hidden_layers,
            embedding=Embedding(
                config.vocab_size,
                config.hidden_size,
                position=position,
                types=types,
                norm=True,
                eps=eps,
                dropout=rate,
            ),
            head=MaskedHead(activation=_activation(config.hidden_act), eps=eps) if masked else Pooler(),
            init="normal",
        )

    return declare


def _bert_links(prefix: str, head: str) -> Callable[[Any], Iterator[Link]]:
    def links(config: Any) -> Iterator[Link]:
        yield Link("embedding.table", f"{prefix}embeddings.word_embeddings.weight")
        how = "from 2" if config.model_type == "roberta" else "same"
        yield Link("embedding.position.table", f"{prefix}embeddings.position_embeddings.weight", how)
        yield Link("embedding.types", f"{prefix}embeddings.token_type_embeddings.weight")
        yield from _linear("embedding.norm", f"{prefix}embeddings.LayerNorm")
        for i in range(config.num_hidden_layers):
            ours, theirs = f"blocks.{i}", f"{prefix}encoder.layer.{i}"
            for letter, word in (("q", "query"), ("k", "key"), ("v", "value")):
                yield from _linear(f"{ours}.attention.w_{letter}", f"{theirs}.attention.self.{word}")
            yield from _linear(f"{ours}.attention.w_o", f"{theirs}.attention.output.dense")
            yield from _linear(f"{ours}.attention_norm", f"{theirs}.attention.output.LayerNorm")
            yield from _linear(f"{ours}.feed_forward.w_in", f"{theirs}.intermediate.dense")
            yield from _linear(f"{ours}.feed_forward.w_out", f"{theirs}.output.dense")
            yield from _linear(f"{ours}.feed_forward_norm", f"{theirs}.output.LayerNorm")
        if head == "pooler":
            yield from _linear("head.w", f"{prefix}pooler.dense")
        elif head == "roberta":
            yield from _linear("head.transform", "lm_head.dense")
            yield from _linear("head.norm", "lm_head.layer_norm")
            yield Link("head.bias", "lm_head.bias")
        else:
            yield from _linear("head.transform", "cls.predictions.transform.dense")
            yield from _linear("head.norm", "cls.predictions.transform.LayerNorm")
            yield Link("head.bias", "cls.predictions.bias")

    return links


# GPT-2


def _gpt2(config: Any) -> Spec:
    _refuse(
        not config.scale_attn_weights or config.scale_attn_by_inverse_layer_idx,
        "its own scale for each layer",
    )
    _refuse(not config.tie_word_embeddings, "an output table of its own")
    width = config.n_embd
    block = Block(
        Attention(width, heads=config.n_head, pattern=causal(), dropout=config.attn_pdrop),
        FeedForward(config.n_inner or 4 * width, activation=_activation(config.activation_function)),
        norm_at="pre",
        eps=config.layer_norm_epsilon,
        dropout=config.resid_pdrop,
    )
    embedding = Embedding(
        config.vocab_size, width, position=learned(config.n_positions), dropout=config.embd_pdrop
    )
    return Encoder(block, config.n_layer, embedding=embedding, head=LanguageHead(), init="depth_scaled")


def _gpt2_links(config: Any) -> Iterator[Link]:
    yield Link("embedding.table", "transformer.wte.weight")
    yield Link("embedding.position.table", "transformer.wpe.weight")
    for i in range(config.n_layer):
        ours, theirs = f"blocks.{i}", f"transformer.h.{i}"
        for place, letter in enumerate("qkv"):
            for kind in ("weight", "bias"):
                name = f"{ours}.attention.w_{letter}.{kind}"
                yield Link(name, f"{theirs}.attn.c_attn.{kind}", "transpose", (place, 3))
        yield from _linear(f"{ours}.attention.w_o", f"{theirs}.attn.c_proj", how="transpose")
        yield from _linear(f"{ours}.attention_norm", f"{theirs}.ln_1")
        yield from _linear(f"{ours}.feed_forward.w_in", f"{theirs}.mlp.c_fc", how="transpose")
        yield from _linear(f"{ours}.feed_forward.w_out", f"{theirs}.mlp.c_proj", how="transpose")
        yield from _linear(f"{ours}.feed_forward_norm", f"{theirs}.ln_2")
    yield from _linear("norm", "transformer.ln_f")


# Llama, Mistral, Qwen2, SmolLM


def _biased(config: Any) -> tuple[bool, bool]:
    """Whether queries, keys and values have biases, and whether the output has."""
    if config.model_type == "qwen2":
        return True, False
    given = bool(getattr(config, "attention_bias", False))
    return given, given


def _llama(config: Any) -> Spec:
    rotation = config.rope_parameters or {}
    _refuse(
        rotation.get("rope_type", "default") != "default", f"rotary positions {rotation.get('rope_type')!r}"
    )
    sliding = getattr(config, "sliding_window", None)
    pattern: Pattern = causal()
    if sliding is not None and getattr(config, "use_sliding_window", True):
        _refuse(
            "full_attention" in (getattr(config, "layer_types", None) or ()), "layers with different windows"
        )
        pattern = causal() & window(sliding - 1)
    d_k = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention = Attention(
        config.hidden_size,
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        d_k=d_k,
        d_v=d_k,
        pattern=pattern,
        position=rope(base=float(rotation.get("rope_theta", 10000.0))),
        biases="all" if any(_biased(config)) else "none",
        dropout=config.attention_dropout,
    )
    _refuse(config.hidden_act != "silu", f"the activation {config.hidden_act!r}")
    mlp = FeedForward(
        config.intermediate_size, activation="swiglu", bias=bool(getattr(config, "mlp_bias", False))
    )
    block = Block(attention, mlp, norm="rms", norm_at="pre", eps=config.rms_norm_eps)
    return Encoder(
        block,
        config.num_hidden_layers,
        embedding=Embedding(config.vocab_size, config.hidden_size),
        head=LanguageHead(tied=config.tie_word_embeddings),
        init="depth_scaled",
    )


def _llama_links(config: Any) -> Iterator[Link]:
    inner, outer = _biased(config)
    mlp = bool(getattr(config, "mlp_bias", False))
    yield Link("embedding.table", "model.embed_tokens.weight")
    for i in range(config.num_hidden_layers):
        ours, theirs = f"blocks.{i}", f"model.layers.{i}"
        for letter in "qkv":
            yield from _linear(f"{ours}.attention.w_{letter}", f"{theirs}.self_attn.{letter}_proj", inner)
        yield from _linear(f"{ours}.attention.w_o", f"{theirs}.self_attn.o_proj", outer)
        if inner and not outer:
            yield Link(f"{ours}.attention.w_o.bias", None)
        yield Link(f"{ours}.attention_norm.weight", f"{theirs}.input_layernorm.weight")
        yield from _linear(f"{ours}.feed_forward.w_in", f"{theirs}.mlp.up_proj", mlp)
        yield from _linear(f"{ours}.feed_forward.w_gate", f"{theirs}.mlp.gate_proj", mlp)
        yield from _linear(f"{ours}.feed_forward.w_out", f"{theirs}.mlp.down_proj", mlp)
        yield Link(f"{ours}.feed_forward_norm.weight", f"{theirs}.post_attention_layernorm.weight")
    yield Link("norm.weight", "model.norm.weight")
    if not config.tie_word_embeddings:
        yield Link("head.table", "lm_head.weight")


# T5


def _t5(config: Any) -> Spec:
    _refuse(config.is_gated_act, "gated activations")
    embedding = Embedding(config.vocab_size, config.d_model)
    mlp = FeedForward(
        config.d_ff, activation=_activation(config.dense_act_fn), bias=False, dropout=config.dropout_rate
    )

    def attention(pattern: Pattern) -> Attention:
        return Attention(
            config.d_model, heads=config.num_heads, d_k=config.d_kv, d_v=config.d_kv, pattern=pattern, scale=1.0,
            biases="none", dropout=config.dropout_rate,
        )  # fmt: skip

    def block(pattern: Pattern, cross: Attention | None = None) -> Block:
        eps, rate = config.layer_norm_epsilon, config.dropout_rate
        return Block(attention(pattern), mlp, cross=cross, norm="rms", norm_at="pre", eps=eps, dropout=rate)

    buckets = (config.relative_attention_num_buckets, config.relative_attention_max_distance)
    scaled = getattr(config, "scale_decoder_outputs", config.tie_word_embeddings)
    return EncoderDecoder(
        Encoder(block(full()), config.num_layers, embedding=embedding, position=t5_buckets(*buckets)),
        Decoder(
            block(causal(), attention(full())),
            config.num_decoder_layers,
            embedding=embedding,
            position=t5_buckets(*buckets, bidirectional=False),
            head=LanguageHead(tied=config.tie_word_embeddings, scaled=scaled),
        ),
        share_embedding=True,
    )


def _t5_links(config: Any) -> Iterator[Link]:
    yield Link("encoder.embedding.table", "shared.weight")
    for stack, layers in (("encoder", config.num_layers), ("decoder", config.num_decoder_layers)):
        first = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        yield Link(f"{stack}.position.table", first, "swap")
        for i in range(layers):
            ours, theirs = f"{stack}.blocks.{i}", f"{stack}.block.{i}.layer"
            for letter in "qkvo":
                yield Link(f"{ours}.attention.w_{letter}.weight", f"{theirs}.0.SelfAttention.{letter}.weight")
            yield Link(f"{ours}.attention_norm.weight", f"{theirs}.0.layer_norm.weight")
            if stack == "decoder":
                for letter in "qkvo":
                    yield Link(
                        f"{ours}.cross.w_{letter}.weight", f"{theirs}.1.EncDecAttention.{letter}.weight"
                    )
                yield Link(f"{ours}.cross_norm.weight", f"{theirs}.1.layer_norm.weight")
            last = 2 if stack == "decoder" else 1
            yield Link(f"{ours}.feed_forward.w_in.weight", f"{theirs}.{last}.DenseReluDense.wi.weight")
            yield Link(f"{ours}.feed_forward.w_out.weight", f"{theirs}.{last}.DenseReluDense.wo.weight")
            yield Link(f"{ours}.feed_forward_norm.weight", f"{theirs}.{last}.layer_norm.weight")
        yield Link(f"{stack}.norm.weight", f"{stack}.final_layer_norm.weight")
    if not config.tie_word_embeddings:
        yield Link("decoder.head.table", "lm_head.weight")


# Marian and BART


def _marian(bart: bool) -> Callable[[Any], Spec]:
    def declare(config: Any) -> Spec:
        _refuse(not getattr(config, "share_encoder_decoder_embeddings", True), "two vocabularies")
        _refuse(not config.tie_word_embeddings, "an output table of its own")
        position = learned(config.max_position_embeddings) if bart else sinusoidal(order="halves")
        embedding = Embedding(
            config.vocab_size, config.d_model, position=position, scaled=config.scale_embedding, norm=bart,
            dropout=config.dropout,
        )  # fmt: skip

        def block(heads: int, width: int, cross: bool) -> Block:
            rates = {"dropout": config.attention_dropout}
            return Block(
                Attention(config.d_model, heads=heads, pattern=causal() if cross else full(), **rates),
                FeedForward(
                    width,
                    activation=_activation(config.activation_function),
                    dropout=config.activation_dropout,
                ),
                cross=Attention(config.d_model, heads=heads, **rates) if cross else None,
                dropout=config.dropout,
            )

        return EncoderDecoder(
            Encoder(
                block(config.encoder_attention_heads, config.encoder_ffn_dim, False),
                config.encoder_layers,
                embedding=embedding,
            ),
            Decoder(
                block(config.decoder_attention_heads, config.decoder_ffn_dim, True),
                config.decoder_layers,
                embedding=embedding,
                head=LanguageHead(bias=True),
            ),
            share_embedding=True,
        )

    return declare


def _check_sinusoids(theirs: dict[str, Tensor]) -> None:
    """Marian's table of positions is a parameter that is never trained; ours is the formula."""
    for stack in ("encoder", "decoder"):
        table = theirs[f"model.{stack}.embed_positions.weight"].double().cpu()
        length, width = table.shape
        angles = (
            torch.arange(length)[:, None] / 10000 ** (2 * torch.arange((width + 1) // 2) / width).double()
        )
        meant = torch.cat([angles.sin(), angles.cos()[:, : width // 2]], -1)
        _refuse(float((table - meant).abs().max()) > 1e-2, "trained positions in place of the sinusoids")


def _marian_links(bart: bool) -> Callable[[Any], Iterator[Link]]:
    def links(config: Any) -> Iterator[Link]:
        yield Link("encoder.embedding.table", "model.shared.weight")
        for stack, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers)):
            if bart:
                table = f"model.{stack}.embed_positions.weight"
                yield Link(f"{stack}.embedding.position.table", table, "from 2")
                yield from _linear(f"{stack}.embedding.norm", f"model.{stack}.layernorm_embedding")
            for i in range(layers):
                ours, theirs = f"{stack}.blocks.{i}", f"model.{stack}.layers.{i}"
                kinds = [("attention", "self_attn"), ("cross", "encoder_attn")][
                    : 2 if stack == "decoder" else 1
                ]
                for mine, name in kinds:
                    for letter in "qkv":
                        yield from _linear(f"{ours}.{mine}.w_{letter}", f"{theirs}.{name}.{letter}_proj")
                    yield from _linear(f"{ours}.{mine}.w_o", f"{theirs}.{name}.out_proj")
                    yield from _linear(f"{ours}.{mine}_norm", f"{theirs}.{name}_layer_norm")
                yield from _linear(f"{ours}.feed_forward.w_in", f"{theirs}.fc1")
                yield from _linear(f"{ours}.feed_forward.w_out", f"{theirs}.fc2")
                yield from _linear(f"{ours}.feed_forward_norm", f"{theirs}.final_layer_norm")
        yield Link("decoder.head.bias", "final_logits_bias", "flat")

    return links


# ViT


def _vit(config: Any) -> Vision:
    _refuse(not config.qkv_bias, "queries, keys and values without biases")
    block = Block(
        Attention(
            config.hidden_size, heads=config.num_attention_heads, dropout=config.attention_probs_dropout_prob
        ),
        FeedForward(config.intermediate_size, activation=_activation(config.hidden_act)),
        norm_at="pre",
        eps=config.layer_norm_eps,
        dropout=config.hidden_dropout_prob,
    )
    sides = [x if isinstance(x, list | tuple) else (x, x) for x in (config.image_size, config.patch_size)]
    return Vision(
        Encoder(block, config.num_hidden_layers),
        image=tuple(sides[0]),
        patch=tuple(sides[1]),
        channels=config.num_channels,
        head=ClassifierHead(config.num_labels, pool="first"),
        dropout=config.hidden_dropout_prob,
    )


def _deit(config: Any) -> Spec:
    return replace(_vit(config), registers=1)  # the distillation token, which this classifier does not read


def _deit_links(config: Any) -> Iterator[Link]:
    yield Link("registers", "deit.embeddings.distillation_token", "row")
    yield from _vit_links(config, "deit")


def _vit_links(config: Any, prefix: str = "vit") -> Iterator[Link]:
    yield Link("class_token", f"{prefix}.embeddings.cls_token", "flat")
    yield Link("position.table", f"{prefix}.embeddings.position_embeddings", "flat")
    yield from _linear("patches", f"{prefix}.embeddings.patch_embeddings.projection")
    for i in range(config.num_hidden_layers):
        ours, theirs = f"encoder.blocks.{i}", f"{prefix}.layers.{i}"
        for letter in "qkvo":
            yield from _linear(f"{ours}.attention.w_{letter}", f"{theirs}.attention.{letter}_proj")
        yield from _linear(f"{ours}.attention_norm", f"{theirs}.layernorm_before")
        yield from _linear(f"{ours}.feed_forward.w_in", f"{theirs}.mlp.fc1")
        yield from _linear(f"{ours}.feed_forward.w_out", f"{theirs}.mlp.fc2")
        yield from _linear(f"{ours}.feed_forward_norm", f"{theirs}.layernorm_after")
    yield from _linear("encoder.norm", f"{prefix}.layernorm")
    yield from _linear("head.w_out", "classifier")


FAMILIES = {
    "BertModel": Family(_bert(False), _bert_links("", "pooler")),
    "BertForMaskedLM": Family(_bert(True), _bert_links("bert.", "bert")),
    "RobertaModel": Family(_bert(False), _bert_links("", "pooler")),
    "RobertaForMaskedLM": Family(_bert(True), _bert_links("roberta.", "roberta")),
    "GPT2LMHeadModel": Family(_gpt2, _gpt2_links),
    "LlamaForCausalLM": Family(_llama, _llama_links),
    "MistralForCausalLM": Family(_llama, _llama_links),
    "Qwen2ForCausalLM": Family(_llama, _llama_links),
    "T5ForConditionalGeneration": Family(_t5, _t5_links),
    "MarianMTModel": Family(
        _marian(False), _marian_links(False), ("embed_positions.weight",), _check_sinusoids
    ),
    "BartForConditionalGeneration": Family(_marian(True), _marian_links(True)),
    "ViTForImageClassification": Family(_vit, _vit_links),
    "DeiTForImageClassification": Family(_deit, _deit_links),
}
