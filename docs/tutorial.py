# %% [markdown]
# # Tutorial: folders of photos
#
# From folders of photos to a model that learns twice, says how good it is, notices what it was never shown, and is
# exported for use without pearl. This page is a program, `docs/tutorial.py`: it was run when the site was built, and
# what stands under a cell is what it said. It takes half a minute on a CPU core and downloads nothing.
#
# Everything below lies in a folder of its own.

# %%
import os
import tempfile

os.chdir(tempfile.mkdtemp())

# %% [markdown]
# ## Photos
#
# A folder per class is all that pearl asks for. Here scikit-learn's handwritten digits stand in for photos: three to
# begin with, three that come later, and one that the model will never learn. Every fifth image is kept for a test.

# %%
from pathlib import Path

from PIL import Image
from sklearn.datasets import load_digits

NAMES = ["zero", "one", "two", "three", "four", "five", "six"]
digits = load_digits(n_class=len(NAMES))
for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
    group = "early" if label < 3 else "late" if label < 6 else "never"
    folder = Path("test" if number % 5 == 0 else "photos") / group / NAMES[label]
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray((image * 255 / 16).astype("uint8")).resize((32, 32)).save(folder / f"{number}.png")

for folder in sorted(Path().glob("*/*/*")):
    print(folder, len(list(folder.iterdir())), "images")

# %% [markdown]
# ## Learn, and learn again
#
# The first call makes a model in the directory `shop`. For photos one starts from a pretrained network and leaves its
# settings as they are, `pearl.learn("shop", "photos/early", backbone="timm/deit_tiny_patch16_224")`; these
# digits are small and differ from photos, so a narrow ResNet-18 that starts from nothing learns them at 32 pixels.
#
# In a terminal: `pearl learn shop --data photos/early --backbone timm/deit_tiny_patch16_224`.

# %%
import pearl

model = pearl.learn(
    "shop",
    "photos/early",
    backbone={"name": "resnet18", "width": 16},
    images={"size": 32, "pad": 4, "flip": False},
    train={"epochs": 6, "phases": {"probe": {"epochs": 3}}},
    quiet=True,
)
model

# %% [markdown]
# Weeks later new classes come. The old images are not needed: none was kept, and they could be gone.

# %%
model = model.learn("photos/late", quiet=True)
model

# %% [markdown]
# ## How good is it?
#
# Learning ends with an estimate, for which no image was taken from training: each new image is left out of the
# statistics that it meets. What is left of the older classes, whose images are gone, the statistics say.

# %%
good = model.outcome
print(f"new classes: {good.new:.1f} % right among all classes, estimated on {good.images} images")
print(f"older classes: {good.old_then:.1f} % when they were learnt, about {good.old_now:.1f} % now")

# %% [markdown]
# That is about images like those that were learnt. Others say more; `test/never` holds a class that the model does not
# know, and that it should find unknown. *class-IL*: right among all classes; *task-IL*: right among the classes that
# came together.

# %%
found = model.evaluate(["test/early", "test/late", "test/never"])
found

# %%
print(f"right: {found.accuracy:.1f} %")
print(f"most frequent mistakes: {found.mistakes(3)}")
print(f"known classes told from {', '.join(found.unknown_classes)}: AUROC {found.auroc:.1f} % (by chance 50)")
refused = found.refused[~found.is_known]
print(f"of class {', '.join(found.unknown_classes)}: {refused.sum()} of {len(refused)} images found unknown")

# %% [markdown]
# In a terminal, `pearl evaluate shop --data test/early -o page.html` writes a page of it, with the worst
# mistakes as pictures.
#
# ## One photo
#
# Of a class that it knows, and of one that it does not. About one photo of twenty that it could have named is called
# unknown as well; `unknown_rate` sets another share.

# %%
photos = [min(Path("test/late/four").iterdir()), min(Path("test/never/six").iterdir())]
for photo, answer in zip(photos, model.predict(photos), strict=True):
    said = answer.name if answer.known else "unknown"
    print(f"{photo}: {said} ({answer.probabilities[0]:.0%} sure of {answer.name})")
Image.open(photos[0]).resize((96, 96))

# %% [markdown]
# ## Export
#
# A program of torch's own, which does not need pearl: images (batch, 3, size, size) from 0 to 1 go in, logits of all
# classes and in-distribution scores come out. It is compared with the model before the call returns. The other formats
# are `onnx` and `peft`.

# %%
print(model.export("torch", "shop.pt2"))

# %%
import numpy as np
import torch

program = torch.export.load("shop.pt2").module()
picture = torch.from_numpy(np.array(Image.open(photos[0]).convert("RGB"))).permute(2, 0, 1)[None] / 255
logits, in_distribution = program(picture)  # the second is a score from 0 to 1; below 0.05 the photo is unknown
model.classes[logits.argmax()]

# %% [markdown]
# What lies where: `shop/tasks/` has a folder per task, what that task added and nothing of older ones;
# `pearl inspect shop` lists it, `pearl report shop` draws it.
#
# Next: [which method?](which_method.md), [all settings](settings.md), [for researchers](researchers.md).
