"""The studio: a real server with the translator of regard, and a browser, as wide as a desktop and as a phone."""

import dataclasses
import json
import math
import re

import pytest
import torch

import regard as rg
from regard.cli.models import LoadedModel, arguments, included_translator, namer, own_output, read_input

pytest.importorskip("fastapi")
from regard.web.app import create_app
from regard.web.studio import Studio
from regard.web.workers import Workers
from web_server import ask, served, tiny

WIDTHS = {"desktop": 1280, "phone": 390}
PANELS = ("model", "heads", "generate", "patterns", "cost", "laws", "runs")
TEXT = "You do not have permission to open this file."


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two runs, one of them unfinished."""
    home = tmp_path_factory.mktemp("runs")
    for name, rate in (("first", 0.01), ("second", 0.02)):
        (home / name).mkdir()
        events = [
            {"event": "train", "step": s, "loss": 2 + 5 * math.exp(-rate * s), "tokens_per_second": 100}
            for s in range(0, 200, 20)
        ]
        events += [{"event": "done", "step": 200}] if name == "first" else []
        (home / name / "log.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    return home


@pytest.fixture(scope="module")
def studio(runs):
    app = create_app(
        included_translator(), workers=Workers(1, deadline=90), name="mine", runs=runs, code=True
    )
    yield from served(app)


@pytest.fixture(scope="module")
def words():
    yield from served(create_app(tiny(), workers=Workers(1, deadline=90), name="tiny-gpt"))


@pytest.fixture
def opened(browser, studio):
    """A function that opens the studio on a panel; at the end the console has to be without errors."""
    errors, contexts = [], []

    def open_at(fragment="", width=1280, scheme="light", port=studio):
        context = browser.new_context(
            viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True
        )
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda e: errors.append(str(e)))
        page.on("console", lambda m: errors.append(m.text) if m.type == "error" else None)
        page.goto(f"http://127.0.0.1:{port}/{fragment}")
        page.wait_for_function("() => document.querySelector('#tabs [aria-selected=true]')")
        return page

    yield open_at
    for context in contexts:
        context.close()
    refused = "the server responded with a status of 422"  # a sentence for the user, which Chromium logs
    assert not [e for e in errors if refused not in e]


def count(page, selector, at_least=1):
    page.wait_for_function(
        "([selector, n]) => document.querySelectorAll(selector).length >= n", arg=[selector, at_least]
    )
    return page.locator(selector).count()


# what the server answers


def test_the_model_is_named_outlined_and_has_an_example(studio):
    model = ask(studio, "/api/model")[1]
    assert (model["name"], model["class"], model["translates"]) == ("mine", "EncoderDecoder", True)
    assert model["parameters"] == sum(p.numel() for p in included_translator().model.parameters())
    encoder = next(p for p in model["parts"] if p["name"] == "encoder")
    blocks = next(p for p in encoder["parts"] if p["name"] == "blocks")
    assert (blocks["class"], blocks["times"]) == ("Block", 4)  # equal blocks are folded
    once = sum((p["parameters"] - p["shared"]) * p["times"] for p in model["parts"])
    assert once == model["parameters"]  # the embedding that both stacks share is counted once
    assert model["cost"]["flops"] == rg.cost(included_translator().config, n=128).total.flops


class Own(torch.nn.Module):
    """A module of a user: neither a declaration of regard nor a model of Hugging Face."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(50, 8)
        self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)

    def forward(self, ids):
        return self.layer(self.embed(ids))


def test_a_module_of_your_own_is_priced_by_the_line_that_is_shown():
    """It was "not priced", beside a line of Python that raised the same error."""
    model = Own().eval()
    found = Studio(LoadedModel(model, None, None), "mine").summary()["cost"]
    by_line = eval(found["python"], {"regard": rg, "torch": torch, "model": model})
    assert found["flops"] == by_line.total.flops == rg.cost(model, torch.ones(1, 128).long()).total.flops
    declared = Studio(tiny(), "tiny-gpt").summary()["cost"]
    assert declared["python"] == "regard.cost(model, n=128)" and declared["flops"] > 0


@pytest.mark.long
def test_the_python_line_of_the_model_gives_that_model():
    space = {}
    exec(included_translator().python, space)
    with torch.no_grad():
        for mine, theirs in zip(space["model"].parameters(), included_translator().model.parameters()):
            assert torch.equal(mine, theirs)


def test_the_steps_of_a_head_lead_to_its_weights(studio):
    heads = ask(studio, "/api/heads", {"text": TEXT})[1]
    layer = next(i for i, each in enumerate(heads["layers"]) if each["group"] == "cross")
    steps = ask(studio, "/api/steps", {"text": TEXT, "layer": layer, "head": 1, "query": 2})[1]
    q, k = torch.tensor(steps["q"]), torch.tensor(steps["k"])
    assert steps["d_k"] > q.shape[0] == k.shape[1] == 8
    scores = torch.tensor(steps["scaled"])
    assert torch.allclose(scores, torch.tensor(steps["products"]) * steps["scale"], atol=1e-4)
    assert torch.allclose(scores.softmax(0), torch.tensor(steps["weights"]), atol=1e-4)
    mixed = torch.tensor(steps["weights"]) @ torch.tensor(steps["v"])
    assert torch.allclose(mixed, torch.tensor(steps["output"]), atol=1e-3)


def test_a_masked_key_has_no_score_and_no_weight(words):
    steps = ask(words, "/api/steps", {"text": "5, 12, 7", "layer": 1, "head": 2, "query": 1})[1]
    assert steps["scores"][2] is None and steps["weights"][2] == 0 and steps["exp"][2] == 0


def test_removing_a_head_or_a_key_changes_the_output_as_the_library_says(words):
    loaded = tiny()
    view = rg.look(loaded.model, torch.tensor([[5, 12, 7]]))
    found = ask(words, "/api/remove", {"text": "5, 12, 7", "layer": 1, "head": 2})[1]
    assert found["effect"] == pytest.approx(view.remove_heads().effects[1, 2], rel=1e-4)
    found = ask(words, "/api/remove", {"text": "5, 12, 7", "key": 1})[1]
    assert found["effect"] == pytest.approx(view.remove_key(1), rel=1e-4)
    assert ask(words, "/api/remove", {"text": "5, 12, 7"}) == (
        422,
        {"error": "nothing to remove: give a layer and a head, or a key"},
    )


def test_a_key_is_removed_in_the_layers_that_have_the_same_keys(studio):
    """A key of the encoder also hid the one of that number in the decoder; one that does not exist had no effect."""
    view = ask(studio, "/api/heads", {"text": TEXT})[1]
    source = view["layers"][0]["keys"]
    layers = [i for i, each in enumerate(view["layers"]) if each["keys"] == source]
    assert {view["layers"][i]["group"] for i in layers} == {"encoder", "cross"}
    loaded = included_translator()
    text = read_input(TEXT, loaded)
    looked = rg.look(loaded.model, arguments(loaded, text, own_output(loaded, text)), namer(loaded.tokenizer))
    assert list(looked.keys(0)) == source
    found = ask(studio, "/api/remove", {"text": TEXT, "layer": 0, "key": 2})[1]
    assert found["effect"] == pytest.approx(looked.remove_key(2, layer=layers), rel=1e-4)
    at_target = next(i for i, each in enumerate(view["layers"]) if each["group"] == "decoder")
    other = ask(studio, "/api/remove", {"text": TEXT, "layer": at_target, "key": 2})[1]
    assert other["effect"] != found["effect"]
    status, answer = ask(studio, "/api/remove", {"text": TEXT, "layer": 0, "key": 99})
    assert status == 422 and answer["error"] == f"key 99: layer 0 has {len(source)} keys"


def test_the_next_token_is_the_one_that_greedy_decoding_takes(words):
    after = []
    for _ in range(4):
        found = ask(words, "/api/next", {"text": "5, 12, 7", "after": after})[1]
        assert sum(t["p"] for t in found["top"]) <= 1.001
        assert abs(sum(found["attention"][0]) - 1) < 1e-2
        after.append(found["top"][0]["id"])
    expected = rg.generate(tiny().model, [[5, 12, 7]], max_new_tokens=4).rows()[0]
    assert after == list(expected)[-4:]


def test_a_token_id_beyond_all_vocabularies_is_refused(words):
    assert ask(words, "/api/next", {"text": "5, 12, 7", "after": [10**30]})[0] == 422


@pytest.mark.parametrize("path", ["/api/pattern", "/api/region", "/api/pair"])
def test_a_pattern_for_each_head_is_refused_where_one_is_drawn(words, path):
    at = {} if path == "/api/pattern" else {"i": 1, "j": 1}
    status, answer = ask(words, path, {"pattern": "per_head([causal(), window(2)])", **at})
    assert status == 422
    assert answer["error"] == "per_head has a pattern for each head, and one is drawn here; enter one of them"


@pytest.mark.parametrize(
    "name, lengths", [("gpt2", (32, 1024)), ("tiny-bert", (8, 128)), ("tiny", (128, 4096))]
)
def test_a_curve_has_the_lengths_that_a_table_of_positions_allows(words, name, lengths):
    points = ask(words, "/api/curve", {"name": name, "batch": 1})[1]["points"]
    assert (points[0]["n"], points[-1]["n"]) == lengths
    assert [p["flops"] for p in points] == [rg.cost(name, n=p["n"]).flops for p in points]


@pytest.mark.long
def test_the_best_path_of_the_beam_tree_is_the_translation(studio):
    tree = ask(studio, "/api/beams", {"text": TEXT, "width": 4, "steps": 40})[1]
    words, node = [], tree["best"]
    while node >= 0:
        words.append(tree["nodes"][node]["token"])
        node = tree["nodes"][node]["parent"]
    said = "".join(reversed(words[1:]))
    assert re.sub(r"\W", "", said) == re.sub(r"\W", "", rg.translate(TEXT))


@pytest.mark.parametrize(("i", "j", "size"), [(0, 0, 16), (5, 90, 10), (40, 0, 60)])
def test_a_region_of_a_pattern_is_exact(words, i, j, size):
    pattern = rg.causal() & (rg.window(2) | rg.every(4))
    found = ask(words, "/api/region", {"pattern": repr(pattern), "n": 100, "i": i, "j": j, "size": size})[1]
    drawn = torch.tensor([list(bytes.fromhex(row)) for row in found["rows"]]) / 255
    rows, columns = (slice(found[x], found[x] + size) for x in ("i", "j"))
    assert found["exact"] and torch.equal(drawn, pattern.allowed(100)[rows, columns].float())


def test_a_large_region_shows_shares_without_stripes(words):
    found = ask(words, "/api/region", {"pattern": "every(7)", "n": 100_000, "size": 100_000})[1]
    shares = torch.tensor([list(bytes.fromhex(row)) for row in found["rows"]]) / 255
    assert not found["exact"] and shares.mean() == pytest.approx(1 / 7, abs=0.03)
    assert shares.mean(0).std() < 0.03  # a regular grid of samples would give columns of 0 and of 1


def test_the_estimate_of_a_pattern_is_shown_beside_full_attention(words):
    fields = {"pattern": "causal() & window(64)", "n": 4096}
    found = ask(words, "/api/pattern", fields)[1]["estimate"]
    pattern = rg.causal() & rg.window(64)
    assert found["flops"] == 4 * 64 * 8 * pattern.count(4096) and found["dense_flops"] == 4 * 64 * 8 * 4096**2
    assert 0 < found["seconds"] < found["dense_seconds"]
    trained = ask(words, "/api/pattern", {**fields, "device": "cuda", "train": True})[1]["estimate"]
    assert 0 < trained["seconds"] < trained["dense_seconds"] < found["dense_seconds"]  # a GPU is faster


def test_a_pattern_is_timed_on_this_machine(words):
    found = ask(words, "/api/timing", {"pattern": "window(2)", "n": 64, "train": True})[1]
    assert found["seconds"] > 0 and found["dense_seconds"] > 0 and found["threads"] >= 1
    assert ask(words, "/api/timing", {"pattern": "window(2)", "n": 100_000})[0] == 422


def test_a_pair_says_which_words_allow_it(words):
    found = ask(words, "/api/pair", {"pattern": "causal() & (window(1) | every(4))", "i": 9, "j": 4})[1]
    assert found["allowed"] and found["words"] == {"causal()": True, "window(1)": False, "every(4)": True}


def test_code_of_the_page_runs_only_where_the_owner_allows_it(studio, words):
    code = "def attention(q, k, v, mask):\n    return q"
    status, found = ask(words, "/api/laws", {"code": code})
    assert status == 422 and found["error"].endswith("its owner can start it with --allow-code")
    status, found = ask(studio, "/api/laws", {"code": code, "cases": 1})
    assert status == 200 and found["cause"]["headline"] == "the queries are returned unchanged"
    assert ask(studio, "/api/laws", {"code": "1 / 0"})[1]["error"] == (
        "the code raised ZeroDivisionError: division by zero"
    )
    assert "unknown target 'os'" in ask(words, "/api/laws", {"target": "os"})[1]["error"]


@pytest.mark.long
def test_runs_are_listed_with_their_curves(studio, words):
    found = ask(studio, "/api/runs")[1]
    assert [(r["name"], r["state"]) for r in found] == [("first", "finished"), ("second", "unfinished")]
    assert found[0]["curves"]["loss"][0] == [0, 7.0] and ask(words, "/api/runs")[1] == []


@pytest.mark.long
def test_a_preset_with_other_layers_is_priced_as_the_library_does(words):
    found = ask(words, "/api/resized", {"name": "tiny-gpt", "n": 64, "layers": 2})[1]
    assert found["layers"] == 2
    assert found["cost"]["total"]["flops"] < rg.cost("tiny-gpt", n=64).total.flops
    assert "did you mean gpt2" in ask(words, "/api/resized", {"name": "gtp2"})[1]["error"]


# what a person sees


def test_the_studio_opens_on_its_model_and_shows_heads_of_an_example(opened):
    page = opened()
    page.wait_for_function("() => document.getElementById('model-name').textContent === 'mine'")
    assert count(page, "#architecture .block", 2) > 4
    page.wait_for_function("() => document.querySelectorAll('#example-kinds button').length > 3")
    assert "No tienes permiso" in page.inner_text("#example-text")
    page.click("#tab-heads")
    assert count(page, ".head", 20) == 60
    assert page.input_value("#text") == TEXT
    assert page.locator("#overview h3").all_inner_texts() == [
        "Encoder",
        "Decoder",
        "Decoder to encoder (cross-attention)",
    ]


@pytest.mark.long
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("device", WIDTHS)
@pytest.mark.parametrize("panel", PANELS)
def test_every_panel_fits_its_screen_and_has_no_serious_accessibility_violation(
    opened, panel, device, scheme
):
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = opened(f"#panel={panel}", WIDTHS[device], scheme)
    page.wait_for_timeout(2500)
    if panel == "heads":
        page.click("#step")
        count(page, "#steps td")
    if panel == "laws":
        page.click("#ask-laws button")
        count(page, ".law")
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTHS[device]
    found = axe.Axe().run(page).response["violations"]
    assert [(v["id"], v["nodes"][0]["html"]) for v in found if v["impact"] in ("serious", "critical")] == []


def test_the_page_says_that_it_reads_the_model(browser, words):
    """It was an empty page with two headings until the model was read, which takes seconds on a busy machine."""
    page, held = browser.new_page(), []
    page.route("**/api/model", lambda route: held.append(route))
    page.goto(f"http://127.0.0.1:{words}/")
    page.wait_for_selector("#model-lead:has-text('Reading the model …')")
    assert page.evaluate("!document.getElementById('looking').hidden")
    held[0].continue_()
    page.wait_for_selector("#model-lead:has-text('predicts the next token')")
    page.close()


@pytest.mark.long
def test_tabs_work_by_keyboard(opened):
    page = opened()
    page.focus("#tab-model")
    for expected in ("heads", "generate", "patterns"):
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.activeElement.id") == f"tab-{expected}"
        assert page.is_visible(f"#{expected}-panel")


@pytest.mark.long
def test_a_link_opens_the_same_head(opened):
    page = opened("#panel=heads&text=Hello world&layer=5&head=3")
    count(page, ".head", 20)
    page.wait_for_function("() => document.getElementById('evidence').textContent.startsWith('layer 5;')")
    assert "head 3" in page.inner_text("#detail-title")
    page.click('.head[data-layer="2"][data-head="1"]')
    assert "layer=2&head=1" in page.url


ADDRESSES = {
    "#panel=nonsense": "there is no panel nonsense here, only model, heads, generate, patterns, cost, laws, runs.",
    "#panel=patterns&patern=full()": "patern is no field of this page.",
    "#panel=cost&dtype=int3&model=gtp2": "dtype=int3 is not possible here; model=gtp2 is not possible here.",
}


@pytest.mark.parametrize("address", ADDRESSES)
def test_what_an_address_asks_for_and_the_page_does_not_have_is_named(opened, words, address):
    """An unknown panel opened Patterns without a word."""
    page = opened(address, port=words)
    page.wait_for_selector("#address-error:not([hidden])")
    assert page.inner_text("#address-error") == f"In the address: {ADDRESSES[address]}"
    assert page.input_value("#dtype") == "float32"  # the choice before it
    page.click("#tab-laws")
    assert not page.is_visible("#address-error")


def test_an_unknown_head_in_the_address_is_named(opened, words):
    page = opened("#panel=heads&layer=99&head=3&mode=sideways", port=words)
    page.wait_for_selector("#address-error:has-text('no mode')")
    expected = "In the address: there is no head 99/3 (layer/head). there is no mode sideways."
    assert page.inner_text("#address-error") == expected


@pytest.mark.long
def test_the_map_zooms_by_button_by_key_and_by_drag(opened):
    page = opened("#panel=heads")
    count(page, ".head", 20)
    page.click("#zoom-in")
    first = page.inner_text("#zoomed")
    assert first.startswith("queries ")
    box = page.locator("#map").bounding_box()
    page.mouse.move(box["x"] + 250, box["y"] + 250)
    page.mouse.down()
    page.mouse.move(box["x"] + 380, box["y"] + 380, steps=5)
    page.mouse.up()
    assert page.inner_text("#zoomed") != first
    page.focus("#map")
    page.keyboard.press("-")
    page.click("#zoom-all")
    assert page.inner_text("#zoomed") == ""


@pytest.mark.long
def test_hovering_the_map_reads_a_weight(opened):
    page = opened("#panel=heads")
    count(page, ".head", 20)
    box = page.locator("#map").bounding_box()
    page.mouse.move(box["x"] + 200, box["y"] + 200)
    assert re.search(r"attends to “.*” \(\d+\) with weight [01]\.\d{4}$", page.inner_text("#reading"))


@pytest.mark.long
def test_the_line_view_has_a_line_for_the_largest_weight(opened):
    page = opened("#panel=heads")
    count(page, ".head", 20)
    page.click("#modes [data-mode=lines]")
    assert count(page, "#lines line") > 3 and not page.is_visible("#map")
    page.hover("#lines text >> nth=1")
    assert page.text_content("#lines text.chosen") in page.inner_text("#reading")


@pytest.mark.long
def test_a_head_compared_with_itself_is_equal(opened):
    page = opened("#panel=heads")
    count(page, ".head", 20)
    page.click('.head[data-layer="1"][data-head="2"]')
    page.click("#modes [data-mode=compare]")
    page.select_option("#other", "1/2")
    assert page.inner_text("#difference").startswith(
        "cosine 1.000; mean total variation distance of their rows 0.000"
    )
    page.select_option("#other", "0/0")
    assert not page.inner_text("#difference").startswith("cosine 1.000")


@pytest.mark.long
def test_heads_are_removed_and_stepped_through_on_the_page(opened):
    page = opened("#panel=heads")
    count(page, ".head", 20)
    page.click("#remove-head")
    count(page, "#after li", 8)
    assert "The output changes by" in page.inner_text("#removed")
    page.click("#step")
    assert count(page, "#steps tbody tr") == len(page.locator("#keys span").all())
    texts = [page.inner_text("#step-text")]
    while not page.is_disabled("#step-next"):
        page.click("#step-next")
        texts.append(page.inner_text("#step-text"))
    assert len(texts) == 7 and "vectors of 64 numbers" in texts[0] and "sum is 1" in texts[5]
    assert page.inner_text("#steps th.now") == "v"
    page.click('.head[data-layer="2"][data-head="1"]')
    assert "stale" in page.get_attribute("#steps-box", "class")  # these are numbers of another head


@pytest.mark.long
def test_two_texts_are_compared_and_the_link_restores_it(opened):
    page = opened("#panel=heads")
    count(page, ".head", 20)
    page.click("#modes [data-mode=compare]")
    page.fill("#second-text", "The cat sat on the mat.")
    page.click("#second-form button")
    assert count(page, "#changed li", 12) == 12
    assert page.input_value("#other") == "text" and "on both texts" in page.inner_text("#changed")
    said = page.inner_text("#difference")
    page.click("#changed li:nth-child(3) button")
    assert page.input_value("#other") == "text" and page.inner_text("#difference") != said
    other = opened(page.url[page.url.index("#") :])
    assert count(other, "#changed li", 12) == 12
    assert other.inner_text("#difference") == page.inner_text("#difference")
    page.fill("#second-text", "x " * 600)
    page.click("#second-form button")
    page.wait_for_function("() => document.getElementById('second-error').textContent.includes('too many')")
    assert "stale" in page.get_attribute("#compare-box", "class")


@pytest.mark.long
def test_a_kind_on_the_first_panel_opens_a_head_of_it(opened):
    page = opened()
    count(page, "#example-kinds button", 3)
    page.click("#example-kinds button >> nth=1")
    kind = page.inner_text("#detail-title").rpartition(": ")[2]
    assert page.is_visible("#heads-panel") and kind == "self"


@pytest.mark.long
def test_a_link_restores_the_cost_panel(opened):
    page = opened("#panel=cost&model=tiny-gpt&positions=6&batch=2&layers=3&dtype=bfloat16&train=1")
    page.wait_for_function("() => document.getElementById('python-cost').textContent.includes('n=64')")
    expected = 'regard.cost(dataclasses.replace(regard.preset("tiny-gpt"), layers=3), n=64, batch=4, '
    assert page.inner_text("#python-cost") == expected + 'dtype="bfloat16", device="cpu", train=True)'


@pytest.mark.long
def test_the_python_line_of_the_cost_panel_gives_its_numbers(opened):
    page = opened("#panel=cost&model=tiny-gpt&layers=3")
    page.wait_for_function("() => document.getElementById('python-cost').textContent.includes('layers=3')")
    found = eval(page.inner_text("#python-cost"), {"regard": rg, "dataclasses": dataclasses})
    page.wait_for_function(
        "text => document.getElementById('totals').textContent.includes(text)",
        arg=f"{found.total.parameters:,}",
    )


@pytest.mark.long
def test_odd_texts_are_shown(opened):
    """Right-to-left text, emoji, one token, a very long word."""
    page = opened("#panel=heads")
    count(page, ".head", 20)
    for text in ("שלום עולם", "😀👩‍👩‍👧‍👦 ok 😀", "a", "Donaudampfschifffahrtsgesellschaft" * 8):
        page.fill("#text", text)
        page.click("#ask-look button")
        page.wait_for_function(
            "() => document.getElementById('looking').hidden && !document.querySelector('#heads-box.stale')"
        )
        assert page.inner_text("#look-error") == ""
        for mode in ("lines", "compare", "map"):
            page.click(f"#modes [data-mode={mode}]")
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280


@pytest.mark.long
def test_a_translation_appears_token_by_token_and_a_click_shows_where_it_looked(opened):
    page = opened("#panel=generate")
    page.wait_for_function(
        "() => document.getElementById('generate-stop').disabled && document.querySelector('#output button')"
    )
    said = "".join(page.locator("#output button").all_inner_texts()[:-1])
    assert re.sub(r"\W", "", said) == re.sub(r"\W", "", rg.translate(TEXT, strategy=rg.greedy()))
    page.click("#output button >> nth=0")
    assert page.locator("#looked span").count() > 5 and page.locator("#choices li").count() == 8
    page.click("#choices li:nth-child(2) button")
    page.wait_for_function("() => document.getElementById('generate-stop').disabled")
    page.fill("#beam-width", "2")
    page.click("#beam-start")
    assert count(page, "#beams text", 5) > 20
    assert page.inner_text("#beam-title") == "Beam tree of width 2"
    assert "strategy=regard.beam(2)" in page.inner_text("#python-generate")


@pytest.mark.long
def test_two_patterns_are_drawn_side_by_side_and_a_pair_is_explained(opened):
    page = opened("#panel=patterns&pattern=causal() %26 window(3)&n=512&beside=every(8)")
    page.wait_for_function("() => document.getElementById('count-2').textContent === '32,768'")
    assert page.is_visible("#drawing-2")
    page.wait_for_function("() => document.getElementById('drawing').frame")
    box = page.locator("#drawing").bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 40)
    page.wait_for_function("() => document.getElementById('pair').textContent.includes('(i, j)')")
    assert "window(3)" in page.inner_text("#pair")
    page.click("#pattern-all")
    page.wait_for_function("() => document.getElementById('pattern-where').textContent.includes('0 to 511')")
    assert "size=512" in page.url


@pytest.mark.long
def test_sliders_change_the_cost(opened):
    page = opened("#panel=cost&model=tiny-gpt")
    page.wait_for_function("() => document.getElementById('totals').textContent.includes('824,448')")
    page.eval_on_selector(
        "#layers", "e => { e.value = 8; e.dispatchEvent(new Event('input', {bubbles: true})); }"
    )
    wider = rg.cost(dataclasses.replace(rg.preset("tiny-gpt"), layers=8), n=16).total.parameters
    page.wait_for_function(
        "text => document.getElementById('totals').textContent.includes(text)", arg=f"{wider / 1e6:.2f} M"
    )
    assert page.locator("#tree details").count() > 1 and page.inner_text("#layers-out") == "8"


@pytest.mark.long
def test_laws_are_checked_and_broken_ones_come_first(opened):
    page = opened("#panel=laws")
    page.select_option("#law-target", "your own …")
    page.fill("#code", "def attention(q, k, v, mask):\n    return (q @ k.transpose(-1, -2)).softmax(-1) @ v")
    page.click("#ask-laws button")
    count(page, ".law", 5)
    assert page.locator(".law >> nth=0").get_attribute("class") == "law broken"
    assert page.locator(".law.broken .case td.wrong").count() > 1
    assert "laws passed" in page.inner_text("#law-cause")


@pytest.mark.long
def test_runs_are_overlaid_smoothed_and_read(opened):
    page = opened("#panel=runs")
    assert count(page, "#run-chart path.curve", 2) == 2
    before = page.get_attribute("#run-chart path.curve >> nth=0", "d")
    page.eval_on_selector(
        "#smooth", "e => { e.value = 0.9; e.dispatchEvent(new Event('input', {bubbles: true})); }"
    )
    assert page.get_attribute("#run-chart path.curve >> nth=0", "d") != before
    box = page.locator("#run-chart").bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 60)
    assert re.search(r"first: [\d.]+ at update \d+.*second: ", page.inner_text("#run-reading"))
    page.click("#run-names button >> nth=0")
    assert page.locator("#run-chart path.curve").count() == 1
    page.focus("#run-chart")
    page.keyboard.press("ArrowRight")
    assert page.inner_text("#run-reading").startswith("second: ")


def test_a_curve_of_one_point_is_visible_and_the_python_line_reads_the_run_as_it_was_trained(opened):
    page = opened("#panel=runs")
    count(page, "#run-chart path.curve", 2)
    folder = re.search(r'train\("(.*)/recipe.json", out="(.*)"\)', page.inner_text("#python-runs")).groups()
    assert folder[0] == folder[1] and folder[0].endswith("/first")
    page.evaluate(
        "chart(document.getElementById('run-chart'), [{name: 'short', color: 0, points: [[12, 8.7]]}], "
        "{width: 900, height: 380, x: 'update', y: 'loss'})"
    )
    assert page.locator("#run-chart circle.point").count() == 1


@pytest.mark.long
def test_a_run_grows_on_the_page_while_it_trains(opened, runs):
    page = opened("#panel=runs")
    count(page, "#run-chart path.curve", 2)
    before = page.get_attribute("#run-chart path.curve >> nth=1", "d")
    event = {"event": "train", "step": 400, "loss": 1.5, "tokens_per_second": 100}
    with (runs / "second" / "log.jsonl").open("a") as log:
        log.write(json.dumps(event) + "\n")
    page.wait_for_function(
        "old => document.querySelectorAll('#run-chart path.curve')[1].getAttribute('d') !== old", arg=before
    )


@pytest.mark.long
def test_the_pattern_is_read_and_zoomed_by_keyboard(opened):
    page = opened("#panel=patterns")
    page.wait_for_function("() => document.getElementById('drawing').frame")
    page.focus("#drawing")
    for key in ("ArrowDown", "ArrowDown", "ArrowRight"):
        page.keyboard.press(key)
    page.wait_for_function("() => document.getElementById('pair').textContent.includes('(2, 1)')")
    page.keyboard.press("+")
    page.wait_for_function("() => document.getElementById('pattern-where').textContent.includes('to 31')")
    page.click("#time-here")
    page.wait_for_function("() => document.getElementById('times').textContent.includes('measured here')")


@pytest.mark.long
def test_a_lost_server_is_reported_and_old_results_are_dimmed(opened):
    page = opened("#panel=heads")
    count(page, ".head", 20)
    page.fill("#text", "x " * 600)
    page.click("#ask-look button")
    page.wait_for_function("() => document.getElementById('look-error').textContent.includes('too many')")
    page.wait_for_function("() => getComputedStyle(document.getElementById('heads-box')).opacity === '0.45'")


@pytest.mark.long
def test_first_paint_and_switching_heads_are_quick(browser):
    """A model of 12 layers of 12 heads on 128 tokens."""
    torch.manual_seed(0)
    block = rg.Block(rg.Attention(96, heads=12, pattern=rg.causal()), rg.FeedForward(64))
    spec = rg.Encoder(block, 12, embedding=rg.Embedding(50, 96), head=rg.LanguageHead())
    app = create_app(LoadedModel(spec.build().eval(), None, spec), workers=Workers(1, deadline=90))
    server = served(app)
    port = next(server)
    page = browser.new_page()
    text = ", ".join(str(i % 50) for i in range(128))
    page.goto(f"http://127.0.0.1:{port}/")
    page.wait_for_function("() => performance.getEntriesByName('first-contentful-paint').length")
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    page.click("#tab-heads")
    page.fill("#text", text)
    page.click("#ask-look button")
    page.wait_for_function("() => document.querySelectorAll('.head').length === 144", timeout=60_000)
    times = page.evaluate(
        """() => [...document.querySelectorAll('.head')].slice(0, 40).map((b) => {
            const began = performance.now();
            b.click(); b.getBoundingClientRect();
            return performance.now() - began; })"""
    )
    server.close()
    times.sort()
    print(
        f"first paint {paint:.0f} ms; switching heads: median {times[20]:.1f} ms, slowest {times[-1]:.1f} ms"
    )
    assert paint < 500 and times[20] < 100
