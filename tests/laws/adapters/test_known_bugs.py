"""Bugs in torch 2.13 and transformers 5.22 that the laws report."""

import pytest
import torch
import torch.nn.functional as F

from regard.laws import Budget, adapters, law, replay, try_law

FEW = Budget(cases=12)


def test_multihead_attention_gives_nan_for_a_row_of_padding():
    target = adapters.multihead_attention()
    observed = try_law(law("P03"), target, FEW)
    assert observed.status == "not promised" and "NaN" in observed.message
    assert try_law(law("P03"), target.with_claims("empty rows"), FEW).failed
    with_weights = replay("P03", target, b=2, n=3, weights=True, seed=0)
    assert "is broken" in with_weights and "NaN" in with_weights


def test_without_regard_the_gradients_of_the_whole_batch_are_nan():
    module = adapters.multihead_attention().module
    x, padding = torch.randn(2, 3, 16), torch.tensor([[False] * 3, [True] * 3])
    o, _ = module(x, x, x, key_padding_mask=padding, need_weights=True)
    o[0].sum().backward()
    assert o[0].isfinite().all() and o[1].isnan().all()
    assert module.in_proj_weight.grad.isnan().all()


def test_the_pre_norm_encoder_gives_nan_for_a_row_of_padding_in_evaluation():
    target = adapters.transformer_encoder(norm_first=True)
    outcome = try_law(law("P03"), target.with_claims("empty rows"), FEW)
    assert outcome.status == "broken" and "NaN" in outcome.message
    with torch.no_grad():
        o = target.module.eval()(
            torch.randn(2, 3, 16), src_key_padding_mask=torch.tensor([[False] * 3, [True] * 3])
        )
    assert o[1].isnan().all() and o[0].isfinite().all()


def test_nan_in_masked_values_reaches_valid_outputs_of_sdpa():
    outcome = try_law(law("P01"), adapters.sdpa(), FEW)
    assert outcome.status == "not promised" and "observed: outputs with" in outcome.message
    v = torch.tensor([[1.0], [float("nan")]])
    o = F.scaled_dot_product_attention(torch.ones(1, 1), torch.ones(2, 1), v, torch.tensor([[True, False]]))
    assert o.isnan().all()


def test_a_mask_of_finfo_min_averages_masked_values_on_an_empty_row():
    outcome = try_law(law("P03"), adapters.sdpa_finfo_min().with_claims("empty rows"), FEW)
    assert outcome.status == "broken" and "got the mean of the masked values" in outcome.message
    assert try_law(law("P03"), adapters.sdpa().with_claims("empty rows"), FEW).status == "holds"


def llama(**more):
    transformers = pytest.importorskip("transformers")
    return adapters.hugging_face(transformers.LlamaConfig(), **more)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_llama_with_a_mask_of_ones_leaks_document_1_into_document_2(attention):
    outcome = try_law(law("L47"), llama(attention=attention), FEW)
    assert outcome.status == "broken" and "document" in outcome.message
    assert "adapters.hugging_face(transformers.LlamaConfig" in outcome.snippet
    assert try_law(law("L47"), llama(attention=attention, with_mask=False), FEW).status == "holds"


def test_without_regard_llama_attends_across_documents():
    module = llama().module
    ids = torch.randint(4, 61, (1, 6), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, 0] = 4 + (ids[0, 0] - 3) % 57
    positions, ones = torch.tensor([[0, 1, 2, 0, 1, 2]]), torch.ones(1, 6, dtype=torch.long)
    with torch.no_grad():
        a, b = (
            module(input_ids=x, position_ids=positions, attention_mask=ones).logits[0, 3:]
            for x in (ids, other)
        )
    assert (a - b).abs().max() > 1e-3


def test_eager_llama_in_float64_returns_nan_with_left_padding():
    module = llama(attention="eager").module.double()
    with torch.no_grad():
        o = module(input_ids=torch.full((1, 4), 5), attention_mask=torch.tensor([[0, 1, 1, 1]])).logits
    assert o.isnan().all()


def test_correct_modules_of_torch_are_reported_as_correct():
    for target in (adapters.sdpa(), adapters.multihead_attention(), adapters.transformer_encoder()):
        outcomes = [try_law(law(number), target, FEW) for number in ("L19", "L48")]
        assert {o.status for o in outcomes} <= {"holds", "not applicable"}
        assert any(o.status == "holds" for o in outcomes)
