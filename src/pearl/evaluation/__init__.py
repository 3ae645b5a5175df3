"""From logits of test images to counts per class, and from counts to metrics."""
