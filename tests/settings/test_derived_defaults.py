"""Options that follow the rest of a configuration: what they are in bare recipes, and when they stay as given."""

import pytest

from pearl.settings.config import ModelConfig, check_config, load_config, raw_config, used_phases
from pearl.settings.parts import METHODS
from pearl.settings.sections import PhaseConfig

VIT = "backbone=timm/test_vit"
GIVEN = f"{VIT}", "backbone.pretrained=true"


@pytest.mark.parametrize(
    ("recipe", "overrides", "options"),
    [
        ("imagenet_r-5t-vit", ["method=inflora"], {"tasks": 5}),
        ("imagenet_r-20t-vit", ["method=inflora"], {"tasks": 20}),
        ("imagenet_r-20t-vit", ["method=inflora", "stream.tasks=[100,50,50]"], {"tasks": 3}),
        ("imagenet_r-20t-vit", ["method=inflora", "method.tasks=10"], {"tasks": 10}),
        ("imagenet_r-5t-vit", ["method=coda_prompt"], {"per_task": 20}),
        ("imagenet_r-20t-vit", ["method=coda_prompt"], {"per_task": 5}),
        ("imagenet_r-20t-vit", ["method=coda_prompt", "stream.tasks=200"], {"per_task": 1}),
        ("tinyimagenet-10t-resnet18", ["method=derpp"], {"beta": 1.0}),
        ("cifar100-5t-resnet18", ["method=derpp"], {"beta": 0.5}),
        ("tinyimagenet-10t-resnet18", ["method=ewc"], {"e_lambda": 25.0}),
        ("cifar100-5t-resnet18", ["method=ewc"], {"e_lambda": 10.0}),
        ("cifar100-5t-resnet18", ["method=ewc", "train.phases.ewc.optimizer=adamw"], {"e_lambda": 1e5}),
        ("digits", ["method=ewc"], {"e_lambda": 1e5}),
        ("digits", ["method=ewc", "train.optimizer=sgd"], {"e_lambda": 10.0}),
        ("digits", ["method=ewc", "method.e_lambda=7"], {"e_lambda": 7.0}),
        ("digits", ["method=ewc", VIT], {"e_lambda": 1e5}),
        ("digits", ["method=ewc", *GIVEN], {"e_lambda": 1e3}),
        ("digits", ["method=ewc", "backbone.weights=some.safetensors"], {"e_lambda": 1e3}),
        ("digits", ["method=sparcl_ewc", *GIVEN], {"e_lambda": 1e3}),
        ("digits", ["method=fecam"], {"alpha1": 1.0, "alpha2": 1.0, "shrinkages": 2, "unit": False}),
        ("digits", ["method=fecam", VIT], {"alpha1": 1.0, "alpha2": "auto", "shrinkages": "auto", "unit": "auto"}),
        ("imagenet_r-5t-vit", ["method=fecam"], {"alpha1": 10.0, "alpha2": 10.0}),
        ("imagenet_r-5t-vit", ["method=fecam", "backbone=resnet18"], {"alpha1": 1.0, "alpha2": 1.0}),
    ],
    ids=str,
)
def test_a_bare_recipe_has_what_fits_its_stream_backbone_and_optimizer(recipe, overrides, options):
    config = load_config(recipe, overrides)
    assert {key: config.method[key] for key in options} == options
    assert check_config(config.model_dump(mode="json")) == config


def test_what_follows_to_a_value_has_the_name_of_what_is_given_it():
    def name(recipe, *more):
        return load_config(recipe, ["method=inflora", *more]).id

    assert name("imagenet_r-10t-vit") == name("imagenet_r-10t-vit", "method.tasks=10")
    assert name("imagenet_r-5t-vit") != name("imagenet_r-5t-vit", "method.tasks=10")


def test_a_model_has_no_stream_to_follow():
    raw = raw_config("photos-vit", ["method=inflora"])
    raw = {key: raw[key] for key in ("images", "backbone", "method", "train")}
    assert check_config(raw, ModelConfig).method["tasks"] == "auto"
    assert check_config({**raw, "method": "derpp"}, ModelConfig).method["beta"] == 0.5


@pytest.mark.parametrize(
    ("recipe", "overrides", "resize"),
    [
        ("photos-vit", [], 256),
        ("photos-vit", ["images.size=112"], 128),
        ("photos-vit", ["images.size=112", "images.resize=120"], 120),
        ("photos-vit", ["images.size=112", "images.resize=null"], None),
        ("imagenet_r-5t-vit", ["images.size=384"], 439),
        ("cpu-grocery-deit_tiny", ["images.size=224"], 256),
        ("cpu-cifar100-deit_tiny", ["images.size=224"], None),
    ],
    ids=str,
)
def test_the_shorter_side_follows_what_the_network_sees(recipe, overrides, resize):
    assert load_config(recipe, overrides).images.resize == resize


def test_every_method_for_vits_has_its_rates_at_the_photo_recipe():
    """Those of Adam at 1e-4, which fine-tuning bears, leave a prompt or an adapter where it began."""
    phases = load_config("photos-vit").train.phases
    lacking = {
        (name, phase)
        for name in METHODS.builtin
        if METHODS.load(name).backbones == "vit"
        for phase in used_phases(METHODS.resolve(name, "method")) - {"reference", "extractor"}
        if "lr" not in phases.get(phase, PhaseConfig()).model_fields_set
    }
    assert lacking == set()
