"""vLLM plugin: vLLM's scheduler, sampler and server over the slots of a g4ir engine.

vLLM calls the two functions below by their entry points (pyproject.toml).
"""

from __future__ import annotations


def platform() -> str:
    """Return the import path of the platform class."""
    return "g4ir_vllm.platform.G4irPlatform"


def register() -> None:
    """Register the config class of prepared folders, and a placeholder model."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from .config import ARCHITECTURE, MODEL_TYPE, EngineConfig, EngineModel

    AutoConfig.register(MODEL_TYPE, EngineConfig, exist_ok=True)
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, EngineModel)
