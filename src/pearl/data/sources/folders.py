"""Images in a folder per class."""

from pathlib import Path

import numpy as np

from pearl.data.sources.folder_scan import Files, copies_among, draw, labelled, left_out, split_hash, tree
from pearl.data.sources.source import Source, checked, some
from pearl.errors import DataError, counted
from pearl.storage.paths import find


def folder(
    *,
    path: str,
    seed: int = 0,
    test_share: float = 0.2,
    validation_share: float = 0.0,
    nested: bool = False,
) -> Source:
    """Images in a folder per class: PATH/train/CLASS/* and test/ and val/ (or valid/, validation/), or PATH/CLASS/*.

    With train/ but no test/, the test set is val/; without that too, or without train/, it is a random share of each
    class. `validation_share` is the share of the remaining training images for validation. If `nested`, classes are the
    innermost folders, at any depth, named by their path. The notes hold the sha256 of the test images' paths.

    Raises:
        DataError: a class without images, a class without training images, or too few images to split.
    """
    root = find(path, what="image folder", error=DataError)
    rng = np.random.default_rng(seed)
    notes = {}
    divided = (root / "train").is_dir()
    images = root / "train" if divided else root
    train = tree(images, nested=nested)
    if unread := left_out(images, nested=nested):
        notes["left_out"] = "; ".join(unread)
    present = [name for name in ("test", "val", "valid", "validation") if divided and (root / name).is_dir()]
    if len(set(present) - {"test"}) > 1:
        raise DataError(f"{root} holds {some(present)}: keep one of val/, valid/ and validation/")
    held_out = [_known(tree(root / name, nested=nested), train, root / name) for name in present]
    if present and present[0] != "test":
        notes["test"] = f"the folder {present[0]}/, as there is no test/"
    if not held_out:
        train, drawn = draw(train, test_share, rng, "test_share")
        held_out = [drawn]
    test, *rest = held_out
    if validation_share > 0:
        if rest:
            raise DataError(f"{root} has validation images of its own: set data.validation_share=0")
        train, drawn = draw(train, validation_share, rng, "validation_share")
        rest = [drawn]
    if among := copies_among(train, test):
        notes["copies"] = (
            f"{root}: {counted(len(among), 'test image')} also among the training images, as {among[0]}: this "
            f"inflates the accuracy; remove them from one of the sets"
        )
    notes["split_sha256"] = split_hash(root, test)
    return checked(
        Source(
            root.resolve().name,
            tuple(train),
            labelled(train, train),
            labelled(test, train),
            labelled(rest[0], train) if rest else None,
            notes,
        )
    )


def _known(files: Files, train: Files, folder: Path) -> Files:
    strange = [name for name in files if name not in train]
    if strange:
        raise DataError(f"{folder} has classes that train/ lacks: {some(strange)}; remove them, or add training images")
    return files
