"""The page: a real server on a free port, requested as a browser does, and by a browser if one is installed."""

import gc
import json
import os
import re
import socket
import sys
import threading
import time
from http.client import HTTPConnection

import pytest
import torch

import new_process
import regard as rg
from regard.errors import SpecError

uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
from regard.web import app, protocol  # noqa: E402
from regard.web.app import create_app  # noqa: E402
from regard.web.guard import MAX_BODY  # noqa: E402
from regard.web.serve import _check_port, serve  # noqa: E402
from regard.web.tasks import MAX_DRAWN, MAX_EXPLAINED, NICENESS  # noqa: E402
from regard.web.workers import Workers, _Worker  # noqa: E402
from web_server import ask, served, tiny  # noqa: E402

TOKEN = "a-secret"
TINY = rg.preset("tiny-gpt").json()


class Words:
    """A tokenizer as those of `tokenizers`: a word is as long as its number says."""

    def encode(self, text):
        return type("Encoding", (), {"ids": [len(word) for word in text.split()]})()

    def id_to_token(self, i):
        return "x" * i


@pytest.fixture(scope="module")
def bare():
    yield from served(create_app(workers=Workers(1, deadline=90)))


@pytest.fixture(scope="module")
def hurried():
    """A server that needs a token, with one worker, half a second for each request and 200 MB of memory."""
    yield from served(create_app(token=TOKEN, workers=Workers(1, deadline=0.5, memory=200_000_000)))


@pytest.fixture(scope="module")
def texts():
    yield from served(create_app(tiny(Words()), workers=Workers(1, deadline=90)))


@pytest.fixture(scope="module")
def ids():
    yield from served(create_app(tiny(), workers=Workers(1, deadline=90)))


def test_the_page_loads_no_external_resource(bare):
    status, page = ask(bare, "/")
    assert status == 200 and "<title>regard</title>" in page
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|src=|@import", page)


def test_the_api_lists_presets_and_the_kind_of_input(bare, texts, ids):
    assert [ask(port, "/api")[1]["reads"] for port in (bare, texts, ids)] == [None, "text", "ids"]
    assert ask(bare, "/api")[1]["presets"] == list(rg.presets())


def test_a_pattern_is_counted_drawn_and_explained_as_the_library_does(bare):
    text, n = "causal() & (window(2) | every(4))", 200
    pattern = rg.causal() & (rg.window(2) | rg.every(4))
    status, result = ask(bare, "/api/pattern", {"pattern": text, "n": n})
    assert status == 200 and result["pattern"] == text
    assert int(result["count"]) == pattern.count(n) and result["share"] == pattern.count(n) / n**2
    picture = torch.tensor([[int(x) for x in row] for row in result["rows"]]).bool()
    assert torch.equal(picture, pattern.allowed(MAX_DRAWN))
    assert result["explained"] == str(rg.explain(pattern, n=n))
    trained = ask(bare, "/api/pattern", {"pattern": text, "n": 16384, "device": "cuda", "train": True})[1]
    assert trained["explained"] == str(rg.explain(pattern, n=16384, device="cuda", grad=True))


def test_a_long_pattern_is_counted_exactly_and_not_planned(bare):
    _, result = ask(bare, "/api/pattern", {"pattern": "causal()", "n": 10**9})
    assert result["count"] == str((10**18 + 10**9) // 2) and result["explained"] is None
    assert ask(bare, "/api/pattern", {"pattern": "causal()", "n": MAX_EXPLAINED})[1]["explained"]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"pattern": "causal() & widow(3)"}, "did you mean window"),
        ({"pattern": "__import__('os').getcwd()"}, "is not a pattern"),
        ({"pattern": "window(3"}, "is not a pattern"),
        ({"pattern": "window(-1)"}, "window(-1): a window cannot end before it begins"),
        ({"pattern": f"window({10**30})"}, "before needs to be below"),
        ({"pattern": "causal()", "n": 0}, "n: "),
        ({"pattern": "causal()", "n": 10**10}, "n: "),
        ({"pattern": "causal()", "device": "tpu"}, "device: "),
        ({"pattern": "causal()" + 70 * " | full()"}, "pattern is longer than 500 characters"),
        ({"n": 3}, "pattern is missing"),
        ({"pattern": "causal()", "trian": True}, "unknown field 'trian'; did you mean train?"),
        ({"pattern": "causal()", "zzz": 1}, "unknown field 'zzz'; known: device, n, pattern, train"),
    ],
)
def test_an_invalid_pattern_gets_a_reason(bare, given, message):
    status, result = ask(bare, "/api/pattern", given)
    assert status == 422 and message in result["error"]


FIELDS = {
    **{route: {"pattern": "causal()"} for route in ("pattern", "region", "timing")},
    **{route: {"name": "gpt2"} for route in ("resized", "curve", "fitting")},
    **{route: {"text": "1, 2"} for route in ("look", "heads", "steps", "remove", "next", "beams")},
    "pair": {"pattern": "causal()", "i": 1, "j": 0},
    "cost": {"model": "gpt2"},
    "laws": {"target": "x"},
}


@pytest.mark.parametrize("route", FIELDS)
def test_an_unknown_field_is_refused_by_its_name_in_every_request(bare, route):
    """They were ignored: a misspelled one had the default."""
    status, result = ask(bare, f"/api/{route}", {**FIELDS[route], "zzz": 1})
    assert status == 422 and result["error"].startswith("unknown field 'zzz'; known: ")


def test_every_route_has_a_test_of_unknown_fields():
    posts = {r.path for r in create_app().routes if "POST" in getattr(r, "methods", ())}
    assert posts == {f"/api/{route}" for route in FIELDS}


def test_fields_in_the_address_are_refused(bare):
    status, result = ask(bare, "/api/pattern?n=7", {"pattern": "causal()"})
    assert status == 422
    assert result["error"] == "the address has 'n', which is not read; send fields as JSON in the body"
    assert ask(bare, "/api?token=x")[0] == 200


def test_a_preset_and_a_declaration_are_priced_as_the_library_does(
    bare, monkeypatch, threads_of_a_new_process
):
    # Tiles of attention are priced by the number of threads: here that of a new process, as the server's workers are.
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads_of_a_new_process)
    sizes = {"n": 64, "batch": 2, "dtype": "bfloat16", "train": True}
    heads = rg.Attention(64, heads=2, pattern=[rg.causal(), rg.causal() & rg.window(8)])
    for declared in (
        rg.preset("tiny-gpt"),
        rg.Attention(64, heads=4, pattern=rg.causal() & rg.window(8)),
        heads,
    ):
        model = "tiny-gpt" if declared == rg.preset("tiny-gpt") else json.loads(declared.json())
        status, result = ask(bare, "/api/cost", {"model": model, **sizes})
        cost = rg.cost(declared, **sizes)
        assert status == 200 and result["text"] == str(cost)
        assert result["cost"] == json.loads(json.dumps(cost.plain()))
    status, result = ask(bare, "/api/cost", {"model": "vit-b16", "n": 7})  # its image says how many
    assert status == 200 and result["cost"]["total"]["parameters"] == 86_567_656


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("gpt3", "did you mean gpt2"),
        ("os:getcwd", "unknown preset"),
        ("/etc/passwd", "unknown preset"),
        ({"kind": "Attention", "d_model": 512, "heads": 7}, "heads=7 does not divide d_model=512"),
        ({"kind": "Popen"}, "Popen"),
        ({"d_model": 512}, "kind"),
    ],
)
def test_a_browser_cannot_name_files_or_objects_and_gets_a_reason(bare, model, message):
    status, result = ask(bare, "/api/cost", {"model": model})
    assert status == 422 and message in result["error"]


def test_heads_are_shown_for_texts_and_for_ids(texts, ids):
    for port, text in ((texts, "a bb ccc"), (ids, "1, 2, 3")):
        status, page = ask(port, "/api/look", {"text": text})
        assert status == 200 and "Attention heads of" in page
    assert '"xxx"' in ask(texts, "/api/look", {"text": "a bb ccc"})[1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a bb", "use token ids"),
        ("/etc/passwd", "use token ids"),
        ("7, 999999", "token 999999 is out of range; this model has tokens 0 to 255"),
        (", ".join(600 * ["1"]), "too many"),
    ],
)
def test_an_invalid_input_gets_a_reason(ids, text, message):
    status, result = ask(ids, "/api/look", {"text": text})
    assert status == 422 and message in result["error"]


def test_a_text_without_a_token_is_refused(texts):
    assert ask(texts, "/api/look", {"text": "  "}) == (422, {"error": "this text has no tokens"})


def test_without_a_model_there_is_a_hint_how_to_start_one(bare):
    assert "regard serve MODEL" in ask(bare, "/api/look", {"text": "a"})[1]["error"]


def test_requests_from_other_sites_are_refused(bare):
    assert ask(bare, "/", host="evil.example")[0] == 400
    assert ask(bare, "/", host="localhost")[0] == 200


def test_a_port_in_use_is_refused_before_a_model_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(SpecError, match=f"port {port} is in use on 127.0.0.1; use another --port"):
            serve(model="no such model", port=port)
    _check_port("127.0.0.1", port)
    with pytest.raises(SpecError, match=r"^cannot listen on ::1:8765: .* --host$"):
        serve(host="::1")


def test_a_vision_model_is_refused_with_a_hint():
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(
        SpecError, match="tiny-vit takes images, and the page takes text; use `regard look tiny-vit"
    ):
        serve(model="tiny-vit", port=port)


def test_the_server_keeps_collections_and_models_from_stopping_the_page(monkeypatch):
    """A full garbage collection over the modules of PyTorch takes tenths of a second; a model runs Python code."""
    seen = []
    monkeypatch.setattr(
        uvicorn, "run", lambda *args, **options: seen.extend((gc.get_freeze_count(), sys.getswitchinterval()))
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    gc.unfreeze()
    interval = sys.getswitchinterval()
    try:
        serve(model="tiny-gpt", port=port)
    finally:
        gc.unfreeze()
        sys.setswitchinterval(interval)
    frozen, switch = seen
    assert frozen > 100_000 and switch < 0.001


def test_a_request_for_the_model_waits_at_most_half_its_deadline(monkeypatch):
    """The other half is left for the model, so that the answer is not late."""
    running = threading.Event()

    def slow(request, loaded):
        running.set()
        time.sleep(2.5)
        return "done"

    monkeypatch.setattr(app, "_heads", slow)
    server = served(create_app(tiny(), workers=Workers(1, deadline=2.0)))
    port, first = next(server), []
    thread = threading.Thread(target=lambda: first.append(ask(port, "/api/look", {"text": "1, 2"})))
    thread.start()
    assert running.wait(20)
    start = time.monotonic()
    status, result = ask(port, "/api/look", {"text": "1, 2"})
    waited = time.monotonic() - start
    thread.join()
    server.close()
    assert status == 429 and "the model was not free within 1 s" in result["error"]
    assert 0.9 < waited < 1.8 and first == [(200, "done")]


SLOW = {
    "pattern": " | ".join(f"dilated({97 + 2 * i}, {31 + 2 * i})" for i in range(12)),
    "n": 1 << 17,
}  # 20 s


def test_a_request_past_its_deadline_is_ended_and_the_next_is_answered(hurried):
    start = time.monotonic()
    status, result = ask(hurried, "/api/pattern", SLOW, token=TOKEN)
    assert status == 422 and "takes longer than 0.5 s" in result["error"]
    assert time.monotonic() - start < 20  # with the time that the first worker needs to start
    wait_for_worker(hurried)


def wait_for_worker(port):
    """A killed worker is replaced; the next request may use up its deadline while the new one starts."""
    for _ in range(20):
        status, result = ask(port, "/api/pattern", {"pattern": "causal()", "n": 8}, token=TOKEN)
        if status == 200:
            assert result["count"] == "36"
            return
    raise AssertionError(result)


def test_the_page_does_not_wait_for_requests_that_are_computed(hurried):
    slow = [threading.Thread(target=ask, args=(hurried, "/api/pattern", SLOW, None, TOKEN)) for _ in range(6)]
    for thread in slow:
        thread.start()
    for _ in range(5):
        start = time.monotonic()
        assert ask(hurried, "/", token=TOKEN)[0] == 200
        assert time.monotonic() - start < 0.5  # one of these requests alone takes longer
    for thread in slow:
        thread.join()
    wait_for_worker(hurried)


def test_no_request_waits_longer_than_its_deadline_while_a_killed_worker_starts_anew(monkeypatch):
    """A new process is slow to start here, as on a crowded machine: that is not added to the time of a request."""
    start = _Worker.start

    def slow(worker):
        begun.append(worker)
        if len(begun) > 1:
            time.sleep(3)
        start(worker)

    begun = []
    monkeypatch.setattr(_Worker, "start", slow)
    server = served(create_app(workers=Workers(1, deadline=0.5)))
    port = next(server)
    assert ask(port, "/api/pattern", {"pattern": "causal()", "n": 8})[0] == 200  # the server has started
    for expected in (422, 429):  # the first is too slow; the second finds its worker starting
        before = time.monotonic()
        assert ask(port, "/api/pattern", SLOW)[0] == expected
        assert time.monotonic() - before < 2.5
    server.close()


def test_requests_that_find_no_free_worker_get_the_answer_that_the_server_is_busy(hurried):
    answers = []
    slow = [
        threading.Thread(target=lambda: answers.append(ask(hurried, "/api/pattern", SLOW, token=TOKEN)))
        for _ in range(4)
    ]
    for thread in slow:
        thread.start()
    for thread in slow:
        thread.join()
    assert {status for status, _ in answers} <= {422, 429} and 429 in {status for status, _ in answers}
    assert any("busy" in result["error"] for _, result in answers)
    wait_for_worker(hurried)


def test_a_worker_that_needs_too_much_memory_says_so_and_goes_on():
    code = """
import json
from multiprocessing import Pipe
from threading import Thread
import torch
from regard.web import tasks
tasks.TASKS = {"grow": lambda fields: torch.zeros(fields["bytes"], dtype=torch.uint8).shape[0]}
ours, theirs = Pipe()
Thread(target=lambda: tasks.serve(theirs, 300_000_000), daemon=True).start()
assert ours.recv_bytes() == b"ready"
for size in (10**9, 10**6):
    ours.send_bytes(json.dumps(["grow", {"bytes": size}]).encode())
    print(json.loads(ours.recv_bytes()))
"""
    code = code.replace("import torch", "import signal, torch\nsignal.signal = lambda *_: None", 1)
    done = new_process.run(code, timeout=100)
    assert done.stdout.splitlines() == [
        "['error', 'this needs more than the 0.279397 GiB that this server allows']",
        "['', 1000000]",
    ], done.stderr


def test_only_requests_with_the_token_are_answered(hurried):
    assert ask(hurried, "/")[0] == ask(hurried, "/api")[0] == ask(hurried, "/?token=wrong")[0] == 401
    assert "open the address that it printed" in ask(hurried, "/api")[1]["error"]
    line = HTTPConnection("127.0.0.1", hurried, timeout=20)
    line.request("GET", f"/?token={TOKEN}")
    answer = line.getresponse()
    cookie = answer.getheader("set-cookie")
    assert answer.status == 200 and "HttpOnly" in cookie and "SameSite=Strict" in cookie
    answer.read()
    line.request("GET", "/api", headers={"cookie": cookie.split(";")[0]})
    assert line.getresponse().status == 200
    line.close()


def test_every_response_forbids_frames_and_foreign_resources(bare):
    line = HTTPConnection("127.0.0.1", bare, timeout=20)
    for path in ("/", "/api", "/nothing"):
        line.request("GET", path)
        answer = line.getresponse()
        answer.read()
        policy = answer.getheader("content-security-policy")
        assert answer.getheader("x-frame-options") == "DENY" and "default-src 'none'" in policy
    line.close()


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/api/pattern", b"[" * 100_000, 422, "not JSON that can be read"),
        ("/api/pattern", b'{"pattern": "' + b"x" * MAX_BODY + b'"}', 413, "1,048,576 bytes"),
        ("/api/pattern", b'{"pattern": "causal()", "n": 1' + b"0" * 400 + b"}", 422, "n: "),
        ("/api/pattern", b'{"pattern": "causal()", "n": 1' + b"0" * 5000 + b"}", 422, "not JSON"),
        ("/api/pattern", json.dumps({"pattern": "~" * 490 + "full()"}).encode(), 422, "100 levels"),
        ("/api/pattern", b"\xff\xfe", 422, "not JSON: JSON decode error"),
        ("/api/pattern", b"[]", 422, "the body of the request is not a JSON object"),
        ("/api/pattern", b"{}", 422, "pattern is missing"),
        ("/api/look", b'{"text": ""}', 422, "text is empty"),
        ("/api/look", json.dumps({"text": "1," * 5000}).encode(), 422, "text is longer than "),
        ("/api/cost", b'{"model": null}', 422, "model"),
        ("/api/cost", b'{"model": {"kind": "Attention", "d_model": null, "heads": 2}}', 422, "needs int"),
        ("/api/cost", b'{"model": {"kind": "window", "before": 3}}', 422, "declaration of a model"),
        (
            "/api/cost",
            b'{"model": ' + b'{"kind": "Not", "inner": ' * 200 + b"0" + b"}" * 200 + b"}",
            422,
            "model: Value error, nested deeper than 100 levels",
        ),
        (
            "/api/cost",
            f'{{"model": {TINY}}}'.replace('"vocab": 256', f'"vocab": {10**40}').encode(),
            422,
            "a number is too large",
        ),
        ("/api/look", json.dumps({"text": "\u00b2"}).encode(), 422, "regard serve MODEL"),
        ("/api/nothing", b"{}", 404, "Not Found"),
    ],
)
def test_a_hostile_request_gets_a_sentence(bare, path, body, status, message):
    answer = ask(bare, path, body)
    assert answer[0] == status and message in answer[1]["error"]


def test_a_digit_that_is_no_number_is_refused(ids):
    assert ask(ids, "/api/look", {"text": "\u00b2"})[0] == 422


def test_worker_processes_run_at_a_lower_priority_than_the_server():
    worker = _Worker(200_000_000)
    worker.start()
    own, its = (os.getpriority(os.PRIO_PROCESS, pid) for pid in (0, worker.process.pid))
    worker.end()
    assert its == min(19, own + NICENESS)


def test_a_client_that_does_not_send_its_request_is_disconnected(monkeypatch):
    monkeypatch.setattr(protocol, "SECONDS", 0.2)
    server = served(create_app(workers=Workers(1, deadline=90)))
    port = next(server)
    with socket.create_connection(("127.0.0.1", port), timeout=20) as line:
        line.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        assert line.recv(100) == b""
    server.close()


def test_the_page_updates_while_typing(browser, texts):
    page = browser.new_page()
    errors = []
    page.on("pageerror", lambda e: errors.append(str(e)))
    page.goto(f"http://127.0.0.1:{texts}/#pattern=causal()&n=64")
    shown = "id => document.getElementById(id).textContent"

    def until(id, message):
        page.wait_for_function(f"([id, message]) => ({shown})(id).includes(message)", arg=[id, message])

    until("count", "2,080")
    page.fill("#pattern", "causal() & window(1)")
    until("count", "127")
    page.wait_for_function("() => location.hash.includes('window')")
    page.fill("#pattern", "widow(1)")
    until("pattern-error", "did you mean window")
    assert page.evaluate("document.getElementById('drawings').classList.contains('stale')")
    page.click("#tab-cost")
    until("totals", "parameters")
    page.select_option("#model", "tiny-gpt")
    until("totals", "824,448")
    page.select_option("#model", "your own …")
    until("cost-table", "Attention(512, pattern=window(64))")
    page.click("#tab-heads")
    page.fill("#text", "a bb ccc")
    page.click("#ask-look button")
    page.wait_for_selector("#heads-box:not([hidden])")
    page.wait_for_function("() => document.querySelectorAll('.head').length === 16")
    assert not errors
