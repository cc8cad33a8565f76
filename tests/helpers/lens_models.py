"""Small models of the families that `look` is tried on, with random weights."""

import torch

import regard as rg
from regard.lens.calls import AttentionCall, Positions, is_causal_call, query_offset, tensors_of

FAMILIES = ("bert", "gpt2", "llama", "t5", "marian", "bart", "vit")
TWO_SIDED = ("t5", "marian", "bart")


def huggingface(family: str, implementation: str):
    """A model of a family: 2 layers, 4 heads, eval mode, its attention run by sdpa or eagerly."""
    import transformers as tf

    wide = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_model": 32, "vocab_size": 50}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    depth = {"encoder_layers": 2, "decoder_layers": 2}
    plain = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config, kind = {
        "bert": (tf.BertConfig(vocab_size=50, **plain), tf.BertModel),
        "gpt2": (tf.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50), tf.GPT2LMHeadModel),
        "llama": (tf.LlamaConfig(vocab_size=50, num_key_value_heads=2, **plain), tf.LlamaForCausalLM),
        "t5": (
            tf.T5Config(d_model=32, num_layers=2, num_heads=4, d_kv=8, d_ff=64, vocab_size=50),
            tf.T5ForConditionalGeneration,
        ),
        "marian": (tf.MarianConfig(pad_token_id=1, **wide, **heads, **depth), tf.MarianMTModel),
        "bart": (tf.BartConfig(**wide, **heads, **depth), tf.BartForConditionalGeneration),
        "vit": (tf.ViTConfig(image_size=32, patch_size=8, **plain), tf.ViTModel),
    }[family]
    torch.manual_seed(0)
    return kind._from_config(config, attn_implementation=implementation).eval()


def inputs(family: str) -> dict[str, torch.Tensor]:
    """Two rows, the first with padding at its end."""
    g = torch.Generator().manual_seed(1)
    if family == "vit":
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=g)}
    ids = torch.randint(3, 50, (2, 11), generator=g)
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[0, 8:] = 0
    given = {"input_ids": ids, "attention_mask": mask}
    if family in TWO_SIDED:
        given["decoder_input_ids"] = torch.randint(3, 50, (2, 7), generator=g)
    return given


def eager_weights(model, given) -> list[torch.Tensor]:
    """What the model itself says its weights are, in the order in which its attentions run."""
    with torch.no_grad():
        out = model(**given, output_attentions=True)
    if "cross_attentions" in out and out.cross_attentions:
        decoder = zip(out.decoder_attentions, out.cross_attentions)
        return [*out.encoder_attentions, *(w for pair in decoder for w in pair)]
    return list(out.attentions)


def small(layers=2, causal=True):
    torch.manual_seed(0)
    own = rg.Attention(24, heads=3, pattern=rg.causal() if causal else rg.full())
    block = rg.Block(own, rg.FeedForward(48))
    words = rg.Embedding(13, 24, position=rg.sinusoidal())
    return rg.Encoder(block, layers=layers, embedding=words, head=rg.LanguageHead()).build().eval()


def captured(source, role="self", valid=None):
    versions = tuple(x._version for x in tensors_of(source))
    offset = query_offset(source, role, Positions())
    return AttentionCall(
        0,
        "layer",
        role,
        "sdpa",
        source,
        source.shape,
        versions,
        is_causal_call(source, role, offset),
        offset,
        valid=valid,
    )
