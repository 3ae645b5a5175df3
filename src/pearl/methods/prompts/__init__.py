"""Methods that keep a ViT frozen and learn additional inputs: prompts, prefixes and their keys."""

from pearl.methods.prompts.pool import PromptMethod, PromptPool

__all__ = ["PromptMethod", "PromptPool"]
