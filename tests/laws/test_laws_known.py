"""What is wrong in torch 2.13 and transformers 5.22 today, found by the laws."""

import pytest
import torch
import torch.nn.functional as F

from regard.laws import adapters
from regard.laws.catalogue import law
from regard.laws.checker import Budget, replay, try_law

FEW = Budget(cases=12)


def held_to(target, promise):
    """The target as if it had promised."""
    return target.having(promise)


def test_multihead_attention_gives_nan_for_a_row_of_padding():
    target = adapters.multihead_attention()
    observed = try_law(law("P03"), target, FEW)
    assert observed.status == "not promised" and "NaN" in observed.said
    assert try_law(law("P03"), held_to(target, "empty rows"), FEW).failed
    with_weights = replay("P03", target, b=2, n=3, weights=True, seed=0)
    assert "is broken" in with_weights and "NaN" in with_weights


def test_the_same_by_hand_the_gradients_of_the_whole_batch_are_nan():
    module = adapters.multihead_attention().module
    x, padding = torch.randn(2, 3, 16), torch.tensor([[False] * 3, [True] * 3])
    o, _ = module(x, x, x, key_padding_mask=padding, need_weights=True)
    o[0].sum().backward()
    assert o[0].isfinite().all() and o[1].isnan().all()
    assert module.in_proj_weight.grad.isnan().all()


def test_the_pre_norm_encoder_gives_nan_for_a_row_of_padding_in_evaluation():
    target = adapters.transformer_encoder(norm_first=True)
    outcome = try_law(law("P03"), held_to(target, "empty rows"), FEW)
    assert outcome.status == "broken" and "NaN" in outcome.said
    with torch.no_grad():
        o = target.module.eval()(
            torch.randn(2, 3, 16), src_key_padding_mask=torch.tensor([[False] * 3, [True] * 3])
        )
    assert o[1].isnan().all() and o[0].isfinite().all()


def test_nan_in_masked_values_reaches_valid_outputs_of_sdpa():
    outcome = try_law(law("P01"), adapters.sdpa(), FEW)
    assert outcome.status == "not promised" and "observed: outputs with" in outcome.said
    v = torch.tensor([[1.0], [float("nan")]])
    o = F.scaled_dot_product_attention(torch.ones(1, 1), torch.ones(2, 1), v, torch.tensor([[True, False]]))
    assert o.isnan().all()


def test_a_mask_of_the_least_number_averages_forbidden_values_on_an_empty_row():
    outcome = try_law(law("P03"), held_to(adapters.sdpa_with_least_number(), "empty rows"), FEW)
    assert outcome.status == "broken" and "the mean of the forbidden values" in outcome.said
    assert try_law(law("P03"), held_to(adapters.sdpa(), "empty rows"), FEW).status == "holds"


def llama(**more):
    transformers = pytest.importorskip("transformers")
    return adapters.hugging_face(transformers.LlamaConfig(), **more)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_llama_with_a_mask_of_ones_lets_document_2_see_document_1(attention):
    outcome = try_law(law("L47"), llama(attention=attention), FEW)
    assert outcome.status == "broken" and "document" in outcome.said
    assert "adapters.hugging_face(transformers.LlamaConfig" in outcome.snippet
    assert try_law(law("L47"), llama(attention=attention, with_mask=False), FEW).status == "holds"


def test_the_same_by_hand_llama_sees_across_documents():
    module = llama().module
    ids = torch.randint(4, 61, (1, 6), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, 0] = 4 + (ids[0, 0] - 3) % 57
    places, ones = torch.tensor([[0, 1, 2, 0, 1, 2]]), torch.ones(1, 6, dtype=torch.long)
    with torch.no_grad():
        a, b = (
            module(input_ids=x, position_ids=places, attention_mask=ones).logits[0, 3:] for x in (ids, other)
        )
    assert (a - b).abs().max() > 1e-3


def test_eager_llama_in_float64_turns_padding_on_the_left_into_nan():
    module = llama(attention="eager").module.double()
    with torch.no_grad():
        o = module(input_ids=torch.full((1, 4), 5), attention_mask=torch.tensor([[0, 1, 1, 1]])).logits
    assert o.isnan().all()


def test_what_is_right_in_torch_is_called_so():
    for target in (adapters.sdpa(), adapters.multihead_attention(), adapters.transformer_encoder()):
        outcomes = [try_law(law(number), target, FEW) for number in ("L19", "L48")]
        assert {o.status for o in outcomes} <= {"holds", "not applicable"}
        assert any(o.status == "holds" for o in outcomes)
