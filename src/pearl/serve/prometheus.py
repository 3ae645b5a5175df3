"""Counters and gauges in the text format of Prometheus."""

from collections import Counter
from collections.abc import Mapping

SECONDS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # upper ends of the buckets of answer times


class Metrics:
    """Answers by path and status, and how long they took until their first byte."""

    def __init__(self) -> None:
        self._answers: Counter[tuple[str, int]] = Counter()
        self._buckets: Counter[tuple[str, float]] = Counter()
        self._seconds: Counter[str] = Counter()

    def answered(self, path: str, status: int, seconds: float) -> None:
        """Count an answer."""
        self._answers[path, status] += 1
        self._buckets.update((path, end) for end in (*SECONDS, float("inf")) if seconds <= end)
        self._seconds[path] += seconds  # type: ignore[assignment]  # a counter of fractions

    def text(self, counters: Mapping[str, float], gauges: Mapping[str, float]) -> str:
        """Return the text for Prometheus: these numbers, by names with labels, and the answers."""
        lines = _lines("counter", counters) + _lines("gauge", gauges)
        answers = {f'pearl_requests_total{{path="{p}",status="{s}"}}': n for (p, s), n in self._answers.items()}
        lines += _lines("counter", answers)
        lines.append("# TYPE pearl_request_seconds histogram")
        for path, seconds in self._seconds.items():
            for end in (*SECONDS, float("inf")):
                le = "+Inf" if end == float("inf") else f"{end:g}"
                lines.append(f'pearl_request_seconds_bucket{{path="{path}",le="{le}"}} {self._buckets[path, end]}')
            lines.append(f'pearl_request_seconds_sum{{path="{path}"}} {seconds}')
            lines.append(f'pearl_request_seconds_count{{path="{path}"}} {self._buckets[path, float("inf")]}')
        return "\n".join(lines) + "\n"


def _lines(kind: str, values: Mapping[str, float]) -> list[str]:
    names = dict.fromkeys(name.partition("{")[0] for name in values)
    lines = []
    for name in names:
        lines.append(f"# TYPE {name} {kind}")
        lines += [f"{full} {value:g}" for full, value in values.items() if full.partition("{")[0] == name]
    return lines
