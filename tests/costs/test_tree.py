"""A cost as a value: one arithmetic for numbers and formulas, a tree that adds up, tables, and error messages."""

import io
import json
import re
import sys
from dataclasses import replace

import pytest
import sympy
import torch
from hypothesis import HealthCheck, given, settings

import cost_witness as witness
import regard as rg
from cost_strategies import specs
from regard.costs import Amounts, Cost, Part, cost
from regard.costs.sizes import Symbols
from regard.errors import BackendError, ShapeError, SpecError

pytestmark = [
    pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies"),
    pytest.mark.filterwarnings("ignore::regard.EmptyRowWarning"),
]
n, d_model, h, b = sympy.symbols("n d_model h b", integer=True, positive=True)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(specs)
def test_every_formula_evaluates_to_its_number(spec):
    symbols = Symbols()
    written = dict(witness.priced(spec, train=True, by=symbols).terms())
    for path, amounts in witness.priced(spec, train=True).terms():
        for name, number in amounts.plain().items():
            formula = sympy.sympify(getattr(written[path], name))
            assert formula.xreplace(symbols.values) == number, (path, name)


@pytest.mark.ledger("S0.Q1c.2", "S0.Q1c.3", "S2.2.0.1")
def test_the_formula_of_an_attention_is_the_ledgers():
    result = cost(rg.Attention(512), n=1000)
    assert sympy.expand(result.formula - b * (8 * n * d_model**2 + 4 * n**2 * d_model)) == 0
    assert result.order == b * n * d_model**2 + b * n**2 * d_model
    qkv = sum(result.symbolic[p].total.flops for p in "qkv")
    assert sympy.expand(qkv - 6 * b * n * d_model**2) == 0
    softmax = result.symbolic["softmax"].total.elementwise_flops
    assert sympy.expand(softmax - b * h * n * (5 * n - 2)) == 0
    assert result.formula.subs(result.values) == result.flops == 4_145_152_000


@pytest.mark.ledger("S2.1.2.5")
def test_the_formula_of_free_sizes_is_the_general_one():
    spec = rg.Attention(3, heads=9, d_k=4, d_v=5, d_out=6, biases="output")
    d_k, d_v, d_out = sympy.symbols("d_k d_v d_out", integer=True, positive=True)
    result = cost(spec, n=2).symbolic.total.parameters
    assert sympy.expand(result - (h * d_model * (2 * d_k + d_v) + h * d_v * d_out + d_out)) == 0


@pytest.mark.parametrize("pattern", [rg.full(), rg.causal(), rg.window(3), rg.window(5, 2)], ids=repr)
def test_a_closed_form_holds_at_other_lengths(pattern):
    here, there = (cost(rg.Attention(64, pattern=pattern), n=size) for size in (40, 97))
    assert here.formula.subs(n, 97).subs(here.values) == there.flops
    assert {s.name for s in here.formula.free_symbols} <= {"b", "n", "d_model"}


def test_pairs_without_a_closed_form_become_a_symbol():
    result = cost(rg.Attention(64, pattern=rg.window(2) | rg.every(4)), n=40)
    assert "pairs" in {s.name for s in result.formula.free_symbols}
    assert result.formula.subs(result.values) == result.flops


def test_the_formula_of_a_part_without_products_is_zero():
    result = cost(rg.Embedding(30, 16), n=4)
    assert result.formula == result.order == result.flops == 0
    assert result.symbolic.total.parameters.subs(result.values) == result.parameters == 30 * 16


def test_one_name_for_two_sizes_becomes_two_symbols():
    wide, narrow = (rg.Encoder(rg.Block(rg.Attention(64), rg.FeedForward(f)), 2) for f in (256, 100))
    block = rg.Block(rg.Attention(64, pattern=rg.causal()), rg.FeedForward(100), cross=rg.Attention(64))
    result = cost(rg.EncoderDecoder(wide, rg.Decoder(block, 2)), n=5, m=7)
    assert {s.name: v for s, v in result.values.items() if "d_ff" in s.name} == {"d_ff": 256, "d_ff_2": 100}
    assert cost(narrow, n=5).formula.subs(cost(narrow, n=5).values) == cost(narrow, n=5).flops


def test_the_tree_adds_up_and_layers_multiply():
    result = cost("gpt2", n=64, batch=3)
    added = sum((a for _, a in result.tree.terms()), Amounts())
    assert added == result.total and result["block"].times == 12
    assert result["block/attention/q"].total.flops == 2 * 3 * 64 * 768 * 768
    paths = {part.name: path for path, part, _ in result.tree.nodes()}
    assert (paths["model"], paths["block"], paths["q"]) == ("", "block", "block/attention/q")
    whole = {part.name: times * part.total.flops for _, part, times in result.tree.nodes()}
    assert whole["q"] == 12 * 2 * 3 * 64 * 768 * 768


def test_the_batch_size_multiplies_flops_and_not_parameters():
    one, five = (cost("tiny-gpt", n=32, batch=size) for size in (1, 5))
    assert five.flops == 5 * one.flops and five.parameters == one.parameters


def test_the_table_has_terms_pairs_savings_bottleneck_and_convention():
    result = str(cost(rg.Attention(512, pattern=rg.window(2) | rg.every(4)), n=16))
    assert "scores                  122,880     262,144                 0.4%" in result
    assert "pairs in attention: window(2) | every(4) allows 120 of 256; backend sdpa computes 256" in result
    assert (
        "the pattern saves 53.1250% of the FLOPs of scores and mixing, 0.8173% of the total; with this backend 0"
        in result
    )
    assert "bottleneck: projections, 98.5% of the FLOPs" in result
    assert (
        "a multiply-add is 2 FLOPs; FLOPs are those of matrix products; a softmax over m entries is 5m − 2"
        in result
    )


def test_backward_and_recomputation_get_columns_when_training():
    block = rg.Block(rg.Attention(64), rg.FeedForward(128))
    plain = cost(rg.Encoder(block, 2), n=32, train=True, backend="reference")
    again = cost(rg.Encoder(block, 2, checkpoint=True), n=32, train=True, backend="reference")
    assert (
        again.total.executed_backward_flops - plain.total.executed_backward_flops
        == plain.total.executed_flops
    )
    assert "backward" in str(plain) and "executed backward" not in str(plain)
    assert "executed backward" in str(again) and "checkpointed" in str(again)
    assert "backward" not in str(cost(rg.Encoder(block, 2), n=32)).split("\n\n")[1]


def test_json_contains_the_whole_cost():
    result = cost("tiny", n=8, m=6)
    data = json.loads(result.json())
    assert data["total"]["parameters"] == result.parameters == data["tree"]["parameters"]
    assert data["sizes"] == {"n": 8, "m": 6, "batch": 1, "dtype": "float32", "device": "cpu", "train": False}
    assert [p["path"] for p in data["pairs"]] == [p.path for p in result.pairs]
    assert (
        data["saving"]["core"] == result.saving.core and data["bottleneck"]["part"] == result.bottleneck.part
    )
    encoder = data["tree"]["parts"][0]
    assert encoder["name"] == "encoder" and encoder["flops"] == result["encoder"].total.flops


def test_a_notebook_and_a_terminal_show_the_same_rows():
    rich = pytest.importorskip("rich.console")
    result = cost("tiny-gpt", n=32)
    page = result._repr_html_()
    console = rich.Console(width=160, record=True, file=io.StringIO())
    console.print(result)
    shown = console.export_text()
    for part in ("feed_forward", "w_gate", f"{result.parameters:,}", "block × 4"):
        assert part in page and part in shown and part in str(result)
    assert "<p>&lt;b&gt;<br></p>" in Cost("<b>", {}, Part("x"))._repr_html_()


def test_latex_writes_each_term_and_the_total():
    result = cost(rg.Attention(512), n=1000).latex
    assert result.startswith(r"\begin{array}{l|r|r|r}") and result.endswith(r"\end{array}")
    assert r"\text{softmax} & 0 & 0 & b h \left(5 n^{2} - 2 n\right) \\" in result
    assert (
        r"\text{total} & 4 d_{model}^{2} + 4 d_{model} & 8 b d_{model}^{2} n + 4 b d_{model} n^{2}" in result
    )


def test_spec_cost_is_the_same_function():
    spec = rg.preset("vit-b16")
    assert spec.cost() == cost(spec) and spec.cost(batch=2, dtype="bfloat16").sizes["dtype"] == "bfloat16"
    assert cost("gpt2", n=10) == rg.preset("gpt2").cost(10)


def test_a_module_that_was_declared_is_priced_by_its_declaration():
    spec = rg.Attention(64, heads=4)
    assert cost(spec.build(), n=32) == cost(spec, n=32)


def test_16_bit_dtypes_halve_the_bytes_and_not_the_flops():
    wide, half = (cost(rg.Attention(64), n=32, dtype=t) for t in (torch.float32, torch.bfloat16))
    assert wide.total.bytes == 2 * half.total.bytes and wide.flops == half.flops


def test_a_sparse_backend_computes_little_more_than_the_pattern_allows():
    result = cost(rg.Attention(512, pattern=rg.causal() & (rg.window(128) | rg.every(64))), n=4096)
    (pairs,) = result.pairs
    assert pairs.backend == "tiles" and 1.0 <= pairs.waste < 4.0
    assert pairs.needed == (rg.causal() & (rg.window(128) | rg.every(64))).count(4096)
    assert 0 < result.saving.core_executed < result.saving.core < 1


def test_a_fused_backend_does_not_move_the_table_of_scores():
    spec = rg.Attention(64, heads=4)
    fused, plain = (cost(spec, n=256, backend=name) for name in ("sdpa", "reference"))
    table = 4 * 4 * 256 * 256
    assert plain["softmax"].total.bytes == 2 * table and fused["softmax"].total.bytes == 0
    assert plain["scores"].total.bytes - fused["scores"].total.bytes == table


def test_a_query_with_no_allowed_key_has_no_softmax():
    result = cost(rg.Attention(64, pattern=rg.causal() - rg.window(2)), n=10)
    assert result["softmax"].total.elementwise_flops == 8 * (5 * result.pairs[0].needed - 2 * 7)


def test_cross_attention_with_more_queries_than_keys_has_query_offset_0():
    spec = rg.Attention(60, heads=4, d_context=22, pattern=rg.causal())
    result = cost(spec, n=13, m=11)
    assert result.pairs[0].needed == rg.causal().count(13, 11, 0) == 11 * 12 // 2 + 2 * 11
    assert spec.build()(torch.zeros(1, 13, 60), torch.zeros(1, 11, 22)).shape == (1, 13, 60)


def test_mixing_without_weights_has_neither_parameters_nor_products():
    result = cost(rg.Mixing("average"), n=10, batch=2)
    assert (result.parameters, result.flops, result.total.elementwise_flops, result.bottleneck) == (
        0,
        0,
        20,
        None,
    )


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": "gtp2", "n": 5}, "unknown preset 'gtp2'; did you mean gpt2?"),
        ({"model": "gpt2"}, "n is missing: pass the number of positions, for example n=1000"),
        ({"model": "gpt2", "n": 0}, "n=0 is not a positive integer"),
        ({"model": "gpt2", "n": -3}, "n=-3 is not a positive integer"),
        ({"model": "gpt2", "n": True}, "n=True is not a positive integer"),
        ({"model": "tiny", "n": 5, "m": 0}, "m=0 is not a positive integer"),
        ({"model": "gpt2", "n": 5, "batch": 0}, "batch=0 is not a positive integer"),
        ({"model": "gpt2", "n": 5, "m": 7}, "m=7: Encoder attends to its own 5 positions only; leave m out"),
        (
            {"model": "gpt2", "n": 2048},
            "n=2048 exceeds the table of learned(1024); use n up to 1024",
        ),
        (
            {"model": "gpt2", "n": 5, "backend": "mask"},
            "unknown backend 'mask'; known: auto, flash4, flex, reference, sdpa, tiles, triton",
        ),
        ({"model": "gpt2", "n": 5, "dtype": "float31"}, "unknown dtype 'float31'; did you mean float32?"),
        ({"model": "gpt2", "n": 5, "device": "cud"}, "unknown device 'cud'; did you mean cuda?"),
        (
            {"model": "gpt2", "n": 5, "dtype": torch.int64},
            "unknown dtype 'int64'; known: bfloat16, float16, float32, float64",
        ),
        (
            {"model": "vit-b16", "n": 5},
            "n=5, m=None: an image of (224, 224) in patches of (16, 16) is 197 tokens; leave n and m out, or "
            "declare another image size",
        ),
        (
            {"model": rg.FeedForward(64), "n": 5},
            "FeedForward(64) has no width of its own; ask for the cost of the block or model that contains it",
        ),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_a_wrong_request_is_an_error_that_says_why(given, message):
    model = given.pop("model")
    with pytest.raises(SpecError) as e:
        cost(model, **given)
    assert str(e.value) == message


def test_example_inputs_for_a_declaration_are_an_error():
    with pytest.raises(SpecError) as e:
        cost(rg.Attention(64), torch.zeros(1, 5, 64))
    assert str(e.value) == (
        "Attention is a declaration: its cost follows from its sizes; pass n= instead of example inputs"
    )


def test_a_backend_that_cannot_run_the_pattern_and_missing_query_offsets_are_errors():
    with pytest.raises(BackendError, match=r"it runs on CUDA, not on cpu; use backend=.sdpa."):
        cost(rg.Attention(64, pattern=rg.window(2)), n=16, backend="triton")
    with pytest.raises(ShapeError, match="9 queries over 7 keys: causal"):
        cost(rg.Attention(64, pattern=rg.causal()), n=9, m=7)


def test_an_unknown_part_names_the_nearest():
    with pytest.raises(SpecError, match=r"attention has no part 'score'; did you mean scores\?"):
        cost(rg.Attention(64), n=4)["score"]


def test_the_bottleneck_of_a_traced_module_is_a_kind_of_module():
    def layer(k):
        linear = Part("linear1", parts=(Part("addmm", Amounts(flops=30, executed_flops=30, bytes=4)),))
        core = Part("scaled_dot_product_attention", Amounts(flops=20, executed_flops=20, bytes=4))
        return Part(str(k), parts=(linear, Part("self_attn", parts=(core,))))

    traced = Cost("TransformerEncoder", {}, Part("TransformerEncoder", parts=(layer(0), layer(1))))
    found = traced.bottleneck
    assert (found.part, found.flops, found.share) == ("*/linear1", 60, 0.6)
    assert found.why == "more than any other part"


def test_the_bottleneck_of_a_sequence_of_modules_has_the_number_of_the_module():
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 64))
    assert cost(model, torch.zeros(2, 4)).bottleneck.part == "2"


def test_a_traced_cost_has_no_formula():
    traced = Cost("Linear", {}, Part("model", Amounts(parameters=6)))
    with pytest.raises(SpecError) as e:
        traced.formula  # noqa: B018
    assert str(e.value) == (
        "the cost of Linear was traced, which gives numbers only; declare a spec to get a formula"
    )
    assert traced.biases is None and traced.saving is None and "model           6" in str(traced)


def test_the_largest_batch_that_fits_is_the_last_that_does():
    block = rg.Block(rg.Attention(16, heads=2), rg.FeedForward(32))
    result, three = (cost(rg.Encoder(block, 1), n=8, batch=size) for size in (1, 3))
    assert [result.fits(three.memory.inference_peak - less) for less in (0, 1)] == [3, 2]
    assert (
        result.fits(cost(rg.Encoder(block, 1), n=11).memory.inference_peak, vary="n") == 11
        and result.fits(1) == 0
    )
    with pytest.raises(SpecError, match="Linear was traced at one size; declare a spec to find what fits"):
        Cost("Linear", {}, Part("model")).fits(1000)


def test_a_formula_without_sympy_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sympy", None)
    result = cost(rg.Attention(64), n=4)
    assert result.flops > 0 and str(result)
    with pytest.raises(
        SpecError, match=r"formulas need sympy, which is not installed: pip install 'regard\[cost\]'"
    ):
        result.formula  # noqa: B018


@pytest.mark.parametrize("sizes", [{"n": 100}, {"m": 3}, {"batch": 7}, {"n": 100, "m": 3, "batch": 7}])
def test_inputs_and_sizes_are_not_given_together(sizes):
    with pytest.raises(SpecError, match="the example inputs have sizes; pass one of the two"):
        cost(torch.nn.Linear(8, 8), torch.zeros(4, 8), **sizes)


def test_frozen_names_that_match_no_parameter_are_an_error():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    for frozen, words in (("zzz*", "known: *.bias, *.weight"), ("0.weigth", "did you mean *.weight?")):
        with pytest.raises(SpecError, match=re.escape(f"frozen={frozen!r} matches no parameter; {words}")):
            cost(model, torch.zeros(4, 8), train=rg.TrainingStep(frozen=("0.bias", frozen)))


@pytest.mark.filterwarnings("ignore")
def test_the_bottleneck_of_a_traced_model_is_its_largest_part():
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=176, num_hidden_layers=2, num_attention_heads=4, vocab_size=11
    )
    result = cost(config, n=256)
    mlp = sum(a.executed_flops for path, a in result.tree.terms() if "/mlp/" in path)
    found = result.bottleneck
    assert found.part == "model/layers/0–1/mlp" and found.flops == mlp
    assert found.why == "more than any other part"


def test_a_head_below_half_of_the_flops_is_not_said_to_exceed_all_layers():
    for vocab in (6000, 100_000):
        tiny = rg.preset("tiny-gpt")
        found = cost(replace(tiny, embedding=replace(tiny.embedding, vocab=vocab)), n=16).bottleneck
        assert found.part == "head"
        assert ("larger than all layers together" in found.why) == (found.share > 0.5)


def test_every_amount_of_the_documentation_is_an_attribute():
    result = cost(rg.Attention(64, pattern=rg.window(2)), n=16)
    for name in vars(result.total):
        assert getattr(result, name) == getattr(result.total, name)


@pytest.mark.parametrize("model", ["tiny-gpt", torch.nn.Linear(4, 4)], ids=["declared", "module"])
def test_a_training_step_that_is_none_is_refused_at_the_call(model):
    """Not at the first use of its memory."""
    given = {"n": 8} if isinstance(model, str) else {}
    with pytest.raises(SpecError, match="train='adam': use True, False or"):
        cost(model, *([] if given else [torch.zeros(2, 4)]), train="adam", **given)


HEADS = [rg.causal(), rg.causal() & rg.window(2), rg.causal(), rg.causal() & (rg.window(0) | rg.every(3))]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("train", [False, True])
def test_heads_with_patterns_of_their_own_cost_what_each_costs_alone(backend, train):
    """By one-head attentions whose sizes add up: all amounts of scores, scale, softmax, bias and mixing."""
    options = {"n": 13, "batch": 3, "backend": backend, "train": train}
    together = {"d_k": 6, "d_v": 3, "position": rg.alibi(), "softcap": 2.0, "sink_logits": True}
    whole = cost(rg.Attention(24, heads=4, pattern=HEADS, **together), **options)
    alone = [cost(rg.Attention(24, heads=1, pattern=p, **together), **options) for p in HEADS]
    for part in ("scores", "scale", "softmax", "bias", "mixing"):
        total = sum((c[part].total for c in alone), Amounts())
        assert whole[part].total == total, part
    assert whole.flops > whole["scores"].total.flops + whole["mixing"].total.flops > 0
    formulas, values = whole.symbolic.total, whole.values
    for name in ("parameters", "flops", "elementwise_flops", "executed_flops", "bytes"):
        assert getattr(formulas, name).subs(values) == getattr(whole.total, name)


def test_the_pairs_of_each_pattern_are_listed_with_its_heads():
    result = cost(rg.Attention(24, heads=4, pattern=HEADS), n=13)
    found = [(p.path, p.heads, p.pattern, p.needed, p.full) for p in result.pairs]
    assert found == [
        ("attention", heads, repr(HEADS[heads[0]]), HEADS[heads[0]].count(13), 169)
        for heads in ((0, 2), (1,), (3,))
    ]
    text = str(result)
    assert "pairs in attention, heads 0, 2: causal() allows 91 of 169; backend sdpa computes 91" in text
    assert "pairs in attention, head 1: causal() & window(2) allows 36 of 169; backend sdpa computes" in text
    needed = sum(p.count(13) for p in HEADS)
    assert result.saving.core == 1 - needed / (4 * 169)
    assert [p["heads"] for p in json.loads(result.json())["pairs"]] == [[0, 2], [1], [3]]
    assert [p.heads for p in cost(rg.Attention(24, heads=4, pattern=rg.causal()), n=13).pairs] == [()]


def test_heads_with_closed_forms_have_a_formula_of_the_length_alone():
    spec = rg.Attention(64, heads=4, pattern=[rg.causal(), rg.full(), rg.causal(), rg.window(3)])
    here, there = (cost(spec, n=size) for size in (40, 97))
    assert here.formula.subs(n, 97).subs(here.values) == there.flops
