"""Settings that were corrected after a comparison with the authors' configurations, value by value."""

import pytest

from pearl.methods.rehearsal.mean_teacher import MeanTeacher
from pearl.settings.config import load_config
from pearl.settings.sections import PhaseConfig
from pearl.training.optimizers import Course, learning_rate


def phase(name: str, recipe: str = "imagenet_r-10t-vit") -> PhaseConfig:
    return load_config(recipe).train.phase(name)


@pytest.mark.parametrize("recipe", ["imagenet_r-10t-vit", "cpu-cifar100-deit_tiny", "schedule-deit_tiny"])
def test_hide_has_no_weight_decay(recipe: str) -> None:
    """configs/imr_hideprompt_5e.py defines the option twice, as 0.0 and 5e-4; argparse keeps the first default."""
    for name in ("hide_identity", "hide_identity_align", "hide_prompt", "hide_align"):
        assert phase(name, recipe).weight_decay == 0


def test_the_cosine_of_hide_ends_at_its_least_rate() -> None:
    prompt = phase("hide_prompt")
    course = Course(per_epoch=100, planned=15000, steps=15000)
    assert learning_rate(prompt, course, 0) == 0.0028125
    assert learning_rate(prompt, course, 7500) == pytest.approx((0.0028125 + 1e-5) / 2)
    assert learning_rate(prompt, course, 15000) == pytest.approx(1e-5)
    assert phase("hide_align").end_lr == 0  # a cosine of PyTorch, which ends at 0


def test_crops_are_those_of_each_method() -> None:
    low = {"dualprompt", "lgcl", "dualprompt_pgp", "l2p_pgp", "hide_identity", "hide_prompt", "convprompt"}
    config = load_config("imagenet_r-10t-vit")
    assert config.images.scale == (0.08, 1.0)
    own = {name: config.train.phase(name).images for name in config.train.phases}
    assert {name for name, images in own.items() if images.model_fields_set} == low
    assert {own[name].scale for name in low} == {(0.05, 1.0)}
    small = load_config("schedule-deit_tiny")
    assert {small.train.phase(name).images.scale for name in low} == {small.images.scale} == {(0.5, 1.0)}


@pytest.mark.parametrize("name", ["pass", "il2a", "ssre_first", "ssre"])
def test_non_exemplar_methods_change_the_brightness(name: str) -> None:
    """By up to 63 / 255 on CIFAR-100; PASS's and IL2A's scripts for TinyImageNet have flips alone."""
    for recipe in ("cifar100-5t-resnet18", "cpu-cifar20-resnet18", "table-resnet18"):
        assert phase(name, recipe).images.brightness == pytest.approx(63 / 255, abs=1e-5)
    tiny = phase(name, "tinyimagenet-10t-resnet18").images
    assert (tiny.brightness, "pad" in tiny.model_fields_set) == (
        (0, True) if name in ("pass", "il2a") else (0.24706, False)
    )


@pytest.mark.parametrize(
    ("method", "tasks", "chance"),
    [("ocdnet", 0.65, 0.1), ("tamil", 1.3, 0.05), ("trire", 0.65, 0.1), ("agile", 1.3, 0.05)],
)
def test_averaged_teachers_have_the_authors_rates_on_published_streams(
    method: str, tasks: float, chance: float
) -> None:
    """In 20 tasks of CIFAR-100 a limit would raise OCDNet's published probability of .1 to .39."""

    def limit(recipe: str) -> float | None:
        return load_config(recipe, [f"method={method}"]).method["ema_tasks"]

    for recipe in ("cifar100-5t-resnet18", "cifar100-20t-resnet18", "tinyimagenet-10t-resnet18", "schedule-resnet18"):
        assert limit(recipe) is None
    for recipe in ("cpu-cifar20-resnet18", "table-resnet18", "digits"):
        assert limit(recipe) == tasks
    assert MeanTeacher(chance, 0.999, None, "own").pace(3900) == (chance, 0.999)
    assert MeanTeacher(chance, 0.999, tasks, "own").pace(3900)[0] == pytest.approx(1 / (tasks * 3.9))


# of ten methods drawn at random all options with a number, and options that were wrong once
AUTHORS: dict[str, dict[str, object]] = {
    "agile": {"old_biases": True, "task_of_memory": False},  # they freeze weights of old heads alone
    "convprompt": {
        "num_prompts_per_task": 5,
        "kernel_size": 17,
        "length": 20,
        "blocks": 7,
        "train_keys": False,  # their optimizer holds keys that were replaced
        "train_norms": True,
        "norm_share": 0.005,
        "stay": 0.01,
        "similarity_over": "earlier",
    },
    "cpg": {"on_growth": "restart"},
    "dia": {"width": 8, "single": "cosine", "pdl": 0.1, "prototypes": 32, "beta": 0.7},  # the paper's
    "er": {"passes": "together"},  # Mammoth's
    "hide": {"prompt_momentum": 0.01, "n_centroids": 10, "identity_draws": 24, "draws": 120},
    "il2a": {"temp": 0.1, "seman_weight": 10, "kd_weight": 10, "ratio": 2.5, "mix_times": 4, "alpha": 20},
    "lae": {"head_std": 0.001},
    "pae": {"on_growth": "restart", "max_multiplier": 2, "goal": "finetuned", "train_accuracy": 95},
    "sema": {
        "ffn_num": 16,
        "rd_dim": 128,
        "adapt_start_layer": 9,
        "adapt_end_layer": 11,
        "exp_threshold": 2,
        "hold_out": 0,
    },
    "sparcl_ewc": {"forgotten_among": "all"},
    "sprompts": {"prompt_length": 10, "centroids": 5},
    "ssre": {"temp": 0.1, "protoAug_weight": 10, "kd_weight": 1},
    "tamil": {
        "code_dim": 64,
        "pairwise_weight": 0.1,
        "reg_weight": 0.1,
        "ema_update_freq": 0.05,
        "ema_alpha": 0.999,
        "ema_norms": "own",
    },
}


@pytest.mark.parametrize("method", AUTHORS)
def test_defaults_are_the_authors(method: str) -> None:
    actual = load_config("digits", [f"method={method}"]).method
    assert {option: actual[option] for option in AUTHORS[method]} == AUTHORS[method]


# method, option, default, the authors' value, why ours differs
DEPARTURES: list[tuple[str, str, object, object, str]] = [
    ("dia", "align_among", "own", "all", "with all classes half of all predictions fall into the newest task"),
    ("dualprompt_pgp", "criterion", "energy", "squared", "the paper's rule; theirs squares energies twice"),
    ("er_ace", "head", "linear", "cosine", "the head of the other rehearsal methods, so that only losses differ"),
    ("evoprompt", "align", "hidden", "both", "a permutation changes what coordinates of a prompt mean"),
    ("il2a", "covariances", "own", "released", "theirs are of other classes from the third task on"),
    ("l2p_pgp", "criterion", "energy", "squared", "the paper's rule; theirs squares energies twice"),
    ("loranpac", "E", 10_000, 100_000, "with theirs every task's folder has up to 4 GB"),
    ("lwf", "kd_lambda", 10.0, 3.0, "ADC's value for random initial weights; 3 is PyCIL's"),
    ("rsiat", "output", "linear", "sigmoid", "a sigmoid can only add, and adds a half at first"),
    ("sema", "detect_batch_size", None, 128, "a decision by the whole task does not depend on the order of batches"),
]


@pytest.mark.parametrize(("method", "option", "ours", "authors", "reason"), DEPARTURES)
def test_departures_from_the_authors_are_options(
    method: str, option: str, ours: object, authors: object, reason: str
) -> None:
    """Their value can be set instead."""
    assert reason
    assert load_config("digits", [f"method={method}"]).method[option] == ours != authors
    assert load_config("digits", [f"method={method}", f"method.{option}={authors}"]).method[option] == authors
