import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from pearl.errors import ConfigError
from pearl.settings.config import (
    RunConfig,
    check_config,
    load_config,
    merge,
    parse_overrides,
    raw_config,
    read_recipe,
    recipe_names,
)
from pearl.settings.parts import BACKBONES, METHODS, RANK_RULES, SOURCES
from pearl.settings.registry import nearest
from pearl.settings.sections import EngineConfig, ImagesConfig, StreamConfig, TrainConfig

CIFAR = "cifar100-5t-resnet18"  # its method has an option: targets


def load(*overrides: str, recipe: str | Path = "digits", smoke: bool = False) -> RunConfig:
    return load_config(recipe, overrides, smoke=smoke)


def problems(*overrides: str, recipe: str | Path = "digits", smoke: bool = False) -> tuple[str, ...]:
    """What is said to be wrong, a line each."""
    with pytest.raises(ConfigError) as caught:
        load(*overrides, recipe=recipe, smoke=smoke)
    assert str(caught.value) == "\n".join(caught.value.problems)
    assert all("\n" not in line and line.isprintable() for line in caught.value.problems)
    return caught.value.problems


def write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


# Recipes


@pytest.mark.parametrize("smoke", [False, True])
@pytest.mark.parametrize("name", recipe_names())
def test_recipes_load(name: str, smoke: bool) -> None:
    config = load(recipe=name, smoke=smoke)
    assert config.recipe == name and config.smoke == smoke
    assert config.about.endswith(".") and "\n" not in config.about


def test_all_recipe_files_are_listed() -> None:
    import pearl

    files = (Path(pearl.__file__).parent / "settings" / "recipes").glob("*.yaml")
    assert recipe_names() == sorted(file.stem for file in files if not file.stem.startswith("_"))
    assert {"digits", CIFAR} <= set(recipe_names())


def test_a_recipe_to_be_extended_is_none_to_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="unknown recipe '_cifar100-resnet18'"):
        load(recipe="_cifar100-resnet18")
    file = write(tmp_path / "mine.yml", "extends: _cifar100-resnet18\nabout: Mine.\n")
    assert load(recipe=file).train == load(recipe="schedule-resnet18").train


def test_recipe_from_a_file(tmp_path: Path) -> None:
    text = yaml.safe_dump({**read_recipe("digits"), "seed": 4})
    config = load("seed=5", "train.lr=0.1", recipe=write(tmp_path / "mine.yml", text))
    assert (config.recipe, config.seed, config.train.lr) == ("mine", 5, 0.1)
    assert config.images == load().images


def test_extends_a_recipe(tmp_path: Path) -> None:
    text = f"extends: {CIFAR}\nseed: 3\ntrain: {{phases: {{probe: {{lr: 0.5}}}}}}\nmethod: {{fold: view}}"
    config, base = load(recipe=write(tmp_path / "mine.yaml", text)), load(recipe=CIFAR)
    assert config.recipe == "mine" and config.seed == 3
    assert base.train.phases["probe"].model_dump(exclude_unset=True) == {"epochs": 15}
    assert config.train.phases["probe"].model_dump(exclude_unset=True) == {"epochs": 15, "lr": 0.5}
    assert config.method == {**base.method, "fold": "view"}
    assert config.stream == base.stream
    assert base.expected and not config.expected  # a figure of the paper belongs to one recipe


def test_extends_files_in_a_chain(tmp_path: Path) -> None:
    first = write(tmp_path / "first.yaml", "extends: digits\nseed: 1\ntrain: {lr: 0.5}")
    second = write(tmp_path / "second.yaml", f"extends: {first}\nseed: 2")
    config = load(recipe=second)
    assert (config.recipe, config.seed, config.train.lr) == ("second", 2, 0.5)
    assert config.stream == load().stream


def test_extends_with_another_method(tmp_path: Path) -> None:
    config = load(recipe=write(tmp_path / "mine.yaml", f"extends: {CIFAR}\nmethod: finetune"))
    assert config.method == {"name": "finetune"}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a: [", r"recipe mine: not valid YAML"),
        ("- a\n- b", r"recipe mine: must be a mapping of settings, is list"),
        ("", r"recipe mine: must be a mapping of settings, is NoneType"),
        ("extends: digit", r"unknown recipe 'digit'; did you mean 'digits'\?"),
    ],
)
def test_recipe_file_that_is_none(tmp_path: Path, text: str, match: str) -> None:
    (line,) = problems(recipe=write(tmp_path / "mine.yaml", text))
    assert re.match(match, line)


def test_sections_that_are_missing_are_all_named(tmp_path: Path) -> None:
    missing = {line.partition(":")[0] for line in problems(recipe=write(tmp_path / "mine.yaml", "seed: 1"))}
    assert missing == {"data", "stream", "images", "backbone", "method"}


def test_recipe_file_not_found() -> None:
    (line,) = problems(recipe="nowhere/mine.yaml")
    assert line.startswith("recipe file nowhere/mine.yaml not found")


@pytest.mark.parametrize("names", [["a"], ["a", "b", "c"]], ids=len)
def test_extends_itself(tmp_path: Path, names: list[str]) -> None:
    for name, base in zip(names, names[1:] + names[:1], strict=True):
        write(tmp_path / f"{name}.yaml", f"extends: {base}.yaml")
    (line,) = problems(recipe=tmp_path / "a.yaml")
    assert line.startswith("recipe a: extends itself (")
    assert line.count("a.yaml") == 2 and all(f"{name}.yaml -> " in line for name in names)


def test_extends_one_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    write(tmp_path / "base" / "digits.yaml", "extends: digits\nseed: 9")
    config = load(recipe=write(tmp_path / "digits.yaml", "extends: base/digits.yaml"))
    assert config.seed == 9 and config.stream == load().stream


def test_extends_a_file_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "base.yaml", "extends: digits\nseed: 9")
    assert load(recipe=write(tmp_path / "mine.yaml", "extends: base.yaml")).seed == 9


# There and back


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_survives_yaml(name: str) -> None:
    config = load(recipe=name)
    again = check_config(yaml.safe_load(config.to_yaml()))
    assert again == config and again.id == config.id
    assert again.to_yaml() == config.to_yaml()


@pytest.mark.parametrize(
    "overrides",
    [
        ("method.rank.name=energy", "method.rank.keep=0.9", "method.alpha=1e-5"),
        ("stream.tasks=[1, 4, 5]", "stream.order=[9,8,7,6,5,4,3,2,1,0]"),
        ("backbone=bsc", "train.clip=1e+3", "about='a: \"b\" # é\n'"),
        ("method=joint", "engine.max_steps=3", "train.phases={joint: {lr: 1.0e-9, milestones: [0.5]}}"),
        ("expected.x.mean=1", "expected.x.where=Table 1", "data.seed=3"),
    ],
    ids=str,
)
def test_a_configuration_survives_yaml(overrides: tuple[str, ...]) -> None:
    config = load(*overrides)
    again = check_config(yaml.safe_load(config.to_yaml()))
    assert again == config and again.id == config.id
    assert config != load()


@pytest.mark.parametrize("value", [".nan", ".inf"])
def test_options_are_finite(value: str) -> None:
    (line,) = problems(f"method.alpha={value}")
    assert line.startswith(f"method.alpha: input should be a finite number (given: {value[1:]})")


# Overrides


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("seed=7", "seed", 7),
        ("train.lr=1e-3", "train.lr", 0.001),  # to YAML, a number without a point is a string
        ("train.lr=2.5E-4", "train.lr", 0.00025),
        ("train.lr=1", "train.lr", 1.0),
        ("train.weight_decay=5e-4", "train.weight_decay", 0.0005),
        ("train.clip=null", "train.clip", None),
        ("train.betas=[0.5, 1e-1]", "train.betas", (0.5, 0.1)),
        ("train.milestones=[0.5,0.75]", "train.milestones", [0.5, 0.75]),
        ("stream.tasks=[4, 6]", "stream.tasks", [4, 6]),
        ("stream.tasks=2", "stream.tasks", 2),
        ("stream.order=1993", "stream.order", 1993),
        ("stream.order=natural", "stream.order", "natural"),
        ("images.flip=true", "images.flip", True),
        ("images.mean=[0, 0.5, 1]", "images.mean", (0.0, 0.5, 1.0)),
        ("engine.precision=bf16", "engine.precision", "bf16"),
        ("about=a=b", "about", "a=b"),
        ("about='1'", "about", "1"),
    ],
)
def test_an_override_arrives(override: str, path: str, value: Any) -> None:
    actual: Any = load(override)
    for key in path.split("."):
        actual = getattr(actual, key)
    assert actual == value and type(actual) is type(value)


def test_nothing_after_the_equals_sign_is_null() -> None:
    assert load("train.clip=").train.clip is None
    assert problems("about=") == ("about: input should be a valid string (given: None)",)


def test_what_is_not_overridden_stays() -> None:
    base, config = load().model_dump(), load("train.lr=0.5", "images.mean=[1,1,1]").model_dump()
    base["train"]["lr"], base["images"]["mean"] = 0.5, (1.0, 1.0, 1.0)
    assert config == base


def test_phases_have_the_settings_of_all_but_their_own() -> None:
    config = load(
        "train.phases={probe: {epochs: 5}}",
        "train.phases.probe.lr=1e-2",
        "train.phases.adapt={epochs: 3, optimizer: sgd}",
        "train={lr: 1e-4, epochs: 15, batch_size: 32, optimizer: adam}",
    )
    probe, adapt, reference = (config.train.phase(name) for name in ("probe", "adapt", "reference"))
    assert (probe.lr, probe.epochs, probe.optimizer) == (0.01, 5, "adam")
    assert (adapt.lr, adapt.epochs, adapt.optimizer) == (0.0001, 3, "sgd")
    assert (reference.lr, reference.epochs, reference.optimizer) == (0.0001, 15, "adam")
    assert probe.batch_size == adapt.batch_size == reference.batch_size == 32


def test_rank_rule_by_parts() -> None:
    assert load("method.rank.name=fixed", "method.rank.r=3").method["rank"] == {"name": "fixed", "r": 3}
    assert load("method.rank={name: fixed, r: 3}").method["rank"] == {"name": "fixed", "r": 3}
    assert load("method.rank=energy").method["rank"] == {"name": "energy", "keep": 0.5}
    assert load().method["rank"] == {"name": "paper"}


def test_another_rank_rule_starts_from_its_own_defaults(tmp_path: Path) -> None:
    path = write(tmp_path / "mine.yaml", "extends: digits\nmethod: {rank: {name: fixed, r: 3}}")
    assert load("method.rank.r=4", recipe=path).method["rank"] == {"name": "fixed", "r": 4}
    assert load("method.rank.name=energy", recipe=path).method["rank"] == {"name": "energy", "keep": 0.5}


def test_another_option_leaves_the_others() -> None:
    assert load(recipe=CIFAR).method["targets"] == "conv"
    assert load("method.fold=view", recipe=CIFAR).method == {**load(recipe=CIFAR).method, "fold": "view"}


@pytest.mark.parametrize("spelling", ["method=finetune", "method.name=finetune", "method={name: finetune}"])
def test_another_method_drops_the_options_of_the_last(spelling: str) -> None:
    assert load(spelling, recipe=CIFAR).method == {"name": "finetune"}


@pytest.mark.parametrize("spelling", ["method=pearl", "method.name=pearl"])
def test_the_same_method_keeps_its_options(spelling: str) -> None:
    assert load(spelling, recipe=CIFAR).method == load(recipe=CIFAR).method


@pytest.mark.parametrize(
    "overrides",
    [
        ("method.rank.r=3", "method.rank.name=fixed"),
        ("method.rank.r=3", "method.rank=fixed"),
        ("method.rank=fixed", "method.rank.r=3", "method=pearl"),
    ],
    ids=str,
)
def test_order_of_overrides_does_not_matter(overrides: tuple[str, ...]) -> None:
    assert load(*overrides).method["rank"] == {"name": "fixed", "r": 3}


def test_options_without_a_name_belong_to_the_default_rule() -> None:
    assert problems("method.rank.r=3") == ("method.rank.r: unknown key; choose from (it has no options)",)


def test_the_last_of_two_overrides_counts() -> None:
    assert load("seed=1", "seed=2").seed == 2


def test_smoke_shrinks_everything() -> None:
    config = load(recipe=CIFAR, smoke=True)
    assert config.engine.max_steps == 1 and config.stream.per_class == 2 and config.stream.test_per_class == 1
    whole = load(recipe=CIFAR)
    assert (config.stream.tasks, config.backbone) == (whole.stream.tasks, whole.backbone)


def test_smoke_shrinks_the_batches_of_every_phase() -> None:
    train = load("train.batch_size=64", "train.phases.probe.batch_size=99", smoke=True).train
    assert {train.phase(name).batch_size for name in ("probe", "adapt", "reference")} == {8}
    assert train.phase("probe").lr == load().train.phase("probe").lr != train.phase("adapt").lr


Keys = st.text("abcdefgh_", min_size=1, max_size=4)
Scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)  # larger ones are refused, and a NUL
    | st.floats(allow_nan=False)
    | st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
)
Values = Scalars | st.lists(Scalars, max_size=3) | st.dictionaries(Keys, Scalars, max_size=3)


def as_yaml(value: Any) -> str:
    return yaml.safe_dump(value, default_flow_style=True, width=10**6).removesuffix("...\n").removesuffix("\n")


@settings(deadline=None, max_examples=60)
@given(st.lists(Keys, min_size=1, max_size=4), Values)
def test_any_value_arrives_at_any_key(keys: list[str], value: Any) -> None:
    actual: Any = parse_overrides([f"{'.'.join(keys)}={as_yaml(value)}"])
    for key in keys:
        assert list(actual) == [key]
        actual = actual[key]
    assert actual == value and type(actual) is type(value)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(Keys, Scalars, max_size=5), st.randoms())
def test_different_keys_in_any_order(values: dict[str, Any], random: Any) -> None:
    items = [f"top.{key}={as_yaml(value)}" for key, value in values.items()]
    random.shuffle(items)
    assert parse_overrides(items) == ({"top": values} if values else {})


Names = st.sampled_from("abc")
Leaves = st.integers(0, 3) | st.just([1])
Trees = Leaves | st.dictionaries(Names, Leaves | st.dictionaries(Names, Leaves, max_size=2), max_size=3)


@settings(deadline=None, max_examples=60)
@given(st.dictionaries(Names, Trees, max_size=3), st.dictionaries(Names, Trees, max_size=3))
def test_merge_changes_what_it_says_and_nothing_else(base: dict[str, Any], changes: dict[str, Any]) -> None:
    before = json.dumps([base, changes])
    merged = merge(base, changes)
    assert json.dumps([base, changes]) == before
    assert merged.keys() == base.keys() | changes.keys()
    for key, value in merged.items():
        old, new = base.get(key), changes.get(key, base.get(key))
        both = key in base and key in changes and isinstance(old, dict) and isinstance(new, dict)
        assert value == (merge(old, new) if both else new)


def test_overrides_that_are_none_are_all_named() -> None:
    lines = problems("seed", "=3", "train.lr=[", "seed=1")
    assert len(lines) == 3
    assert "'seed' is not of the form key=value" in lines[0] and "'=3' is not of the form" in lines[1]
    assert lines[2].startswith("train.lr: the value '[' is not valid YAML")


@pytest.mark.parametrize("text", ["2024-13-45", "0x_"])
def test_values_that_only_look_like_dates_or_numbers(text: str) -> None:
    (problem,) = problems(f"about={text}")
    assert problem.startswith(f"about: the value {text!r} is not valid YAML (") and problem.endswith("); quote it")


# What is wrong


def test_all_wrong_keys_at_once() -> None:
    wrong = {
        "engine.precison=fp32": "precision",
        "sede=3": "seed",
        "train.optimzer=sgd": "optimizer",
        "stream.task=5": "tasks",
        "method.fodl=view": "fold",
        "backbone.widht=3": "width",
        "data.sed=1": "seed",
        "images.agument=crop": "augment",
    }
    expected = {f"{key.partition('=')[0]}: unknown key; did you mean {right!r}?" for key, right in wrong.items()}
    lines = problems(*wrong)
    assert set(lines) == expected and len(lines) == len(expected)


def test_a_blank_is_missing_behind_a_colon() -> None:
    assert problems("backbone={name: resnet18,width:8}") == (
        "backbone.width:8: unknown key; write 'width: 8', with a space",
    )


def test_wrong_keys_names_and_values_at_once() -> None:
    lines = problems("method=perl", "backbone=resnt18", "train.lr=fast", "seed=-1", "stream.taks=3")
    assert len(lines) == 5
    for start in ("method.name: ", "backbone.name: ", "train.lr: ", "seed: ", "stream.taks: "):
        assert sum(line.startswith(start) for line in lines) == 1
    assert any(line.endswith("(given: 'fast')") for line in lines) and any("(given: -1)" in line for line in lines)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("method=fintune", "method.name: unknown method 'fintune'; did you mean 'finetune'?"),
        ("method=pearl/x", "method.name: unknown method 'pearl/x'; did you mean 'pearl'?"),
        ("method=zzz", f"method.name: unknown method 'zzz'; choose from {', '.join(sorted(METHODS.names()))}"),
        ("backbone=resnet19", "backbone.name: unknown backbone 'resnet19'; did you mean 'resnet18'?"),
        ("data=digit", "data.name: unknown data source 'digit'; did you mean 'digits'?"),
        ("data.name=tinyimagnet", "data.name: unknown data source 'tinyimagnet'; did you mean 'tinyimagenet'?"),
        ("method.rank=fixd", "method.rank.name: unknown rank rule 'fixd'; did you mean 'fixed'?"),
        (
            "backbone=timm/*",
            "backbone.name: timm/* is a family; give a member, such as timm/deit_tiny_patch16_224",
        ),
    ],
)
def test_unknown_names(override: str, said: str) -> None:
    assert problems(override) == (said,)


def test_unknown_recipe() -> None:
    assert problems(recipe="digit") == ("unknown recipe 'digit'; did you mean 'digits'? (`pearl list recipes`)",)
    (line,) = problems(recipe="qqq")
    assert all(name in line for name in recipe_names())


@pytest.mark.parametrize(
    ("word", "hint"),
    [("lerning_rate", "did you mean 'learning_rate'?"), ("x", "choose from epochs, learning_rate")],
)
def test_nearest_name_or_all_of_them(word: str, hint: str) -> None:
    assert nearest(word, ["learning_rate", "epochs"]) == hint


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("seed=1.5", "seed"),
        ("seed=x", "seed"),
        ("seed=true", "seed"),
        ("seed=4294967296", "seed"),
        ("train.epochs=0", "train.epochs"),
        ("train.epochs=2.5", "train.epochs"),
        ("train.lr=0", "train.lr"),
        ("train.lr=.nan", "train.lr"),
        ("train.lr=.inf", "train.lr"),
        ("train.optimizer=lion", "train.optimizer"),
        ("train.betas=[0.9]", "train.betas"),
        ("train.milestones=[0.5, 2]", "train.milestones"),
        ("stream.tasks=0", "stream.tasks"),
        ("stream.tasks=many", "stream.tasks"),
        ("stream.tasks=2.0", "stream.tasks"),
        ("stream.tasks=[]", "stream.tasks"),
        ("stream.tasks=[3, 0]", "stream.tasks"),
        ("stream.order=random", "stream.order"),
        ("stream.order=true", "stream.order"),
        ("stream.order=-1", "stream.order"),
        ("stream.order=4294967296", "stream.order"),
        ("stream.order=[]", "stream.order"),
        ("stream.validation=1", "stream.validation"),
        ("stream.evaluate_on=train", "stream.evaluate_on"),
        ("images.mean=[1, 2]", "images.mean"),
        ("images.std=[1, 1, 0]", "images.std"),
        ("engine.channels_last=maybe", "engine.channels_last"),
        ("data.seed=first", "data.seed"),
        ("data=npz", "data.path"),
        ("method=[1]", "method.name"),
        ("method.fold=round", "method.fold"),
        ("method.targets=5", "method.targets"),
        ("method.rank={name: fixed, r: many}", "method.rank.r"),
        ("backbone.width=wide", "backbone.width"),
        ("expected.x={mean: high, where: Table 1}", "expected.x.mean"),
    ],
)
def test_wrong_values_are_named(override: str, key: str) -> None:
    (line,) = problems(override)
    assert line.startswith(f"{key}: ")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("images.size=28", "images.resize=10"), "images: resize 10 is below size 28"),
        (("images.scale=[0.5, 0.1]",), "images: scale [0.5, 0.1] must rise"),
        (("images.scale=[0.5, 1.1]",), "images: scale [0.5, 1.1] must rise and end at 1"),
        (("stream.order=[1, 2, 1]",), "stream: order lists a class twice"),
    ],
    ids=str,
)
def test_values_that_do_not_go_together(overrides: tuple[str, ...], said: str) -> None:
    (line,) = problems(*overrides)
    assert line.startswith(said)


@pytest.mark.parametrize("override", ["train.betas=[0.9]", "images.mean=[0, 0]"])
def test_lists_that_are_too_short(override: str) -> None:
    key, _, value = override.partition("=")
    assert problems(override) == (f"{key}: too few values (given: {value})",)


def test_all_that_is_said_of_one_setting_is_in_one_line() -> None:
    (line,) = problems("stream.tasks=many")
    assert line == (
        "stream.tasks: input should be a valid integer (given: 'many'), or input should be a valid list (given: 'many')"
    )


def test_all_that_is_wrong_in_phases_is_named() -> None:
    wrong = ("train.phases.probe.lr=-1", "train.phases.adapt.epohcs=3", "train.phases.prob.epochs=3")
    assert problems(*wrong) == (
        "train.phases.probe.lr: input should be greater than 0 (given: -1)",
        "train.phases.adapt.epohcs: unknown key; did you mean 'epochs'?",
        "train.phases.prob: no such phase; did you mean 'probe'?",
    )


def test_a_recipe_may_hold_phases_of_another_method() -> None:
    assert load("train.phases.joint.epochs=3").train.phase("joint").epochs == 3


def test_wrong_key_of_an_expected_figure() -> None:
    lines = problems("expected.x={mean: 1, where: Table 1, sdt: 1}")
    assert lines == ("expected.x.sdt: unknown key; did you mean 'std'?",)


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("method={1: 2, name: pearl}", "method.1"),
        ("train=5", "train"),
        ("train.phases=5", "train.phases"),
        ("train.phases.probe=5", "train.phases.probe"),
        ("engine=5", "engine"),
    ],
)
@pytest.mark.parametrize("smoke", [False, True])
def test_odd_mappings(override: str, key: str, smoke: bool) -> None:
    (line,) = problems(override, smoke=smoke)
    assert line.startswith(f"{key}: ")


# The name of a run


DIGITS = load()
CHANGES = [
    "seed=1",
    "data={name: npz, path: digits.npz}",
    "data.seed=1",
    "data.test_share=0.3",
    "backbone=bsc",
    "backbone.width=8",
    "method=finetune",
    "method=joint",
    "method.fold=view",
    "method.rank=energy",
    "method.rank={name: energy, keep: 0.6}",
    "stream.tasks=2",
    "stream.domains=[plain, edges]",
    "stream.tasks=[2, 8]",
    "stream.order=7",
    "stream.per_class=5",
    "stream.test_per_class=5",
    "stream.classes=5",
    "stream.validation=0.1",
    "stream.evaluate_on=validation",
    "images.size=9",
    "images.resize=9",
    "images.augment=none",
    "images.pad=2",
    "images.scale=[0.5, 1]",
    "images.flip=true",
    "images.policy=autoaugment",
    "images.brightness=0.1",
    "images.mean=[0, 0, 0]",
    "images.std=[1, 1, 1]",
    "images.bits=12",
    "images.reduced=true",
    "train.epochs=3",
    "train.batch_size=16",
    "train.optimizer=sgd",
    "train.lr=0.01",
    "train.betas=[0.8, 0.99]",
    "train.momentum=0.5",
    "train.weight_decay=0.1",
    "train.schedule=cosine",
    "train.milestones=[0.5]",
    "train.gamma=0.5",
    "train.clip=1",
    "train.steps=3",
    "train.nesterov=true",
    "train.end_lr=0.0001",
    "train.warmup=0.1",
    "train.warmup_lr=0.0001",
    "train.groups={body: {lr: 0.1}}",
    "train.images={pad: 2}",
    "train.phases={probe: {epochs: 6}}",
    "train.phases={adapt: {epochs: 6}}",
    "engine.precision=fp32",
    "engine.channels_last=false",
    "engine.eval_batch_size=7",
    "engine.max_steps=3",
    "smoke=true",
]


def test_every_setting_is_among_the_changes() -> None:
    sections = {"stream": StreamConfig, "images": ImagesConfig, "train": TrainConfig, "engine": EngineConfig}
    settings = {f"{section}.{key}" for section, model in sections.items() for key in model.model_fields}
    settings |= RunConfig.model_fields.keys() - sections.keys() - {"recipe", "about", "expected"}
    settings -= {"engine.cuda_graphs", "engine.reuse", "engine.earlier_states"}  # the same arithmetic
    changed = {item.partition("=")[0] for item in CHANGES}
    assert settings <= changed


def test_any_change_gives_another_id() -> None:
    ids = [load().id, *(load(item).id for item in CHANGES), load(recipe=CIFAR).id, load(smoke=True).id]
    assert len(set(ids)) == len(CHANGES) + 3


def test_settings_of_another_method_leave_the_id() -> None:
    assert load("train.phases.joint.epochs=6").id == load().id
    assert load("train.phases.joint.epochs=6", "method=joint").id != load("method=joint").id


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("about=something else",),
        ("expected.x.mean=1", "expected.x.where=Table 1"),
        ("seed=0", f"train.lr={DIGITS.train.lr:e}", "train.clip=null"),
        ("method=pearl", "data.name=digits", "method.rank=paper"),
        (f"images.mean={[f'{mean:e}' for mean in DIGITS.images.mean]}",),
        (f"train.phases={json.dumps(DIGITS.train.model_dump(mode='json')['phases'])}",),
        ("data={test_share: 0.2, seed: 0}",),
    ],
    ids=str,
)
def test_the_same_settings_give_the_same_id(overrides: tuple[str, ...]) -> None:
    assert load(*overrides).id == load().id


def test_a_number_in_a_phase_may_be_written_in_any_way() -> None:
    assert load("train.phases.probe.lr=1e-3").id == load("train.phases.probe.lr=0.001").id


@pytest.mark.parametrize("name", recipe_names())
def test_id_is_readable_and_safe(name: str) -> None:
    config = load("seed=12", recipe=name)
    assert re.fullmatch(rf"{re.escape(name)}-pearl-seed12-[0-9a-f]{{8}}", config.id)
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,100}", config.id)
    assert load(recipe=name, smoke=True).id.startswith(f"{name}-pearl-seed0-smoke-")


@pytest.mark.parametrize(
    "recipe", ["../../elsewhere", "/etc", ".", "", "a\0b", "a\n", "x" * 300], ids=lambda name: name[:9]
)
def test_no_recipe_leads_out_of_the_runs(recipe: str) -> None:
    with pytest.raises(ConfigError, match=r"^recipe: string should match pattern"):
        check_config({**raw_config("digits"), "recipe": recipe})


# Parts


@pytest.mark.parametrize("registry", [METHODS, BACKBONES, SOURCES, RANK_RULES], ids=lambda registry: registry.kind)
def test_every_part_can_be_had_by_name(registry: Any) -> None:
    for name in registry.names():
        assert callable(registry.load(name.replace("*", "x")))
        assert registry.options(name.replace("*", "x")).model_config["extra"] == "forbid"


def test_family_member_is_the_first_argument() -> None:
    assert load("backbone=timm/deit_tiny_patch16_224").backbone["name"] == "timm/deit_tiny_patch16_224"
    assert BACKBONES.load("timm/deit_tiny_patch16_224").args == ("deit_tiny_patch16_224",)


# Before torch is needed


@pytest.mark.parametrize(
    "code",
    [
        "import pearl, pearl.settings.config, pearl.settings.registry, pearl.evaluation.metrics",
        "from pearl.settings.config import raw_config; "
        "raw_config('digits', ['train.lr=1e-3', 'method=finetune'], smoke=True)",
        "from pearl.cli import app; from pearl.reports.text import listing; listing('recipes')",
    ],
)
def test_names_and_recipes_cost_no_torch(code: str) -> None:
    heavy = {"torch", "torchvision", "timm", "lightning_fabric", "sklearn", "PIL"}
    checked = f"import sys; {code}; print(*({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", checked], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize("method", ["seqlora", "inflora"])
def test_a_rank_may_be_a_number(method: str) -> None:
    assert load(f"method={method}", "method.rank=4").method["rank"] == 4
    assert load("method.rank.name=fixed", f"method={method}", "method.rank=4").method["rank"] == 4
    assert "unknown rank rule '4'" in problems("method.rank=4")[0]


@pytest.mark.parametrize("override", ["seed=0", "train.images.pad=2", "train.phases.adapt.images.pad=2"])
def test_a_stored_configuration_has_the_name_of_its_run(override: str) -> None:
    config = load(override)
    stored = check_config(yaml.safe_load(config.to_yaml()))
    assert (stored, stored.id) == (config, config.id)
