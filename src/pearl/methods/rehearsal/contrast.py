"""Contrastive losses on embeddings of a batch: unit vectors (n, d)."""

import torch
from torch import Tensor

from pearl.nn.precision import full, outside_autocast


def supervised_contrast(z: Tensor, labels: Tensor, temperature: float, anchors: Tensor | None = None) -> Tensor:
    """Return the supervised contrastive loss (Khosla et al., NeurIPS 2020, equation 2) of embeddings with labels (n,).

    An anchor's term is the mean, over the others with its label, of -log softmax of cosine / temperature over all
    others; 0 without such others. With `anchors` (n,) bool only these have a term; the others are negatives and
    positives for them. The sum is always divided by n.
    """
    same = labels[:, None] == labels
    same.fill_diagonal_(False)
    terms = -(same * _log_softmax_of_others(z, temperature)).sum(1) / same.sum(1).clamp(min=1)
    return (terms if anchors is None else terms * anchors).mean()


def contrast_across(anchors: Tensor, z: Tensor, labels: Tensor, temperature: float) -> Tensor:
    """Return the loss of `supervised_contrast` with anchors (n, d) from another network for the same images.

    The first positive of an anchor is its own image.
    """
    same = labels[:, None] == labels
    with outside_autocast(z):
        log_p = (full(anchors) @ full(z).T / temperature).log_softmax(1)
    return -((same * log_p).sum(1) / same.sum(1)).mean()


def relation_distillation(student: Tensor, teacher: Tensor, temperature: float, teachers: float) -> Tensor:
    """Return the loss of instance-wise relation distillation (Co2L, Cha et al., ICCV 2021).

    It is the cross-entropy of the softmax over the others' cosines, with each network's own temperature, averaged over
    the batch.
    """
    log_p = _log_softmax_of_others(student, temperature)
    q = _log_softmax_of_others(teacher, teachers).exp()
    q.fill_diagonal_(0.0)
    return -(q * log_p).sum(1).mean()


def _log_softmax_of_others(z: Tensor, temperature: float) -> Tensor:
    """Return the log-softmax (n, n) of cosines over all but oneself; the diagonal is finite and meaningless."""
    with outside_autocast(z):
        cosines = full(z) @ full(z).T / temperature
        diagonal = torch.eye(len(z), dtype=torch.bool, device=z.device)
        return cosines - cosines.masked_fill(diagonal, -torch.inf).logsumexp(1, keepdim=True)
