"""A value that the first thread needing it creates."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def once(make: Callable[[], T]) -> Callable[[], T]:
    """Return a function that calls `make` once and returns the same result every time.

    Other threads wait for the first, so that an expensive value is created only once; with `functools.cache` each
    thread would create its own.
    """
    lock, made = threading.Lock(), list[T]()

    def get() -> T:
        with lock:
            if not made:
                made.append(make())
        return made[0]

    return get
