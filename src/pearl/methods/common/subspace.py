"""The memory of gradient projection: for each layer, the subspace of its inputs so far."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.nn.task_modules import TaskTensors

ROUNDING = 1e-12  # smaller values are float64 rounding errors, not energy
STORED = 1e-6  # smaller norms are rounding errors of a float32 basis
CHUNK = 64  # images per chunk; fixed, so that sums are reproducible

Seen = Callable[[Tensor, Tensor], Tensor]  # maps a layer's input and output to vectors (..., n, dim)


class Subspaces(nn.Module):
    """GPM (Saha et al., ICLR 2021), stored as DualGPM (Liang and Li, CVPR 2023).

    A layer stores an orthonormal basis of its subspace, or of the orthogonal complement if that is smaller, and so at
    most half a square matrix.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stored = TaskTensors(buffers=True)  # "basis.LAYER" (inputs, k); "rest.LAYER": True for the complement

    def dimension(self, layer: str) -> int:
        """Return the dimension of a layer's stored subspace."""
        if f"basis.{layer}" not in self.stored:
            return 0
        inputs, k = self.stored[f"basis.{layer}"].shape
        return inputs - k if self.stored[f"rest.{layer}"] else k

    def outside(self, layer: str, matrix: Tensor) -> Tensor:
        """Return the part of the columns of `matrix` (inputs, n) that is orthogonal to the stored subspace."""
        if f"basis.{layer}" not in self.stored:
            return matrix
        basis = self.stored[f"basis.{layer}"].to(matrix)
        part = basis @ (basis.T @ matrix)
        return part if self.stored[f"rest.{layer}"] else matrix - part

    def directions(self, layer: str, matrix: Tensor, count: int) -> Tensor:
        """Return orthonormal columns (inputs, count): the principal directions of `matrix` outside the stored subspace.

        Columns without such a direction are zero.
        """
        u, s, _ = torch.linalg.svd(self.outside(layer, matrix), full_matrices=False)
        kept = torch.zeros(len(matrix), count).to(matrix)
        real = int((s[:count] > STORED * torch.linalg.matrix_norm(matrix)).sum())
        real = min(real, len(matrix) - self.dimension(layer))
        kept[:, :real] = self.outside(layer, u[:, :real])
        return kept

    def remember(self, layer: str, matrix: Tensor, share: float, *, most: int | None = None, fewer: int = 0) -> None:
        """Add the fewest directions that bring `share` of the energy of `matrix` (inputs, n) inside.

        At most `most` are added, and `fewer` than the share needs.
        """
        matrix = matrix.double()
        new = self.outside(layer, matrix)
        u, s, _ = torch.linalg.svd(new, full_matrices=False)
        left, total = new.square().sum(), matrix.square().sum()
        inside = torch.cat([s.new_zeros(1), s.square().cumsum(0)]) + (total - left)  # by number of added directions
        room = len(matrix) - self.dimension(layer)
        count = int((inside < (share - ROUNDING) * total).sum()) - fewer
        count = min(count, room if most is None else min(room, most))
        if count < 1:
            return
        basis, rest = u[:, :count], False
        if f"basis.{layer}" in self.stored:
            old, rest = self.stored[f"basis.{layer}"].double(), bool(self.stored[f"rest.{layer}"])
            basis = old @ _complement(old.T @ basis) if rest else torch.linalg.qr(torch.cat([old, basis], dim=1)).Q
        if not rest and basis.shape[1] > len(matrix) / 2:
            basis, rest = _complement(basis), True
        self.stored.add(f"basis.{layer}", basis.float().contiguous())  # in the form that a file has
        self.stored.add(f"rest.{layer}", torch.tensor(rest, device=basis.device))


def _complement(basis: Tensor) -> Tensor:
    """Return orthonormal columns that span the complement of `basis` (n, k)."""
    return torch.linalg.qr(basis, mode="complete").Q[:, basis.shape[1] :]


def input_matrices(
    network: nn.Module, forward: Callable[[Tensor], object], layers: Iterable[str], task: Task
) -> dict[str, Tensor]:
    """Return the mean of x x^T over the inputs x of linear layers: (inputs, inputs) float64, by layer name."""
    return second_moments(network, forward, dict.fromkeys(layers, lambda inputs, _: inputs.flatten(0, -2)), task)


@torch.no_grad()
def second_moments(
    network: nn.Module, forward: Callable[[Tensor], object], seen: Mapping[str, Seen], task: Task
) -> dict[str, Tensor]:
    """Return the mean of x x^T over the vectors x of each layer: (dim, dim) float64, by layer name.

    `forward` runs the network on a task's images without augmentation, in chunks; `seen` maps a layer's input and
    output to the vectors (..., n, dim).
    """
    sums: dict[str, Tensor] = {}
    counts = dict.fromkeys(seen, 0)

    def watch(layer: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            x = seen[layer](inputs[0], output).float()
            sums[layer] = sums.get(layer, 0.0) + (x.mT @ x).double()
            counts[layer] += x.shape[-2]

        return hook

    hooks = [network.get_submodule(layer).register_forward_hook(watch(layer)) for layer in seen]
    training = network.training
    network.eval()
    try:
        for x, _, _ in task.in_order(CHUNK):
            forward(x)
    finally:
        network.train(training)
        for hook in hooks:
            hook.remove()
    return {layer: sums[layer] / count for layer, count in counts.items()}
