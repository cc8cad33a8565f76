"""HTTP of the service: a client that does not finish sending its request is disconnected."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

SECONDS = 10.0  # for the headers and the body of a request


class TimedProtocol(H11Protocol):
    """uvicorn's HTTP/1.1, with a time limit for the first request of a connection to arrive completely."""

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._limit = asyncio.get_running_loop().call_later(SECONDS, self._close_if_waiting)

    def connection_lost(self, exc: Exception | None) -> None:
        self._limit.cancel()
        super().connection_lost(exc)

    def _close_if_waiting(self) -> None:
        """Close a connection whose request has not arrived; one that is being answered stays open."""
        if self.cycle is None or (self.cycle.more_body and not self.cycle.response_started):
            self.transport.close()
