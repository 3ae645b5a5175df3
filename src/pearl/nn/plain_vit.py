"""timm's plain vision transformers without timm: the same tensors, names and bits, for models that are loaded.

Importing timm takes three seconds of CPU time, since it imports torchvision, which imports PyTorch's compiler. A model
that predicts needs only the forward pass of its network. Training from scratch still builds timm's network, whose
initial weights belong to a run's result.
"""

import re
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS = {"tiny": (192, 12), "small": (384, 12), "base": (768, 12), "large": (1024, 24)}  # dimensions, blocks
HEAD = 64  # dimensions of an attention head in all of them
# ViT (Dosovitskiy et al., ICLR 2021) and DeiT (Touvron et al., ICML 2021), with any tag of pretrained weights
_NAMES = re.compile(r"(?:vit|deit)_(tiny|small|base|large)_patch(8|14|16|32)_(?:224|384)(?:\.\w+)?")


def plain_vit(model: str, image_size: int) -> "PlainViT | None":
    """Return the network of a name of timm's, for images of this size, with uninitialised weights; None for others."""
    matched = _NAMES.fullmatch(model)
    if matched is None or image_size % int(matched[2]):
        return None
    dim, depth = WIDTHS[matched[1]]
    with torch.device("meta"):  # drawing initial weights takes longer than reading the real ones
        network = PlainViT(image_size, int(matched[2]), dim, depth, dim // HEAD)
    return network._apply(lambda tensor: torch.empty(tensor.shape))  # to_empty imports sympy


class PlainViT(nn.Module):
    """A ViT with a class token, whose last state is the feature. It has the parts that `nn.vit` uses."""

    def __init__(self, image_size: int, patch: int, dim: int, depth: int, heads: int) -> None:
        super().__init__()
        self.dim, self.pretrained, self.num_prefix_tokens = dim, False, 1
        self.patch_embed = Patches(image_size, patch, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, self.patch_embed.num_patches + 1, dim))
        self.patch_drop, self.norm_pre = nn.Identity(), nn.Identity()
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.feature_info = [{"module": f"blocks.{i}", "num_chs": dim, "reduction": patch} for i in range(depth)]
        self.norm = nn.LayerNorm(dim, eps=1e-6)

    def forward(self, x: Tensor) -> Tensor:
        """Map images (B, 3, size, size) to features (B, dim)."""
        return self.pool(self.norm(self.blocks(self._pos_embed(self.patch_embed(x)))))

    def _pos_embed(self, patches: Tensor) -> Tensor:
        return torch.cat([self.cls_token.expand(patches.shape[0], -1, -1), patches], dim=1) + self.pos_embed

    def pool(self, tokens: Tensor) -> Tensor:
        """Return the class token of (B, n, dim)."""
        return tokens[:, 0]

    def forward_head(self, tokens: Tensor, pre_logits: bool = True) -> Tensor:
        """Return the features (B, dim) of the last tokens (B, n, dim). The network has no head of its own."""
        return self.pool(tokens)


class Patches(nn.Module):
    """Maps images (B, 3, size, size) to a token per patch (B, n, dim)."""

    def __init__(self, image_size: int, patch: int, dim: int) -> None:
        super().__init__()
        self.patch_size, self.num_patches = (patch, patch), (image_size // patch) ** 2
        self.proj = nn.Conv2d(3, dim, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        """See the class."""
        return self.proj(x).flatten(2).transpose(1, 2)


class Block(nn.Module):
    """Attention and an MLP, each after a norm layer and added to its input."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), Attention(dim, heads)
        self.norm2, self.mlp = nn.LayerNorm(dim, eps=1e-6), Mlp(dim, 4 * dim)
        self.ls1, self.drop_path1, self.ls2, self.drop_path2 = (nn.Identity() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (B, n, dim) to tokens."""
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Attention(nn.Module):
    """Attention with several heads and one layer for queries, keys and values."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.num_heads, self.gate = heads, None
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.q_norm, self.k_norm, self.norm = (nn.Identity() for _ in range(3))
        self.attn_drop, self.proj_drop = nn.Dropout(0.0), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (B, n, dim) to tokens."""
        count, length, _ = x.shape
        parts: Any = self.qkv(x).reshape(count, length, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        return self.proj(F.scaled_dot_product_attention(*parts).transpose(1, 2).reshape(count, length, -1))


class Mlp(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, dim: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (B, n, dim) to tokens."""
        return self.fc2(self.act(self.fc1(x)))
