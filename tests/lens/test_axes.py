"""A view is read by its strides: which parts of which axes it has, also where sizes coincide."""

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from regard.lens.axes import Axes
from regard.nested import tensors_in


class Recording(TorchDispatchMode):
    def __init__(self, weights=()):
        super().__init__()
        self.axes = Axes(weights)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.axes.record(func, args, out)
        return out


def kinds(axes, x):
    return [[(f.kind, f.size) for f in parts] for parts in axes.of(x)]


def test_heads_are_a_part_of_the_features_wherever_they_are_moved():
    layer, x = nn.Linear(3, 9), torch.randn(3, 3, 3)
    with torch.no_grad(), Recording(list(layer.parameters())) as seen:
        q = layer(x).view(3, 3, 3, 3).permute(2, 0, 3, 1)  # h b d n
        copy = (q * 2).contiguous()
        folded = copy.view(9, 3, 3)
    for z in (q, copy):
        assert kinds(seen.axes, z) == [[("feature", 3)], [("row", 3)], [("feature", 3)], [("row", 3)]]
    assert kinds(seen.axes, folded) == [[("feature", 3), ("row", 3)], [("feature", 3)], [("row", 3)]]


def test_a_slice_keeps_its_start_through_copies_and_layers():
    layer, x = nn.Linear(4, 4), torch.randn(2, 7, 4)
    with torch.no_grad(), Recording() as seen:
        part = layer((x[:, 3:5] + 1).contiguous())[:, 1:]
        one = layer(x[:, 6])
        single = layer(part)
    (rows,) = seen.axes.of(part)[1]
    assert (rows.start, rows.size, rows.length) == (4, 1, 7)
    for z, at in ((one, 6), (single, 4)):
        (index,) = seen.axes.selected(z)
        assert (index.start, index.length) == (at, 7)


def test_every_second_position_is_no_consecutive_slice():
    x = torch.randn(2, 8, 4)
    with Recording() as seen:
        (rows,) = seen.axes.of(x[:, 1::2] * 1)[1]
    assert (rows.start, rows.step, rows.size, rows.length) == (1, 2, 4, 8)


def test_a_buffer_that_is_written_to_is_no_weight():
    """It may hold keys: a static cache is a buffer."""
    cache, k = torch.zeros(2, 8, 4), torch.randn(2, 3, 4)
    with Recording([cache]) as seen:
        before = seen.axes.constant(cache)
        cache[:, :3] = k
        assert (before, seen.axes.constant(cache), seen.axes.constant(cache[:, :5])) == (True, False, False)


def test_overlapping_windows_and_expanded_axes_are_not_followed_into_wrong_ones():
    x = torch.randn(2, 8)
    with Recording() as seen:
        windows = x.unfold(1, 4, 2)
        expanded = x[:, None].expand(2, 8, 8).clone()
    assert [[f.size for f in parts] for parts in seen.axes.of(windows)] == [[2], [3], [4]]
    assert kinds(seen.axes, expanded) == [[("data", 2)], [("new", 8)], [("data", 8)]]
    assert tensors_in(windows)
