"""Methods that leave a ViT as it came and learn what it reads beside an image: prompts, prefixes and their keys."""

from pearl.methods.prompts.pool import PromptMethod, PromptPool

__all__ = ["PromptMethod", "PromptPool"]
