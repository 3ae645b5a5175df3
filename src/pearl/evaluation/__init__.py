"""Logits of test images -> counts per class -> every number."""
