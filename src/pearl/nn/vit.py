"""A plain ViT of timm with something put into it: prompt tokens, prefixes, adapters, scales and shifts.

Functions over timm's own module: no weight is copied and no layer wrapped; with nothing put in, the result is timm's.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pearl.errors import ConfigError

Prefix = tuple[Tensor, Tensor]  # keys and values (B or 1, length, dim), beside those a block makes of its tokens
PrefixOf = Callable[[Tensor], Prefix]  # one that is made of the tokens (B, n, dim) that enter its block
Prompts = Tensor | Mapping[int, Tensor]  # tokens (B or 1, length, dim) before the first block, or by block
Adapter = Callable[[Tensor], Tensor]  # what is added to the output of a layer that reads the same tokens (B, n, dim)


class Compensated(NamedTuple):
    """A prefix at full strength: own tokens count as beside it, its values as if it stood alone (LAE's)."""

    keys: Tensor
    values: Tensor


def require_plain(net: nn.Module) -> None:
    """Refuse what is not timm's own ViT with its own blocks and attention.

    Raises:
        ConfigError: nothing can be put into this network.
    """
    from timm.models.vision_transformer import (
        Attention,
        Block,
        VisionTransformer,
    )  # late: reading recipes needs no timm

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
    """Return True if something can be put into this network, see `require_plain`."""
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
    """Features (B, dim) as the network pools its own tokens; prompts take part in attention, not in pooling."""
    own, _ = tokens(
        net, x, prompts=prompts, prefixes=prefixes, adapters=adapters, attention_adapters=attention_adapters
    )
    return pool(net, own)


def features_of_each(net: Any, x: Tensor, adapters: Sequence[Mapping[int, Adapter]]) -> list[Tensor]:
    """Features (B, dim) with each of several sets of adapters; what lies before the first adapter is computed once."""
    first = min(min(own) for own in adapters)
    x = _embedded(net, x)
    for block in net.blocks[:first]:
        x = block(x)
    before, after = _block_halves(net.blocks[first], x)
    found = []
    for own in adapters:
        tokens = after + own[first](before) if first in own else after
        for i, block in enumerate(net.blocks[first + 1 :], first + 1):
            tokens = _block(block, tokens, None, own.get(i))
        found.append(pool(net, net.norm(tokens)))
    return found


def unnormalised(net: Any, x: Tensor, *, prompts: Prompts | None = None) -> Tensor:
    """Features (B, dim) before the last norm layer."""
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
    """The last tokens: the network's own (B, n, dim), and those of the prompts (B, length, dim).

    `prompts` stand between the class tokens and the patches, without a position, later ones behind earlier ones, and
    stay to the end. All else is by the number of the block: `prefixes`; `adapters`, which stand beside the MLP and read
    the tokens before its norm layer; `attention_adapters`, beside attention, which read what attention does.
    """
    x = _embedded(net, x)
    start = stop = net.num_prefix_tokens  # class, distillation and register tokens
    entering = {0: prompts} if isinstance(prompts, Tensor) else prompts or {}
    for i, block in enumerate(net.blocks):
        if i in entering:
            # not len(x): a program has to take batches of any size
            more = entering[i].to(x.dtype).expand(x.shape[0], -1, -1)
            x = torch.cat([x[:, :stop], more, x[:, stop:]], dim=1)
            stop += more.shape[1]
        prefix = (prefixes or {}).get(i)
        prefix = prefix(x) if callable(prefix) else prefix
        x = _block(block, x, prefix, (adapters or {}).get(i), (attention_adapters or {}).get(i))
    if normalised:
        x = net.norm(x)
    return torch.cat([x[:, :start], x[:, stop:]], dim=1), x[:, start:stop]


def _embedded(net: Any, x: Tensor) -> Tensor:
    """The tokens that enter the first block."""
    return net.norm_pre(net.patch_drop(net._pos_embed(net.patch_embed(x))))


def pool(net: Any, own: Tensor) -> Tensor:
    """The network's own last tokens (B, n, dim) -> features (B, dim)."""
    return net.forward_head(own, pre_logits=True)


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
    """Tokens before a block's MLP, with its norm layer, and after it."""
    seen = block.norm1(x)
    attended = block.attn(seen) if prefix is None else _attention(block.attn, seen, prefix)
    if beside is not None:
        attended = attended + beside(seen)
    before = x + block.drop_path1(block.ls1(attended))
    return before, before + block.drop_path2(block.ls2(block.mlp(block.norm2(before))))


def heads(part: Tensor, count: int) -> Tensor:
    """Vectors (B, n, dim) cut into those of so many heads (B, heads, n, dim / heads): a view."""
    return part.unflatten(2, (count, -1)).transpose(1, 2)


def prefix_of(block: Any, tokens: Tensor) -> Prefix:
    """The keys and values that a block makes of tokens (B or 1, length, dim): a prefix that is as if they were there.

    That is so of prompts which leave the sequence behind their block, as VPT's deep ones do (Jia et al., ECCV 2022).
    """
    attn = block.attn
    _, k, v = attn.qkv(block.norm1(tokens)).chunk(3, dim=2)
    return attn.k_norm(heads(k, attn.num_heads)).transpose(1, 2).flatten(2), v


def _attention(attn: Any, x: Tensor, prefix: Prefix) -> Tensor:
    """Attention over a block's tokens and a prefix, whose keys and values are given as they are."""
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
    """Weights with which each named layer gives scale * output + shift; for `functional_call`.

    Scales and shifts (out,) by the layer's name: a linear layer, a convolution or a norm layer with a bias. What SSF
    (Lian et al., NeurIPS 2022) puts after a layer is thus in its weights, at no cost at test time.
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
