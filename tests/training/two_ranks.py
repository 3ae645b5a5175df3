"""What test_ddp.py looks at, made by forks of one process that has imported everything: python two_ranks.py OUT

Networks with BatchNorm are in float64. What rounding grows to over steps of such little networks in float32 depends on
the CPU's kernels for a whole batch and for half of one; on one CPU it was a tenth of what a missing gradient does.
"""

import copy
import os
import pickle
import sys
import tempfile
from pathlib import Path

import timm
import torch
from ddp import follow, fork, learn, logits

from pearl.data.batches import Batch
from pearl.errors import Interrupted
from pearl.methods.bounds.finetune import Finetune
from pearl.methods.pearl import Pearl
from pearl.nn.rank_rules import EnergyRule, PaperRule
from pearl.nn.resnet import resnet18
from pearl.testing import tiny
from pearl.training.engine import Engine
from pearl.training.phase_cache import PhaseCache
from pearl.training.resume import Resume
from pearl.training.world import World
from zoo import ZOO, shared_out

FP32 = {"engine": {"precision": "fp32"}}  # in bfloat16 these networks are far from themselves already
SMALL = {**FP32, "images": {"size": 32}, "train": {"batch_size": 8, "epochs": 2, "optimizer": "sgd", "lr": 0.001}}


def resnet(method):
    """BatchNorm; of the last batch's three images one rank has a single one."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    learner = method(resnet18(32, width=4))
    losses = learn(learner, range(2), 11, **SMALL)
    return {"losses": losses, "state": learner.state_dict(), "logits": logits(learner)}


def leftover():
    """Batches of two images for three ranks."""
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    learner = Finetune(resnet18(32, width=4))
    losses = learn(learner, range(1), 6, **SMALL | {"train": {**SMALL["train"], "batch_size": 2}})
    return {"losses": losses, "state": learner.state_dict()}


def dropout(folder=None, every=0):
    """A ViT with dropout and a parameter that no loss reaches; stopped on the second rank every so many steps."""
    torch.manual_seed(0)
    net = timm.create_model("test_vit", img_size=32, num_classes=0, proj_drop_rate=0.3)
    net.dim, net.pretrained = net.num_features, True
    net.unused = torch.nn.Parameter(torch.ones(3))
    train = {"batch_size": 8, "epochs": 2, "weight_decay": 0.1}
    cuts = 0
    while True:
        learner = Pearl(copy.deepcopy(net))
        try:
            resume = (lambda world: Cut(folder, world, every)) if folder else None
            learn(learner, range(1), 20, train=train, resume=resume, **FP32)
            return {"state": learner.state_dict(), "cuts": cuts}
        except Interrupted:
            cuts += 1


class Cut(Resume):
    """The last rank alone is asked to stop."""

    def __init__(self, folder, world, every):
        super().__init__(Path(folder), world=world)
        self.left = every

    def due(self):
        self.left -= 1
        self.stop.requested = self.left <= 0 and self.world.rank == self.world.size - 1
        return super().due()


def kept(folder, *rules):
    """PEARL by one rank rule after the other, whose reference and probe are the same; with what was reused."""
    torch.set_default_dtype(torch.float64)
    actual = []
    for rule in rules:
        told = World.join("cpu", int(os.environ["WORLD_SIZE"]))
        engine = Engine(
            tiny.config(), device="cpu", world=told, phase_cache=PhaseCache(Path(folder) if told.first else None)
        )
        method, reused = engine.to_device(Pearl(tiny.small_resnet(), rank=rule)), []
        for t in range(2):
            engine.learn(method, tiny.make_task(t))
            reused.append(engine.reused)
        actual.append({"state": method.state_dict(), "reused": reused})
    return actual


def draws():
    world = World.join("cpu", 2)
    torch.manual_seed(world.rank_seed(7))
    batch = Batch(torch.arange(5), torch.arange(5), torch.arange(5))
    return {
        "draw": torch.rand(1).item(),
        "share": world.share(batch)[0].rows.tolist(),
        "any": world.any(world.rank == 1, False),
        "same": world.same(f"of {world.rank}"),
        "gather": world.gather(world.rank),
    }


def zoo():
    """All methods that several processes can learn: after two tasks of 15 images, in batches of 8 and 7."""
    torch.set_default_dtype(torch.float64)
    settings = tiny.config(train={"batch_size": 8, "epochs": 1, "optimizer": "sgd", "lr": 0.001})
    engine = Engine(settings, device="cpu", world=World.join("cpu", int(os.environ["WORLD_SIZE"])))
    actual = {}
    for name, make in ZOO.items():
        method = engine.to_device(make())
        if shared_out(method):
            tiny.learn(method, range(2), engine, per_class=7, extra=1)
            actual[name] = {"state": method.state_dict(), "logits": tiny.logits(method)}
    return actual


def main(out):
    actual = {"draws": fork(2, draws), "leftover": fork(3, leftover), "leftover one": fork(1, leftover)}
    for name in ("pearl", "finetune"):
        actual[name] = fork(2, follow, name, "test_vit", 7, 9)
        actual[f"{name} one"] = fork(1, follow, name, "test_vit", 7, 9)
    for method in (Pearl, Finetune):
        actual[f"resnet {method.__name__}"] = fork(2, resnet, method)
        actual[f"resnet {method.__name__} one"] = fork(1, resnet, method)
    actual["zoo"], actual["zoo one"] = fork(2, zoo), fork(1, zoo)
    actual["dropout"] = fork(2, dropout)
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
        actual["kept"] = fork(2, kept, folder, PaperRule(), EnergyRule())
        actual["kept alone"] = fork(2, kept, other, EnergyRule())
        actual["kept one"] = fork(1, kept, folder, EnergyRule())
    with tempfile.TemporaryDirectory() as folder:
        actual["dropout cut"] = fork(2, dropout, folder, 4)
    Path(out).write_bytes(pickle.dumps(actual))


if __name__ == "__main__":
    main(sys.argv[1])
