"""Small ViTs for tests of what is put into them, and one that is written out."""

import math

import torch
import torch.nn.functional as F
from timm.models.vision_transformer import VisionTransformer

from pearl.testing.tiny import SIZE, config, make_task
from pearl.training.engine import Engine

WIDTH, HEADS = 16, 2


def small(**options):
    """A ViT for the suite's images, with biases and class token that are not zero."""
    torch.manual_seed(1)
    shape = {"img_size": SIZE, "patch_size": 4, "embed_dim": WIDTH, "depth": 3, "num_heads": HEADS, "num_classes": 0}
    net = VisionTransformer(**(shape | options)).eval()
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    net.dim, net.pretrained = WIDTH, True
    return net


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(a, b, atol=1e-5, rtol=1e-4):
    torch.testing.assert_close(a, b, atol=atol, rtol=rtol)


def run(method, tasks):
    engine = Engine(config(), device="cpu")
    for t in tasks:
        engine.learn(method, make_task(t))
    return method


def naive(net, x, prefixes, adapters, attention_adapters=()):
    """A ViT written out, one image and one head at a time."""
    features = []
    for image in x.double():
        patches = F.conv2d(image[None], net.patch_embed.proj.weight, net.patch_embed.proj.bias, stride=4)
        tokens = torch.cat([net.cls_token[0], patches[0].flatten(1).T]) + net.pos_embed[0]
        for i, block in enumerate(net.blocks):
            seen = F.layer_norm(tokens, (WIDTH,), block.norm1.weight, block.norm1.bias, block.norm1.eps)
            q, k, v = (seen @ block.attn.qkv.weight.T + block.attn.qkv.bias).split(WIDTH, 1)
            if i in prefixes:
                k, v = torch.cat([prefixes[i][0], k]), torch.cat([prefixes[i][1], v])
            size, out = WIDTH // HEADS, []
            for h in range(HEADS):
                part = slice(h * size, (h + 1) * size)
                scores = torch.einsum("qd,kd->qk", q[:, part], k[:, part]) / math.sqrt(size)
                out.append(torch.einsum("qk,kd->qd", scores.softmax(1), v[:, part]))
            attended = torch.cat(out, 1) @ block.attn.proj.weight.T + block.attn.proj.bias
            tokens = tokens + attended + (attention_adapters[i](seen) if i in attention_adapters else 0)
            seen = F.layer_norm(tokens, (WIDTH,), block.norm2.weight, block.norm2.bias, block.norm2.eps)
            hidden = F.gelu(seen @ block.mlp.fc1.weight.T + block.mlp.fc1.bias)
            after = tokens + hidden @ block.mlp.fc2.weight.T + block.mlp.fc2.bias
            tokens = after + adapters[i](tokens) if i in adapters else after
        features.append(F.layer_norm(tokens, (WIDTH,), net.norm.weight, net.norm.bias, net.norm.eps)[0])
    return torch.stack(features)
