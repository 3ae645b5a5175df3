"""Continual-learning methods: one file each, in a wing per family; `base` says what a method is.

This is the door for methods of your own (docs/adding.md); what it gives stays.
"""

from pearl.methods.base import Expert, Method, Network, Phase, own_loss
from pearl.methods.common.average import Average
from pearl.methods.common.memory import Memory
from pearl.methods.common.statistics import ClassStatistics
from pearl.methods.common.teacher import distillation, frozen

__all__ = [
    "Average",
    "ClassStatistics",
    "Expert",
    "Memory",
    "Method",
    "Network",
    "Phase",
    "distillation",
    "frozen",
    "own_loss",
]
