"""The report in a real browser: clicks, hovers, keys, and tokens that try to be scripts."""

import json
import re

import pytest
import torch

import accessibility
import regard as rg
from regard.lens.html_report import contents, fill, inline, page

EVIL = "</script><img src=x onerror='window.hacked=1'><script>window.hacked=2</script>"
WORDS = [*(f"w{i}" for i in range(62)), EVIL, '<b>bold</b> & "quoted"']


def model(layers: int, heads: int):
    torch.manual_seed(0)
    block = rg.Block(rg.Attention(4 * heads, heads=heads, pattern=rg.causal()), rg.FeedForward(8))
    embedding = rg.Embedding(70, 4 * heads, position=rg.sinusoidal())
    return rg.Encoder(block, layers, embedding=embedding).build().eval()


@pytest.fixture(scope="module")
def view():
    return rg.look(model(12, 12), torch.arange(64)[None], tokens=WORDS)


@pytest.fixture(scope="module")
def vision():
    torch.manual_seed(0)
    encoder = rg.Encoder(rg.Block(rg.Attention(8, heads=2), rg.FeedForward(8)), 1)
    net = (
        rg.Vision(encoder, image=(12, 12), patch=(4, 4), head=rg.ClassifierHead(3, pool="first"))
        .build()
        .eval()
    )
    picture = torch.rand(1, 3, 12, 12)
    return rg.look(net, picture, image=picture[0])


@pytest.fixture
def open_page(browser, tmp_path):
    """Opens a view's page from the disk; at the end no error may have been logged and nothing asked for."""
    problems, pages = [], []

    def open_(view):
        at = browser.new_page(viewport={"width": 1400, "height": 900})
        at.on("console", lambda m: problems.append(m.text) if m.type in ("error", "warning") else None)
        at.on("pageerror", lambda e: problems.append(str(e)))
        at.on("request", lambda r: None if r.url.startswith(("file:", "data:")) else problems.append(r.url))
        at.goto(view.save(tmp_path / "heads.html").as_uri())
        pages.append(at)
        return at

    yield open_
    for at in pages:
        at.close()
    assert not problems


def test_twelve_by_twelve_heads_fit_two_megabytes_and_need_no_network(view):
    whole = page(view)
    assert len(whole.encode()) < 2_000_000
    assert not re.findall(r"(?:src|href)\s*=\s*[\"']?https?:", whole) and "@import" not in whole


def test_the_bytes_of_a_map_are_its_weights(view):
    import base64

    content = contents(view)
    packed = content["layers"][3]["maps"][5]
    raw = torch.frombuffer(bytearray(base64.b64decode(packed["bytes"])), dtype=torch.uint8).reshape(64, 64)
    assert torch.allclose(raw / 255 * packed["top"], view.map(3, 5), atol=packed["top"] / 500)
    assert json.loads(json.dumps(content)) == json.loads(json.dumps(content, allow_nan=False))


def test_long_maps_are_pooled_with_a_note_on_the_page():
    long = rg.look(model(1, 2), torch.zeros(1, 1600, dtype=torch.long))
    content = contents(long)
    assert content["pooled"] and content["layers"][0]["shape"] == [774, 774]
    assert len(page(long)) < 2_000_000


def test_a_click_enlarges_a_head_and_a_hover_shades_the_keys(view, open_page):
    at = open_page(view)
    at.click('.head[data-layer="3"][data-head="5"]')
    assert at.inner_text("#detail-title").startswith("blocks.3.attention, head 5: ")
    at.hover("#queries span:nth-child(20)")
    best = view.map(3, 5)[19].argmax()
    assert at.inner_text("#reading").startswith(f"“w19” attends to w{int(best)} ")
    shown = at.evaluate("[...document.querySelectorAll('#keys span')].map(s => +s.title)")
    assert torch.allclose(torch.tensor(shown), view.map(3, 5)[19], atol=3e-3)
    at.hover("#keys span:nth-child(3)")
    assert at.inner_text("#reading").startswith("“w2” is attended to by ")


def test_tokens_are_inserted_as_text_and_never_as_markup(view, open_page):
    at = open_page(view)
    at.hover("#queries span:nth-child(63)")
    assert at.evaluate("window.hacked") is None
    assert at.inner_text("#queries span:nth-child(63)") == EVIL
    assert at.inner_text("#queries span:nth-child(64)") == WORDS[-1]
    assert at.evaluate("document.querySelectorAll('#words img, #words b').length") == 0


def test_a_token_that_looks_like_a_placeholder_stays_a_token():
    filled = fill(
        "<h1>{{title}}</h1><script>{{data}};{{js}}</script>", {"title": "t", "data": "'{{js}}'", "js": "f()"}
    )
    assert filled == "<h1>t</h1><script>'{{js}}';f()</script>"


def test_filters_and_the_slider_select_heads(view, open_page):
    at = open_page(view)
    kind = view.kinds[0][0].name
    at.select_option("#kind", kind)
    shown = at.eval_on_selector_all(
        ".head", "b => b.filter(x => x.offsetParent !== null).map(x => x.dataset.kind)"
    )
    assert set(shown) == {kind} and len(shown) == sum(k.name == kind for ks in view.kinds for k in ks)
    at.select_option("#kind", "")
    at.eval_on_selector("#layer", "e => { e.value = 4; e.dispatchEvent(new Event('input')); }")
    assert at.locator(".row:visible").count() == 1 and at.locator("tbody tr").count() == 12


@pytest.mark.long
def test_the_table_sorts_in_both_directions(view, open_page):
    at = open_page(view)
    at.click("th[data-field=entropy] button")
    column = at.evaluate(
        "[...document.querySelectorAll('thead th')].findIndex(t => t.dataset.field === 'entropy')"
    )
    read = f"[...document.querySelectorAll('tbody tr')].map(r => +r.children[{column}].textContent)"
    falling = at.evaluate(read)
    assert falling == sorted(falling, reverse=True) and len(falling) == 144
    assert at.get_attribute("th[data-field=entropy]", "aria-sort") == "descending"
    at.click("th[data-field=entropy] button")
    assert at.evaluate(read) == sorted(falling)
    at.click("tbody tr:first-child")
    assert at.locator(".head[aria-pressed=true]").count() == 1


def test_everything_works_by_keyboard(view, open_page):
    at = open_page(view)
    at.focus('.head[data-layer="0"][data-head="0"]')
    for key in ("ArrowRight", "ArrowDown", "ArrowDown", "Enter"):
        at.keyboard.press(key)
    assert "blocks.2.attention, head 1" in at.inner_text("#detail-title")
    at.focus("#map")
    before = at.inner_text("#reading")
    at.keyboard.press("ArrowUp")
    assert at.inner_text("#reading") != before


def test_tab_passes_a_group_in_one_step_and_arrows_move_inside_it(view, open_page):
    """144 heads and all tokens were tab stops between the controls and the map."""
    at = open_page(view)
    stops = "id => [...document.querySelectorAll('#' + id + ' *')].filter(e => e.tabIndex === 0).length"
    assert [at.evaluate(stops, group) for group in ("overview", "queries", "keys")] == [1, 1, 1]
    at.focus(".head[aria-pressed=true]")
    at.keyboard.press("ArrowLeft")
    moved = at.evaluate("document.activeElement.getAttribute('aria-label')")
    at.keyboard.press("Tab")
    assert at.evaluate("document.activeElement.dataset.mode") == "map"
    at.keyboard.press("Shift+Tab")  # back to the head that was left
    assert at.evaluate("document.activeElement.getAttribute('aria-label')") == moved
    at.focus("#queries span[tabindex='0']")
    at.keyboard.press("ArrowRight")
    assert at.evaluate("document.activeElement === document.querySelectorAll('#queries span')[1]")
    assert at.inner_text("#reading").startswith(f"“{view.queries(0)[1]}” attends to")
    at.eval_on_selector("#layer", "e => { e.value = 4; e.dispatchEvent(new Event('input')); }")
    assert at.evaluate("document.querySelector('#overview .head[tabindex=\"0\"]').dataset.layer") == "4"


def test_a_page_without_maps_says_no_weights(open_page):
    at = open_page(rg.look(model(2, 2), torch.arange(7)[None], keep=False))
    assert not at.is_visible("#words") and not at.is_visible("#reading")
    assert at.inner_text("#python-head").startswith("view.statistics[")


def test_a_patch_shows_its_attention_over_the_image(vision, open_page):
    at = open_page(vision)
    box = at.locator("#picture").bounding_box()
    at.locator("#picture").click(position={"x": box["width"] * 0.5, "y": box["height"] * 0.84})
    # the middle of the last row of 3 × 3 patches, behind the class token
    assert at.inner_text("#reading").startswith(f"“{vision.queries(0)[1 + 7]}” attends to ")
    at.locator("#picture").press("ArrowLeft")
    assert at.inner_text("#reading").startswith(f"“{vision.queries(0)[1 + 6]}” attends to ")


def test_a_notebook_shows_the_page_in_a_separate_frame(view):
    frame = inline(view)
    assert frame.startswith('<iframe srcdoc="&lt;!doctype html') and 'sandbox="allow-scripts"' in frame
    assert view._repr_html_() == frame and "<script" not in frame


@pytest.mark.long
def test_the_page_fits_a_phone_and_has_no_serious_accessibility_violation(view, browser, tmp_path):
    assert accessibility.problems(browser, view.save(tmp_path / "heads.html", "Heads of mine")) == []
    assert "<h1>Heads of mine</h1>" in (tmp_path / "heads.html").read_text("utf-8")
