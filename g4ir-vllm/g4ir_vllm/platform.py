"""The platform: what vLLM is told of a machine on which the engine computes, and what is refused.

vLLM's scheduler sees a cache of one block for each row of the engine, a block as long as the
longest request. So a request that is admitted has its row until it ends, nothing is ever preempted,
and what `/metrics` calls usage of the cache is the share of rows in use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from vllm.platforms.interface import Platform, PlatformEnum

from .config import EngineConfig, Options

if TYPE_CHECKING:
    from vllm.config import VllmConfig

#: key of the additional config under which vLLM's flag of prefix caching goes to the worker
REUSE = "reuse"
#: what vLLM may be asked for and an engine does not do -> whether it is asked for, and what helps
REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "LoRA adapters": (lambda c: c.lora_config is not None, "build from the merged checkpoint"),
    "speculative decoding": (
        lambda c: c.speculative_config is not None,
        "leave --speculative-config out",
    ),
    "more than one device": (
        lambda c: c.parallel_config.world_size_across_dp > 1,
        "start one server for each engine, and a proxy before them",
    ),
    "moving caches between servers": (
        lambda c: c.kv_transfer_config is not None or c.ec_transfer_config is not None,
        "leave --kv-transfer-config out",
    ),
    "pooling": (lambda c: c.model_config.runner_type != "generate", "leave --runner out"),
    "embeddings as prompts": (
        lambda c: c.model_config.enable_prompt_embeds,
        "leave --enable-prompt-embeds out",
    ),
}
#: the same of one request's SamplingParams -> its value where it is not asked for
REFUSED_PARAMS: dict[str, Any] = {"prompt_logprobs": None, "thinking_token_budget": None}


class G4irPlatform(Platform):
    """Engines of g4ir. Logits are sampled on the host, wherever the engine computes."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    simple_compile_backend = "eager"

    #: whether the worker of this process has ended
    ended = False
    #: placeholders of media, of the model that this process serves
    media_ids: frozenset[int] = frozenset()
    #: whether prompts are computed from what is remembered of others
    reuse = True

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16]

    def is_cpu(self) -> bool:
        """Whether there is no accelerator whose memory vLLM could free, which it asks last. Before
        that: no, what it knows of CPUs is for kernels of its own."""
        return self.ended and not torch.accelerator.is_available()

    @classmethod
    def import_kernels(cls) -> None:
        """Import none of vLLM's: the engine has its own."""

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
        """Accept any: the engine has its dtype."""

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        """Leave it: a block is a row, see `check_and_update_config`."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Refuse what engines do not do, and set what the engine's limits decide."""
        from vllm.config import CompilationMode, CUDAGraphMode

        c = vllm_config
        if c.model_config is None:
            return
        config = c.model_config.hf_config
        if not isinstance(config, EngineConfig):
            raise ValueError(
                f"{c.model_config.model}: not made by `python -m g4ir_vllm.prepare ENGINE OUT`; "
                f"with g4ir-vllm installed vLLM serves such folders only"
            )
        for what, (asked, cure) in REFUSED.items():
            if asked(c):
                raise ValueError(f"an engine of g4ir does not do {what}; {cure}")
        Options.read({k: v for k, v in c.additional_config.items() if k != REUSE})
        cls.media_ids = frozenset(config.media_ids)
        scheduler, length = c.scheduler_config, c.model_config.max_model_len
        rows = scheduler.max_num_seqs = min(scheduler.max_num_seqs, config.max_batch)
        # A token for each row that decodes, and one chunk of a prompt.
        scheduler.max_num_batched_tokens = rows + min(config.prefill_chunk, length)
        scheduler.max_num_scheduled_tokens = None
        scheduler.enable_chunked_prefill = True
        scheduler.long_prefill_token_threshold = 0
        scheduler.async_scheduling = False
        # vLLM's own reuse is of blocks; the worker's is of prompts. The flag is for that one.
        cls.reuse = c.additional_config.setdefault(REUSE, c.cache_config.enable_prefix_caching)
        c.cache_config.enable_prefix_caching = False
        c.cache_config.block_size = length
        c.cache_config.num_gpu_blocks_override = rows + 1  # vLLM keeps one for itself
        c.parallel_config.worker_cls = "g4ir_vllm.worker.G4irWorker"
        c.compilation_config.mode = CompilationMode.NONE
        c.compilation_config.cudagraph_mode = CUDAGraphMode.NONE

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: Any) -> None:
        """Raise an error, a 400 of the server, for what would fail in the worker."""
        from vllm.exceptions import VLLMValidationError as Refused

        for name, absent in REFUSED_PARAMS.items():
            if getattr(params, name, absent) != absent:
                what = f"{name}: an engine of g4ir has no such thing; leave it out"
                raise Refused(what, parameter=name)
        if processed_inputs.get("cache_salt") and cls.reuse:
            raise Refused(
                "cache_salt: prompts are not kept apart by it here; start the server with "
                "--no-enable-prefix-caching, so that none uses what is remembered of another",
                parameter="cache_salt",
            )
        ids = processed_inputs.get("prompt_token_ids") or ()
        if cls.media_ids.intersection(ids):
            raise Refused(
                "media: vLLM over an engine of g4ir takes texts; pictures and sounds are answered "
                "by `g4ir serve`"
            )
