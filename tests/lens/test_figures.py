"""The pictures: what each shows is what was computed, labels are whole, boxes do not overlap."""

import dataclasses
from io import BytesIO
from itertools import combinations, pairwise

import pytest
import torch
from matplotlib.patches import FancyBboxPatch

import regard as rg
from regard.lens import figures
from regard.lens.figures import memory, style
from regard.lens.figures.architecture import _middle, columns_of
from regard.schedule import constant, inverse_sqrt, warmup_cosine

WORDS = ("The", "cat", "sat", "on", "the", "<b>mat</b>", "because", "$it$", "was", "tired", "of", "dogs")


@pytest.fixture(scope="module")
def view():
    torch.manual_seed(0)
    block = rg.Block(rg.Attention(16, heads=2, pattern=rg.causal()), rg.FeedForward(16))
    model = rg.Encoder(block, 2, embedding=rg.Embedding(20, 16, position=rg.sinusoidal())).build().eval()
    return rg.look(model, torch.arange(len(WORDS))[None], tokens=list(WORDS)).remove_heads()


def written(figure, kind="svg") -> bytes:
    out = BytesIO()
    figure.savefig(out, format=kind)
    return out.getvalue()


def texts(figure) -> list[str]:
    return [t.get_text() for t in figure.findobj(lambda a: hasattr(a, "get_text")) if t.get_text()]


def image(figure, number=0):
    return torch.tensor(figure.axes[number].images[0].get_array().filled(float("nan")))


def titled(figure, title):
    return next(ax for ax in figure.axes if ax.get_title() == title)


@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
@pytest.mark.parametrize("dark", [False, True])
def test_a_picture_is_written_light_and_dark(kind, dark):
    figure = figures.mask_matrix(rg.causal(), 5, dark=dark)
    assert len(written(figure, kind)) > 1000
    assert figure.get_facecolor()[:3] == pytest.approx(
        [c / 255 for c in ((0x16, 0x18, 0x1D) if dark else (255,) * 3)]
    )


@pytest.mark.ledger("S1.Q6a.1")
def test_the_mask_matrix_shows_the_pattern_its_count_and_its_depth():
    pattern = rg.window(2) | rg.every(4)
    figure = figures.mask_matrix(pattern, 16)
    assert torch.equal(image(figure) == 1, pattern.allowed(16))
    title = figure.axes[0].get_title()
    assert f"{pattern.count(16)} of 256 pairs" in title and title.endswith("3 layers connect all positions")
    assert (
        figures.mask_matrix(rg.causal(), 6)
        .axes[0]
        .get_title()
        .endswith("1 layer connects all reachable positions")
    )
    assert "connect" not in figures.mask_matrix(rg.full(), 4, 6).axes[0].get_title()


def test_the_receptive_field_is_the_support_of_the_product():
    pattern, n = rg.causal() & rg.dilated(1, 3), 20
    figure = figures.receptive_field(pattern, n, 3)
    step = (pattern.allowed(n) | torch.eye(n, dtype=torch.bool)).double()
    row = torch.eye(n, dtype=torch.double)[-1]
    for layer in range(4):
        assert torch.equal(image(figure)[layer] == 1, row > 0)
        row = row @ step
    assert " 4 (≤ 20)" in texts(figure)


@pytest.mark.ledger("S3.Q2b.1", "S3.Q2b.2", "S3.Q2b.3")
def test_the_mask_table_has_the_masks_of_three_models():
    figure = figures.mask_table()
    shown = {ax.get_title().split("\n")[1]: image(figure, i) for i, ax in enumerate(figure.axes)}
    assert torch.equal(shown["self: causal"] == 1, rg.causal().allowed(5))
    assert shown["cross: key padding of the source"].shape == (5, 6)
    assert bool((shown["encoder self: key padding"][:, 4:] == 0).all())


@pytest.mark.ledger("S1.Q7a.1")
def test_the_learning_rate_is_the_schedules_and_its_points_are_marked():
    one = warmup_cosine(1e-3, 4000, 100000)
    figure = figures.learning_rates(one, inverse_sqrt(512, 4000), constant(5e-4))
    line = figure.axes[0].lines[0]
    assert [one(round(x)) for x in line.get_xdata()] == list(line.get_ydata())
    assert {"0.001 at 4,000", "0.0005 at 52,000", "0 at 100,000"} <= set(texts(figure))


@pytest.mark.ledger("S2.1.1.3")
def test_a_map_shows_scores_weights_and_entropies_with_readable_tokens(view):
    figure = figures.attention_map(view, 1, 0)
    weights = view.map(1, 0)
    shown = titled(figure, "weights")
    assert torch.allclose(torch.tensor(shown.images[0].get_array().filled(0.0)), weights.float())
    bars = titled(figure, "entropy").patches
    expected = -(weights * weights.clamp(min=1e-30).log()).sum(-1)
    assert [b.get_width() for b in bars] == pytest.approx(expected.tolist(), abs=1e-5)
    words = [t.get_text() for t in shown.get_yticklabels()]
    assert words == [style.shown(w) for w in WORDS] and r"\$it\$" in words
    assert len(written(figure)) > 5000


@pytest.mark.ledger("S2.1.1.1")
def test_the_row_of_a_token_is_drawn_for_each_sentence():
    torch.manual_seed(0)
    names = [["the", "cat", "it", "the"], ["the", "mat", "it", "the"]]
    model = rg.Attention(8, heads=2, scale=3.0).build().eval()
    two = rg.look(model, torch.randn(2, 4, 8), tokens=names)
    figure = figures.attention_rows(two, 0, 1, "it")
    assert len(figure.axes) == 2
    for b, ax in enumerate(figure.axes):
        row = two.map(0, 1, b)[2]
        assert [p.get_width() for p in ax.patches] == pytest.approx(row.tolist())
        labels = [t.get_text() for t in ax.get_yticklabels()]
        assert labels == ["the (0)", names[b][1], "it", "the (3)"]
        assert ax.get_title() == f"from it: {float(row.max()):.0%} on {labels[int(row.argmax())]}"
    assert len(figures.attention_rows(two, 0, 0, 2, [1]).axes) == 1


def test_sixty_token_labels_do_not_overlap():
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    torch.manual_seed(0)
    model = rg.Attention(8, heads=1).build().eval()
    names = [f"token{i}" for i in range(60)]
    view_of_60 = rg.look(model, torch.randn(1, 60, 8), tokens=names)
    figure = figures.attention_map(view_of_60, 0, 0)
    FigureCanvasAgg(figure).draw()
    boxes = [t.get_window_extent() for t in figure.axes[0].get_yticklabels()]
    assert len(boxes) == 60
    gaps = [abs(a.y0 - b.y0) for a, b in pairwise(boxes)]
    assert min(gaps) >= 0.75 * max(b.height for b in boxes)


def test_the_overview_has_one_map_per_head(view):
    figure = figures.overview(view)
    assert len(figure.axes) == 4
    assert torch.allclose(image(figure, 3), view.map(1, 1).float())


def test_the_gallery_shows_kinds_similarity_and_effects(view):
    figure = figures.head_gallery(view, 1)
    text = " ".join(texts(figure))
    assert view.kinds[1][0].name in text and "effect of removal" in text
    assert "use at least" in text.replace("\n", " ")  # too few tokens for an angle
    bars = titled(figure, "effect of removal").patches
    assert [b.get_height() for b in bars] == pytest.approx([view.effects[1, h] for h in range(2)])


MODELS = ["transformer-base", "gpt2", "bert-base", "t5-small", "vit-b16", "tiny-classifier"]


@pytest.mark.ledger("S1.Q5a.1", "S1.I.3")
@pytest.mark.parametrize("name", MODELS)
def test_the_diagram_is_complete_and_no_box_overlaps_another(name):
    declared = rg.preset(name)
    figure = figures.architecture(declared, source='"Hello world"', target='"Hola mundo"')
    rectangles = [p for p in figure.axes[0].patches if isinstance(p, FancyBboxPatch)]
    columns = columns_of(declared)
    assert len(rectangles) == sum(len(c.boxes) + 1 for c in columns)
    frames = sorted(rectangles, key=lambda p: -p.get_height())[: len(columns)]
    boxes = [p for p in rectangles if p not in frames]
    for a, b in combinations(boxes, 2):
        apart_x = abs(a.get_x() - b.get_x()) >= a.get_width()
        apart_y = abs(a.get_y() - b.get_y()) >= a.get_height()
        assert apart_x or apart_y
    text = " ".join(texts(figure))
    stacks = (
        [declared.encoder, declared.decoder]
        if hasattr(declared, "decoder")
        else [getattr(declared, "encoder", declared)]
    )
    for stack in stacks:
        assert f"× {stack.layers}" in text and f"{stack.block.attention.heads} heads" in text
    assert ("cross-attention" in text) == hasattr(declared, "decoder")
    if name == "transformer-base":
        assert '"Hello world"' in text and "masked self-attention" in text and "sinusoidal positions" in text


def residual_arrows(figure):
    """(start, end) heights of each line that leaves the middle of a column and ends in an arrow at its side."""
    ax = figure.axes[0]
    heads = {tuple(a.xyann): tuple(a.xy) for a in ax.texts if getattr(a, "arrow_patch", None) is not None}
    lines = [list(zip(*line.get_data())) for line in ax.lines if len(line.get_xdata()) == 3]
    return [(points[0][1], heads[points[-1]][1]) for points in lines if points[-1] in heads]


@pytest.mark.ledger("S1.Q5a.6", "S1.Q5a.7")
@pytest.mark.parametrize("norm_at", ["pre", "post"])
def test_a_residual_goes_around_each_part_into_its_sum(norm_at):
    attention = rg.Attention(8, heads=2)
    causal = rg.Attention(8, heads=2, pattern=rg.causal())
    block = rg.Block(causal, rg.FeedForward(8), cross=attention, norm_at=norm_at)
    for residual in (True, False):
        decoder = rg.Decoder(dataclasses.replace(block, residual=residual), 2, embedding=rg.Embedding(5, 8))
        figure = figures.architecture(decoder)
        boxes = columns_of(decoder)[0].boxes
        arrows = residual_arrows(figure)
        sums = [_middle(i) for i, b in enumerate(boxes) if b.label == "add"]
        assert [end for _, end in arrows] == sums and len(sums) == (3 if residual else 0)
        for (start, end), name in zip(arrows, ("self-attention", "cross-attention", "feed-forward")):
            inside = [b.label for i, b in enumerate(boxes) if start < _middle(i) < end]
            assert any(name in label for label in inside)
            assert any("norm" in label for label in inside) == (norm_at == "pre")


def test_what_has_no_diagram_is_refused():
    with pytest.raises(
        rg.SpecError, match=r"^Attention has no diagram; use an Encoder, a Decoder, an EncoderDecoder or"
    ):
        figures.architecture(rg.Attention(8, heads=2))


@pytest.mark.ledger("S1.Q4a.1")
def test_positions_are_shown_with_their_products():
    figure = figures.positional_encoding(32, 16)
    products = titled(figure, "PE(p) · PE(p + k)").lines[0]
    assert products.get_ydata()[0] == pytest.approx(8.0)  # ‖PE‖² = d/2
    learned = figures.positional_encoding(table=torch.randn(9, 6, generator=torch.Generator().manual_seed(0)))
    assert not any(ax.get_title() == "wavelengths" for ax in learned.axes)
    grid = figures.patch_positions(torch.randn(1 + 6, 5), (2, 3), skip=1)
    assert len(grid.axes) == 6 and image(grid)[0, 0] == pytest.approx(1.0)


@pytest.mark.ledger("S3.Q1a.7", "S1.Q1b.2")
def test_saturation_shows_the_collapse_without_the_scale():
    figure = figures.saturation((16, 512), samples=400)
    lines = {line.get_label(): list(line.get_ydata()) for ax in figure.axes for line in ax.lines}
    assert lines["q·k"][1] > 0.8 and abs(lines["q·k / √d"][0] - lines["q·k / √d"][1]) < 0.02
    assert lines["q·k, median"][1] < 1e-3 < lines["q·k, mean"][1]


@pytest.mark.ledger("S4.1.1c.1", "S4.1.1d.1")
def test_sharpness_goes_from_uniform_to_the_shared_maximum():
    q, k, v = torch.randn(3, 5, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    figure = figures.sharpness([2.0, 2.0, 1.0], q, k, v)
    lines = [list(line.get_ydata()) for line in figure.axes[0].lines]
    assert [y[-1] for y in lines] == pytest.approx([0.5, 0.5, 0.0], abs=1e-6)
    assert [y[0] for y in lines] == pytest.approx([1 / 3] * 3, abs=5e-3)
    exact, first = (figure.axes[1].lines[i].get_ydata() for i in (0, 1))
    assert exact[10] == pytest.approx(0, abs=1e-9) and abs(exact[-1] - first[-1]) > 1e-4
    bare = figures.sharpness([2.0, 2.0, 1.0])
    assert len(bare.axes) == 1 and [list(line.get_ydata()) for line in bare.axes[0].lines] == lines
    with pytest.raises(
        rg.ShapeError, match=r"^got only q and v; the effect of a changed key needs q, k and v"
    ):
        figures.sharpness([2.0, 1.0], q, v=v)


def test_what_was_recorded_is_drawn(view):
    recorder = rg.Recorder()
    model = torch.nn.Linear(3, 3)
    for step in (1, 2):
        recorder.loss(step, 3.0 - step, floor=0.5)
        model(torch.ones(1, 3)).sum().backward()
        recorder.gradient(step, model)
        recorder.gradient(step, model, clipped=True)
        recorder.view(step, view)
    curves = figures.training_curves(recorder)
    assert list(curves.axes[0].lines[0].get_ydata()) == [2.0, 1.0] and "floor 0.5" in texts(curves)
    flow = figures.recorded_gradients(recorder)
    assert {"step 1, before clipping", "step 2, after clipping"} <= set(texts(flow))
    course = figures.head_evolution(recorder)
    assert len(course.axes) == 4 and len(course.axes[0].lines) == 2
    with pytest.raises(rg.ShapeError, match=r"^no head is recorded; call recorder.view"):
        figures.head_evolution(rg.Recorder())


def test_costs_taps_traces_and_dependence_are_drawn():
    costs = figures.cost_curves({"attention": {128: 1e6, 256: 4e6}}, crossings={"n = d": 200})
    assert list(costs.axes[0].lines[0].get_ydata()) == [1e6, 4e6] and "n = d" in texts(costs)
    taps = torch.zeros(2, 3, 3)
    taps[0, 0, 1], taps[1, 2, 2] = 1.0, 0.5
    figure = figures.convolution_map(taps, torch.tensor([[-1.0, 0.0], [1.0, 1.0]]))
    assert "head 0\n(-1, +0), weight 1.00" in texts(figure) and "head 1\n(+1, +1), weight 0.50" in texts(
        figure
    )
    trace = figures.shape_trace([("scores", "q kᵀ/√d", torch.ones(2, 3), "2·n·m·d")])
    assert {"scores", "2 × 3", "2·n·m·d"} <= set(texts(trace))
    table = torch.ones(3, 3).tril()
    depends = figures.dependence({"causal": table})
    assert torch.equal(image(depends).isnan(), table == 0)
    with pytest.raises(rg.ShapeError, match=r"^no table to draw$"):
        figures.dependence({})


@pytest.mark.ledger("S0.Q1c.1")
def test_the_costs_of_layer_types_are_those_of_cost():
    figure = figures.layer_costs(64, (32, 64, 128))
    lines = {line.get_label(): list(line.get_ydata()) for line in figure.axes[0].lines}
    assert lines["GRU"] == [rg.costs.compare(n, 64)["GRU"].flops for n in (32, 64, 128)]
    assert "n = 128" in texts(figure) and len(lines) >= 10


@pytest.mark.compiled
def test_memory_is_drawn_by_kind_and_module_with_areas_in_proportion():
    result = rg.cost("tiny-gpt", n=32, batch=4, train=True)
    peak = result.memory.peak
    tree = figures.memory_treemap(result)
    areas = sum(p.get_width() * p.get_height() for p in tree.axes[0].patches)
    assert areas == pytest.approx(1.0) and any("saved for backward" in t for t in texts(tree))
    timeline = figures.memory_timeline(result)
    assert any(t.endswith(peak.operation) for t in texts(timeline)) and " backward" in texts(timeline)
    highest = max(
        max(path.vertices[:, 1].max() for path in area.get_paths()) for area in timeline.axes[0].collections
    )
    assert highest == pytest.approx(peak.bytes / 2**30, rel=0.01)


def test_every_kind_of_memory_has_a_color_of_its_own():
    assert len({memory._color(kind) for kind in memory.KINDS}) == len(memory.KINDS)


@pytest.mark.compiled
def test_modules_are_drawn_under_the_roofline():
    from regard.costs.gpus import card
    from regard.costs.time import estimate

    machine = card("h100").roofline("h100")
    guess = estimate(rg.cost("tiny-gpt", n=32), machine)
    figure = figures.roofline(guess, machine)
    points = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    assert len(points) == sum(bool(p.flops and p.bytes) for p in guess.parts) > 3
    top = max(machine.flops_per_s.values())
    assert all(line.get_ydata()[0] <= top for line in points)


def test_a_pattern_for_each_head_is_drawn_one_by_one_and_connects_by_any_head():
    heads = rg.per_head([rg.causal() & rg.window(1), rg.causal() & (rg.window(0) | rg.every(4))])
    with pytest.raises(rg.SpecError, match=r"is one pattern for each head; draw one of .patterns"):
        figures.mask_matrix(heads)
    texts = [t.get_text() for t in figures.receptive_field(heads, 16, 2).axes[0].texts]
    union = rg.causal() & (rg.window(1) | rg.every(4))
    assert texts == [t.get_text() for t in figures.receptive_field(union, 16, 2).axes[0].texts]
