"""Engines of g4ir behind vLLM: its scheduler, its sampler, its server, over the rows of an engine.

vLLM finds the two functions below by their entry points (see pyproject.toml).
"""

from __future__ import annotations


def platform() -> str:
    """Return where vLLM finds the platform."""
    return "g4ir_vllm.platform.G4irPlatform"


def register() -> None:
    """Tell vLLM's registries of prepared folders: their config.json, and a model that is none."""
    from transformers import AutoConfig
    from vllm import ModelRegistry

    from .config import ARCHITECTURE, MODEL_TYPE, EngineConfig, EngineModel

    AutoConfig.register(MODEL_TYPE, EngineConfig, exist_ok=True)
    if ARCHITECTURE not in ModelRegistry.get_supported_archs():
        ModelRegistry.register_model(ARCHITECTURE, EngineModel)
