"""Where images come from: one function per data set, each returns a `Source`."""

from pearl.data.sources.arrays import npz
from pearl.data.sources.cifar import cifar100
from pearl.data.sources.folders import folder
from pearl.data.sources.imagenets import imagenet_r, tinyimagenet
from pearl.data.sources.scikit import digits
from pearl.data.sources.source import Source, Split, reason
from pearl.data.sources.trees import class_folders, image_files, image_formats, left_out, no_images

__all__ = [
    "Source",
    "Split",
    "cifar100",
    "class_folders",
    "digits",
    "folder",
    "image_files",
    "image_formats",
    "imagenet_r",
    "left_out",
    "no_images",
    "npz",
    "reason",
    "tinyimagenet",
]
