"""The memory of gradient projection: for each layer, the subspace in which its inputs have lain so far."""

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor, nn

from pearl.data.batches import Task
from pearl.nn.growing import TaskTensors

ROUNDING = 1e-12  # below that, float64 sees rounding instead of energy
STORED = 1e-6  # below that, a direction is the rounding of a basis in float32
CHUNK = 64  # images at once; fixed, so that sums are the same everywhere

Seen = Callable[[Tensor, Tensor], Tensor]  # a layer's input and output -> vectors (..., n, dim)


class Subspaces(nn.Module):
    """GPM (Saha et al., ICLR 2021), stored as DualGPM (Liang and Li, CVPR 2023).

    A layer whose subspace is at most half of its inputs' keeps an orthonormal basis of it; another one that of the
    orthogonal complement. Both mean the same, so a layer costs at most half a square matrix.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stored = TaskTensors(buffers=True)  # "basis.LAYER" (inputs, k); "rest.LAYER": of the complement, or not

    def dimension(self, layer: str) -> int:
        """How many dimensions of a layer's inputs are remembered."""
        if f"basis.{layer}" not in self.stored:
            return 0
        inputs, k = self.stored[f"basis.{layer}"].shape
        return inputs - k if self.stored[f"rest.{layer}"] else k

    def outside(self, layer: str, matrix: Tensor) -> Tensor:
        """The part of the columns of `matrix` (inputs, n) that is orthogonal to what is remembered."""
        if f"basis.{layer}" not in self.stored:
            return matrix
        basis = self.stored[f"basis.{layer}"].to(matrix)
        part = basis @ (basis.T @ matrix)
        return part if self.stored[f"rest.{layer}"] else matrix - part

    def directions(self, layer: str, matrix: Tensor, count: int) -> Tensor:
        """Orthonormal columns (inputs, count): the principal directions of `matrix` outside what is remembered.

        Columns are zero where no such direction is left.
        """
        u, s, _ = torch.linalg.svd(self.outside(layer, matrix), full_matrices=False)
        kept = torch.zeros(len(matrix), count).to(matrix)
        real = int((s[:count] > STORED * torch.linalg.matrix_norm(matrix)).sum())
        real = min(real, len(matrix) - self.dimension(layer))
        kept[:, :real] = self.outside(layer, u[:, :real])
        return kept

    def remember(self, layer: str, matrix: Tensor, share: float, *, most: int | None = None, fewer: int = 0) -> None:
        """Add the fewest directions with which `share` of the energy of `matrix` (inputs, n) is inside.

        At most `most` of them, and `fewer` than that share asks.
        """
        matrix = matrix.double()
        new = self.outside(layer, matrix)
        u, s, _ = torch.linalg.svd(new, full_matrices=False)
        left, total = new.square().sum(), matrix.square().sum()
        inside = torch.cat([s.new_zeros(1), s.square().cumsum(0)]) + (total - left)  # by number of directions added
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
        self.stored.add(f"basis.{layer}", basis.float().contiguous())  # as a file gives it back
        self.stored.add(f"rest.{layer}", torch.tensor(rest, device=basis.device))


def _complement(basis: Tensor) -> Tensor:
    """Orthonormal columns that span all that `basis` (n, k) does not."""
    return torch.linalg.qr(basis, mode="complete").Q[:, basis.shape[1] :]


def input_matrices(
    network: nn.Module, forward: Callable[[Tensor], object], layers: Iterable[str], task: Task
) -> dict[str, Tensor]:
    """The mean of x x^T over the inputs x of linear layers: (inputs, inputs) float64, by the layer's name."""
    return second_moments(network, forward, dict.fromkeys(layers, lambda inputs, _: inputs.flatten(0, -2)), task)


@torch.no_grad()
def second_moments(
    network: nn.Module, forward: Callable[[Tensor], object], seen: Mapping[str, Seen], task: Task
) -> dict[str, Tensor]:
    """The mean of x x^T over the vectors x seen at each layer: (..., dim, dim) float64, by the layer's name.

    `forward` runs the network on a task's images as they are tested, without augmentation, chunk by chunk; `seen` makes
    of a layer's input and output the vectors (..., n, dim).
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
