"""The page of a verdict: whole, without a network, and nothing from outside unescaped; who depends on whom."""

import re

import torch
import torch.nn.functional as F
from torch import nn

from faults.fault import sound
from regard.laws import Function, Part, adapters, check
from regard.laws.dependence import dependence
from regard.laws.html_report import inline, page


def pictures(target):
    return {d.name: d.strength for d in dependence(target)}


def test_a_causal_attention_depends_on_the_past_alone():
    found = pictures(adapters.regard_function())
    assert (found["causal"].triu(1) == 0).all() and (found["causal"].tril() > 0).sum() == 36
    assert (found["nothing hidden"] > 0).all()
    assert (found["lengths: 5 of 8 are real"][:, 5:] == 0).all()
    documents = found["documents of 3, 2 and 3"] > 0
    ids = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    assert torch.equal(documents, ids[:, None] == ids)
    i, j = torch.arange(8)[:, None], torch.arange(8)
    assert torch.equal(found["a window of 2 before, 1 after"] > 0, (i - j <= 2) & (j - i <= 1))


def test_without_gradients_inputs_are_changed_instead():
    target = sound("attention").having(lacking=("grad", "double backward"))
    assert torch.equal(pictures(target)["causal"] > 0, torch.ones(8, 8).tril() > 0)


def test_tokens_are_replaced_and_vectors_differentiated():
    assert (pictures(sound("decoder"))["nothing hidden"].triu(1) == 0).all()
    found = pictures(sound("encoder"))
    assert (found["nothing hidden"] > 0).all()
    assert (found["lengths: 5 of 8 are real"][:5, 5:] == 0).all()
    module = pictures(adapters.multihead_attention())
    assert (module["causal"].triu(1) == 0).all() and (module["2 of padding on the left"][2:, :2] == 0).all()


def test_layer_norm_depends_on_its_row_and_batch_norm_on_its_column():
    rows, columns = torch.arange(12) // 4, torch.arange(12) % 4
    (layer,) = dependence(Part("layer norm", "norm", nn.LayerNorm(4).double()))
    assert torch.equal(layer.strength > 1e-12, rows[:, None] == rows)

    def batch_norm(x, training):
        return F.batch_norm(x, torch.zeros(4).double(), torch.ones(4).double(), training=training)

    training, evaluation = dependence(Part("batch norm", "batch norm", batch_norm))
    assert (training.name, evaluation.name) == ("in training", "in evaluation")
    assert torch.equal(training.strength > 1e-12, columns[:, None] == columns)
    assert torch.equal(evaluation.strength > 1e-12, torch.eye(12) > 0)


def test_what_raises_leaves_no_picture():
    def call(q, k, v, **asked):
        raise RuntimeError("no")

    assert dependence(Function("broken", call, claims={"causal", "grad"})) == []


EVIL = "<script>alert('x')</script>&"


def verdict():
    def call(q, k, v, *, causal=False):
        if causal and q.shape[-2] > 2:
            raise RuntimeError(EVIL)
        return F.scaled_dot_product_attention(q, k, v)

    return check(
        Function(EVIL, call, claims={"causal"}, source=f"load({EVIL!r})"), ["L02", "L29", "L41", "P05"], 3
    )


def test_the_page_says_all_and_escapes_all():
    text = page(verdict())
    assert text.startswith("<!doctype html>") and text.rstrip().endswith("</html>")
    assert EVIL not in text and "<script" not in text and "&lt;script&gt;" in text
    for said in (
        "L29",
        "causality",
        "Smallest case found",
        "replay(",
        "Not applicable",
        "Who depends on whom",
    ):
        assert said in text


def test_the_page_needs_no_network_and_no_script():
    text = page(verdict())
    assert not re.search(r"https?://|src=|@import|url\(|<link|<script", text)


def test_the_fragment_brings_its_style_and_touches_nothing_else():
    text = inline(verdict())
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    selectors = re.findall(r"(?:^|[}])\s*([^{}@]+)\{", re.sub(r"@media[^{]+\{", "", style))
    assert selectors and all(".regard" in part for s in selectors for part in s.split(","))
    assert "<html" not in text and text.count("<div") == text.count("</div>")
