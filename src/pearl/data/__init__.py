"""Images in, batches out: sources, the cache of decoded images, task streams, augmentation."""
