"""rg.look and what it gives: labels, tables, files, and what it says of bad input."""

import json
import os

import numpy
import pytest
import torch
from torch import nn

import regard as rg
from lens_models import huggingface, inputs, small
from regard.lens.calls import is_index
from regard.lens.recorder import Recorder, gradient_norms
from regard.lens.text_table import Table
from regard.lens.view import look

IDS = torch.tensor([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]])


@pytest.mark.ledger("S2.1.1.3")
def test_weights_are_the_softmax_of_scores():
    view = look(small(), IDS)
    scores = view.scores(1, 2, batch=1)
    assert torch.allclose(scores.softmax(-1), view.map(1, 2, batch=1), atol=1e-6)
    assert (scores[0, 1:] == -torch.inf).all()
    assert not view.calls[0].allowed()[0, 0, 1] and view.calls[0].allowed()[0, 6].all()


def test_a_layer_is_found_by_number_name_or_the_end_of_its_name():
    view = look(small(), IDS)
    assert view.call(1) is view.call("blocks.1.attention") is view.calls[1]
    pytest.importorskip("transformers")
    view = look(huggingface("bart", "sdpa"), inputs("bart"))
    assert view.call("decoder.layers.0.encoder_attn").layer == 3
    with pytest.raises(
        rg.ShapeError, match=r"'encoder_attn' matches 2 layers: model.decoder.layers.0.encoder_attn, "
    ):
        view.call("encoder_attn")
    with pytest.raises(
        rg.ShapeError, match=r"no layer is named 'model.encoder.layers.0.self_atn'; did you mean"
    ):
        view.call("model.encoder.layers.0.self_atn")


@pytest.mark.parametrize(
    ("layer", "head", "batch", "message"),
    [
        (2, 0, 0, "layer 2: there are 2 layers, 0 to 1"),
        (-1, 0, 0, "layer -1: there are 2 layers, 0 to 1"),
        (1, 3, 0, r"head 3 of layer 1 \(blocks.1.attention\): it has 3 heads, 0 to 2"),
        (1, 0, 2, "batch row 2 of blocks.1.attention: it has 2 rows, 0 to 1"),
    ],
)
def test_what_does_not_exist_is_refused_with_the_range(layer, head, batch, message):
    with pytest.raises(rg.ShapeError, match=message):
        look(small(), IDS).map(layer, head, batch)
    with pytest.raises(
        rg.ShapeError, match=r"query 7 of layer 0 \(blocks.0.attention\): it has 7 queries, 0 to 6"
    ):
        look(small(), IDS).calls[0].weights([0], [7])
    for names in (look(small(), IDS).queries, look(small(), IDS).keys):
        with pytest.raises(rg.ShapeError, match=r"batch row 2 of blocks.0.attention: it has 2 rows, 0 to 1"):
            names(0, 2)


def test_an_index_is_a_whole_number_of_any_library():
    """A head of 1.5 was that of 1."""
    assert all(is_index(i, 3) for i in (0, 2, torch.tensor(2), numpy.int64(1)))
    assert not any(is_index(i, 3) for i in (3, -1, 1.0, 1.5, "1", None, torch.tensor(3)))


def test_tokens_come_from_ids_from_names_or_from_a_tokenizer():
    model = small()
    assert look(model, IDS).queries(0, batch=1) == ("6", "5", "3", "5", "8", "9", "7")
    words = [list("abcdefg"), list("hijklmn")]
    assert look(model, IDS, words).keys(1) == tuple("abcdefg")
    assert look(model, IDS[:1], list("abcdefg")).keys(0) == tuple("abcdefg")
    assert look(model, IDS, lambda ids: [f"<{i}>" for i in ids]).keys(0)[:2] == ("<3>", "<1>")
    with pytest.raises(rg.ShapeError, match="tokens has 1 rows of 6; the input has 2 rows of 7"):
        look(model, IDS, list("abcdef"))
    with pytest.raises(rg.SpecError, match="tokens='the cat': use a list of strings"):
        look(model, IDS, "the cat")
    with pytest.raises(rg.SpecError, match="tokens has the key 'from'; its keys are 'source' and 'target'"):
        look(model, IDS, {"from": []})


def test_a_second_input_in_place_of_tokens_is_recognized():
    x = torch.randn(1, 5, 16)
    with pytest.raises(rg.SpecError) as refused:
        look(rg.Attention(16, heads=2).build(), x, x)
    assert str(refused.value) == (
        "tokens is a tensor of shape (1, 5, 16); several inputs are one tuple: rg.look(model, (a, b))"
    )


def test_names_and_grids_that_fit_no_attention_are_refused():
    layer, x = torch.nn.TransformerEncoderLayer(16, 2, 16, batch_first=True).eval(), torch.randn(2, 5, 16)
    with pytest.raises(rg.ShapeError, match="tokens has 2 rows of 4; the attention has 2 rows of 5"):
        look(layer, x, [list("abcd")] * 2)
    with pytest.raises(rg.ShapeError, match="tokens has 1 rows of 5; the attention has 2 rows of 5"):
        look(layer, x, list("abcde"))
    with pytest.raises(rg.ShapeError, match=r"grid=\(9, 9\) has 81 tokens; the attention has 2 rows of 5"):
        look(layer, x, grid=(9, 9))
    assert look(layer, x, [list("abcde")] * 2, grid=(2, 2, 1)).keys(0) == tuple("abcde")


def test_both_sides_of_a_cross_attention_have_their_tokens():
    pytest.importorskip("transformers")
    given = inputs("marian")
    names = {"source": [[f"s{i}" for i in range(11)]] * 2, "target": [[f"t{i}" for i in range(7)]] * 2}
    view = look(huggingface("marian", "sdpa"), given, names)
    assert view.queries(0)[0] == view.keys(0)[0] == "s0"
    assert view.queries(2)[0] == view.keys(2)[0] == "t0"
    assert (view.queries(3)[0], view.keys(3)[10]) == ("t0", "s10")
    assert view.statistics[0].queries == 19  # padding is not counted


def test_an_image_input_gives_a_grid_and_a_picture():
    pytest.importorskip("transformers")
    view = look(huggingface("vit", "sdpa"), inputs("vit"))
    assert view.grid == (4, 4) and view.skip == 1 and view.image.shape == (3, 32, 32)
    assert view.queries(0)[:3] == ("class", "0,0", "0,1")
    assert view.statistics[0].center.shape == (4, 2) and "center_y" in view.rows()[0]
    with pytest.raises(rg.SpecError, match=r"grid=5: use \(rows, columns\)"):
        look(huggingface("vit", "sdpa"), inputs("vit"), grid=5)


def test_the_table_has_one_row_per_head_and_converts_to_json():
    view = look(small(), IDS)
    rows = view.rows()
    assert [(r["layer"], r["head"]) for r in rows] == [(i, h) for i in range(2) for h in range(3)]
    assert rows[0]["name"] == "blocks.0.attention" and rows[0]["on_next"] is None
    assert json.loads(json.dumps(view.to_plain(), allow_nan=False))["heads"] == rows
    shown = repr(Table(rows)).splitlines()
    assert len(shown) == 7 and shown[0].split()[:3] == ["layer", "head", "role"]
    assert (
        Table(rows)["head"] == [0, 1, 2, 0, 1, 2] and len(Table(rows)) == 6 and repr(Table([])) == "(no rows)"
    )


def test_the_table_is_a_data_frame_if_pandas_is_installed(monkeypatch):
    import sys

    view = look(small(), IDS)
    if "pandas" in sys.modules or pytest.importorskip("pandas"):
        assert list(view.heads["head"]) == [0, 1, 2, 0, 1, 2]
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert isinstance(view.heads, Table)


def test_statistics_during_the_run_are_the_same_without_maps():
    stored, streamed = look(small(), IDS), look(small(), IDS, keep=False)
    assert streamed.rows() == stored.rows()
    with pytest.raises(rg.RegardError, match=r"layer 0 \(blocks.0.attention\) was recorded with keep=False"):
        streamed.map(0, 0)
    with pytest.raises(rg.RegardError, match="keep='all'; use True, False or 'copy'"):
        look(small(), IDS, keep="all")


def test_a_model_without_attention_is_refused():
    with pytest.raises(
        rg.RegardError, match=r"no attention call was found while Linear ran \(1 module calls\): it has none"
    ):
        look(nn.Linear(3, 3), torch.randn(2, 3))
    with pytest.raises(rg.SpecError, match="int is not callable; pass a model"):
        look(3, torch.randn(2, 3))


def test_weights_without_a_softmax_and_with_one_over_the_queries_are_described():
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(rg.RegardError) as refused:
        look(lambda q: (q @ q.mT).sigmoid() @ q, q)
    assert str(refused.value) == (
        "no attention call was found while function ran (0 module calls): it has none, computes weights without a "
        "softmax, or runs outside PyTorch"
    )
    with pytest.raises(rg.RegardError) as refused:
        look(lambda q: (q @ q.mT).softmax(-2) @ q, q)
    not_summed = (
        "no attention call was found while function ran (0 module calls); a softmax ran, but no matrix product of "
        "its result with values, summed over the axis of the softmax, was recognized"
    )
    assert str(refused.value) == not_summed
    with pytest.raises(rg.RegardError) as refused:
        look(lambda q: (q @ q.mT).softmax(-1), q)
    assert str(refused.value) == not_summed


DIAGONAL = torch.eye(5, dtype=torch.bool)


@pytest.mark.parametrize(
    "change",
    [
        lambda w: w.masked_fill(DIAGONAL, 0.0),
        lambda w: w.masked_fill_(DIAGONAL, 0.0),
        lambda w: torch.where(DIAGONAL, 0.0, w).nan_to_num(),
        lambda w: (~DIAGONAL).to(w.dtype).expand_as(w) * w,
        lambda w: w.mul_(~DIAGONAL),
    ],
    ids=["masked_fill", "masked_fill_", "where", "mask first", "mul_"],
)
def test_weights_that_are_masked_after_the_softmax_are_shown_as_they_are_used(change):
    q = torch.randn(1, 2, 5, 4)
    view = look(lambda q: change((q @ q.mT).softmax(-1)) @ q, q)
    torch.testing.assert_close(view.map(0, 1), (q @ q.mT).softmax(-1)[0, 1].masked_fill(DIAGONAL, 0.0))


@pytest.mark.parametrize("shape", [(1, 0, 8), (0, 3, 8)])
@pytest.mark.parametrize("keep", [True, False])
def test_an_empty_sequence_or_batch_is_an_error_that_names_the_sizes(shape, keep):
    layer = rg.Attention(8, heads=2).build().eval()
    sizes = f"MultiHeadAttention has {shape[0]} batch rows, {shape[1]} queries and {shape[1]} keys"
    with pytest.raises(rg.ShapeError, match=sizes):
        look(layer, torch.zeros(shape), keep=keep)


@pytest.mark.parametrize("keep", [True, False])
def test_autocast_does_not_round_maps_and_statistics(keep):
    """Under autocast q and k have 16 bits; the weights are computed from them in float32, as without it."""
    torch.manual_seed(0)
    attend = rg.Attention(16, heads=2).build().eval()
    x = torch.randn(1, 40, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        kept = look(attend, x)
        inside, shown = look(attend, x, keep=keep).statistics[0], kept.map(0, 1)
    call, outside = kept.calls[0].source, kept.statistics[0]
    expected = (call.q[0, 1].float() @ call.k[0, 1].float().mT / 8**0.5).softmax(-1)
    assert call.q.dtype == torch.bfloat16 and shown.dtype == torch.float32
    assert (shown - expected).abs().max() < 1e-6
    for name in ("entropy", "distance", "on_self", "on_first"):
        assert torch.equal(getattr(inside, name), getattr(outside, name)), name


def test_an_input_that_does_not_fit_is_described():
    with pytest.raises(rg.ShapeError, match=r"Linear does not run on float32 \(2, 3\), str: TypeError: "):
        look(nn.Linear(3, 3), (torch.randn(2, 3), "x"))
    with pytest.raises(rg.ShapeError, match="Linear does not run on colour=str: TypeError: "):
        look(nn.Linear(3, 3), {"colour": "red"})


def test_a_model_without_numbers_and_ids_without_a_row_are_refused_in_words():
    with pytest.raises(rg.SpecError, match=r"Stack or its input is on the device meta, .* or use rg.cost"):
        look(small().to("meta"), IDS.to("meta"))
    model = nn.Sequential(nn.Embedding(9, 4), nn.TransformerEncoderLayer(4, 2, 8))
    with pytest.raises(
        rg.ShapeError, match=r"the largest id is 9; the largest embedding of the model has 9 rows, 0 to 8"
    ):
        look(model, IDS)


def test_maps_with_nan_are_valid_json():
    """A softmax over no key is NaN, which JSON does not have."""
    x = torch.randn(1, 2, 5, 4)
    allowed = torch.ones(5, 5, dtype=torch.bool).tril()
    allowed[3] = False
    view = look(lambda x: (x @ x.mT).masked_fill(~allowed, -torch.inf).softmax(-1) @ x, x)
    maps = view.to_plain(maps=True)["layers"][0]["maps"]
    assert maps[1][3] == [None] * 5 and maps[1][0] == [1, 0, 0, 0, 0]
    json.dumps(view.to_plain(maps=True), allow_nan=False)


def test_numbers_are_saved_and_unknown_formats_refused(tmp_path):
    view = look(small(), IDS)
    path = view.save(tmp_path / "heads.json")
    assert json.loads(path.read_text())["heads"] == view.rows()
    with pytest.raises(rg.FormatError, match=r"heads.doc: unknown format; accepted: .html, .json, "):
        view.save(tmp_path / "heads.doc")


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    view = look(small(), IDS)
    with pytest.raises(rg.RegardError, match=r"cannot write .*nowhere/heads.json: No such file or directory"):
        view.save(tmp_path / "nowhere" / "heads.json")
    closed = tmp_path / "closed"
    closed.mkdir()
    closed.chmod(0o500)
    if os.access(closed, os.W_OK):
        pytest.skip("this user may write anywhere")
    with pytest.raises(rg.RegardError, match="Permission denied; choose a folder with write permission"):
        view.save(closed / "heads.json")


def test_the_view_prints_what_it_recorded():
    assert repr(look(small(), IDS)) == "<View of Stack: 2 layers, 6 heads (regard)>"


def test_look_runs_the_model_in_its_current_mode():
    model = small().train()
    outputs = []
    model.register_forward_hook(lambda _m, _a, out: outputs.append(out))
    look(model, IDS)
    assert model.training and not outputs[0].requires_grad
    with torch.no_grad():
        assert torch.equal(outputs[0], model(IDS))


@pytest.mark.ledger("S1.Q5c.1", "S2.4.2.1")
def test_a_recorder_has_what_the_pictures_of_training_need(tmp_path):
    model, recorder = small().train(), Recorder()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        loss = nn.functional.cross_entropy(model(IDS)[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        recorder.loss(step, loss, floor=0.5)
        recorder.gradient(step, model)
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        recorder.gradient(step, model, clipped=True)
        optimizer.step()
        recorder.view(step, look(model, IDS))
        recorder.table(step, "tokens", model.embedding.table)
    assert len(recorder.losses["train"]) == 3 and recorder.floors == {"train": 0.5}
    assert list(recorder.gradients[0][1])[:2] == ["embedding", "blocks.0"]
    total = sum(v**2 for v in recorder.clipped[0][1].values()) ** 0.5
    assert total == pytest.approx(0.01, rel=1e-3)
    entropies = [v for _, v in recorder.series(1, 2, "entropy")]
    assert len(set(entropies)) == 3
    loaded = Recorder.load(recorder.save(tmp_path / "record.json"))
    assert (
        loaded.losses == recorder.losses
        and loaded.heads == recorder.heads
        and loaded.gradients == recorder.gradients
    )
    assert (
        torch.equal(loaded.tables[2][2], recorder.tables[2][2])
        and recorder.tables[0][2].ne(recorder.tables[2][2]).any()
    )


def test_a_recorder_names_what_it_does_not_have(tmp_path):
    recorder = Recorder()
    with pytest.raises(rg.RegardError, match=r"no parameter has a gradient; record after loss.backward\(\)"):
        recorder.gradient(0, small())
    recorder.view(0, look(small(), IDS))
    with pytest.raises(rg.ShapeError, match="step 0 has no layer 2, head 0; its last is layer 1, head 2"):
        recorder.series(2, 0, "entropy")
    with pytest.raises(rg.ShapeError, match="step 0 has no 'color'; it has layer, name"):
        recorder.series(0, 0, "color")
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(rg.FormatError, match=r"x.json is not a record in regard's format 1"):
        Recorder.load(tmp_path / "x.json")
    assert gradient_norms(small()) == {}


@pytest.mark.parametrize("given", [None, rg.window(4), [rg.window(1), rg.full(), rg.window(3)]], ids=type)
def test_each_head_is_seen_with_its_own_pattern(given):
    heads = [rg.causal(), rg.causal() & rg.window(2), rg.causal() & (rg.window(0) | rg.every(3))]
    attention = rg.Attention(24, heads=3, pattern=heads, position=rg.alibi(), sink_logits=True)
    torch.manual_seed(0)
    model = rg.Encoder(rg.Block(attention, rg.FeedForward(20)), 2, embedding=rg.Embedding(11, 24)).build()
    expected = model(IDS, pattern=given, return_weights=True)[1]
    view = look(model, {"x": IDS, "pattern": given})
    for layer in range(2):
        for head in range(3):
            for batch in range(2):
                found = view.map(layer, head, batch)
                assert torch.allclose(found, expected[layer]["self"][batch, head], atol=1e-6)
                allowed = heads[head].allowed(7)
                assert not (view.scores(layer, head, batch=batch)[~allowed] > -torch.inf).any()
