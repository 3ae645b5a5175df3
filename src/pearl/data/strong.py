"""Strong augmentation, and several views of each image, for contrastive methods."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pearl.data.augment import Draws, View, draw_boxes, resized_crop

JITTER = (0.4, 0.4, 0.4, 0.1)  # ranges of brightness, contrast, saturation and hue
JITTERED, GREYED, BLURRED = 0.8, 0.2, 0.5  # shares of the images
SIGMA = (0.1, 2.0)  # standard deviation of the blur, in pixels


class StrongView(View):
    """Random resized crops with colour jitter, some of them grey; above 32 pixels half of them blurred.

    Half are mirrored, unless `images.flip` is false: digits and letters have a direction.

    SupCon (Khosla et al., NeurIPS 2020) and Co2L train on these; each image has its own random numbers, and its own
    order of the four colour changes. With `views` 2, a batch of B images is (2B, 3, size, size): a view of each, then
    another.
    """

    def __init__(self, like: View, area: tuple[float, float], *, views: int = 1) -> None:
        """Take size, mean and std from `like`; `area` is the smallest and largest share of an image in a view."""
        super().__init__(like.images, channels_last=like.channels_last)
        self.area, self.views = area, views

    def draw(self, count: int, shape: tuple[int, int], generator: torch.Generator) -> Draws:
        """See `View.draw`."""
        return tuple(part for _ in range(self.views) for part in self._draw_one(count, shape, generator))

    def _draw_one(self, count: int, shape: tuple[int, int], generator: torch.Generator) -> Draws:
        uniform: Callable[..., Tensor] = lambda *size: torch.rand(*size, generator=generator)  # noqa: E731
        boxes = draw_boxes(count, shape, self.area, generator)
        flip = uniform(count) < (0.5 if self.images.flip else 0.0)
        most = torch.tensor(JITTER)
        middle = torch.tensor([1.0, 1.0, 1.0, 0.0])
        changes = torch.where(uniform(count, 1) < JITTERED, middle + most * (2 * uniform(count, 4) - 1), middle)
        order, grey = uniform(count, 4).argsort(1), uniform(count) < GREYED
        sigma = SIGMA[0] + (SIGMA[1] - SIGMA[0]) * uniform(count)
        sigma = torch.where(uniform(count) < (BLURRED if self.images.size > 32 else 0.0), sigma, 0.0)
        return boxes, flip, changes, order, grey, sigma

    def train(self, raw: Tensor, draws: Draws) -> Tensor:
        """See `View.train`; all first views, then all second ones."""
        each = len(draws) // self.views
        return torch.cat([self._train_one(raw, *draws[i * each : (i + 1) * each]) for i in range(self.views)])

    def _train_one(
        self, raw: Tensor, boxes: Tensor, flip: Tensor, changes: Tensor, order: Tensor, grey: Tensor, sigma: Tensor
    ) -> Tensor:
        x = resized_crop(raw, boxes, flip, self.images.size) / 255
        x = jittered(x, changes, order)
        x = torch.where(grey[:, None, None, None], greyscale(x).expand_as(x), x)
        if self.images.size > 32:
            x = blurred(x, sigma, self.images.size // 20 * 2 + 1)
        return self._normalise(255 * x)


def greyscale(x: Tensor) -> Tensor:
    """Return the luma (B, 1, H, W) of images (B, 3, H, W), with the weights of ITU-R BT.601."""
    return (x * torch.tensor([0.299, 0.587, 0.114], device=x.device)[:, None, None]).sum(1, keepdim=True)


def jittered(x: Tensor, changes: Tensor, order: Tensor) -> Tensor:
    """Return images (B, 3, H, W) in [0, 1] with other colours.

    `changes` (B, 4) are factors of brightness, contrast and saturation, and a shift of hue as a part of the circle;
    `order` (B, 4) is their order of application. The formulas are torchvision's.
    """
    for chosen in order.T:
        kinds = (brighter, contrasted, saturated, turned)
        made = [kind(x, changes[:, i, None, None, None]) for i, kind in enumerate(kinds)]
        x = torch.stack(made, 1)[torch.arange(len(x), device=x.device), chosen]
    return x


def brighter(x: Tensor, factor: Tensor) -> Tensor:
    """Multiply all values by a factor."""
    return (factor * x).clamp(0, 1)


def contrasted(x: Tensor, factor: Tensor) -> Tensor:
    """Interpolate between an image and its mean grey, or extrapolate."""
    mean = greyscale(x).mean((2, 3), keepdim=True)
    return (mean + factor * (x - mean)).clamp(0, 1)


def saturated(x: Tensor, factor: Tensor) -> Tensor:
    """Interpolate between pixels and their grey, or extrapolate."""
    grey = greyscale(x)
    return (grey + factor * (x - grey)).clamp(0, 1)


def turned(x: Tensor, part: Tensor) -> Tensor:
    """Shift hues by `part` of the circle; value and saturation (HSV) are unchanged."""
    top, low = x.amax(1), x.amin(1)
    span = (top - low).clamp(min=1e-12)
    red, green, blue = x.unbind(1)
    sixth = torch.where(
        top == red, (green - blue) / span, torch.where(top == green, 2 + (blue - red) / span, 4 + (red - green) / span)
    )
    hue = (sixth / 6 + part[:, 0]) % 1.0
    # weights of red, green and blue: 0 if a hue is at most a sixth away, 1 if it is a third or more
    apart = ((hue[:, None] - torch.tensor([0.0, 1 / 3, 2 / 3], device=x.device)[:, None, None] + 0.5) % 1 - 0.5).abs()
    return top[:, None] - (top - low)[:, None] * (6 * apart - 1).clamp(0, 1)


def blurred(x: Tensor, sigma: Tensor, kernel: int) -> Tensor:
    """Blur images (B, C, H, W) with a Gaussian of `kernel` pixels and their own `sigma` (B,); 0 disables blur."""
    at = torch.arange(kernel, device=x.device) - kernel // 2
    weights = torch.exp(-((at / sigma[:, None].clamp(min=1e-3)) ** 2) / 2)
    weights = (weights / weights.sum(1, keepdim=True))[..., None, None, None]
    height, width = x.shape[2:]
    wide = F.pad(x, [kernel // 2] * 4, mode="reflect")
    rows = torch.stack([wide[:, :, i : i + height] for i in range(kernel)], 1)
    across = (rows * weights).sum(1)
    return (torch.stack([across[..., i : i + width] for i in range(kernel)], 1) * weights).sum(1)
