"""vLLM's worker: computes the steps of vLLM's scheduler, and samples with vLLM's sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.sampling_params import SamplingType
from vllm.utils.torch_utils import set_random_seed
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput
from vllm.v1.sample.logits_processor import LogitsProcessor, build_logitsprocs
from vllm.v1.sample.sampler import Sampler
from vllm.v1.structured_output.utils import apply_grammar_bitmask
from vllm.v1.worker.gpu_input_batch import CachedRequestState, InputBatch
from vllm.v1.worker.worker_base import CompilationTimes, WorkerBase

from g4ir.builder.load import load_engine
from g4ir.errors import EngineError

from .config import EngineModel, Options, engine_folder
from .platform import REUSE, G4irPlatform
from .runner import Runner

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import GrammarOutput, NewRequestData, SchedulerOutput


class SuppressedTokens(LogitsProcessor):
    """Logits processor that masks the checkpoint's suppressed tokens, and ids without an
    embedding."""

    def __init__(self, ids: tuple[int, ...]) -> None:
        self.ids = torch.tensor(ids, dtype=torch.int64)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.index_fill_(-1, self.ids, float("-inf"))

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        """Do nothing: the mask is the same for all requests."""


class G4irWorker(WorkerBase):
    """vLLM's worker over one engine: computes the scheduler's steps, and samples on the host."""

    def init_device(self) -> None:
        """Set seeds; the engine was built for its device."""
        self.device = torch.device("cpu")
        set_random_seed(self.model_config.seed)

    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        """Load the engine of a prepared folder. EngineError if its limits are below vLLM's, which
        come from the folder's config.json."""
        config, rows = self.model_config.hf_config, self.scheduler_config.max_num_seqs
        given = dict(self.vllm_config.additional_config)
        self.reuse = bool(given.pop(REUSE))
        options = Options.read(given)
        folder = engine_folder(self.model_config.model, config)
        self.engine = load_engine(folder, trust=options.trust)
        limits, length = self.engine.limits, self.model_config.max_model_len
        if limits.max_batch < rows or limits.max_seq < length:
            raise EngineError(
                f"{folder}: was built for {limits.max_batch} sequences of {limits.max_seq} tokens, "
                f"and {rows} of {length} are requested; run python -m g4ir_vllm.prepare again"
            )
        self.runner = Runner(self.engine, rows, options)
        #: unfinished requests; the batch has those that are sampled in this step
        self.states: dict[str, CachedRequestState] = {}
        self.batch = self._new_batch(rows, length)
        self.sampler = Sampler(logprobs_mode=self.model_config.logprobs_mode)
        #: computed step and its logits, until `sample_tokens` is called
        self._step: tuple[SchedulerOutput, torch.Tensor] | None = None

    def _new_batch(self, rows: int, length: int) -> InputBatch:
        custom = self.model_config.logits_processors or ()
        processors = build_logitsprocs(self.vllm_config, self.device, False, False, custom)
        processors.non_argmax_invariant.append(SuppressedTokens(self.engine.suppressed()))
        return InputBatch(
            max_num_reqs=rows,
            max_model_len=length,
            max_num_batched_tokens=self.scheduler_config.max_num_batched_tokens,
            device=self.device,
            vocab_size=self.model_config.get_vocab_size(),
            block_sizes=[],
            max_num_blocks_per_req=[],
            logitsprocs=processors,
            logitsprocs_need_output_token_ids=bool(custom),
        )

    # --- queries of vLLM's engine core before the first step --------------------------------------

    def get_model(self) -> torch.nn.Module:
        """Return the placeholder model, which raises when called."""
        return EngineModel(vllm_config=self.vllm_config)

    def get_supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """Return a spec with one block per sequence; its size in bytes has no meaning, since vLLM
        allocates nothing."""
        sizes = {"block_size": self.model_config.max_model_len, "num_kv_heads": 1, "head_size": 1}
        return {"rows": FullAttentionSpec(**sizes, dtype=torch.uint8)}

    def get_supported_kv_cache_layouts(self) -> list[str]:
        return [layout.name for layout in KVCacheLayout]

    def determine_available_memory(self) -> int:
        """Return 0: the platform sets the number of blocks."""
        return 0

    def update_max_model_len(self, max_model_len: int) -> None:
        """Do nothing: a block is a slot, whatever its length."""

    def initialize_from_config(self, kv_cache_configs: Any) -> None:
        """Do nothing: the engine allocates its KV caches on first use."""

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Return times of 0: engines are compiled at build."""
        return CompilationTimes(language_model=0.0, encoder=0.0)

    # --- a step -------------------------------------------------------------------------------

    @torch.inference_mode()
    def execute_model(self, scheduler_output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Compute a scheduled step. Return None, after which vLLM calls `sample_tokens`; an empty
        output if nothing is scheduled."""
        so = scheduler_output
        for name in so.finished_req_ids:
            self._free(name)
            self.states.pop(name, None)
        for name in so.preempted_req_ids or ():
            self._free(name)
        for request in so.scheduled_new_reqs:
            self._add(request)
        if not so.num_scheduled_tokens:
            self._fill_batch([])
            return EMPTY_MODEL_RUNNER_OUTPUT
        logits = self._logits(so)
        self._fill_batch([*logits])
        rows = [logits[name].to(self.device, torch.float32) for name in self.batch.req_ids]
        self._step = so, torch.stack(rows) if rows else torch.empty(0, self.batch.vocab_size)
        return None

    def _add(self, request: NewRequestData) -> None:
        s = request.sampling_params
        seeded = s.sampling_type == SamplingType.RANDOM_SEED
        nothing = {"mm_features": [], "block_ids": (), "num_computed_tokens": 0}
        self.states[request.req_id] = CachedRequestState(
            req_id=request.req_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=s,
            generator=torch.Generator().manual_seed(s.seed) if seeded else None,
            output_token_ids=[],
            **nothing,
        )

    def _free(self, name: str) -> None:
        self.runner.drop(name)
        self.batch.remove_request(name)

    def _logits(self, so: SchedulerOutput) -> dict[str, torch.Tensor]:
        """Compute the step; return request name -> logits [vocab] for those sampled in it."""
        old, requests = so.scheduled_cached_reqs, self.runner.requests
        # request -> tokens that the scheduler counts as computed
        begun = dict(zip(old.req_ids, old.num_computed_tokens, strict=True))
        begun |= {r.req_id: r.num_computed_tokens for r in so.scheduled_new_reqs}
        decoding = {
            name: self.states[name].output_token_ids[-1]
            for name in begun
            if name in requests and requests[name].slot >= 0
        }
        found = {name: row.clone() for name, row in self.runner.decode(decoding).items()}
        for name, start in begun.items():
            if name in decoding:
                continue
            if name not in requests:
                state = self.states[name]
                reuse = self.reuse and not state.sampling_params.skip_reading_prefix_cache
                tokens = [*state.prompt_token_ids, *state.output_token_ids]
                self.runner.add(name, tokens, reuse)
            logits = self.runner.compute(name, start + so.num_scheduled_tokens[name])
            if logits is not None:
                found[name] = logits
        return found

    def _fill_batch(self, names: list[str]) -> None:
        """Set the requests of vLLM's batch to those that are sampled in this step."""
        for name in [n for n in self.batch.req_ids if n is not None and n not in names]:
            self.batch.remove_request(name)
        for name in names:
            if name not in self.batch.req_id_to_index:
                self.batch.add_request(self.states[name])
        self.batch.condense()
        self.batch.refresh_metadata()

    @torch.inference_mode()
    def sample_tokens(self, grammar_output: GrammarOutput | None) -> ModelRunnerOutput:
        """Sample a token for each request of the batch; requests in prefill get none."""
        assert self._step
        (so, logits), self._step = self._step, None
        sampled, names = [*self.batch.req_ids], [*so.num_scheduled_tokens]
        order = sampled + [name for name in names if name not in self.batch.req_id_to_index]
        tokens: list[list[int]] = [[] for _ in order]
        logprobs, size, spoiled = None, self.batch.vocab_size, self.runner.spoiled
        if sampled:
            if grammar_output is not None:
                apply_grammar_bitmask(so, grammar_output, self.batch, logits)
            metadata = self.batch.sampling_metadata
            drawn = self.sampler(logits=logits, sampling_metadata=metadata)
            for i, token in enumerate(drawn.sampled_token_ids.tolist()):
                tokens[i] = self._taken(i, token)
            logprobs = drawn.logprobs_tensors.tolists() if drawn.logprobs_tensors else None
        return ModelRunnerOutput(
            req_ids=order,
            req_id_to_index={name: i for i, name in enumerate(order)},
            sampled_token_ids=tokens,
            logprobs=logprobs,
            num_nans_in_logits={name: size for name in sampled if name in spoiled} or None,
        )

    def _taken(self, index: int, token: list[int]) -> list[int]:
        """Record the sampled token of the request at an index of the batch; return it."""
        batch, name = self.batch, self.batch.req_ids[index]
        end = int(batch.num_tokens_no_spec[index])
        if end < batch.max_model_len:
            batch.token_ids_cpu[index, end] = token[0]
            batch.is_token_ids[index, end] = True
        batch.num_tokens_no_spec[index] = end + 1
        self.states[name].output_token_ids.append(token[0])
        return token

    def execute_dummy_batch(self) -> None:
        """Do nothing: there are no data-parallel processes to keep in step."""

    def reset_encoder_cache(self) -> None:
        """Do nothing: there are no media."""

    def shutdown(self) -> None:
        """Close the engine."""
        if runner := self.__dict__.pop("runner", None):
            runner.close()
            self.engine.close()
        G4irPlatform.ended = True
