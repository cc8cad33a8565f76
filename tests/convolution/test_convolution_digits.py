"""The classifier of quadratic heads on digits (T4): that it is watched, lowered and lifted; long: that it learns."""

import importlib.util
import sys
from pathlib import Path
from statistics import mean

import pytest
import torch

from regard.convolution import Lifted, lower_all

pytest.importorskip("sklearn")
torch.set_flush_denormal(True)


@pytest.fixture(scope="module")
def digits_heads():
    path = Path(__file__).parents[2] / "examples" / "digits_heads.py"
    spec = importlib.util.spec_from_file_location("digits_heads", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules["digits_heads"] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def data(digits_heads):
    return digits_heads.digits()


@pytest.mark.ledger("S2.4.2.1", "S2.4.2.2", "S2.4.2.3")
def test_heads_are_recorded_at_every_epoch_and_drawn(digits_heads, data, tmp_path):
    images, labels = data
    torch.manual_seed(0)
    model = digits_heads.PixelAttention(start="random")
    heads = digits_heads.Heads(model, images[:2])
    digits_heads.train(model, images[:8], labels[:8], epochs=2, watch=heads)
    assert heads.epochs == [0, 1, 2] and len(heads.layers[0]) == digits_heads.LAYERS
    assert heads.layers[2][1].center.shape == (9, 2)
    for layer in (s for of_epoch in heads.layers for s in of_epoch):  # in nats, of at most 64 keys
        assert ((layer.entropy > 0) & (layer.entropy <= torch.tensor(64.0).log())).all()
        assert (layer.spread > 0).all()
    assert not torch.equal(heads.layers[0][0].center, heads.layers[2][0].center)
    assert len(heads.table().splitlines()) == 1 + 18
    assert all(sum(kinds.values()) == 9 for kinds in heads.kinds())
    assert 0 <= heads.near_whole() <= 1
    pytest.importorskip("matplotlib")
    digits_heads.picture(heads, str(tmp_path / "heads.png"))
    assert (tmp_path / "heads.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.ledger("S2.4.2.6")
@pytest.mark.parametrize("window", [None, 2])
def test_heads_started_at_shifts_lower_to_them_and_the_scores_stay(digits_heads, data, window):
    images, _ = data
    torch.manual_seed(0)
    model = digits_heads.PixelAttention("position", window=window).eval()
    lowered, certificates = lower_all(model, images[:16], tolerance=0.05)
    for certificate in certificates.values():
        assert [head.kind for head in certificate.heads] == ["shift"] * 9
        assert [head.offset for head in certificate.heads][:3] == [(-1, -1), (-1, 0), (-1, 1)]
    with torch.no_grad():
        assert torch.allclose(lowered(images[:16]), model(images[:16]), atol=0.05)


def test_a_cnn_lifted_softly_gives_nearly_its_scores_and_trains(digits_heads, data):
    images, labels = data
    torch.manual_seed(0)
    cnn = digits_heads.cnn()
    lifted = digits_heads.lifted_from(cnn, sharpness=12.0)
    assert sum(isinstance(part, Lifted) for part in lifted) == 3
    with torch.no_grad():
        assert torch.allclose(lifted(images[:8]), cnn(images[:8]), atol=1e-3)
    before = lifted[0].center.detach().clone()
    digits_heads.train(lifted, images[:16], labels[:16], epochs=1)
    assert not torch.equal(lifted[0].center, before)


def test_the_three_networks_are_of_one_size(digits_heads):
    sizes = [
        digits_heads.parameters(m)
        for m in (digits_heads.PixelAttention(), digits_heads.cnn(), digits_heads.vit())
    ]
    assert max(sizes) <= 1.05 * min(sizes)


@pytest.mark.long
@pytest.mark.ledger("S2.4.2.2", "S2.4.2.6")
def test_a_trained_classifier_loses_nothing_when_its_heads_are_lowered(digits_heads, data):
    """As bench/convolution_heads.py: in five folds, so that each image is tested once, half a point or less; and in
    each half of the first layer's heads or more. (In one fold two images of 360 are more than half a point.)"""
    images, labels = data
    before, after, near = [], [], []
    for fold in range(5):
        learn, test = digits_heads.split(labels, fold)
        torch.manual_seed(fold)
        model = digits_heads.PixelAttention("position")
        heads = digits_heads.Heads(model, images[learn][:64])
        digits_heads.train(model, images[learn], labels[learn], epochs=10, watch=heads)
        before.append(digits_heads.accuracy(model, images[test], labels[test]))
        lowered, certificates = lower_all(model, images[learn][:128], tolerance=0.05)
        after.append(digits_heads.accuracy(lowered, images[test], labels[test]))
        assert before[-1] >= 90
        assert len(next(iter(certificates.values())).lowered) >= 5
        near.append(heads.near_whole())
    assert abs(mean(after) - mean(before)) <= 0.5 and mean(near) >= 0.9
