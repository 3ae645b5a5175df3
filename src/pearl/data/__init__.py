"""Data sources, the cache of decoded images, task streams, augmentation and batches.

This is the public interface for your own data sources and for the tasks that a method sees (docs/adding.md).
"""

from pearl.data.augment import View
from pearl.data.batches import Batch, Task, derive_seed
from pearl.data.sources import Source, Split

__all__ = ["Batch", "Source", "Split", "Task", "View", "derive_seed"]
