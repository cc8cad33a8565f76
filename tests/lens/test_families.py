"""Families of transformers with unusual attention are shown whole, or what is not shown is named.

docs/look_families.md has all families; these are the ones that were once shown incompletely without a report.
"""

import pytest
import torch
from torch import nn

import regard as rg

tf = pytest.importorskip("transformers")
SMALL = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}


def ids(n: int) -> torch.Tensor:
    return torch.randint(3, 50, (1, n), generator=torch.Generator().manual_seed(1))


def model_of(kind, config):
    torch.manual_seed(0)
    return kind._from_config(config, attn_implementation="eager").eval()


def test_a_sink_takes_its_share_of_the_weights():
    config = tf.GptOssConfig(
        **SMALL, num_attention_heads=4, num_key_value_heads=2, head_dim=4, num_local_experts=2, sliding_window=4,
        num_experts_per_tok=1, layer_types=["sliding_attention", "full_attention"], rope_parameters=None,
    )  # fmt: skip
    model = model_of(tf.GptOssModel, config)
    for layer in model.layers:
        nn.init.normal_(layer.self_attn.sinks)
    view = rg.look(model, {"input_ids": ids(9)})
    with torch.no_grad():
        returned = model(ids(9), output_attentions=True).attentions
    assert view.missed == () and len(view.calls) == len(returned) == 2
    for call, weights in zip(view.calls, returned, strict=True):
        assert torch.equal(call.weights(), weights[0])
        assert float(call.weights().sum(-1).max()) < 1  # the rest is the sink's


class SplitAttention(nn.Module):
    """One softmax of which one product uses all columns but the last, and something else uses the last one."""

    def __init__(self):
        super().__init__()
        self.q = nn.Linear(8, 8)

    def forward(self, x):
        q = self.q(x)
        weights = torch.cat([q @ x.mT, (q * x).sum(-1, keepdim=True)], -1).softmax(-1)
        return weights[..., :-1] @ x + weights[..., -1:] * x


def test_columns_that_are_used_elsewhere_are_not_sinks():
    view = rg.look(SplitAttention().eval(), torch.randn(1, 6, 8))
    assert "1 of its softmaxes was not read; its maps show part" in view.missed[0]


def test_longformer_with_global_tokens_is_named():
    config = tf.LongformerConfig(
        **SMALL, num_attention_heads=2, attention_window=4, max_position_embeddings=40, pad_token_id=0
    )
    given = {"input_ids": ids(16), "attention_mask": torch.ones(1, 16, dtype=torch.long)}
    model = model_of(tf.LongformerModel, config)
    chosen = torch.zeros(1, 16, dtype=torch.long)
    chosen[0, 0] = 1
    view = rg.look(model, {**given, "global_attention_mask": chosen})
    assert [text.split()[0] for text in view.missed] == [f"encoder.layer.{i}.attention.self" for i in (0, 1)]


def test_each_layer_of_big_bird_is_named():
    config = tf.BigBirdConfig(
        **SMALL, num_attention_heads=2, block_size=4, num_random_blocks=1, max_position_embeddings=64
    )
    view = rg.look(model_of(tf.BigBirdModel, config), {"input_ids": ids(40)})
    named = [text.split()[0] for text in view.missed if "(BigBirdBlockSparseAttention)" in text]
    assert named == [f"encoder.layer.{i}.attention.self" for i in (0, 1)]


def test_the_windows_of_hiera_are_batch_rows():
    config = tf.HieraConfig(embed_dim=8, depths=[1, 1], num_heads=[1, 2], image_size=[32, 32], query_stride=[2, 2],
                            num_query_pool=1, masked_unit_size=[4, 4], embed_dim_multiplier=2.0)  # fmt: skip
    model, given = model_of(tf.HieraModel, config), {"pixel_values": torch.randn(1, 3, 32, 32)}
    view = rg.look(model, given)
    with torch.no_grad():
        returned = model(**given, output_attentions=True).attentions  # (b, h, windows, n, m)
    assert view.missed == () and view.grid is None and len(view.calls) == len(returned) == 2
    for call, weights in zip(view.calls, returned, strict=True):
        for window in range(4):
            assert torch.equal(call.weights(batch=window), weights[0, :, window])


def test_reformer_is_refused_with_the_layers_that_were_not_read():
    config = tf.ReformerConfig(
        vocab_size=50, hidden_size=16, num_attention_heads=2, attention_head_size=8, feed_forward_size=16,
        attn_layers=["local", "lsh"], local_attn_chunk_length=4, lsh_attn_chunk_length=4, num_buckets=2,
        axial_pos_embds=False, max_position_embeddings=32, is_decoder=False,
    )  # fmt: skip
    with pytest.raises(rg.RegardError, match=r"LocalSelfAttention\): it ran.*LSHSelfAttention\): it ran"):
        rg.look(model_of(tf.ReformerModel, config), {"input_ids": ids(16)})
