"""The HTML report: complete, without network access, all foreign text escaped; and the dependence maps."""

import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import accessibility
from faults.fault import correct
from regard.laws import Function, Part, adapters, check
from regard.laws.adapters import adapt
from regard.laws.dependence import dependence
from regard.laws.drawn_case import draw_case
from regard.laws.html_report import inline, page


def maps(target):
    return {d.name: d.strength for d in dependence(target)}


def test_a_causal_attention_depends_on_the_past_alone():
    found = maps(adapters.regard_function())
    assert (found["causal"].triu(1) == 0).all() and (found["causal"].tril() > 0).sum() == 36
    assert (found["no mask"] > 0).all()
    assert (found["lengths: 5 of 8 positions are real"][:, 5:] == 0).all()
    documents = found["documents of 3, 2 and 3 positions"] > 0
    ids = torch.tensor([0, 0, 0, 1, 1, 2, 2, 2])
    assert torch.equal(documents, ids[:, None] == ids)
    i, j = torch.arange(8)[:, None], torch.arange(8)
    assert torch.equal(found["a window of 2 before, 1 after"] > 0, (i - j <= 2) & (j - i <= 1))


def test_without_gradients_inputs_are_changed_instead():
    target = correct("attention").with_claims(lacking=("grad", "double backward"))
    assert torch.equal(maps(target)["causal"] > 0, torch.ones(8, 8).tril() > 0)


def test_tokens_are_replaced_and_vectors_differentiated():
    assert (maps(correct("decoder"))["no mask"].triu(1) == 0).all()
    found = maps(correct("encoder"))
    assert (found["no mask"] > 0).all()
    assert (found["lengths: 5 of 8 positions are real"][:5, 5:] == 0).all()
    module = maps(adapters.multihead_attention())
    assert (module["causal"].triu(1) == 0).all() and (
        module["2 padded positions on the left"][2:, :2] == 0
    ).all()


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


def test_a_call_that_raises_gives_no_map():
    def call(q, k, v, **options):
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


def test_the_page_is_complete_and_escaped():
    text = page(verdict())
    assert text.startswith("<!doctype html>") and text.rstrip().endswith("</html>")
    assert EVIL not in text and "<script" not in text and "&lt;script&gt;" in text
    for text_ in (
        "L29",
        "causality",
        "Smallest case found",
        "replay(",
        "Not applicable",
        "Which output depends on which input",
    ):
        assert text_ in text


def test_the_page_needs_no_network_and_no_script():
    text = page(verdict())
    assert not re.search(r"https?://|src=|@import|url\(|<link|<script", text)


def test_the_fragment_brings_its_style_and_touches_nothing_else():
    text = inline(verdict())
    style = re.search(r"<style>(.*?)</style>", text, re.DOTALL)[1]
    selectors = re.findall(r"(?:^|[}])\s*([^{}@]+)\{", re.sub(r"@media[^{]+\{", "", style))
    assert selectors and all(".regard" in part for s in selectors for part in s.split(","))
    assert "<html" not in text and text.count("<div") == text.count("</div>")


def without_mask(q, k, v, mask=None):
    return (q @ k.mT / q.shape[-1] ** 0.5).softmax(-1) @ v


def test_the_smallest_case_is_drawn_with_the_wrong_numbers_marked():
    found = check(adapt(without_mask), ["L01", "L34", "L19"], 3)
    drawn = draw_case(found.outcomes[0], found.target, found.probed)
    weights = drawn.tables[0]
    assert drawn.allowed == [[True, True], [False, True]] and weights.name == "weights"
    assert weights.expected[1] == [0.0, 1.0] and weights.wrong == [[False, False], [True, True]]
    text = page(found)
    assert text.count('class="wrong"') >= 2 and "weights, got" in text and "weights, expected" in text
    assert draw_case(found.outcomes[2], found.target, found.probed) is None  # L19 holds


def test_a_case_with_nan_can_be_sent_as_json():
    found = check(adapt(torch_like), ["P03"], 1)
    drawn = draw_case(found.outcomes[0], found.target, found.probed)
    assert drawn.plain()["tables"][0]["got"] == [[None]] and drawn.tables[0].wrong == [[True]]


def torch_like(q, k, v, mask=None):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    return (scores if mask is None else scores.masked_fill(~mask, -torch.inf)).softmax(-1) @ v


def test_laws_are_grouped_by_subject_and_those_that_hold_are_folded():
    text = page(check(adapt(without_mask), ["L01", "L34", "L19"], 3))
    assert "Laws: softmax" in text and "Laws: order" in text and "Laws: <" not in text
    order = text[text.index("Laws: order") :]
    assert order.index("1 law holds</summary>") < order.index("permutation equivariance")


@pytest.mark.long
def test_the_page_fits_a_phone_and_has_no_serious_accessibility_violation(browser, tmp_path):
    (tmp_path / "check.html").write_text(page(check(adapt(without_mask), None, 2)), "utf-8")
    assert accessibility.problems(browser, tmp_path / "check.html") == []


class Leaky(nn.Module):
    """Causal self-attention, as it says."""

    def __init__(self):
        super().__init__()
        self.heads, self.qkv, self.out = 2, nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        return self.out(((q @ k.mT / 2).softmax(-1) @ v).transpose(1, 2).flatten(2))


def test_the_case_of_a_module_is_drawn_too():
    torch.manual_seed(0)
    found = check(Leaky(), ["L29", "L48"], 4)
    drawn = draw_case(found["L29"], found.target, found.probed)
    assert "after later inputs were changed" in drawn.title and drawn.allowed is None
    (table,) = drawn.tables
    assert len(table.got[0]) == 8 and any(map(any, table.wrong))
    assert table.got[0][0] != table.expected[0][0]
    assert drawn.title in page(found) and "value, expected" in page(found)
    assert draw_case(found["L48"], found.target, found.probed) is None  # it holds
