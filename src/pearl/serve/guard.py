"""Checks of every request before the application: access, origin, and size.

A page of another site cannot reach a server on this machine. Its requests have its own `Origin`. A name of its own that
leads to 127.0.0.1 (DNS rebinding) is not a name of this server; a numeric address cannot be redirected.
"""

import asyncio
import hmac
import time
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from contextlib import suppress
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qs, urlsplit

from fastapi import HTTPException
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse, RedirectResponse, Response

from pearl.serve.prometheus import Metrics

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

LONGEST_BODY = 512 * 2**20  # bytes of a request; 100 photos of a phone
MEMORY = 2 * 2**30  # bytes of all requests that are being read or answered
LINGER = 30.0  # seconds for which the rest of a refused body is read, and discarded
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' blob:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class Guard:
    """Middleware (ASGI).

    Args:
        app: the application.
        names: allowed host names of the server, besides localhost and numeric addresses.
        token: required in every request; None for no token.
        metrics: counts the answers.
    """

    def __init__(self, app: Any, *, names: Collection[str], token: str | None, metrics: Metrics) -> None:
        self.app, self.token, self.metrics = app, token, metrics
        self.names = {"localhost", *(name.lower() for name in names)}
        self.held = 0  # bytes of bodies in memory

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on with limits to its body and headers for its answer."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        taken, began, arrived = 0, time.perf_counter(), not has_body(scope)

        async def limited() -> MutableMapping[str, Any]:
            nonlocal taken, arrived
            message = await receive()
            arrived = not message.get("more_body", False)  # also if the client has gone
            size = len(message.get("body", b""))
            taken, self.held = taken + size, self.held + size
            if taken > LONGEST_BODY:
                raise HTTPException(413, too_long())
            if self.held > MEMORY:
                raise HTTPException(503, "too many requests are being read; try again later")
            return message

        async def with_headers(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
                path = getattr(scope.get("route"), "path", "")  # as it is declared, so that there are few
                self.metrics.answered(path, message["status"], time.perf_counter() - began)
                if not arrived:
                    MutableHeaders(scope=message)["Connection"] = "close"
            elif not arrived and not message.get("more_body", False):
                # a connection that is closed with unread bytes is reset, and the client may lose the answer
                await send({**message, "more_body": True})
                message = {"type": "http.response.body"}
                with suppress(TimeoutError):
                    await asyncio.wait_for(discarded(receive), LINGER)
            await send(message)

        try:
            app = self.refusal(scope) or self.app
            await app(scope, limited, with_headers)
        finally:
            self.held -= taken

    def refusal(self, scope: Scope) -> Response | None:
        """Return the answer to a refused request; None for an allowed one."""
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_own(host):
            return refused(403, f"host {host!r} is not a name of this server; use its address, or start it with --name")
        if origin not in (None, f"http://{host}", f"https://{host}"):  # a proxy may end TLS
            return refused(403, f"requests from {origin!r} are refused; only the server's own page may send them")
        if headers.get("content-length", "0").isdecimal() and int(headers.get("content-length", "0")) > LONGEST_BODY:
            return refused(413, too_long())
        if self.token is None or scope["path"] == "/healthz":
            return None
        given = parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]
        if given and scope["path"] == "/" and self._fits(given):
            moved = RedirectResponse("/", 303)
            moved.set_cookie(cookie_name(host), given, httponly=True, samesite="lax", secure=scope["scheme"] == "https")
            return moved
        kind, _, carried = headers.get("authorization", "").partition(" ")
        if (kind.lower() == "bearer" and self._fits(carried.strip())) or self._fits(cookie_of(headers)):
            return None
        return refused(401, "a token is needed: open /?token=TOKEN, or send the header Authorization: Bearer TOKEN")

    def _is_own(self, host: str) -> bool:
        try:
            parts = urlsplit(f"//{host}")
            name, _ = parts.hostname or "", parts.port  # either may be invalid
            return name in self.names or bool(ip_address(name))
        except ValueError:
            return False

    def _fits(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), (self.token or "").encode())


def has_body(scope: Scope) -> bool:
    """Return True if a request has a body that has to be read."""
    headers = Headers(scope=scope)
    return headers.get("content-length", "0") != "0" or "transfer-encoding" in headers


async def discarded(receive: Receive) -> None:
    """Read the rest of a body, which is not kept."""
    while (await receive()).get("more_body", False):
        pass


def cookie_name(host: str) -> str:
    """Return the name of the token's cookie: cookies apply to all ports of a machine, so each server needs its own."""
    return f"pearl_token_{urlsplit(f'//{host}').port or 0}"


def cookie_of(headers: Headers) -> str:
    """Return the token in the cookie of a request; empty if there is none."""
    try:
        cookie = SimpleCookie(headers.get("cookie", "")).get(cookie_name(headers.get("host", "")))
    except CookieError:
        return ""
    return cookie.value if cookie else ""


def refused(status: int, why: str) -> Response:
    """Return an answer of one line."""
    return JSONResponse({"error": why}, status)


def too_long() -> str:
    """Return the error for a body that is too long."""
    return f"the request is longer than {LONGEST_BODY // 2**20} MiB; send fewer photos at a time"
