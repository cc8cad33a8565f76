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
    relative_ways,
    score_ways,
)
from regard.costs.layer_types import crossings

PROJECTIONS = ("q", "k", "v", "output")


def each(kind):
    return pytest.mark.parametrize("c", cases(kind), ids=lambda c: c["id"])


def of(tree, name, amount="operations"):
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
    told = {
        "per_head": qkv // i["heads"],
        "qkv_weights": qkv,
        "qkv_biases": sum(of(priced.tree, name, "parameters") for name in "qkv") - qkv,
        "out_weight": of(bare, "output", "parameters"),
        "out_bias": of(priced.tree, "output", "parameters") - of(bare, "output", "parameters"),
        "total": priced.parameters,
    }
    assert agrees(told, c["expected"], c["compare"])


@pytest.mark.ledger("S0.Q2a.5", "S2.1.2.5", "S2.3.2.6")
def test_biases_stand_side_by_side_and_say_nothing_by_default():
    told = cost(rg.Attention(512), n=10)
    assert told.biases == {"none": 1_048_576, "output": 1_049_088, "all": 1_050_624}
    assert "parameters with biases none: 1,048,576, output: 1,049,088, all: 1,050,624" in str(told)
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
    told = cost(rg.Embedding(11, i["d_model"], position=position), n=7)
    assert {"total": told["position"].total.parameters} == c["expected"]
    assert told["position"].total.other == 7 * i["d_model"]  # N·D additions, and no product


@each("params.ffn")
@pytest.mark.ledger("S4.1.4d.1")
def test_the_parameters_of_a_feed_forward(c):
    i = c["inputs"]

    def count(bias):
        block = rg.Block(rg.Attention(i["d_model"]), rg.FeedForward(i["d_ff"], bias=bias))
        return cost(block, n=5)["feed_forward"].total.parameters

    told = {"weights": count(False), "biases": count(True) - count(False), "total": count(i["bias"])}
    assert told == c["expected"]


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

    told = {
        "encoder_layer": count("encoder/block") // i["enc_layers"],
        "decoder_layer": count("decoder/block") // i["dec_layers"],
        "encoder_stack": count("encoder/block"),
        "decoder_stack": count("decoder/block"),
        "final_norms": sum(of(tree[s], "norm", "parameters") for s in ("encoder", "decoder")),
        "embeddings": sum(of(tree[s], "embedding", "parameters") for s in ("encoder", "decoder")),
        "total": tree.total.parameters,
    }
    assert told == c["expected"]


@pytest.mark.ledger("S1.Q5a.1")
def test_the_tables_of_hello_world_are_2_by_2_and_3_by_3_and_3_by_2():
    expected = case("shapes.hello_world")["expected"]
    pairs = {p.where: p for p in cost("transformer-base", n=3, m=2).pairs}
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
    told = cost(spec)
    tree = told.tree

    def count(path):
        return tree[path].total.parameters

    told = {
        "patches": spec.tokens - 1,
        "tokens": told.sizes["n"],
        "patch_embed": count("patches"),
        "cls_token": count("class_token"),
        "pos_embed": count("position"),
        "per_layer": count("encoder/block") // i["layers"],
        "layers": count("encoder/block"),
        "final_norm": count("encoder/norm"),
        "head_linear": count("head"),
        "total": tree.total.parameters,
    }
    assert told == c["expected"]


@each("flops.attention")
@pytest.mark.ledger("S0.Q1c.2", "S0.Q1c.3", "S0.Q2a.8", "S0.Q2a.9", "S0.Q2a.10", "S1.Q2b.3", "S1.Q6b.2")
@pytest.mark.ledger("S3.Q2c.1", "S3.Q2c.3", "S3.Q2c.5", "S3.Q2c.6", "S2.2.1.3")
def test_the_operations_of_an_attention_term_by_term(c):
    i = c["inputs"]
    spec = rg.Attention(i["heads"] * i["d_head"], heads=i["heads"], output=i.get("out_proj", True))
    tree = cost(spec, n=i["n_t"], m=i["n_s"]).tree
    told = {
        "q_proj": of(tree, "q"),
        "k_proj": of(tree, "k"),
        "v_proj": of(tree, "v"),
        "scores": of(tree, "scores"),
        "scale": of(tree, "scale", "other"),
        "softmax": of(tree, "softmax", "other"),
        "mix": of(tree, "mixing"),
        "out_proj": of(tree, "output"),
        "matmul_total": tree.total.operations,
        "projections": sum(of(tree, p) for p in PROJECTIONS),
        "core": of(tree, "scores") + of(tree, "mixing"),
        "grand_total": tree.total.operations + tree.total.other,
    }
    assert told == c["expected"]


@pytest.mark.ledger("S3.Q2c.2", "S3.Q2c.4")
def test_folding_heads_is_no_term_for_a_view_costs_nothing():
    names = [p.name for p in cost(rg.Attention(512), n=128, m=256).tree.parts]
    assert names == ["q", "k", "v", "scores", "scale", "softmax", "mixing", "output"]
    one, eight = (cost(rg.Attention(512, heads=h), n=128) for h in (1, 8))
    assert one.operations == eight.operations and one.total.bytes == eight.total.bytes


@pytest.mark.parametrize(
    ("id", "part", "told"),
    [
        ("flops.short_wide.32.32.16x128", "projections", "128.0 times their work"),
        ("flops.long_narrow.8192.8192.4x16", "core", "64.0 times their work"),
    ],
)
@pytest.mark.ledger("S3.Q2d.1", "S3.Q2d.2")
def test_the_bottleneck_is_named_with_its_reason(id, part, told):
    i, expected = case(id)["inputs"], case(id)["expected"]
    spec = rg.Attention(i["heads"] * i["d_head"], heads=i["heads"])
    found = cost(spec, n=i["n_t"], m=i["n_s"]).bottleneck
    assert (found.part, found.operations) == (part, expected[part]) and told in found.why
    assert found.share == expected[part] / expected["matmul_total"]
    assert str(found).startswith(f"bottleneck: {part}, {found.share:.1%} of the operations")
    assert found.limit(found.intensity / 2) == "operations" and found.limit(found.intensity * 2) == "bytes"


@pytest.mark.ledger("S3.Q2d.1")
def test_the_bottleneck_changes_sides_at_twice_the_width():
    spec = rg.Attention(64, heads=4)
    assert [cost(spec, n=n).bottleneck.part for n in (127, 129)] == ["projections", "core"]
    even = cost(spec, n=128)
    assert sum(even[p].total.operations for p in PROJECTIONS) * 2 == even.operations


@each("flops.crossover")
@pytest.mark.ledger("S0.Q1c.8", "S0.Q1c.9", "S4.1.4b.2")
def test_the_lengths_at_which_two_costs_are_equal(c):
    d = c["inputs"]["d"]
    at = {(x.first, x.second): x.n for x in crossings(d)}
    five = {(x.first, x.second): x.n for x in crossings(d, kernel=5)}
    told = {
        "core_equals_projections": at["attention's core", "its projections"],
        "core_equals_plain_rnn": at["attention's core", "RNN"],
        "attention_equals_gru": at["attention", "GRU"],
        "attention_equals_lstm": at["attention", "LSTM"],
        "attention_equals_conv_k5": float(five["attention", "convolution"]),
        "attention_ge_plain_rnn_always": at["attention", "RNN"] is None,
    }
    assert agrees(told, c["expected"], c["compare"])
    assert at["attention", "convolution"] is None  # three taps: attention always costs more


@each("flops.scores_absolute")
@pytest.mark.ledger("S2.2.1.2", "S2.2.1.4", "S2.2.0.1")
def test_scores_projected_for_every_pair_once_or_merged(c):
    n, d = c["inputs"]["n"], c["inputs"]["d"]
    ways = cost(rg.Attention(d, heads=1), n=n).score_ways
    assert ways == score_ways(n, n, d)
    assert f"{ways.again:,} projected again for each pair" in str(cost(rg.Attention(d, heads=1), n=n))
    ratio = ways.again / ways.once
    told = {
        "naive": ways.again,
        "project_once": ways.once,
        "merged": ways.merged,
        "naive_over_project_once": ratio,
    }
    assert agrees(told, c["expected"], c["compare"])


def test_scores_projected_once_are_the_terms_q_k_and_scores():
    told = cost(rg.Attention(60, heads=4, d_k=5, d_v=3), n=7, m=11)
    assert told.score_ways.once == sum(told[p].total.operations for p in ("q", "k", "scores"))
    assert cost(rg.Attention(60, heads=4, score="additive"), n=7).score_ways is None


@each("flops.scores_relative")
@pytest.mark.ledger("S2.2.2.2", "S2.2.2.3", "S2.2.2.4")
def test_scores_of_relative_positions_for_every_pair_or_each_offset_once(c):
    i = c["inputs"]
    ways = relative_ways(i["n"], i["n"], i["d_p"], i["d"])
    told = {
        "position_only_per_pair": ways.pairs,
        "distinct_offsets": ways.offsets,
        "position_only_per_offset": ways.each_offset_once,
        "with_content": ways.with_content,
    }
    assert told == c["expected"]
    assert ways.with_content > score_ways(i["n"], i["n"], i["d"]).once  # relative costs more, not less


@pytest.mark.ledger("S2.2.2.2")
def test_a_declared_relative_position_is_counted_for_every_pair_and_for_each_offset_once():
    line = cost(rg.Attention(60, heads=4, position=rg.quadratic()), n=100)
    assert line.position_ways == relative_ways(100, 100, 2, 60, heads=4)
    assert (line.position_ways.pairs, line.position_ways.each_offset_once) == (160_000, 2 * 4 * 199 * 2)
    assert line.position_ways.with_content - line.position_ways.pairs == line.score_ways.once
    assert (
        "scores of positions: 160,000 operations for every pair; 3,184 for each of 199 offsets once"
        in str(line)
    )
    grid = cost(rg.Attention(60, heads=4, score="position", position=rg.quadratic((3, 5))), n=15)
    assert grid.position_ways.offsets == 5 * 9 and grid.position_ways.pairs == 2 * 4 * 15 * 15 * 3
    assert cost(rg.Attention(60, heads=4, position=rg.alibi()), n=10).position_ways is None


@pytest.mark.ledger("S2.2.2.3")
def test_a_score_of_position_alone_still_projects_its_values():
    told = cost(rg.Attention(512, heads=8, score="position", position=rg.quadratic()), n=100)
    assert told["v"].total.operations == 2 * 100 * 512**2 and of(told.tree, "scores") == 0


@each("compare.layers")
@pytest.mark.ledger("S1.Q2a.1", "S1.Q2a.2", "S1.Q2a.3", "S0.Q1c.1", "S0.Q1c.5", "S1.Q6b.1", "S4.1.4a.1")
def test_layer_types_compared(c):
    i, expected = c["inputs"], c["expected"]
    n, d, k, w = i["n"], i["d"], i["k"], i["w"]
    told = compare(n, d, k, w)

    def row(name, flops="flops", path="layers_to_connect_all"):
        l = told[name]
        return {flops: l.operations, "sequential": l.sequential, path: l.path}

    attention, window, rnn = told["attention"], told["restricted attention"], row("RNN", path="path")
    pairs = rg.window(w).count(n)
    found = {
        "self_attention": row("attention", "with_projections") | {"core_flops": attention.core},
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
            "core_flops": window.core,
            "core_flops_no_edges": 4 * n * (2 * w + 1) * d,
            "sequential": window.sequential,
            "layers_to_connect_all": window.path,
        },
    }
    assert agrees(found, expected, c["compare"])
    assert window.core == 4 * pairs * d


def cost_of_states(n, d):
    return cost(rg.Recurrent(1, d, cell="rnn", attention="none"), n=n)[
        "encoder/layer_0/states"
    ].total.operations


READINGS = {
    "band": rg.window(2),
    "columns": rg.window(2) | rg.every(4),
    "columns+rows": rg.window(2) | rg.every(4) | rg.rows(4),
    "strided": rg.window(2) | rg.strided(4),
}


@each("cost.sparse_layer")
@pytest.mark.ledger("S1.Q6a.1", "S1.Q6a.2", "S1.Q6a.3", "S1.Q6a.4", "S1.Q6a.6")
def test_what_a_pattern_saves_of_the_core_and_of_the_whole_layer(c):
    i, pattern = c["inputs"], READINGS[c["id"].removeprefix("cost.sparse16.")]
    told = cost(rg.Attention(i["d_model"], pattern=pattern), n=i["n"])
    dense = cost(rg.Attention(i["d_model"]), n=i["n"])
    assert told.pairs[0].needed == i["nnz"]
    found = {
        "core": told["scores"].total.operations + told["mixing"].total.operations,
        "core_full": dense["scores"].total.operations + dense["mixing"].total.operations,
        "projections": sum(told[p].total.operations for p in PROJECTIONS),
        "core_saving_percent": 100 * told.saving.core,
        "layer_saving_percent": 100 * told.saving.whole,
    }
    assert agrees(found, c["expected"], {"type": "close", "rel": 1e-12, "abs": 1e-13})
    assert told.pairs[0].backend == "masked" and told.saving.core_computed == told.saving.whole_computed == 0


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
    told = cost(rg.Attention(64, pattern=pattern), n=i["n"])
    assert told.pairs[0].needed == c["expected"]["nnz"]
    assert 100 * told.saving.core == pytest.approx(c["expected"]["saving_percent"], rel=1e-12)
    assert layers_to_connect(pattern, i["n"]) == c["expected"]["layers_to_connect_all"]


@pytest.mark.ledger("S1.Q6b.1")
def test_a_window_of_two_over_a_thousand_tokens():
    told = cost(rg.Attention(512, pattern=rg.window(2)), n=1000)
    assert told.pairs[0].needed == 4994 and told.pairs[0].full == 1_000_000
    assert told.pairs[0].computed < 1_000_000 / 4 and told.pairs[0].backend == "progressions"
    assert layers_to_connect(rg.window(2), 1000) == 500 and layers_to_connect(rg.full(), 1000) == 1


@each("receptive_field")
@pytest.mark.ledger("S3.Q2a.1", "S3.Q2a.2", "S3.Q2a.3")
def test_the_receptive_field_is_bounded_and_the_bound_is_reached(c):
    k, layers, length = (c["inputs"][x] for x in ("heads", "layers", "seq_len"))
    told = receptive_field(k, layers, length)
    found = {"bound": told.bound, "clipped": told.clipped, "contiguous_shifts": told.neighbours}
    assert found == c["expected"]
    spread = [[s * (k + 1) ** l for s in range(1, k + 1)] for l in range(layers)]
    near = [range(1, k + 1)] * layers
    last = told.bound if length is None else length - 1
    assert len(receptive_set(last, spread, length)) == told.clipped
    assert len(receptive_set(last, near, length)) == told.neighbours
    assert len(receptive_set(0, spread, length)) == 1  # nothing stands before the first token


@pytest.mark.ledger("S4.1.4a.2", "S0.Q1c.1")
def test_the_core_grows_with_the_square_of_the_length_and_the_rest_with_the_length():
    short, long = (cost(rg.Attention(64), n=n) for n in (100, 200))
    assert long["scores"].total.operations == 4 * short["scores"].total.operations
    assert long["q"].total.operations == 2 * short["q"].total.operations


@pytest.mark.ledger("S2.3.3.2")
def test_a_stride_divides_what_the_queries_cost():
    whole, half = (cost(rg.Attention(64, pattern=rg.full()), n=n, m=100) for n in (100, 50))
    assert 2 * half["scores"].total.operations == whole["scores"].total.operations
    assert 2 * half["output"].total.operations == whole["output"].total.operations


@pytest.mark.ledger("S1.Q6b.3")
def test_an_additive_score_works_on_four_values_where_a_dot_multiplies_two():
    told = cost(rg.Attention(512, heads=1, score="additive"), n=1000)
    assert told["scores"].total.other == 1000 * 1000 * (4 * 512 - 1) and told["scores"].total.operations == 0
    assert cost(rg.Attention(512, heads=1), n=1000)["scores"].total.operations == 2 * 1000 * 1000 * 512
