"""Does `discover` group images of unknown classes as their labels do?

    python benchmarks/discover.py            both data sets, seeds 0, 1, 2; docs/results/discover.md
    python benchmarks/discover.py --part dev the classes on which the method was chosen

Class statistics in one feature space, that of the pretrained DeiT-Tiny (nothing is trained); its features at 112 pixels
are computed once and kept under $PEARL_RUNS. A half of the classes, the same for all seeds, served to choose the
method; results are of the other half. Of these the seed draws the classes that are held back and those that are learnt.
Data is looked for under $PEARL_DATA.
"""

import os
from pathlib import Path

import torch
from torch import Tensor

from pearl.data.augment import View
from pearl.lifecycle.saved import build_backbone
from pearl.nn.inner import WithInner, inner_layers
from pearl.settings.config import load_config
from pearl.settings.parts import SOURCES
from unknown import RECIPES, of_classes

IMAGES = 26  # per class at most; classes with fewer than `FEWEST` are left out
FEWEST = 18


@torch.no_grad()
def features(data: str) -> list[Tensor]:
    """Return DeiT-Tiny's features (n, p_raw) of up to `IMAGES` images of each class."""
    file = Path(os.environ.get("PEARL_RUNS", "runs")) / "discover" / f"{data}.pt"
    if not file.is_file():
        config = load_config(RECIPES[data])
        backbone = build_backbone(config).eval()
        network, view = WithInner(backbone, inner_layers(backbone)), View(config.images)
        made = [
            torch.cat([network(view.test(x)) for x in torch.from_numpy(images).split(64)])
            for images in of_classes(SOURCES.build(config.data), IMAGES, config.images.stored)
            if len(images) >= FEWEST
        ]
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(made, file)
    loaded: list[Tensor] = torch.load(file)
    return loaded
