"""A plain ViT of timm with additional parts: prompt tokens, prefixes, adapters, scales and shifts.

These are functions of timm's own module: they neither copy weights nor wrap layers. Without additional parts, the
result is timm's.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.errors import ConfigError
from pearl.nn.plain_vit import PlainViT

# keys and values (B or 1, length, dim), in addition to those a block computes from its tokens
Prefix = tuple[Tensor, Tensor]
PrefixOf = Callable[[Tensor], Prefix]  # a prefix computed from the tokens (B, n, dim) that enter its block
Prompts = Tensor | Mapping[int, Tensor]  # tokens (B or 1, length, dim) before the first block, or by block
Adapter = Callable[[Tensor], Tensor]  # the term added to the output of a layer with the same input tokens (B, n, dim)


class Compensated(NamedTuple):
    """A prefix whose values are weighted as if it were alone, while tokens are weighted as beside it (LAE)."""

    keys: Tensor
    values: Tensor


def require_plain(net: nn.Module) -> None:
    """Raise unless the network is timm's own ViT with its own blocks and attention, or pearl's form of it.

    Raises:
        ConfigError: parts cannot be added to this network.
    """
    if type(net) is PlainViT:
        return
    from timm.models.vision_transformer import (
        Attention,
        Block,
        VisionTransformer,
    )  # late import: reading recipes needs no timm

    def refuse(what: str) -> ConfigError:
        return ConfigError(f"this method needs a plain ViT, such as backbone=timm/vit_base_patch16_224; here is {what}")

    if not isinstance(net, VisionTransformer) or type(net).forward_features is not VisionTransformer.forward_features:
        raise refuse(f"a {type(net).__name__}")
    for part, plain in [(b, Block) for b in net.blocks] + [
        (b.attn, Attention) for b in net.blocks if hasattr(b, "attn")
    ]:
        if type(part) is not plain:
            raise refuse(f"one with {type(part).__name__}")


def is_plain(net: nn.Module) -> bool:
    """Return True if parts can be added to this network, see `require_plain`."""
    try:
        require_plain(net)
    except ConfigError:
        return False
    return True


def features(
    net: Any,
    x: Tensor,
    *,
    prompts: Prompts | None = None,
    prefixes: Mapping[int, Prefix | PrefixOf] | None = None,
    adapters: Mapping[int, Adapter] | None = None,
    attention_adapters: Mapping[int, Adapter] | None = None,
) -> Tensor:
    """Return features (B, dim), pooled from the network's own tokens; prompts take part in attention only."""
    tokens_out, _ = tokens(
        net, x, prompts=prompts, prefixes=prefixes, adapters=adapters, attention_adapters=attention_adapters
    )
    return pool(net, tokens_out)


def features_of_each(net: Any, x: Tensor, adapters: Sequence[Mapping[int, Adapter]]) -> list[Tensor]:
    """Return features (B, dim) for each of several sets of adapters; layers before the first adapter run once."""
    first = min(min(by_block) for by_block in adapters)
    x = embedded(net, x)
    for block in net.blocks[:first]:
        x = block(x)
    before, after = _block_halves(net.blocks[first], x)
    features = []
    for by_block in adapters:
        tokens = after + by_block[first](before) if first in by_block else after
        for i, block in enumerate(net.blocks[first + 1 :], first + 1):
            tokens = _block(block, tokens, None, by_block.get(i))
        features.append(pool(net, net.norm(tokens)))
    return features


def unnormalised(net: Any, x: Tensor, *, prompts: Prompts | None = None) -> Tensor:
    """Return features (B, dim) before the last norm layer."""
    return net.pool(tokens(net, x, prompts=prompts, normalised=False)[0])


def tokens(
    net: Any,
    x: Tensor,
    *,
    prompts: Prompts | None = None,
    prefixes: Mapping[int, Prefix | PrefixOf] | None = None,
    adapters: Mapping[int, Adapter] | None = None,
    attention_adapters: Mapping[int, Adapter] | None = None,
    normalised: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return the last tokens: the network's own (B, n, dim), and those of the prompts (B, length, dim).

    `prompts` are inserted between the class tokens and the patches, without positions, later ones after earlier ones,
    and remain to the end. The others are by block number: `prefixes`; `adapters`, parallel to the MLP, whose input is
    the tokens before its norm layer; `attention_adapters`, parallel to attention, with its input.
    """
    x = embedded(net, x)
    start = stop = net.num_prefix_tokens  # class, distillation and register tokens
    entering = {0: prompts} if isinstance(prompts, Tensor) else prompts or {}
    for i, block in enumerate(net.blocks):
        if i in entering:
            # not len(x): an exported program must accept any batch size
            more = entering[i].to(x.dtype).expand(x.shape[0], -1, -1)
            x = torch.cat([x[:, :stop], more, x[:, stop:]], dim=1)
            stop += more.shape[1]
        prefix = (prefixes or {}).get(i)
        prefix = prefix(x) if callable(prefix) else prefix
        x = _block(block, x, prefix, (adapters or {}).get(i), (attention_adapters or {}).get(i))
    if normalised:
        x = net.norm(x)
    return torch.cat([x[:, :start], x[:, stop:]], dim=1), x[:, start:stop]


def embedded(net: Any, x: Tensor) -> Tensor:
    """Return the tokens that enter the first block."""
    return net.norm_pre(net.patch_drop(net._pos_embed(net.patch_embed(x))))


def pool(net: Any, tokens_out: Tensor) -> Tensor:
    """Pool the network's own last tokens (B, n, dim) to features (B, dim)."""
    return net.forward_head(tokens_out, pre_logits=True)


def _block(
    block: Any, x: Tensor, prefix: Prefix | None, adapter: Adapter | None = None, beside: Adapter | None = None
) -> Tensor:
    if prefix is None and adapter is None and beside is None:
        return block(x)
    before, after = _block_halves(block, x, prefix, beside)
    return after if adapter is None else after + adapter(before)


def _block_halves(
    block: Any, x: Tensor, prefix: Prefix | None = None, beside: Adapter | None = None
) -> tuple[Tensor, Tensor]:
    """Return the tokens before a block's MLP, the same with its norm layer, and the tokens after it."""
    seen = block.norm1(x)
    attended = block.attn(seen) if prefix is None else _attention(block.attn, seen, prefix)
    if beside is not None:
        attended = attended + beside(seen)
    before = x + block.drop_path1(block.ls1(attended))
    return before, before + block.drop_path2(block.ls2(block.mlp(block.norm2(before))))


def heads(part: Tensor, count: int) -> Tensor:
    """Split vectors (B, n, dim) into attention heads (B, heads, n, dim / heads), as a view."""
    return part.unflatten(2, (count, -1)).transpose(1, 2)


def prefix_of(block: Any, tokens: Tensor) -> Prefix:
    """Return keys and values of tokens (B or 1, length, dim) in a block: a prefix equivalent to inserting them.

    The equivalence needs prompts that leave the sequence after their block, as VPT's deep ones do (Jia et al., ECCV
    2022).
    """
    attn = block.attn
    _, k, v = attn.qkv(block.norm1(tokens)).chunk(3, dim=2)
    return attn.k_norm(heads(k, attn.num_heads)).transpose(1, 2).flatten(2), v


def _attention(attn: Any, x: Tensor, prefix: Prefix) -> Tensor:
    """Compute attention over a block's tokens and a prefix of given keys and values."""
    q, k, v = (heads(part, attn.num_heads) for part in attn.qkv(x).chunk(3, dim=2))
    q, k = attn.q_norm(q), attn.k_norm(k)
    keys, values = (heads(part.to(k.dtype).expand(x.shape[0], -1, -1), attn.num_heads) for part in prefix)
    compensated = isinstance(prefix, Compensated)
    k, v = torch.cat([keys, k], dim=2), torch.cat([torch.zeros_like(values) if compensated else values, v], dim=2)
    dropout = attn.attn_drop.p if attn.training else 0.0
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
    if compensated:
        out = out + F.scaled_dot_product_attention(q, keys, values, dropout_p=dropout)
    out = attn.norm(out.transpose(1, 2).flatten(2))
    if getattr(attn, "gate", None) is not None:
        out = out * attn.gate(x).sigmoid()
    return attn.proj_drop(attn.proj(out))


def scale_shift(net: nn.Module, scales: Mapping[str, Tensor], shifts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return weights with which each named layer outputs scale * output + shift; for `functional_call`.

    Scales and shifts (out,) are by the layer's name: a linear layer, a convolution or a norm layer with a bias. SSF's
    operation after a layer (Lian et al., NeurIPS 2022) is thus merged into its weights, without cost at test time.
    """
    changed = {}
    for layer, scale in scales.items():
        module: Any = net.get_submodule(layer)
        if module.bias is None:
            raise ConfigError(f"{layer} has no bias that could hold a shift; use a backbone whose layers have one")
        weight = module.weight
        changed[f"{layer}.weight"] = weight * scale.reshape(-1, *(1,) * (weight.ndim - 1))
        changed[f"{layer}.bias"] = module.bias * scale + shifts[layer]
    return changed
