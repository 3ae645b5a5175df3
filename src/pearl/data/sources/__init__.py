"""Data sources: one function per data set, each returns a `Source`."""

from pearl.data.sources.arrays import npz
from pearl.data.sources.cifar import cifar100
from pearl.data.sources.folder_scan import (
    Files,
    files_below,
    image_files,
    image_formats,
    is_image,
    labelled,
    left_out,
    no_images,
    tree,
)
from pearl.data.sources.folders import folder
from pearl.data.sources.hub import columns, hugging_face, is_from_hub
from pearl.data.sources.imagenets import imagenet_r, tinyimagenet
from pearl.data.sources.rows import class_names
from pearl.data.sources.scikit import digits
from pearl.data.sources.source import Rows, Source, Split, reason, some
from pearl.data.sources.vision import vision

__all__ = [
    "Files",
    "Rows",
    "Source",
    "Split",
    "cifar100",
    "class_names",
    "columns",
    "digits",
    "files_below",
    "folder",
    "hugging_face",
    "image_files",
    "image_formats",
    "imagenet_r",
    "is_from_hub",
    "is_image",
    "labelled",
    "left_out",
    "no_images",
    "npz",
    "reason",
    "some",
    "tinyimagenet",
    "tree",
    "vision",
]
