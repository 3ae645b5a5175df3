"""Seconds of a run, from its files."""

from pearl.storage.run_directory import RunDirectory


def total_seconds(directory: RunDirectory) -> float:
    """Return the seconds of training and evaluation, including reused phases.

    Raises:
        RunError: its files are damaged.
    """
    learning = sum(sum(manifest["seconds"].values()) for _, manifest in directory.manifests())
    results = directory.results
    if stream := results.get("online"):
        seen, facts = stream["curve"][-1]["seen"], stream["facts"]
        learning += seen * facts["seconds_per_image"] + facts["evaluation_seconds"]
    return float(learning + sum(stage["evaluation_seconds"] for stage in results["stages"]))


def reused_seconds(directory: RunDirectory) -> float:
    """Return the seconds of reused phases, spent by other runs.

    Raises:
        RunError: its files are damaged.
    """
    every = [manifest for _, manifest in directory.manifests()]
    return sum(manifest["seconds"].get(phase, 0.0) for manifest in every for phase in manifest.get("reused", []))
