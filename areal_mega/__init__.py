"""areal-mega: reinforcement learning for large MoE language models on Megatron-Core and SGLang."""

__version__ = "0.1.0"

__all__ = ["Recipe", "Trainer", "__version__", "load_recipe"]


def __getattr__(name: str) -> object:
    """Resolve the public names on first use, so that `import areal_mega` costs nothing."""
    if name == "Trainer":
        from areal_mega.controller.trainer import Trainer

        return Trainer
    if name == "Recipe":
        from areal_mega.config.schema import Recipe

        return Recipe
    if name == "load_recipe":
        from areal_mega.config.loader import load_recipe

        return load_recipe
    raise AttributeError(f"module 'areal_mega' has no attribute {name!r}")
