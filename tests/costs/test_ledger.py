"""The ledger's own numbers of costs: every case of its cost kinds, and the statements of sections 7 and 9."""

from dataclasses import replace

import pytest

import regard as rg
from ledger_cases import agrees, case, cases
from regard.costs import (
    compare,
    cost,
    layers_to_connect,
    receptive_field,
    receptive_set,
    relative_orders,
    score_orders,
)
from regard.costs.layer_types import crossovers

PROJECTIONS = ("q", "k", "v", "output")


def each(kind):
    return pytest.mark.parametrize("c", cases(kind), ids=lambda c: c["id"])


def of(tree, name, amount="flops"):
    """An amount of a part that may be absent."""
    found = [p for p in tree.parts if p.name == name]
    return getattr(found[0].total, amount) if found else 0


@each("params.attention")
@pytest.mark.ledger("S0.Q2a.1", "S0.Q2a.2", "S0.Q2a.3", "S0.Q2a.4", "S0.Q2a.5", "S1.Q2b.1")
@pytest.mark.ledger("S2.1.2.1", "S2.1.2.2", "S2.1.2.3", "S2.1.2.4", "S2.1.2.5")
def test_the_parameters_of_an_attention(c):
    i = c["inputs"]
    word = "all" if i["qkv_bias"] else "output" if i["out_bias"] and i["out_proj"] else "none"
    spec = rg.Attention(
        i["d_in"], heads=i["heads"], d_k=i["d_hid"], d_v=i["d_o"], d_out=i["d_out"] if i["out_proj"] else None,
        output=i["out_proj"], biases=word,
    )  # fmt: skip
    priced, bare = cost(spec, n=7), cost(replace(spec, biases="none"), n=11).tree
    qkv = sum(of(bare, name, "parameters") for name in "qkv")
    result = {
        "per_head": qkv // i["heads"],
        "qkv_weights": qkv,
        "qkv_biases": sum(of(priced.tree, name, "parameters") for name in "qkv") - qkv,
        "out_weight": of(bare, "output", "parameters"),
        "out_bias": of(priced.tree, "output", "parameters") - of(bare, "output", "parameters"),
        "total": priced.parameters,
    }
    assert agrees(result, c["expected"], c["compare"])


@pytest.mark.ledger("S0.Q2a.5", "S2.1.2.5", "S2.3.2.6")
def test_parameters_are_listed_for_each_choice_of_biases():
    result = cost(rg.Attention(512), n=10)
    assert result.biases == {"none": 1_048_576, "output": 1_049_088, "all": 1_050_624}
    line = (
        "parameters: 1,048,576 without biases, 1,049,088 with output biases only, 1,050,624 with all biases"
    )
    assert line in str(result)
    free = rg.Attention(3, heads=9, d_k=4, d_v=5, d_out=6, biases="output")
    assert cost(free, n=10).biases == {"none": 621, "output": 627, "all": 744}
    block = rg.Block(rg.Attention(512), rg.FeedForward(2048))
    gone = cost(block, n=4).biases
    assert gone["all"] - gone["output"] == 3 * 512 + 2048 + 512 and gone["output"] - gone["none"] == 512


@each("params.score")
@pytest.mark.ledger("S1.Q6b.3")
def test_the_parameters_of_a_score(c):
    i = c["inputs"]
    if i["form"] == "additive":
        spec = rg.Attention(
            i["d_q"], heads=1, d_k=i["d_a"], d_context=i["d_k"], score="additive", biases="none"
        )
        names = ("q", "k", "scores")
    elif i["form"] == "bilinear":
        spec = rg.Attention(i["d_q"], heads=1, d_context=i["d_k"], score="bilinear", biases="none")
        names = ("q", "k", "scores")
    else:
        spec, names = rg.Attention(i["d_q"], heads=1, d_k=i["d_k"], biases="none"), ("scores",)
    tree = cost(spec, n=3, m=5).tree
    assert {"total": sum(of(tree, name, "parameters") for name in names)} == c["expected"]


@each("params.positional")
@pytest.mark.ledger("S1.Q4b.2", "S2.2.1.1")
def test_the_parameters_of_positions_at_the_input(c):
    i = c["inputs"]
    position = rg.learned(i["max_len"]) if i["form"] == "learned" else rg.sinusoidal()
    result = cost(rg.Embedding(11, i["d_model"], position=position), n=7)
    assert {"total": result["position"].total.parameters} == c["expected"]
    assert result["position"].total.elementwise_flops == 7 * i["d_model"]  # N·D additions, and no product


@each("params.ffn")
@pytest.mark.ledger("S4.1.4d.1")
def test_the_parameters_of_a_feed_forward(c):
    i = c["inputs"]

    def count(bias):
        block = rg.Block(rg.Attention(i["d_model"]), rg.FeedForward(i["d_ff"], bias=bias))
        return cost(block, n=5)["feed_forward"].total.parameters

    result = {"weights": count(False), "biases": count(True) - count(False), "total": count(i["bias"])}
    assert result == c["expected"]


@each("params.transformer")
@pytest.mark.ledger("S1.Q5a.1")
def test_the_parameters_of_a_transformer(c):
    i = c["inputs"]
    embedding = rg.Embedding(i["vocab"], i["d_model"]) if i["vocab"] else None
    attention, mlp = rg.Attention(i["d_model"], heads=i["heads"]), rg.FeedForward(i["d_ff"])
    past = replace(attention, pattern=rg.causal())
    more = {"embedding": embedding, "final_norm": i["final_norms"]}
    tree = cost(
        rg.EncoderDecoder(
            rg.Encoder(rg.Block(attention, mlp), i["enc_layers"], **more),
            rg.Decoder(rg.Block(past, mlp, cross=attention), i["dec_layers"], **more),
            share_embedding=embedding is not None,
        ),
        n=3,
        m=2,
    ).tree

    def count(path):
        return tree[path].total.parameters

    result = {
        "encoder_layer": count("encoder/block") // i["enc_layers"],
        "decoder_layer": count("decoder/block") // i["dec_layers"],
        "encoder_stack": count("encoder/block"),
        "decoder_stack": count("decoder/block"),
        "final_norms": sum(of(tree[s], "norm", "parameters") for s in ("encoder", "decoder")),
        "embeddings": sum(of(tree[s], "embedding", "parameters") for s in ("encoder", "decoder")),
        "total": tree.total.parameters,
    }
    assert result == c["expected"]


@pytest.mark.ledger("S1.Q5a.1")
def test_the_tables_of_hello_world_are_2_by_2_and_3_by_3_and_3_by_2():
    expected = case("shapes.hello_world")["expected"]
    pairs = {p.path: p for p in cost("transformer-base", n=3, m=2).pairs}
    assert pairs["encoder/block/attention"].full == 2 * 2 and expected["encoder_self"] == [8, 2, 2]
    own = pairs["decoder/block/attention"]
    assert (own.full, own.needed) == (3 * 3, expected["decoder_self_allowed"])
    assert pairs["decoder/block/cross"].full == 3 * 2 and expected["cross"] == [8, 3, 2]


@each("params.vit")
@pytest.mark.ledger("S4.1.5a.2", "S4.1.5b.1")
def test_the_parameters_of_a_vision_transformer(c):
    i = c["inputs"]
    block = rg.Block(rg.Attention(i["d_model"], heads=i["heads"]), rg.FeedForward(i["d_ff"]), norm_at="pre")
    spec = rg.Vision(
        rg.Encoder(block, i["layers"]), image=(i["image"],) * 2, patch=(i["patch"],) * 2, channels=i["channels"],
        class_token=i["cls_token"], head=rg.ClassifierHead(i["classes"], pool="first"),
    )  # fmt: skip
    result = cost(spec)
    tree = result.tree

    def count(path):
        return tree[path].total.parameters

    result = {
        "patches": spec.tokens - 1,
        "tokens": result.sizes["n"],
        "patch_embed": count("patches"),
        "cls_token": count("class_token"),
        "pos_embed": count("position"),
        "per_layer": count("encoder/block") // i["layers"],
        "layers": count("encoder/block"),
        "final_norm": count("encoder/norm"),
        "head_linear": count("head"),
        "total": tree.total.parameters,
    }
    assert result == c["expected"]


@each("flops.attention")
@pytest.mark.ledger("S0.Q1c.2", "S0.Q1c.3", "S0.Q2a.8", "S0.Q2a.9", "S0.Q2a.10", "S1.Q2b.3", "S1.Q6b.2")
@pytest.mark.ledger("S3.Q2c.1", "S3.Q2c.3", "S3.Q2c.5", "S3.Q2c.6", "S2.2.1.3")
def test_the_flops_of_an_attention_term_by_term(c):
    i = c["inputs"]
    spec = rg.Attention(i["heads"] * i["d_head"], heads=i["heads"], output=i.get("out_proj", True))
    tree = cost(spec, n=i["n_t"], m=i["n_s"]).tree
    result = {
        "q_proj": of(tree, "q"),
        "k_proj": of(tree, "k"),
        "v_proj": of(tree, "v"),
        "scores": of(tree, "scores"),
        "scale": of(tree, "scale", "elementwise_flops"),
        "softmax": of(tree, "softmax", "elementwise_flops"),
        "mix": of(tree, "mixing"),
        "out_proj": of(tree, "output"),
        "matmul_total": tree.total.flops,
        "projections": sum(of(tree, p) for p in PROJECTIONS),
        "core": of(tree, "scores") + of(tree, "mixing"),
        "grand_total": tree.total.flops + tree.total.elementwise_flops,
    }
    assert result == c["expected"]
    heads, n, m = i["heads"], i["n_t"], i["n_s"]
    wide = cost(rg.Attention(heads, heads=heads, d_k=3, d_v=5), n=n, m=m).tree  # values wider than keys
    assert (of(wide, "scores"), of(wide, "mixing")) == (2 * heads * n * m * 3, 2 * heads * n * m * 5)


@pytest.mark.ledger("S3.Q2c.2", "S3.Q2c.4")
def test_splitting_heads_is_not_a_term_because_a_view_is_free():
    names = [p.name for p in cost(rg.Attention(512), n=128, m=256).tree.parts]
    assert names == ["q", "k", "v", "scores", "scale", "softmax", "mixing", "output"]
    one, eight = (cost(rg.Attention(512, heads=h), n=128) for h in (1, 8))
    assert one.flops == eight.flops and one.total.bytes == eight.total.bytes


@pytest.mark.parametrize(
    ("id", "part", "reason"),
    [
        ("flops.short_wide.32.32.16x128", "projections", "128.0 times the attention core"),
        ("flops.long_narrow.8192.8192.4x16", "core", "64.0 times the projections"),
    ],
)
@pytest.mark.ledger("S3.Q2d.1", "S3.Q2d.2")
def test_the_bottleneck_is_named_with_its_reason(id, part, reason):
    i, expected = case(id)["inputs"], case(id)["expected"]
    spec = rg.Attention(i["heads"] * i["d_head"], heads=i["heads"])
    found = cost(spec, n=i["n_t"], m=i["n_s"]).bottleneck
    assert (found.part, found.flops) == (part, expected[part]) and reason in found.why
    assert found.share == expected[part] / expected["matmul_total"]
    assert str(found).startswith(f"bottleneck: {part}, {found.share:.1%} of the FLOPs")
    assert found.limit(found.intensity / 2) == "compute" and found.limit(found.intensity * 2) == "memory"


@pytest.mark.ledger("S3.Q2d.1")
def test_the_bottleneck_moves_to_the_core_at_n_equal_to_twice_the_width():
    spec = rg.Attention(64, heads=4)
    assert [cost(spec, n=n).bottleneck.part for n in (127, 129)] == ["projections", "core"]
    even = cost(spec, n=128)
    assert sum(even[p].total.flops for p in PROJECTIONS) * 2 == even.flops


@each("flops.crossover")
@pytest.mark.ledger("S0.Q1c.8", "S0.Q1c.9", "S4.1.4b.2")
def test_the_lengths_at_which_two_costs_are_equal(c):
    d = c["inputs"]["d"]
    at = {(x.first, x.second): x.n for x in crossovers(d)}
    five = {(x.first, x.second): x.n for x in crossovers(d, kernel=5)}
    result = {
        "core_equals_projections": at["attention core", "its projections"],
        "core_equals_plain_rnn": at["attention core", "RNN"],
        "attention_equals_gru": at["attention", "GRU"],
        "attention_equals_lstm": at["attention", "LSTM"],
        "attention_equals_conv_k5": float(five["attention", "convolution"]),
        "attention_ge_plain_rnn_always": at["attention", "RNN"] is None,
    }
    assert agrees(result, c["expected"], c["compare"])
    assert at["attention", "convolution"] is None  # three taps: attention always costs more


@each("flops.scores_absolute")
@pytest.mark.ledger("S2.2.1.2", "S2.2.1.4", "S2.2.0.1")
def test_flops_of_scores_in_three_orders_of_the_products(c):
    n, d = c["inputs"]["n"], c["inputs"]["d"]
    orders = cost(rg.Attention(d, heads=1), n=n).score_orders
    assert orders == score_orders(n, n, d)
    assert f"{orders.naive:,} if each pair projects its vectors" in str(cost(rg.Attention(d, heads=1), n=n))
    ratio = orders.naive / orders.projected
    result = {
        "naive": orders.naive,
        "project_once": orders.projected,
        "merged": orders.merged_qk,
        "naive_over_project_once": ratio,
    }
    assert agrees(result, c["expected"], c["compare"])


def test_scores_projected_once_are_the_terms_q_k_and_scores():
    result = cost(rg.Attention(60, heads=4, d_k=5, d_v=3), n=7, m=11)
    assert result.score_orders.projected == sum(result[p].total.flops for p in ("q", "k", "scores"))
    assert cost(rg.Attention(60, heads=4, score="additive"), n=7).score_orders is None


@each("flops.scores_relative")
@pytest.mark.ledger("S2.2.2.2", "S2.2.2.3", "S2.2.2.4")
def test_flops_of_relative_position_scores_per_pair_and_per_offset(c):
    i = c["inputs"]
    orders = relative_orders(i["n"], i["n"], i["d_p"], i["d"])
    result = {
        "position_only_per_pair": orders.per_pair,
        "distinct_offsets": orders.offsets,
        "position_only_per_offset": orders.per_offset,
        "with_content": orders.with_content,
    }
    assert result == c["expected"]
    assert (
        orders.with_content > score_orders(i["n"], i["n"], i["d"]).projected
    )  # relative costs more, not less


@pytest.mark.ledger("S2.2.2.2")
def test_a_declared_relative_position_is_counted_per_pair_and_per_offset():
    line = cost(rg.Attention(60, heads=4, position=rg.quadratic()), n=100)
    assert line.position_orders == relative_orders(100, 100, 2, 60, heads=4)
    assert (line.position_orders.per_pair, line.position_orders.per_offset) == (160_000, 2 * 4 * 199 * 2)
    assert line.position_orders.with_content - line.position_orders.per_pair == line.score_orders.projected
    assert (
        "FLOPs of position scores: 160,000 if computed for each pair; 3,184 for each of 199 distinct offsets"
        in str(line)
    )
    grid = cost(rg.Attention(60, heads=4, score="position", position=rg.quadratic((3, 5))), n=15)
    assert grid.position_orders.offsets == 5 * 9 and grid.position_orders.per_pair == 2 * 4 * 15 * 15 * 3
    assert cost(rg.Attention(60, heads=4, position=rg.alibi()), n=10).position_orders is None


@pytest.mark.ledger("S2.2.2.3")
def test_position_only_scores_still_project_the_values():
    result = cost(rg.Attention(512, heads=8, score="position", position=rg.quadratic()), n=100)
    assert result["v"].total.flops == 2 * 100 * 512**2 and of(result.tree, "scores") == 0


@each("compare.layers")
@pytest.mark.ledger(
    "S1.Q2a.1", "S1.Q2a.2", "S1.Q2a.3", "S0.Q1c.1", "S0.Q1c.5", "S1.Q6b.1", "S4.1.4a.1", "S4.1.4b.3"
)
def test_layer_types_compared(c):
    i, expected = c["inputs"], c["expected"]
    n, d, k, w = i["n"], i["d"], i["k"], i["w"]
    result = compare(n, d, k, w)

    def row(name, flops="flops", path="layers_to_connect_all"):
        l = result[name]
        return {flops: l.flops, "sequential": l.sequential_steps, path: l.path_length}

    attention, window, rnn = result["attention"], result["restricted attention"], row("RNN", path="path")
    pairs = rg.window(w).count(n)
    found = {
        "self_attention": row("attention", "with_projections") | {"core_flops": attention.core_flops},
        "recurrent_vanilla": rnn | {"hidden_only_flops": cost_of_states(n, d)},
        "recurrent_gru": row("GRU", path="path"),
        "recurrent_lstm": row("LSTM", path="path"),
        "conv": row("convolution"),
        "conv_causal": row("causal convolution"),
        "conv_dilated": row("dilated convolution"),
        "conv_dilated_causal": row("dilated causal convolution"),
        "conv_separable": row("separable convolution"),
        "restricted_attention": {
            "window": 2 * w + 1,
            "nnz": pairs,
            "core_flops": window.core_flops,
            "core_flops_no_edges": 4 * n * (2 * w + 1) * d,
            "sequential": window.sequential_steps,
            "layers_to_connect_all": window.path_length,
        },
    }
    assert agrees(found, expected, c["compare"])
    assert window.core_flops == 4 * pairs * d


def cost_of_states(n, d):
    return cost(rg.Recurrent(1, d, cell="rnn", attention="none"), n=n)["encoder/layer_0/states"].total.flops


READINGS = {
    "band": rg.window(2),
    "columns": rg.window(2) | rg.every(4),
    "columns+rows": rg.window(2) | rg.every(4) | rg.rows(4),
    "strided": rg.window(2) | rg.strided(4),
}


@each("cost.sparse_layer")
@pytest.mark.ledger("S1.Q6a.1", "S1.Q6a.2", "S1.Q6a.3", "S1.Q6a.4", "S1.Q6a.6")
def test_what_a_pattern_saves_in_the_core_and_in_the_layer(c):
    i, pattern = c["inputs"], READINGS[c["id"].removeprefix("cost.sparse16.")]
    result = cost(rg.Attention(i["d_model"], pattern=pattern), n=i["n"])
    dense = cost(rg.Attention(i["d_model"]), n=i["n"])
    assert result.pairs[0].needed == i["nnz"]
    found = {
        "core": result["scores"].total.flops + result["mixing"].total.flops,
        "core_full": dense["scores"].total.flops + dense["mixing"].total.flops,
        "projections": sum(result[p].total.flops for p in PROJECTIONS),
        "core_saving_percent": 100 * result.saving.core,
        "layer_saving_percent": 100 * result.saving.total,
    }
    assert agrees(found, c["expected"], {"type": "close", "rel": 1e-12, "abs": 1e-13})
    assert (
        result.pairs[0].backend == "sdpa" and result.saving.core_executed == result.saving.total_executed == 0
    )


@each("mask.pattern")
@pytest.mark.ledger("S1.Q6a.1", "S1.Q6a.2", "S1.Q6a.3", "S1.Q6a.4")
def test_pairs_and_layers_of_the_16_by_16_patterns(c):
    i = c["inputs"]
    base, k, phase = rg.window(i["window"]), i["stride"], i["phase"]
    pattern = {
        "band": base,
        "columns": base | rg.every(k, phase),
        "columns+rows": base | rg.every(k, phase) | rg.rows(k, phase),
        "strided": base | rg.strided(k),
    }[i["reading"]]
    pattern = rg.causal() & pattern if i["causal"] else pattern
    result = cost(rg.Attention(64, pattern=pattern), n=i["n"])
    assert result.pairs[0].needed == c["expected"]["nnz"]
    assert 100 * result.saving.core == pytest.approx(c["expected"]["saving_percent"], rel=1e-12)
    assert layers_to_connect(pattern, i["n"]) == c["expected"]["layers_to_connect_all"]


@pytest.mark.ledger("S1.Q6b.1")
def test_a_window_of_two_over_a_thousand_tokens():
    result = cost(rg.Attention(512, pattern=rg.window(2)), n=1000)
    assert result.pairs[0].needed == 4994 and result.pairs[0].full == 1_000_000
    assert result.pairs[0].computed < 1_000_000 / 4 and result.pairs[0].backend == "tiles"
    assert layers_to_connect(rg.window(2), 1000) == 500 and layers_to_connect(rg.full(), 1000) == 1


@each("receptive_field")
@pytest.mark.ledger("S3.Q2a.1", "S3.Q2a.2", "S3.Q2a.3")
def test_the_receptive_field_is_bounded_and_the_bound_is_reached(c):
    k, layers, length = (c["inputs"][x] for x in ("heads", "layers", "seq_len"))
    result = receptive_field(k, layers, length)
    found = {"bound": result.bound, "clipped": result.clipped, "contiguous_shifts": result.neighbors}
    assert found == c["expected"]
    spread = [[s * (k + 1) ** l for s in range(1, k + 1)] for l in range(layers)]
    near = [range(1, k + 1)] * layers
    last = result.bound if length is None else length - 1
    assert len(receptive_set(last, spread, length)) == result.clipped
    assert len(receptive_set(last, near, length)) == result.neighbors
    assert len(receptive_set(0, spread, length)) == 1  # no token precedes the first


@pytest.mark.ledger("S4.1.4a.2", "S0.Q1c.1")
def test_the_core_grows_with_the_square_of_the_length_and_the_rest_with_the_length():
    short, long = (cost(rg.Attention(64), n=n) for n in (100, 200))
    assert long["scores"].total.flops == 4 * short["scores"].total.flops
    assert long["q"].total.flops == 2 * short["q"].total.flops


@pytest.mark.ledger("S2.3.3.2")
def test_a_stride_divides_what_the_queries_cost():
    whole, half = (cost(rg.Attention(64, pattern=rg.full()), n=n, m=100) for n in (100, 50))
    assert 2 * half["scores"].total.flops == whole["scores"].total.flops
    assert 2 * half["output"].total.flops == whole["output"].total.flops


@pytest.mark.ledger("S1.Q6b.3")
def test_an_additive_score_has_elementwise_flops_where_a_dot_product_has_matrix_flops():
    result = cost(rg.Attention(512, heads=1, score="additive"), n=1000)
    assert (
        result["scores"].total.elementwise_flops == 1000 * 1000 * (4 * 512 - 1)
        and result["scores"].total.flops == 0
    )
    assert cost(rg.Attention(512, heads=1), n=1000)["scores"].total.flops == 2 * 1000 * 1000 * 512
