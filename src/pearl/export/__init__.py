"""Export of a model for use without pearl: a torch.export program, an ONNX file, or PEFT adapters."""

from pearl.export.verbs import export, export_directory

__all__ = ["export", "export_directory"]
