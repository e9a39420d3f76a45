"""vLLM's platform for g4ir engines: device properties, scheduler settings, and refused options.

To vLLM's scheduler the KV cache has one block per slot of the engine, as long as the longest
request. So no request is preempted for lack of memory, and the cache usage in `/metrics` is the
share of slots in use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms.interface import Platform, PlatformEnum

from .config import EngineConfig, Options

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: key of the additional config that passes vLLM's prefix-caching flag to the worker
REUSE = "reuse"
#: unsupported feature of vLLM -> whether a config requests it, and the fix
REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "LoRA adapters": (lambda c: c.lora_config is not None, "build from the merged checkpoint"),
    "speculative decoding": (
        lambda c: c.speculative_config is not None,
        "leave --speculative-config out",
    ),
    "more than one device": (
        lambda c: c.parallel_config.world_size_across_dp > 1,
        "start one server per engine behind a proxy",
    ),
    "KV cache transfer": (
        lambda c: c.kv_transfer_config is not None or c.ec_transfer_config is not None,
        "leave --kv-transfer-config and --ec-transfer-config out",
    ),
    "pooling": (lambda c: c.model_config.runner_type != "generate", "leave --runner/--convert out"),
    "embeddings as prompts": (
        lambda c: c.model_config.enable_prompt_embeds,
        "leave --enable-prompt-embeds out",
    ),
}
#: unsupported field of a request's SamplingParams -> its default
REFUSED_PARAMS: dict[str, Any] = {"prompt_logprobs": None, "thinking_token_budget": None}


class G4irPlatform(Platform):
    """Platform of g4ir engines. Logits are sampled on the host, whatever the engine's device."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    simple_compile_backend = "eager"

    #: whether the worker of this process has ended
    ended = False
    #: ids of media placeholders of the served model
    media_ids: frozenset[int] = frozenset()
    #: whether prompts reuse the KV cache of earlier prompts
    reuse = True

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    def is_cpu(self) -> bool:
        """Return False while the worker runs, since vLLM's CPU settings are for vLLM's kernels.
        Afterwards vLLM uses this to decide whether to free accelerator memory."""
        return self.ended and not torch.accelerator.is_available()

    @classmethod
    def import_kernels(cls) -> None:
        """Do nothing: the engine has its own kernels."""

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "g4ir"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return 0

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Do nothing: the engine was built for its device."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        torch.manual_seed(seed)

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Accept any dtype: the engine's is fixed at build."""

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        """Do nothing: `check_and_update_config` sets the block size."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Raise ValueError for unsupported options; reduce the scheduler's limits to the
        engine's."""
        from vllm.config import CompilationMode, CUDAGraphMode

        c = vllm_config
        if c.model_config is None:
            return
        config = c.model_config.hf_config
        if not isinstance(config, EngineConfig):
            raise ValueError(
                f"{c.model_config.model}: not created by `python -m g4ir_vllm.prepare ENGINE OUT`; "
                f"with g4ir-vllm installed vLLM serves such folders only"
            )
        for what, (asked, cure) in REFUSED.items():
            if asked(c):
                raise ValueError(f"vLLM over a g4ir engine does not support {what}; {cure}")
        Options.read({k: v for k, v in c.additional_config.items() if k != REUSE})
        cls.media_ids = frozenset(config.media_ids)
        scheduler, length = c.scheduler_config, c.model_config.max_model_len
        rows = scheduler.max_num_seqs = min(scheduler.max_num_seqs, config.max_batch)
        # One token per decoding sequence, and one chunk of a prompt.
        scheduler.max_num_batched_tokens = rows + min(config.prefill_chunk, length)
        scheduler.max_num_scheduled_tokens = None
        scheduler.enable_chunked_prefill = True
        scheduler.long_prefill_token_threshold = 0
        scheduler.async_scheduling = False
        # vLLM's prefix cache works by blocks, and a block here is a slot. So vLLM's is disabled,
        # and its flag controls the worker's own prefix cache.
        cls.reuse = c.additional_config.setdefault(REUSE, c.cache_config.enable_prefix_caching)
        c.cache_config.enable_prefix_caching = False
        c.cache_config.block_size = length
        c.cache_config.num_gpu_blocks_override = rows + 1  # vLLM reserves one block
        c.parallel_config.worker_cls = "g4ir_vllm.worker.G4irWorker"
        c.compilation_config.mode = CompilationMode.NONE
        c.compilation_config.cudagraph_mode = CUDAGraphMode.NONE

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Raise an error (HTTP 400) for a request that the worker could not compute, and for a
        `cache_salt` that the prefix cache would ignore."""
        from vllm.exceptions import VLLMValidationError as Refused

        for name, absent in REFUSED_PARAMS.items():
            if getattr(params, name, absent) != absent:
                what = f"{name}: not supported over a g4ir engine; leave it out"
                raise Refused(what, parameter=name)
        if processed_inputs.get("cache_salt") and cls.reuse:
            raise Refused(
                "cache_salt: the prefix cache of g4ir engines ignores it; start the server with "
                "--no-enable-prefix-caching, so that requests share no KV cache",
                parameter="cache_salt",
            )
        ids = processed_inputs.get("prompt_token_ids") or ()
        if cls.media_ids.intersection(ids):
            raise Refused(
                "media: vLLM over a g4ir engine takes text only; images and audio are supported "
                "by `g4ir serve`"
            )
