"""Learn folders of photos as one model: one call per folder, in order of arrival.

python examples/photos.py MODEL FIRST_FOLDER [NEXT_FOLDER ...] [--test FOLDER]
"""

import argparse
from pathlib import Path
from typing import Any

import pearl
from pearl import PearlError


def main(model: Path, folders: list[Path], test: Path | None = None, **settings: Any) -> None:
    """Learn each folder of classes as a task, then print the model's accuracy; `settings` are for its first task."""
    for folder in folders:
        grown = pearl.learn(model, folder, **({} if model.exists() else settings))
        if grown.outcome and grown.outcome.new is not None:
            print(f"{folder}: {grown.outcome.new:.1f} % of the new classes right (estimated)")
    known = pearl.load(model)
    print(f"{len(known.classes)} classes: {', '.join(known.classes)}")
    if test:
        print(known.evaluate(test))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--test", type=Path)
    given = parser.parse_args()
    try:
        main(given.model, given.folders, given.test, backbone="timm/deit_tiny_patch16_224")
    except PearlError as error:
        parser.exit(2, f"{error}\n")
