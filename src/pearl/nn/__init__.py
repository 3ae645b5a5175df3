"""Networks and their parts: adaptation targets, low-rank updates, rank rules, containers that grow with the tasks.

This is the public interface for your own backbones and rank rules (docs/adding.md).
"""

from pearl.nn.functional import functional_call
from pearl.nn.lowrank import Target, select_targets, task_norms
from pearl.nn.rank_rules import Choice, RankRule
from pearl.nn.task_modules import CosineHeads, TaskHeads, TaskTensors
from pearl.nn.weights import load_weights

__all__ = [
    "Choice",
    "CosineHeads",
    "RankRule",
    "Target",
    "TaskHeads",
    "TaskTensors",
    "functional_call",
    "load_weights",
    "select_targets",
    "task_norms",
]
