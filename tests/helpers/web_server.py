"""A real server of the page on a free port, in a thread of its own, and requests to it."""

import json
import threading
import time
from http.client import HTTPConnection

import torch
import uvicorn

import regard as rg
from regard.cli.models import LoadedModel
from regard.web import protocol


def tiny(tokenizer=None):
    torch.manual_seed(0)
    declared = rg.preset("tiny-gpt")
    return LoadedModel(declared.build().eval(), tokenizer, declared)


def served(app):
    """A server in a thread of its own; gives its port, then ends it."""
    one = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", http=protocol.TimedProtocol))
    thread = threading.Thread(target=one.run)
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while not one.started:
            assert time.monotonic() < deadline, "the server did not start"
            time.sleep(0.01)
        yield one.servers[0].sockets[0].getsockname()[1]
    finally:
        one.should_exit = True
        thread.join(20)


def ask(port, path, given=None, host=None, token=None):
    """Status and body. given: what is sent as JSON, or bytes that are sent as they are."""
    line = HTTPConnection("127.0.0.1", port, timeout=60)
    headers = {"content-type": "application/json"} | ({"host": host} if host else {})
    headers |= {"authorization": f"Bearer {token}"} if token else {}
    body = given if given is None or isinstance(given, bytes) else json.dumps(given)
    line.request("GET" if given is None else "POST", path, body, headers)
    answer = line.getresponse()
    body = answer.read().decode()
    line.close()
    return answer.status, json.loads(body) if "json" in answer.getheader("content-type") else body
