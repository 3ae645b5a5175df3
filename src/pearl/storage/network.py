"""Early detection of failing downloads: without internet, an error within seconds."""

import socket
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

SECONDS = 4.0  # for a connection
STALLED = 30.0  # seconds without data after which a download is abandoned
# Downloads change global settings and restore them, so only one may run at a time.
_ALONE = threading.RLock()


def reach(address: str, *, seconds: float | None = None) -> None:
    """Check that the host of an address responds. Connections by proxy are assumed to work.

    Raises:
        OSError: it does not within the limit in seconds (default: `SECONDS`).
    """
    parts = urlsplit(address)
    if parts.scheme in urllib.request.getproxies() or not parts.hostname:
        return
    end = (parts.hostname, parts.port or {"http": 80}.get(parts.scheme, 443))
    limit = SECONDS if seconds is None else seconds
    failed: list[OSError] = [TimeoutError(f"{parts.hostname} does not respond within {limit:g} seconds")]

    def attempt() -> None:
        try:
            socket.create_connection(end, timeout=limit).close()
            failed.clear()
        except OSError as error:
            failed[:] = [error]

    # name resolution has no timeout, so it runs in a thread
    trying = threading.Thread(target=attempt, daemon=True)
    trying.start()
    trying.join(limit)
    if failed:
        raise failed[0]


class _Reached(urllib.request.BaseHandler):
    """Checks that a host responds before each download from it; once for a host that does not."""

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
    """Make downloads by the standard library fail within seconds if their host does not respond or stalls."""
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
    """Make the Hugging Face hub offline, using only its cache, if it does not respond or must not be used."""
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
