"""`pearl serve`: the application on a socket of this machine."""

import socket
import webbrowser
from collections.abc import Callable, Collection
from contextlib import closing, suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

import uvicorn

from pearl.errors import ConfigError, reason
from pearl.serve.app import create_app

SHORTEST_TOKEN = 16  # characters
# Seconds until an idle connection is closed. A request that is sent in the moment of closing gets a reset instead of an
# answer, and clients do not repeat a POST. So the client has to close first: Python's clients do so after 5 seconds,
# uvicorn's default, and proxies after 60.
IDLE = 75


def serve(
    path: Path,
    *,
    address: str = "127.0.0.1",
    port: int = 8000,
    token: str | None = None,
    names: Collection[str] = (),
    device: str = "auto",
    method: str | None = None,
    unknown_rate: float | Literal["auto"] = "auto",
    open_page: bool = True,
    say: Callable[[str], object] = print,
) -> None:
    """Serve a model until the process is stopped; see `create_app`.

    Args:
        path: directory of the model.
        address: of this machine; others than loopback's can be reached from elsewhere, and need a token.
        port: 0 takes any that is free.
        token: required in every request.
        names: host names by which the server may be called.
        device: auto, cpu or cuda.
        method: the file of a method of the user's own.
        unknown_rate: as of `Model.predict`.
        open_page: open the page in the user's browser.
        say: prints the address of the page.

    Raises:
        PearlError: the model cannot be read, or the address cannot be used.
    """
    check(address, token)
    with closing(listening(address, port)) as listener:
        app = create_app(path, device=device, method=method, unknown_rate=unknown_rate, token=token, names=names)
        host, bound = listener.getsockname()[:2]
        shown = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        page = f"http://{shown}:{bound}/" + (f"?token={quote(token)}" if token else "")
        say(f"serving {path} at {page}")
        say("photos stay in memory, nothing of them is written; stop with Ctrl-C")
        if open_page:
            webbrowser.open(page)
        with suppress(KeyboardInterrupt):  # uvicorn raises it again once all is closed
            uvicorn.Server(configured(app)).run(sockets=[listener])


def configured(app: Any) -> uvicorn.Config:
    """Return uvicorn's settings for an application."""
    return uvicorn.Config(
        app,
        access_log=False,
        log_level="warning",
        server_header=False,
        ws="none",
        limit_concurrency=512,
        timeout_keep_alive=IDLE,
        timeout_graceful_shutdown=2,
    )


def check(address: str, token: str | None) -> None:
    """Check that the address and the token suit each other.

    Raises:
        ConfigError: the address needs a token, or the token can be guessed.
    """
    try:
        loopback = address == "localhost" or ip_address(address).is_loopback
    except ValueError:
        raise ConfigError(f"--address {address}: give an address in numbers, as 127.0.0.1 or 0.0.0.0") from None
    hint = "give --token or PEARL_TOKEN, as from: openssl rand -hex 16"
    if token is None and not loopback:
        raise ConfigError(f"--address {address} can be reached from other machines, which needs a token; {hint}")
    if token is not None and (len(token) < SHORTEST_TOKEN or not (token.isascii() and token.isprintable())):
        raise ConfigError(f"the token needs {SHORTEST_TOKEN} characters of ASCII or more; {hint}")


def listening(address: str, port: int) -> socket.socket:
    """Return a bound socket.

    Raises:
        ConfigError: the port or the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(512)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"{address}, port {port}: cannot be used ({reason(error)}); choose another --port") from None
    return listener
