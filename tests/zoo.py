"""All methods, on networks of a few thousand parameters: functions that make one by what it is called here."""

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from pearl.methods.adapters.ada import Ada
from pearl.methods.adapters.clora import CLora
from pearl.methods.adapters.dia import Dia
from pearl.methods.adapters.e2lora import E2Lora
from pearl.methods.adapters.ease import Ease
from pearl.methods.adapters.inflora import InfLoRA
from pearl.methods.adapters.lae import Lae
from pearl.methods.adapters.rsiat import Rsiat
from pearl.methods.adapters.sdlora import SdLora
from pearl.methods.adapters.sema import Sema
from pearl.methods.adapters.seqlora import SeqLora
from pearl.methods.adapters.slcapp import SlcaPlusPlus
from pearl.methods.adapters.sldc import Sldc
from pearl.methods.adapters.ssiat import Ssiat
from pearl.methods.base import Method
from pearl.methods.bounds.finetune import Finetune
from pearl.methods.bounds.isolation import Isolation
from pearl.methods.bounds.joint import Joint
from pearl.methods.common.by_statistics import Statistics
from pearl.methods.pearl import Pearl
from pearl.methods.prompts.coda_prompt import CodaPrompt
from pearl.methods.prompts.convprompt import ConvPrompt
from pearl.methods.prompts.cprompt import CPrompt
from pearl.methods.prompts.dualprompt import DualPrompt
from pearl.methods.prompts.evoprompt import EvoPrompt
from pearl.methods.prompts.hide import HidePrompt
from pearl.methods.prompts.l2p import L2P
from pearl.methods.prompts.lgcl import Lgcl
from pearl.methods.prompts.pgp import DualPromptPgp, L2PPgp
from pearl.methods.prompts.sprompts import SiPrompts
from pearl.methods.prototypes.aper import Aper
from pearl.methods.prototypes.apr import Apr
from pearl.methods.prototypes.efcpp import EfcPlusPlus
from pearl.methods.prototypes.fecam import FeCam
from pearl.methods.prototypes.fetril import FeTril
from pearl.methods.prototypes.il2a import IL2A
from pearl.methods.prototypes.klda import Klda
from pearl.methods.prototypes.loranpac import LoRanPac
from pearl.methods.prototypes.ncm import NearestMean
from pearl.methods.prototypes.pass_ import PASS
from pearl.methods.prototypes.ranpac import RanPac
from pearl.methods.prototypes.seed import Seed
from pearl.methods.prototypes.ssre import SSRE
from pearl.methods.regularization.ewc import OnlineEwc
from pearl.methods.regularization.lwf import Lwf
from pearl.methods.rehearsal.agile import Agile
from pearl.methods.rehearsal.co2l import Co2L
from pearl.methods.rehearsal.derpp import DerPlusPlus
from pearl.methods.rehearsal.er import Er
from pearl.methods.rehearsal.er_ace import ErAce
from pearl.methods.rehearsal.ocdnet import OcdNet
from pearl.methods.rehearsal.tamil import Tamil
from pearl.methods.rehearsal.trire import TriRe
from pearl.methods.sparse.clnp import Clnp
from pearl.methods.sparse.cpg import Cpg
from pearl.methods.sparse.nispa import Nispa
from pearl.methods.sparse.packnet import PackNet
from pearl.methods.sparse.pae import Pae
from pearl.methods.sparse.pnn import Progressive
from pearl.methods.sparse.sparcl import SparClEwc
from pearl.nn.bsconv import bsc
from pearl.nn.convnet import convnet
from pearl.nn.dynamic.codyra import CodyraRule
from pearl.nn.dynamic.dylora import DyloraRule
from pearl.nn.dynamic.pruned import AdaLoraRule, DoraRule
from pearl.nn.lowrank import matrix_shape
from pearl.nn.precision import computes_bf16
from pearl.nn.rank_rules import Choice, EnergyRule, FixedRule, RandomRule
from pearl.testing.tiny import SIZE, small_resnet, small_vit

needs_bf16 = pytest.mark.skipif(not computes_bf16("cpu"), reason="oneDNN does not compute in bfloat16 on this CPU")


def separable():
    torch.manual_seed(1)
    return bsc(SIZE, width=4)


def small_convnet():
    torch.manual_seed(1)
    return convnet(SIZE, width=4)


DUAL: dict[str, Any] = {"g_prompt_layer_idx": (0,), "e_prompt_layer_idx": (1, 2), "length": 3}


@cache
def text_features() -> str:
    """A file of random text features of a width of its own, for the classes of `testing.tiny`."""
    names = [f"class {label}" for label in range(12)]
    file = Path(tempfile.mkdtemp()) / "texts.npz"
    np.savez(file, names=names, features=np.random.default_rng(0).standard_normal((12, 10)))
    return str(file)


def without_effect(name: str, method: Method) -> Method:
    """A method of which an option or a phase changes nothing as it is made here."""
    method.may_not_matter = (name,)
    return method


ZOO = {
    "finetune": lambda: Finetune(small_resnet()),
    "joint": lambda: Joint(small_resnet()),
    "isolation": lambda: Isolation(small_resnet()),
    # memories smaller than the images of one task, so that they are full
    "er": lambda: Er(small_resnet(), buffer_size=20, minibatch_size=8),
    "er, balanced": lambda: Er(small_resnet(), buffer_size=19, minibatch_size=8, policy="balanced"),
    "er_ace": lambda: ErAce(small_resnet(), buffer_size=20, minibatch_size=8),
    "er_ace, cosine": lambda: ErAce(small_resnet(), buffer_size=20, minibatch_size=8, head="cosine"),
    "derpp": lambda: DerPlusPlus(small_resnet(), buffer_size=20, minibatch_size=8),
    "co2l": lambda: Co2L(small_resnet(), buffer_size=20),
    "tamil": lambda: Tamil(small_resnet(), buffer_size=20, minibatch_size=8),
    "agile": lambda: Agile(small_resnet(), code_dim=6, buffer_size=20, minibatch_size=8, ema_norms="averaged"),
    "ocdnet": lambda: OcdNet(small_resnet(), buffer_size=20, minibatch_size=8),
    "trire": lambda: TriRe(small_resnet(), tasks=3, buffer_size=20, minibatch_size=8),
    "lwf": lambda: Lwf(small_resnet()),
    "ewc": lambda: OnlineEwc(small_resnet()),
    "pearl": lambda: Pearl(small_resnet()),
    "pearl with given weights": lambda: Pearl(small_resnet(), reference="given"),
    "pearl on BSC": lambda: Pearl(separable()),
    "pearl, energy rule, view": lambda: Pearl(small_resnet(), rank=EnergyRule(keep=0.8), fold="view"),
    "pearl, random ranks": lambda: Pearl(small_resnet(), rank=RandomRule()),
    "pearl, fixed rank, unfold": lambda: Pearl(small_resnet(), rank=FixedRule(r=2), fold="unfold"),
    # the paper's rule chooses rank 1 with and without a probe
    "pearl, adalora": lambda: without_effect(
        "probe", Pearl(small_vit(), rank=AdaLoraRule(start=4, r=2, budget="paper", then="restart"))
    ),
    "pearl, dora on a ResNet": lambda: Pearl(small_resnet(), rank=DoraRule(start=3, r=2)),
    "pearl, codyra": lambda: Pearl(small_vit(), rank=CodyraRule(start=4)),
    "pearl, dylora": lambda: Pearl(small_vit(), rank=DyloraRule(start=3, hold_out=0.3)),
    "pearl, probe of some images": lambda: Pearl(small_vit(), probe_images=0.7),
    "pearl, probe of the targets": lambda: Pearl(small_vit(), probe="targets"),
    "pearl, from the SVD": lambda: Pearl(small_resnet(), init="svd"),
    "pearl, statistics": lambda: Pearl(small_resnet(), classifier=Statistics(spaces=2)),
    "pearl on a ViT, statistics": lambda: Pearl(
        small_vit(), classifier=Statistics(spaces="all", projection=16, covariance="frozen", train="all")
    ),
    "pearl, statistics, cosines": lambda: Pearl(
        small_vit(), targets="linear", classifier=Statistics(spaces=2, head="cosine")
    ),
    "isolation, statistics": lambda: Isolation(small_resnet(), classifier=Statistics(layers="final")),
    "pnn, statistics": lambda: Progressive(small_resnet(), classifier=Statistics(spaces=2, projection=None)),
    "packnet, statistics": lambda: PackNet(small_resnet(), classifier=Statistics(spaces=2, projection=8)),
    "seqlora": lambda: SeqLora(small_vit()),
    "seqlora on a ResNet": lambda: SeqLora(small_resnet()),
    "seqlora on BSC, given weights": lambda: SeqLora(separable(), rank=2, reference="given"),
    "inflora": lambda: InfLoRA(small_vit(), rank=2, energy=0.9, tasks=3),
    "sdlora": lambda: SdLora(small_vit(), rank=2),
    "sdlora, carried": lambda: SdLora(small_vit(), rank=2, magnitude="carry"),
    "e2lora": lambda: E2Lora(small_vit(), draws=8),
    "slcapp": lambda: SlcaPlusPlus(small_vit(), rank=2, draws=8),
    "sldc": lambda: Sldc(small_vit(), rank=2, draws=8, linearity=0.0),
    "sldc, nonlinear": lambda: Sldc(small_vit(), rank=2, draws=8, operator="nonlinear"),
    "clora": lambda: CLora(small_vit(), rank=2),
    "clora on a ResNet": lambda: CLora(small_resnet(), rank=2),
    "lae": lambda: Lae(small_vit(), adapt_blocks=(0, 2), ema_decay=0.5),
    "lae, prefixes": lambda: Lae(small_vit(), pet="prefix", size=3, adapt_blocks=(0, 2), ema_decay=0.5),
    "lae, LoRA": lambda: Lae(small_vit(), pet="lora", size=2, adapt_blocks=(0, 2), ema_decay=0.5),
    "lae on a ResNet": lambda: Lae(small_resnet(), size=2, ema_decay=0.5),
    "sema": lambda: Sema(small_vit(), ffn_num=4, rd_dim=6, adapt_start_layer=1, adapt_end_layer=2, exp_threshold=0.9),
    "sema, batches": lambda: Sema(
        small_vit(),
        ffn_num=4,
        rd_dim=6,
        adapt_start_layer=1,
        adapt_end_layer=2,
        exp_threshold=0.0,
        detect_batch_size=8,
        hold_out=0.25,
    ),
    "dia": lambda: Dia(small_vit(), width=3, prototypes=5),
    "ada": lambda: Ada(small_vit(), width=3, pool=2),
    "ada, transrate": lambda: Ada(small_vit(), width=3, pool=1, score="transrate", train_heads=True),
    # each process drops other units
    "ssiat": lambda: Ssiat(small_vit(), ffn_num=4, dropout=0.0, draws=8),
    "rsiat": lambda: Rsiat(small_vit(), ffn_num=4, dropout=0.0, draws=8, code=5, rs_warmup=1),
    "ease": lambda: Ease(small_vit(), ffn_num=4, dropout=0.0),
    "l2p": lambda: L2P(small_vit(), pool=4, length=2, top_k=2),
    "coda-prompt": lambda: CodaPrompt(small_vit(), per_task=2, length=4, blocks=2, ortho=0.1),
    "dualprompt": lambda: DualPrompt(small_vit(), **DUAL),
    "sprompts": lambda: SiPrompts(small_vit(), prompt_length=3, centroids=2),
    "lgcl": lambda: Lgcl(small_vit(), text_features=text_features(), **DUAL),
    "hide": lambda: HidePrompt(
        small_vit(), e_prompt_layer_idx=(0, 2), length=3, n_centroids=2, identity_draws=8, draws=8
    ),
    "dualprompt, pgp": lambda: DualPromptPgp(small_vit(), epsilon=0.99, criterion="squared", **DUAL),
    "l2p, pgp": lambda: L2PPgp(small_vit(), pool=4, length=2, top_k=2, epsilon=0.999, key_epsilon=0.9999),
    "evoprompt": lambda: EvoPrompt(small_vit(), hidden_dim=4, length=2, num_heads=4, align="both"),
    "cprompt": lambda: CPrompt(small_vit(), length=3, blocks=(0, 2)),
    "convprompt": lambda: ConvPrompt(small_vit(), num_prompts_per_task=2, kernel_size=3, length=4, blocks=2),
    "convprompt, fewer kernels": lambda: ConvPrompt(
        small_vit(),
        similarity=text_features(),
        kernel_size=3,
        length=4,
        blocks=2,
        train_keys=True,
        train_norms=False,
        norm_share=0.0,
    ),
    "pnn": lambda: Progressive(small_resnet()),
    "packnet": lambda: PackNet(small_resnet()),
    "packnet on BSC": lambda: PackNet(separable(), prune=0.5),
    "cpg": lambda: Cpg(small_convnet(), train_accuracy=90.0, tasks=3),
    "pae": lambda: Pae(small_convnet(), train_accuracy=90.0, tasks=3),
    "clnp": lambda: Clnp(small_convnet(), m_perc=60.0),
    "nispa": lambda: Nispa(small_convnet(), density=0.5, step_size_param=3),
    "sparcl_ewc": lambda: SparClEwc(small_resnet(), rounds=3, sample_frequency=2, removals=2),
    "ncm": lambda: NearestMean(small_resnet()),
    "ncm with given weights": lambda: NearestMean(small_resnet(), extractor="given", distance="cosine"),
    "fetril": lambda: FeTril(small_resnet()),
    "fetril with given weights": lambda: FeTril(small_resnet(), extractor="given"),
    "fecam": lambda: FeCam(small_resnet()),
    "pass": lambda: PASS(small_resnet()),
    "il2a": lambda: IL2A(small_resnet()),
    "ssre": lambda: SSRE(small_resnet()),
    "efcpp": lambda: EfcPlusPlus(small_resnet()),
    "seed": lambda: Seed(small_resnet(), experts=2, features=5),
    "apr": lambda: Apr(small_resnet(), replayed=6, replay_batch=8, drift_images=6, steps=2, drift_steps=2),
    "aper": lambda: Aper(small_vit()),
    "aper, deep prompts": lambda: Aper(small_vit(), tuning="vpt_deep", prompt_token_num=2),
    "aper on a ResNet": lambda: Aper(small_resnet()),
    "ranpac": lambda: RanPac(small_vit(), M=50),
    "loranpac": lambda: LoRanPac(small_resnet(), E=60, rank=8, truncate_percent=90.0),
    "klda": lambda: Klda(small_vit(), D=40),
    "klda on a ResNet, ensemble": lambda: Klda(small_resnet(), D=40, members=2),
    "loranpac, adapted": lambda: LoRanPac(small_vit(), E=60, rank=12, truncate_percent=90.0, tuning="ssf"),
}


def shared_out(method: Method) -> bool:
    """Whether several processes learn what one does."""
    return not (method.rehearsal or method.oracle or method.batch_coupled)


def taught(method: Pearl, tasks: int = 3) -> Pearl:
    """As after so many tasks, of updates, norm layers and numbers of classes that all differ."""
    for t in range(tasks):
        method.heads.grow(2 + t)
        if t < method.first_adapted:
            continue
        choices = {}
        for target in method.targets:
            full = min(matrix_shape(target.shape, method.fold))
            choices[target.label] = Choice(min(2 + t, full), full, 0.1)
        method.start_updates(t, method.backbone, choices)
    with torch.no_grad():
        for name, tensor in [*method.tensors.named_parameters(), *method.statistics.named_buffers()]:
            if tensor.is_floating_point() and "threshold" not in name:
                tensor.uniform_(0.2, 2) if name.endswith(("weight", "var")) and "norm" in name else tensor.normal_(
                    0, 0.2
                )
    return method.requires_grad_(False).eval()


def same(ours: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Hold two tensors against each other, relative to the largest entry where that is above 1."""
    scale = max(1.0, float(expected.abs().max()))
    torch.testing.assert_close(ours / scale, expected / scale, rtol=0, atol=tolerance)
