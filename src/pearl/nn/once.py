"""A value that is made when it is first needed, by whichever thread needs it first."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def once(make: Callable[[], T]) -> Callable[[], T]:
    """Return a function that calls `make` the first time and returns that result every time.

    Other threads wait meanwhile, so that what takes long and much memory is made a single time; `functools.cache` lets
    each of them make its own.
    """
    lock, made = threading.Lock(), list[T]()

    def get() -> T:
        with lock:
            if not made:
                made.append(make())
        return made[0]

    return get
