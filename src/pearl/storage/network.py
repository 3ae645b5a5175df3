"""Downloads that cannot come are found out in seconds: whoever has no internet should not wait for it."""

import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

SECONDS = 4.0  # for a connection to be made
STALLED = 30.0  # seconds without a byte, after which a download is given up
# Downloads change settings of the process, and put them back: two at a time would put back each other's.
_ALONE = threading.RLock()


def reach(address: str, *, seconds: float | None = None) -> None:
    """See that the host of an address answers. What goes through a proxy is taken to.

    Raises:
        OSError: it does not, within so many seconds (default: `SECONDS`).
    """
    parts = urlsplit(address)
    if parts.scheme in urllib.request.getproxies() or not parts.hostname:
        return
    end = (parts.hostname, parts.port or {"http": 80}.get(parts.scheme, 443))
    limit = SECONDS if seconds is None else seconds
    failed: list[OSError] = [TimeoutError(f"{parts.hostname} does not answer within {limit:g} seconds")]

    def attempt() -> None:
        try:
            socket.create_connection(end, timeout=limit).close()
            failed.clear()
        except OSError as error:
            failed[:] = [error]

    # looking a name up has no timeout of its own, so that it is waited for from outside
    trying = threading.Thread(target=attempt, daemon=True)
    trying.start()
    trying.join(limit)
    if failed:
        raise failed[0]


class _Reached(urllib.request.BaseHandler):
    """Asks whether a host answers before each download from it; of one that does not, once."""

    def __init__(self) -> None:
        self.failed: dict[str, OSError] = {}

    def http_request(self, request: urllib.request.Request) -> urllib.request.Request:
        if request.host in self.failed:
            raise self.failed[request.host]
        try:
            reach(request.full_url)
        except OSError as error:
            self.failed[request.host] = error
            raise
        return request

    https_request = http_request


@contextmanager
def short_waits() -> Iterator[None]:
    """Meanwhile a download by the standard library fails in seconds if its host does not answer, or stalls."""
    with _ALONE:
        before, timeout = urllib.request._opener, socket.getdefaulttimeout()  # type: ignore[attr-defined]
        urllib.request.install_opener(urllib.request.build_opener(_Reached()))
        socket.setdefaulttimeout(STALLED)
        try:
            yield
        finally:
            urllib.request._opener = before  # type: ignore[attr-defined]
            socket.setdefaulttimeout(timeout)


@contextmanager
def hub(*, offline: bool = False) -> Iterator[None]:
    """Meanwhile the Hugging Face hub is offline, if it does not answer or is not to be asked: its cache is all."""
    from huggingface_hub import constants

    with short_waits():
        before = constants.HF_HUB_OFFLINE
        try:
            if offline:
                constants.HF_HUB_OFFLINE = True
            elif not before:
                try:
                    reach(constants.ENDPOINT)
                except OSError:
                    constants.HF_HUB_OFFLINE = True
            yield
        finally:
            constants.HF_HUB_OFFLINE = before
