"""The contents of the phase cache, in words. No torch."""

import time
from pathlib import Path

from pearl.errors import RunError, counted
from pearl.reports.text import aligned, duration
from pearl.storage import phases
from pearl.storage.schemas import CheckpointManifest
from pearl.storage.stored_task import read_manifest


def kept(root: Path) -> str:
    """Return a line about the folder of the cache, and one per entry, last used first."""
    entries = phases.entries(root)[::-1]
    took, rows = 0.0, []
    for entry in entries:
        ago = duration(max(time.time() - entry.used, 0.0))
        try:
            manifest = read_manifest(entry.path, CheckpointManifest)
            took += manifest["seconds"]
            what = [manifest["phase"], f"{manifest['steps']} steps", f"trained in {duration(manifest['seconds'])}"]
        except (RunError, KeyError):  # the next run that needs it trains it again
            what = ["damaged", "", ""]
        rows.append([entry.path.name[:12], *what, f"{entry.bytes / 1e6:.1f} MB", f"used {ago} ago"])
    size = sum(entry.bytes for entry in entries) / 1e9
    head = f"{root}: {counted(len(entries), 'finished phase')}, {size:.2f} of at most {phases.limit() / 1e9:g} GB"
    return "\n".join(
        [f"{head}; training them took {duration(took)}" if entries else head, *filter(None, [aligned(rows)])]
    )
