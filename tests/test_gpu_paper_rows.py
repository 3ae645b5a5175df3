"""The program for a GPU that runs the paper's other rows: its settings, and what fixed ranks share with the paper's."""

import pytest
from paper_rows import LANES

from paper_recipe import CANDIDATES
from pearl.settings.config import load_config

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("lane", LANES, ids=lambda lane: lane.name)
def test_all_settings_are_valid(lane) -> None:
    for variant in lane.variants:
        if lane.recipe:
            load_config(lane.recipe, variant.split())
        else:
            assert variant in CANDIDATES


def test_rows_of_the_main_stream_have_its_first_task() -> None:
    """Fixed ranks differ from the paper's rule by nothing that their first task trains with."""
    main = load_config("cifar100-5t-resnet18")
    for lane in LANES:
        if lane.name.startswith("rank"):
            config = load_config(lane.recipe, lane.variants[0].split())
            assert config.method["rank"] == {"name": "fixed", "r": int(lane.name.removeprefix("rank"))}
            assert (config.train.phase("reference"), config.stream) == (main.train.phase("reference"), main.stream)
