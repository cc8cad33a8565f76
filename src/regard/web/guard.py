"""Checks before a request is read: its size and its token; and the headers of every response."""

import hmac
import json
from collections.abc import Awaitable, Callable, MutableMapping
from http.cookies import CookieError, SimpleCookie
from typing import Any
from urllib.parse import parse_qs

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

MAX_BODY = 1 << 20
COOKIE = "regard_token"
HEADERS = {
    "x-frame-options": "DENY",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    # The page and the heads that it embeds carry their own script and style; nothing else may be loaded or sent.
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; frame-src 'self'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'",
}


class Guard:
    """ASGI middleware. token: the secret that requests have to show, in the address or in the cookie set from it."""

    def __init__(self, app: Any, token: str | None = None, max_body: int = MAX_BODY):
        self.app, self.token, self.max_body = app, token, max_body

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1").lower(): v.decode("latin-1") for name, v in scope["headers"]}
        new_token = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                extra = dict(HEADERS)
                if self.token and _equal(new_token, self.token):
                    extra["set-cookie"] = f"{COOKIE}={self.token}; HttpOnly; SameSite=Strict; Path=/"
                encoded = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in extra.items()]
                message = {**message, "headers": [*message.get("headers", ()), *encoded]}
            await send(message)

        if self.token and not any(
            _equal(t, self.token) for t in (new_token, _cookie(headers), _bearer(headers))
        ):
            await refuse(
                send_with_headers, 401, "this server needs its token: open the address that it printed"
            )
            return
        length = headers.get("content-length", "0")
        too_large = f"a request may have {self.max_body:,} bytes"
        if length.isdecimal() and int(length[:20]) > self.max_body:
            await refuse(send_with_headers, 413, too_large)
            return
        body = b""
        while scope["method"] in ("POST", "PUT", "PATCH"):
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if len(body) > self.max_body:
                await refuse(send_with_headers, 413, too_large)
                return
            if not message.get("more_body"):
                break
        whole = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return whole.pop() if whole else await receive()

        await self.app(scope, replay, send_with_headers)


async def refuse(send: Send, status: int, error: str) -> None:
    """Send a sentence as JSON."""
    body = json.dumps({"error": error}).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _equal(given: str, token: str) -> bool:
    return hmac.compare_digest(given.encode(), token.encode())


def _bearer(headers: dict[str, str]) -> str:
    return headers.get("authorization", "").removeprefix("Bearer ")


def _cookie(headers: dict[str, str]) -> str:
    try:
        morsel = SimpleCookie(headers.get("cookie", "")).get(COOKIE)
    except CookieError:
        return ""
    return morsel.value if morsel else ""
