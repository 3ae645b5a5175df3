"""The program for a GPU that looks for the most accurate recipe: what it would run, and how it chooses."""

import accuracy
import pytest
from accuracy import PILOT, PILOT_EPOCHS, RECIPE, VARIANTS, Choice, choose, epochs_for, jobs, leftovers, passes

from paper_recipe import CANDIDATES
from pearl.settings.config import load_config

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("chosen", [Choice("trivialaugment", True, "adamw"), Choice("none", False, "sgd")])
def test_all_settings_are_valid(chosen: Choice) -> None:
    for job in [*jobs(chosen, 80), *leftovers()]:
        for variant in job.variants:
            if job.recipe:
                load_config(job.recipe, [f"seed={job.seed}", *variant.split()])
            else:
                assert variant in CANDIDATES


def test_variants_have_as_many_images_and_steps() -> None:
    for parts in VARIANTS.values():
        choice = Choice(*parts)
        config = load_config(RECIPE, [*PILOT.split(), *choice.settings(PILOT_EPOCHS).split()])
        assert config.images.policy == choice.policy and config.method["rotations"] == choice.rotations
        for name in ("reference", "adapt"):
            phase, turns = config.train.phase(name), 4 if choice.rotations else 1
            assert phase.epochs * turns == PILOT_EPOCHS and phase.batch_size * turns == 128
        assert config.train.phase("reference").optimizer == choice.optimizer


def test_policy_rotations_and_optimizer_are_chosen_one_after_the_other() -> None:
    scores = dict.fromkeys(VARIANTS, 50.0)
    assert choose(scores) == Choice("autoaugment", False, "sgd")
    better = {"trivialaugment": 51.0, "autoaugment, rotations": 50.5, "autoaugment, adamw": 49.0}
    assert choose(scores | better) == Choice("trivialaugment", True, "sgd")
    assert choose(scores | {"no policy": 52.0, "no policy, rotations": 51.0}) == Choice("none", False, "sgd")
    assert choose(scores | {"autoaugment, adamw": 50.1}).optimizer == "adamw"


def test_epochs_follow_from_the_time() -> None:
    """Four streams of 5 tasks, with three phases and two probes of 15 epochs on 10,000 images; a half and a quarter."""
    assert passes(0) == 4.75 * 30 * 10_000
    assert passes(100) - passes(0) == pytest.approx(10_000 * 100 * (4.75 * 3 + (4 + 4 * 4 / 3) / 2))
    assert epochs_for(0) == 40 and epochs_for(1e12) == 200
    assert epochs_for(passes(100)) == 100 and epochs_for(passes(100) - 1) == 96
    assert accuracy.pilot_of("autoaugment, rotations") == "pilot-autoaugment-rotations"
