"""Costs of traced modules, compared with PyTorch's FLOP counter on a path that it counts completely."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.flop_counter import FlopCounterMode

import regard as rg
from long_cases import in_long, rows_in_long
from memory_witness import counted
from regard.costs.entry import cost
from regard.engine import flex

B, N, D, H, FF = 3, 13, 24, 4, 40
CORE, PROJECTIONS = 4 * B * N * N * D, 8 * B * N * D * D
x = torch.randn(B, N, D, generator=torch.Generator().manual_seed(0))
q = torch.randn(B, H, N, 7, generator=torch.Generator().manual_seed(1))


def flops(call, backward=False):
    """What PyTorch counts while `call` really runs."""
    with FlopCounterMode(display=False) as counter:
        out = call()
        if backward:
            out = out if isinstance(out, torch.Tensor) else out[0]
            out.square().mean().backward()
    return counter.get_total_flops()


def with_weights(module):
    """Attention that also returns its weights runs as plain products, which the counter sees."""
    return flops(lambda: module(x, x, x, need_weights=True))


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_is_counted_in_full(training, need_weights):
    module = nn.MultiheadAttention(D, H, batch_first=True).train(training)
    given = {"query": x, "key": x, "value": x, "need_weights": need_weights}
    assert cost(module, given).flops == with_weights(module.train()) == CORE + PROJECTIONS


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("norm_first", [True, False])
def test_an_encoder_layer_is_counted_in_full_in_training_and_on_its_fast_path(training, norm_first):
    layer = nn.TransformerEncoderLayer(D, H, FF, batch_first=True, norm_first=norm_first).train(training)
    attention, up, down = with_weights(layer.self_attn.train()), layer.linear1, layer.linear2
    rest = flops(lambda: down(up(x)))
    layer.train(training)
    assert cost(layer, x).flops == attention + rest


def test_sdpa_counts_the_pairs_of_its_mask():
    def causal(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def masked(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    every = flops(lambda: (q @ q.mT).softmax(-1) @ q)
    pairs = N * (N + 1) // 2
    below = torch.ones(N, N).tril().bool()
    assert cost(F.scaled_dot_product_attention, q, q, q).flops == every
    assert cost(causal, q, q, q).flops * N * N == every * pairs
    for mask in (below, torch.zeros(N, N).masked_fill(~below, -torch.inf)):
        result = cost(masked, q, q, q, mask)
        assert result.flops * N * N == every * pairs and result.total.executed_flops == every
        assert (result.pairs[0].needed, result.pairs[0].computed, result.pairs[0].full) == (
            pairs,
            N * N,
            N * N,
        )


@pytest.mark.parametrize("kind", [causal_upper_left, causal_lower_right])
@pytest.mark.parametrize("keys", [N, N + 4])
def test_a_causal_bias_counts_the_pairs_that_it_means(kind, keys):
    class Biased(nn.Module):
        def __init__(self):
            super().__init__()
            self.mask = kind(N, keys)

        def forward(self, q, k):
            return F.scaled_dot_product_attention(q, k, k, self.mask)

    class Plain(nn.Module):
        def forward(self, q, k):
            if at == 0:
                return F.scaled_dot_product_attention(q, k, k, is_causal=True)
            table = torch.ones(N, keys, dtype=torch.bool, device=q.device).tril(at)
            return F.scaled_dot_product_attention(q, k, k, table)

    at, k = 0 if kind is causal_upper_left else keys - N, torch.randn(B, H, keys, 7)
    result, plain = cost(Biased(), q, k), cost(Plain(), q, k)
    assert result.pairs[0].needed == rg.causal().count(N, keys, at)
    assert result.flops == plain.flops and result.memory.inference_peak == plain.memory.inference_peak


def test_a_mask_built_inside_the_module_is_counted():
    class Masked(nn.Module):
        def forward(self, x):
            allowed = torch.ones(x.shape[-2], x.shape[-2], device=x.device).tril(2).bool()
            learned = torch.where(allowed, x.mean() + 0 * allowed, -torch.inf)
            return F.scaled_dot_product_attention(x, x, x, attn_mask=learned)

    result = cost(Masked(), q)
    assert result.pairs[0].needed == int(torch.ones(N, N).tril(2).sum())


def test_a_mask_with_unknown_values_counts_all_pairs_and_is_reported():
    def masked(q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    result = cost(masked, q, q, q, torch.empty(N, N, dtype=torch.bool, device="meta"))
    assert result.pairs[0].needed == N * N
    assert result.pairs[0].pattern == "a mask with unknown values: all pairs are counted"


def test_flex_attention_counts_the_pairs_of_its_mask_mod_and_of_its_blocks():
    flex = pytest.importorskip("torch.nn.attention.flex_attention")
    k = torch.randn(1, 2, 64, 8)
    mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, 64, 64, device="cpu", BLOCK_SIZE=16)
    result = cost(lambda q: flex.flex_attention(q, q, q, block_mask=mask), k)
    pair = 2 * 2 * (8 + 8)
    assert result.flops == pair * 64 * 65 // 2
    assert result.total.executed_flops == pair * 10 * 16 * 16  # ten of sixteen blocks


@pytest.mark.parametrize(
    "build, per_step", [(nn.RNN, 4), (nn.GRU, 12), (nn.LSTM, 16)], ids=["rnn", "gru", "lstm"]
)
def test_recurrent_layers_are_counted_in_full(build, per_step):
    assert cost(build(D, D, batch_first=True), x).flops == per_step * B * N * D * D


def test_forward_and_backward_are_what_pytorch_counts_of_both():
    model = nn.Sequential(nn.Linear(D, FF), nn.GELU(), nn.Linear(FF, D), nn.LayerNorm(D))
    result = cost(model, x, train=True).total
    assert result.flops + result.backward_flops == flops(lambda: model(x), backward=True)


# -- Hugging Face -------------------------------------------------------------------------------------------------


def configurations():
    t = pytest.importorskip("transformers")
    small = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48}
    sides = {
        f"{s}_{k}": v
        for s in ("encoder", "decoder")
        for k, v in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
    }
    return {
        "bert": t.BertConfig(vocab_size=50, **small),
        "gpt2": t.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=50),
        "llama": t.LlamaConfig(num_key_value_heads=2, vocab_size=50, **small),
        "t5": t.T5Config(num_layers=2, d_model=32, d_kv=8, num_heads=4, d_ff=48, vocab_size=50),
        "marian": t.MarianConfig(
            d_model=32, vocab_size=50, pad_token_id=0, decoder_start_token_id=0, **sides
        ),
        "vit": t.ViTConfig(image_size=32, patch_size=8, **small),
    }


def real_inputs(config, n, m, b):
    if config.model_type == "vit":
        return {"pixel_values": torch.randn(b, 3, 32, 32)}
    ids = {"input_ids": torch.ones(b, m if config.is_encoder_decoder else n, dtype=torch.long)}
    return ids | (
        {"decoder_input_ids": torch.ones(b, n, dtype=torch.long)} if config.is_encoder_decoder else {}
    )


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["bert", "llama", "t5", "vit", *in_long("gpt2", "marian")])
def test_a_hugging_face_configuration_is_counted_as_its_eager_model_is(name):
    import transformers

    n, m, b = 11, 7, 2
    config = configurations()[name]
    fused = cost(config, n=n, m=m, batch=b)
    assert not fused.uncounted
    config._attn_implementation = "eager"
    model = getattr(transformers, fused.name)(config).eval()
    config = model.config
    real = flops(lambda: model(**real_inputs(config, n, m, b)))
    assert cost(config, n=n, m=m, batch=b).flops == real  # the decomposed path, product for product
    hidden = [p.full - p.needed for p in fused.pairs]
    heads, width = 4, 8
    assert fused.flops == real - b * heads * 4 * width * sum(hidden)
    assert fused.parameters == sum(p.numel() for p in model.parameters())


@pytest.mark.filterwarnings("ignore")
def test_causal_models_count_causal_pairs_in_every_layer():
    for name, layers in (("gpt2", 2), ("llama", 2), ("t5", 2)):
        result = cost(configurations()[name], n=11, m=7)
        assert sum(p.needed == 66 and p.full == 121 for p in result.pairs) == layers


# -- memory, names, errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_memory_of_a_foreign_layer_is_within_one_activation_of_the_allocator(dropout):
    layer = nn.TransformerEncoderLayer(D, H, FF, batch_first=True, dropout=dropout)
    given = torch.randn(16, 31, D)
    adam = torch.optim.AdamW(layer.parameters(), foreach=False)

    def step():
        layer(given).square().mean().backward()
        adam.step()
        adam.zero_grad()

    step()
    size = sum(p.numel() * 4 for p in layer.parameters())
    result = cost(layer, given, train=True).memory
    real = 3 * size + given.numel() * 4 + counted(step)[0]
    assert (
        abs(result.training_peak - real) <= given.numel() * 4
    )  # tracing does not include every copy inside a kernel
    assert result.weights == result.gradients == size and result.optimizer_state == 2 * size


class Odd(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return torch.linalg.inv(torch.fft.fft(self.inner(x)).real)


def test_an_unknown_operation_is_listed_with_its_module_and_never_silently_left_out():
    result = cost(nn.Sequential(Odd()), torch.randn(4, 4))
    assert result.flops == 2 * 4 * 4 * 4
    assert (
        "aten._fft_r2c in 0 (1 ×)" in result.uncounted and "aten.linalg_inv_ex in 0 (1 ×)" in result.uncounted
    )
    assert "aten._fft_r2c in 0" in str(result)


def test_flops_are_attributed_to_the_module_that_calls_them():
    result = cost(nn.Sequential(nn.Linear(D, FF), nn.Sequential(nn.Linear(FF, D))), x)
    assert result["1/0"].total.flops == 2 * B * N * FF * D
    assert result["1/0"].total.parameters == FF * D + D
    assert sum(a.flops for _, a in result.tree.terms()) == result.flops


def test_tied_weights_are_counted_once():
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    model[1].weight = model[0].weight
    assert cost(model, x).parameters == D * D + 2 * D


def test_a_module_may_branch_on_values_that_follow_from_its_inputs():
    class Looks(nn.Module):
        def forward(self, ids, x):
            return x @ x.mT if (ids > 0).all() else x

    result = cost(Looks(), torch.ones(3, dtype=torch.long), x)
    assert result.flops == 2 * B * N * N * D


@pytest.mark.parametrize(
    "reads",
    {
        "a list of positions": lambda ids, x: 3 in ids[[0, 2]],
        "a list of tensors": lambda ids, x: torch.tensor([ids[0], ids[1] + 2]).sum() == 5,
        "a text": lambda ids, x: f"{ids[0] + 4}" == "5",
        "ones like an unknown tensor": lambda ids, x: x.new_ones(2).masked_fill(ids[:2] > 1, 0).sum() == 1,
        "a table filled by parts": lambda ids, x: _filled(torch.empty(3, dtype=torch.long), ids).sum() == 6,
        "a check of unknown values": lambda ids, x: torch._check_tensor_all(x == x) is None,
        "a mask of unknown values": lambda ids, x: not (x > 0).all(),
        "positions that are drawn": lambda ids, x: torch.multinomial(ids.float(), 3).sum() == 3,
        "codes of the nearest vectors": lambda ids, x: x.argmin(-1).max() < D,
    }.items(),
    ids=lambda case: case[0],
)
def test_values_that_do_not_depend_on_unknown_ones_are_read(reads):
    class Looks(nn.Module):
        def forward(self, ids, x):
            return x @ x.mT if reads[1](ids, x) else x

    assert cost(Looks(), torch.arange(1, 4), x.to("meta")).flops == 2 * B * N * N * D


def _filled(table, ids):
    for i in range(3):
        table[i] = ids[i]
    return table


def test_assumptions_about_values_are_stated():
    class Looks(nn.Module):
        def forward(self, x):
            torch._check_tensor_all(x == x)
            return x if (x > 0).all() else -x

    notes = cost(Looks(), x.to("meta")).notes
    assert any("checks of values" in n for n in notes) and any("hide something" in n for n in notes)


@pytest.mark.parametrize(
    "layer",
    [nn.Conv1d(4, 4, 3), nn.ConvTranspose1d(4, 4, 3), nn.LSTM(8, 4), torch.linalg.qr, torch.matrix_exp],
)
def test_the_unknown_workspace_of_convolutions_lstms_and_factorizations_is_stated(layer):
    notes = cost(layer, torch.zeros(2, 4, 8) if isinstance(layer, nn.Module) else torch.zeros(2, 8, 8)).notes
    assert notes == (
        "memory inside a convolution, a recurrent layer or a factorization of a matrix is not counted",
    )
    assert cost(nn.Linear(8, 4), torch.zeros(2, 4, 8)).notes == ()


def test_a_tensor_beside_the_buffers_is_copied_with_the_module():
    class Keeps(nn.Module):
        def __init__(self):
            super().__init__()
            self.kept = torch.ones(30, D)

        def forward(self, x):
            return torch.cdist(x, self.kept)

    assert cost(Keeps(), x).memory.inference_peak >= 4 * B * N * 30


class Asks(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x


@pytest.mark.parametrize(
    "ask, message",
    [
        (
            lambda: cost(nn.Bilinear(2, 3, 4)),
            "Bilinear is missing input1, input2; pass example inputs",
        ),
        (
            lambda: cost(nn.Linear(3, 4)),
            "Linear is missing input; pass example inputs: rg.cost(module, input)",
        ),
        (
            lambda: cost(Asks(), torch.empty(3, device="meta")),
            "the top-level call reads a value that a meta tensor does not have",
        ),
        (lambda: cost(nn.Linear(3, 4), x, x, x[..., :3]), "Linear does not take these inputs: "),
        (
            lambda: cost(7),
            "cannot find the cost of int; pass a spec, the name of a preset, an nn.Module or a Hugging Face",
        ),
        (
            lambda: cost(nn.ReLU(), x, train=True),
            "no output requires a gradient: a training step needs trainable weights",
        ),
    ],
)
def test_a_bad_request_says_what_is_missing(ask, message):
    with pytest.raises(rg.RegardError) as error:
        ask()
    assert message in str(error.value)


def test_tracing_restores_the_module_and_torch():
    true = F.scaled_dot_product_attention
    module = nn.MultiheadAttention(D, H, batch_first=True)
    cost(module, x, x, x)
    assert F.scaled_dot_product_attention is true
    assert not module._forward_hooks and not module._forward_pre_hooks
    assert module.in_proj_weight.device.type == "cpu" and module(x, x, x)[0].shape == x.shape


def test_without_dispatch_modes_a_module_is_refused_and_a_declaration_is_not(monkeypatch):
    monkeypatch.setattr("regard.costs.entry.CAN_DISPATCH", False)
    with pytest.raises(rg.SpecError) as error:
        cost(nn.Linear(D, D), x)
    assert str(error.value) == (
        "tracing a module needs TorchDispatchMode, which this PyTorch does not have; declare a spec instead"
    )
    assert cost(rg.Attention(D, heads=H), n=N).flops > 0


def test_what_cannot_be_traced_is_named_with_what_is_still_known():
    class Branches(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y if y.sum() > 0 else -y

    with pytest.raises(
        rg.ShapeError, match=r"reads a value that a meta tensor does not have.*still known: 12 param"
    ):
        cost(Branches(3, 3), torch.empty(2, 3, device="meta"))
    with pytest.raises(
        rg.ShapeError, match=r"Linear fails on inputs of these shapes: .*still known: 12 parameters"
    ):
        cost(nn.Linear(3, 3), torch.zeros(2, 4))
    huge = torch.empty(1 << 40, 3, device="meta")
    with pytest.raises(rg.ShapeError, match="still known: 12 parameters, 48 bytes in float32"):
        cost(lambda_of(nn.Linear(3, 3)), huge)


def lambda_of(module):
    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = module

        def forward(self, x):
            return self.inner(x) @ self.inner(x).mT

    return Outer()


def test_equal_layers_are_one_part_of_the_tree():
    layer = nn.TransformerEncoderLayer(D, H, FF, batch_first=True)
    result = cost(nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval(), x)
    part = result["layers"].parts[0]
    assert (part.name, part.times, len(result["layers"].parts)) == ("0–2", 3, 1)
    assert result.flops == 3 * cost(layer.eval(), x).flops and len(repr(result)) < 200


def test_products_of_groups_of_rows_count_each_row_once():
    rows, experts = torch.empty(12, 16, dtype=torch.bfloat16), torch.empty(3, 16, 8, dtype=torch.bfloat16)
    ends = torch.tensor([4, 8, 12], dtype=torch.int32)
    result = cost(lambda a, b, offs: torch._grouped_mm(a, b, offs=offs), rows, experts, ends)
    assert result.flops == 2 * 12 * 16 * 8 and not result.uncounted


@pytest.mark.parametrize("call", [torch.fft.rfft, torch.matrix_exp])
def test_an_operation_that_may_contain_products_is_named(call):
    result = cost(call, torch.zeros(4, 4))
    assert len(result.uncounted) >= 1 and result.flops == 0


def test_sparse_attention_of_this_library_counts_the_pairs_of_its_pattern():
    pattern, x = rg.causal() & (rg.window(2) | rg.every(4)), torch.zeros(2, 4, 24, 8, requires_grad=True)
    result = cost(lambda x: rg.attention(x, x, x, pattern, backend="tiles"), x)
    assert result.flops == 2 * 2 * 4 * pattern.count(24) * (8 + 8) and not result.uncounted


def test_integers_are_counted_on_a_gpu_as_experts_by_a_router():
    """PyTorch's histc takes integers on CUDA only, where mixtures of experts call it."""

    def routed(ids, x):
        counts = torch.histc(ids.int(), bins=4, min=0, max=3)
        return x[: int(counts[1])] @ x.mT

    ids, x = torch.tensor([0, 1, 1, 3, 1]), torch.empty(7, 5, device="meta")
    assert cost(routed, ids, x, device="cuda").flops == 2 * 3 * 5 * 7


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("name", "chosen"),
    [
        ("bert", "BertForMaskedLM"),
        ("llama", "LlamaForCausalLM"),
        ("t5", "T5ForConditionalGeneration"),
        ("vit", "ViTForImageClassification"),
        *rows_in_long(("gpt2", "GPT2LMHeadModel"), ("marian", "MarianMTModel")),
    ],
)
def test_a_configuration_without_architectures_is_the_model_that_its_family_trains(name, chosen):
    config = configurations()[name]
    result = cost(config, n=11, m=7, batch=2, train=True)
    config.architectures = [chosen]
    named = cost(config, n=11, m=7, batch=2, train=True)
    assert result.name == named.name == chosen
    assert (result.flops, result.memory.training_peak) == (named.flops, named.memory.training_peak)
    note = f"the configuration is built as {chosen}; config.architectures = [...] names another class"
    assert note in result.notes and f"assumed: {note}" in str(result)


@pytest.mark.filterwarnings("ignore")
def test_the_class_of_a_configuration_may_be_a_decoder_or_the_base_model():
    transformers = pytest.importorskip("transformers")
    bert = configurations()["bert"]
    bert.is_decoder = True
    assert cost(bert, n=5).name == "BertLMHeadModel"
    bert.architectures = ["BertModel"]
    assert cost(bert, n=5).name == "BertModel"
    clip = transformers.CLIPTextConfig(
        vocab_size=9, hidden_size=8, num_attention_heads=2, num_hidden_layers=1
    )
    assert cost(clip, n=5).name == "CLIPTextModel"  # a family without a head of its own


@pytest.mark.filterwarnings("ignore")
def test_a_length_that_was_not_given_is_noted():
    config = configurations()["llama"]
    note = "n = 128, as none was given"
    assert note in cost(config).notes and note not in cost(config, n=128).notes
    assert not any("n = " in x for x in cost(configurations()["vit"]).notes)  # its image determines n


class OwnAttention(nn.Module):
    """This library's attention over a pattern, with a weight to train."""

    def __init__(self, pattern, **options):
        super().__init__()
        self.pattern, self.options, self.weight = pattern, options, nn.Parameter(torch.ones(1))

    def forward(self, q, k, v):
        made = rg.attention(q * self.weight, k, v, self.pattern, **self.options)
        return made[0].sum() + made[1].sum() if self.options.get("return_lse") else made.sum()


ids = torch.arange(2048) // 600
BY_DATA = {
    "documents": rg.documents(ids[None]),
    "documents by row": rg.documents(torch.stack([ids, ids // 2, ids.clamp(max=2)])),
    "where": rg.where(lambda i, j: (i - j) % 3 == 0),
    "tree": rg.tree(torch.arange(-1, 2047)[None]) & rg.window(100),
    "neighborhood": rg.neighborhood((32, 64), 5),
}


@pytest.mark.parametrize("options", [{}, {"return_lse": True}], ids=["output", "lse"])
@pytest.mark.parametrize("pattern", BY_DATA.values(), ids=BY_DATA.keys())
def test_patterns_by_data_are_priced_for_a_gpu_where_there_is_none(pattern, options):
    """There they run on FlexAttention, which real calls compile: not while a model is priced."""
    n, heads, d, rows = 2048, 2, 64, pattern.data_shape[0]
    inputs = [torch.empty(rows, heads, n, d, device="meta") for _ in range(3)]
    before = flex._compiled, flex._block_mask, dict(flex._masks)
    pairs = heads * pattern.count(n)
    computed = pattern.block_mask(n)
    blocks = int(computed.kv_num_blocks.sum() + computed.full_kv_num_blocks.sum())
    for _ in range(2):  # a first price leaves nothing behind that a second one finds
        found = cost(OwnAttention(pattern, **options), *inputs, device="cuda", dtype="bfloat16", train=True)
        assert [p.backend for p in found.pairs] == ["flex"] and not found.uncounted
        assert (found.flops, found.backward_flops) == (4 * d * pairs, 8 * d * pairs)
        assert (
            found.executed_flops == 4 * d * heads * blocks * 128**2 * rows // computed.kv_num_blocks.shape[0]
        )
    assert before == (flex._compiled, flex._block_mask, dict(flex._masks))


def test_flex_attention_takes_the_memory_that_was_measured_on_a_gpu():
    """On an H200 forward allocates the output and numbers per row; backward one number per row beside the gradients:
    no float32 copy of a gradient, and none for each query head where key/value heads are shared."""
    b, h, h_kv, n, d = 2, 8, 2, 2048, 64
    q, k = (torch.empty(b, heads, n, d, device="meta") for heads in (h, h_kv))
    rows, out = 4 * b * h * n, 4 * b * h * n * d
    found = cost(OwnAttention(BY_DATA["where"]), q, k, k, device="cuda").memory
    given = out + out // 4 + found.workspace
    assert found.inference_peak == pytest.approx(given + out + out + rows, abs=2048)  # q · weight, o
    peak = cost(OwnAttention(BY_DATA["where"]), q, k, k, device="cuda", train=True).memory.peak
    assert peak.operation == "scaled_dot_product_attention (flex)"
    assert {a.kind: a.bytes for a in peak.alive if a.kind == "workspace" and a.path == ""} == {
        "workspace": rows
    }


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("backend", ["auto", "sdpa", "reference"])
def test_every_backend_is_counted_by_the_pairs_of_its_pattern(backend, device):
    """Those that are only masked are executed, and not needed; nothing inside is named as not counted."""
    n, m, window, lengths = 150, 190, rg.causal() & rg.window(8), torch.tensor([190, 60])
    q, k = torch.zeros(2, 3, n, 16), torch.zeros(2, 3, m, 16)
    found = cost(OwnAttention(window, backend=backend), q, k, k, device=device, train=True)
    assert found.flops == 4 * 16 * 2 * 3 * window.count(n, m) and not found.uncounted
    assert found.backward_flops == 2 * found.flops < found.executed_backward_flops
    assert found.pairs[0].needed == window.count(n, m) <= found.pairs[0].computed
    hidden = cost(OwnAttention(window, backend=backend, lengths=lengths), q, k, k, device=device)
    allowed = window.allowed(n, m) & (torch.arange(m) < lengths[:, None, None])
    assert hidden.flops == 4 * 16 * 3 * int(allowed.sum())


def test_a_model_may_make_a_pattern_of_its_inputs():
    def packed(q, ids):
        return rg.attention(q, q, q, rg.documents(ids))

    q, ids = torch.empty(2, 3, 40, 16, device="meta"), torch.arange(40)[None] // 9
    pairs, unknown = rg.documents(ids).count(40), torch.empty(1, 40, dtype=torch.long, device="meta")
    for device in ("cpu", "cuda"):
        assert cost(packed, q, ids, device=device).flops == 4 * 16 * 2 * 3 * pairs
    assert cost(packed, q, unknown, device="cuda").flops == 4 * 16 * 2 * 3 * 40 * 40
    with pytest.raises(
        rg.ShapeError, match="reads a value that a meta tensor does not have; pass the inputs"
    ):
        cost(packed, q, unknown)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_cost_is_the_same_where_gradients_are_turned_off(mode):
    module = nn.MultiheadAttention(D, H, batch_first=True)
    expected = cost(module, x, x, x), cost(module, x, x, x, train=True)
    with mode():
        same = x.clone()  # in inference mode, an inference tensor
        found = cost(module, same, same, same), cost(module, same, same, same, train=True)
    assert found[0].flops == expected[0].flops > 0
    assert [c.memory.plain() for c in found] == [c.memory.plain() for c in expected]
