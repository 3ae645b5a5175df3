"""Images in, batches out: sources, the cache of decoded images, task streams, augmentation.

This is the door for data sources of your own, and for what a method sees of a task (docs/adding.md); what it gives
stays.
"""

from pearl.data.augment import View
from pearl.data.batches import Batch, Task, fold
from pearl.data.sources import Source, Split

__all__ = ["Batch", "Source", "Split", "Task", "View", "fold"]
