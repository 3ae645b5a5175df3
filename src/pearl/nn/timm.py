"""Any network of the timm library (Wightman) as a backbone: ViTs at any image size, and CNNs."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from pearl.errors import ConfigError, WeightsError
from pearl.nn.weights import load_weights
from pearl.settings.registry import nearest
from pearl.storage.network import hub


def timm_backbone(model: str, image_size: int, *, pretrained: bool = False, weights: str | None = None) -> nn.Module:
    """Build a timm network without its head: random, pretrained by name, or from a local weight file.

    A ViT is built for `image_size`; position embeddings of another size are resampled (bicubic, as timm does).
    `weights` is a weight file with timm's names, or a run directory, whose reference network is used; it overrides
    `pretrained`.

    Raises:
        ConfigError: timm has no network of this name, or the network cannot take this image size.
        WeightsError: the weights cannot be downloaded or do not fit.
    """
    import timm  # late: with torchvision it takes three seconds, and reading a configuration imports this file

    if not timm.is_model(model):
        raise ConfigError(f"unknown timm network {model!r}; {nearest(model, timm.list_models())}")
    pretrained = pretrained and weights is None
    net = _create(model, image_size, pretrained)
    patch = getattr(getattr(net, "patch_embed", None), "patch_size", (1, 1))
    patch = (patch, patch) if isinstance(patch, int) else patch
    if image_size % patch[0] or image_size % patch[1]:
        near = max(1, round(image_size / patch[0])) * patch[0]
        raise ConfigError(f"images.size={image_size}: {model} cuts patches of {patch[0]} pixels; use {near}")
    net.pretrained = pretrained
    if weights is not None:
        load_weights(net, weights)
    net.dim = _feature_width(net, model, image_size)
    return net


def _create(model: str, image_size: int, pretrained: bool) -> Any:
    import timm

    try:
        with _hub() if pretrained else nullcontext():
            try:
                return timm.create_model(model, pretrained=pretrained, num_classes=0, img_size=image_size)
            except TypeError:  # a CNN: accepts any image size, and has no such argument
                return timm.create_model(model, pretrained=pretrained, num_classes=0)
    except (OSError, RuntimeError) as error:
        if "Invalid pretrained tag" in str(error):
            raise ConfigError(
                f"timm network {model!r}: {str(error).splitlines()[0]}; remove the suffix after the dot"
            ) from None
        if not pretrained:
            raise
        raise WeightsError(
            f"pretrained weights of {model} cannot be downloaded ({type(error).__name__}); without internet, give a "
            f"local file: backbone.weights=FILE.safetensors"
        ) from None


@contextmanager
def _hub() -> Iterator[None]:
    """Silence the hub's client, which prints a dozen lines without internet; our error has the fix."""
    logger = logging.getLogger("huggingface_hub")
    with hub():
        before = logger.level
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(before)


def _feature_width(net: nn.Module, model: str, image_size: int) -> int:
    training = net.training
    with torch.no_grad():
        try:
            features = net.eval()(torch.zeros(1, 3, image_size, image_size))
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise ConfigError(
                f"images.size={image_size}: {model} cannot take it ({reason}); use a larger one"
            ) from None
    net.train(training)
    return features.shape[1]
