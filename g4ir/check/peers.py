"""Peers that an engine is compared with: the interpreter on the same weights, or transformers."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from g4ir.engine.artefact import LinkedWeights, MergedWeights
from g4ir.engine.engine import Engine
from g4ir.engine.load import open_weights
from g4ir.engine.prepare import agreed_spec
from g4ir.errors import InputError, MissingError
from g4ir.model.names import HEAD, checkpoint_name
from g4ir.model.tensors import text_tensors
from g4ir.ops.types import ITEMSIZE, torch_dtype
from g4ir.plan.fit import device_memory
from g4ir.quant.rewrite import weights_of
from g4ir.ui.progress import Progress
from g4ir.ui.units import size_text
from g4ir.weights.checkpoint import WeightSource
from g4ir.weights.formats import is_coded
from g4ir.weights.hub import snapshot_of
from g4ir.weights.origin import CheckpointDirectory, find_origin
from g4ir.weights.random import RandomCheckpoint

from .float64 import other_attention, wide_model
from .hf import cache_argument, hf_model, refusals_of_transformers, rows_kept
from .layer_errors import LocalError, local_errors
from .reference import reference_engine, wide_engine
from .rounding_baseline import divisor, round_activations, rounding_caches
from .tokens import Turns
from .watch import ChunkPosition, watched

#: value -> index of a token -> the value's row there, f32[hidden]
Rows = dict[str, dict[int, torch.Tensor]]
#: logits of a run, and the outputs of its layers
Shown = tuple[torch.Tensor, "Rows"]
#: names of what is compared layer by layer
LAYER_OUT, FINAL = re.compile(r"L\d+\.out"), "final.norm"


class Peer(Protocol):
    """A model that an engine is compared with, one row at a time."""

    def logits(
        self, given: Turns, ends: Sequence[int] = (), layers: Rows | None = None
    ) -> torch.Tensor:
        """Return f32[N, vocab]. The outputs of the layers at the tokens `ends`, the ends of the
        chunks, go into `layers`."""

    def wide(self, given: Turns) -> torch.Tensor:
        """Return `logits` in float64 on the same weights."""

    def other(self, given: Turns) -> torch.Tensor:
        """Return `logits` in another mode of the peer: the same sums in another order."""

    def greedy(
        self, prompt: torch.Tensor, count: int, readable: int
    ) -> tuple[list[int], torch.Tensor]:
        """Return (tokens, the logits f32[count, readable] that chose them), of the ids below
        `readable` alone."""


@dataclass(frozen=True)
class EnginePeer:
    """A peer that is any engine."""

    engine: Engine

    def logits(
        self, given: Turns, ends: Sequence[int] = (), layers: Rows | None = None
    ) -> torch.Tensor:
        def keep(place: ChunkPosition, name: str, t: torch.Tensor) -> None:
            if layers is not None and (name == FINAL or LAYER_OUT.fullmatch(name)):
                # After the last layer whose K and V are read later, a chunk goes on with its end.
                rows, first = t[0].float().cpu(), place.end + 1 - t.shape[1]
                rows = rows * (1 if name == FINAL else by)
                kept = {first + i: row for i, row in enumerate(rows) if first + i in wanted}
                layers.setdefault(name, {}).update(kept)

        wanted, by = set(ends), divisor(self.engine)
        session = watched(self.engine, keep) if layers is not None else self.engine.session()
        turns = given.ids.split([*given.sizes])
        rows = [session.prefill(t[None], all_logits=given.every)[0] for t in turns]
        return torch.cat(rows) if given.every else torch.stack(rows)

    def in_rounds(self, given: Turns) -> torch.Tensor:
        """Return the logits after each single step at the end of the turns, where these are
        verified in rounds: half of each is right, the rest is wrong and rejected."""
        session, most = self.engine.session(), self.engine.draft_tokens + 1
        tokens, at, rows = given.ids, len(given.ids) - given.steps, list[torch.Tensor]()
        for t in tokens[:at].split([*given.sizes[: len(given.sizes) - given.steps]]):
            session.prefill(t[None])
        wrong = tokens.flip(0).repeat(most)
        while at < len(tokens):
            right = tokens[at : at + (most + 1) // 2]
            draft = torch.cat((right, wrong))[: min(most, self.engine.limits.max_seq - at)]
            found = session.verify(draft[None])[0, : len(right)]
            rows.append(found.to("cpu", torch.float32, copy=True))
            at += len(right)
            session.truncate([at])
        return torch.cat(rows)

    def wide(self, given: Turns) -> torch.Tensor:
        return EnginePeer(wide_engine(self.engine)).logits(given)

    def other(self, given: Turns) -> torch.Tensor:
        """Return the logits that are made token by token."""
        return self.logits(Turns(given.ids, [1] * len(given.ids)))[given.where]

    def greedy(
        self, prompt: torch.Tensor, count: int, readable: int
    ) -> tuple[list[int], torch.Tensor]:
        session = self.engine.session()
        rows = [session.prefill(prompt[None])[:, :readable]]
        while len(rows) < count:
            rows.append(session.decode(rows[-1].argmax(-1))[:, :readable])
        logits = torch.cat(rows)
        return logits.argmax(-1).tolist(), logits


@dataclass(frozen=True)
class HfPeer:
    """A transformers text model: one pass without a cache, greedy tokens with one. `caches` makes
    the cache of either where K and V are to be rounded."""

    model: Any
    caches: Callable[[], Any] | None = None

    def logits(
        self, given: Turns, ends: Sequence[int] = (), layers: Rows | None = None
    ) -> torch.Tensor:
        device = self.model.device
        where = torch.tensor(given.where, device=device)
        with torch.no_grad(), _hooked(self.model.get_decoder(), ends, layers):
            ids = given.ids[None].to(device)
            past = {cache_argument(self.model.forward): self.caches()} if self.caches else {}
            out = self.model(input_ids=ids, use_cache=False, logits_to_keep=where, **past)
        rows: torch.Tensor = out.logits[0]
        return rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows

    def wide(self, given: Turns) -> torch.Tensor:
        with wide_model(self.model):
            return self.logits(given)

    def other(self, given: Turns) -> torch.Tensor:
        """Return logits of the other attention: one product where eager has two, or the reverse."""
        with other_attention(self.model):
            return self.logits(given)

    def local(self, given: Turns, own: Shown, theirs: Shown, dtype: str) -> tuple[LocalError, ...]:
        """Compare each layer, and the head, in float64 on what the engine gave it, beside the same
        of the peer in 16 bits: what a layer adds of its own, whatever the ones before it added."""
        count = len(self.model.get_decoder().layers)
        names = [n for i in range(count) if (n := f"L{i}.out") in own[1] and n in theirs[1]]
        both = {n: own[1][n].keys() & theirs[1][n].keys() for n in names}
        both = {n: at for n, at in both.items() if at}
        if not both:
            return ()  # the engine shows none of its layers
        sides = []
        for logits, shown in (own, theirs):
            rows = {n: {i: shown[n][i] for i in sorted(at)} for n, at in both.items()}
            inputs = {i + 1: rows[n] for i in range(count) if (n := f"L{i}.out") in rows}
            margins: dict[int, torch.Tensor] = {}
            made: Rows = {}
            with wide_model(self.model, inputs, margins):
                head = self.logits(given, range(len(given.ids)), made)
            sides.append((logits, rows, head, made, margins))
        return local_errors(count, given.where, *sides, dtype=dtype)

    def greedy(
        self, prompt: torch.Tensor, count: int, readable: int
    ) -> tuple[list[int], torch.Tensor]:
        from transformers import DynamicCache

        cache = self.caches() if self.caches else DynamicCache(config=self.model.config)
        given = {cache_argument(self.model.forward): cache, "logits_to_keep": rows_kept(self.model)}
        column, rows = prompt[None], []
        with torch.no_grad():
            for _ in range(count):
                out = self.model(input_ids=column, use_cache=True, **given)
                rows.append(out.logits[0, -1, :readable].float())
                column = rows[-1].argmax()[None, None]
        logits = torch.stack(rows)
        return logits.argmax(-1).tolist(), logits


@contextmanager
def _hooked(decoder: Any, ends: Sequence[int], layers: Rows | None) -> Iterator[None]:
    """Keep the rows `ends` of what the layers and the final norm of a transformers model make."""

    def keeper(name: str) -> Callable[..., None]:
        def keep(module: Any, given: Any, made: Any) -> None:
            out = made[0] if isinstance(made, tuple) else made
            if layers is not None:
                layers[name] = {at: out[0, at].float().cpu() for at in ends}

        return keep

    named = {f"L{i}.out": layer for i, layer in enumerate(decoder.layers)} | {FINAL: decoder.norm}
    hooks = [module.register_forward_hook(keeper(name)) for name, module in named.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def find_peer(
    engine: Engine, against: str, checkpoint: str | Path | None, progress: Progress
) -> Iterator[Peer]:
    if against == "reference":
        yield EnginePeer(reference_engine(engine))
        return
    need_transformers("--against hf")
    model = _model(engine, checkpoint, progress)
    round_activations(engine, model)
    yield HfPeer(model, rounding_caches(engine, model))


def need_transformers(asked: str) -> None:
    """MissingError, which says what asked for it, where transformers does not know the model."""
    try:
        from transformers import Gemma4ForCausalLM  # noqa: F401
    except ImportError as e:
        raise MissingError(
            f"{asked} needs transformers 5.17 or newer: `pip install 'g4ir[hf]'`"
        ) from e


def _model(engine: Engine, checkpoint: str | Path | None, progress: Progress) -> Any:
    seed, dtype = engine.facts.seed, torch_dtype(engine.dtype)
    source: WeightSource
    if checkpoint is None and seed is not None:
        size = _check_room(engine)
        progress(f"transformers takes {size_text(size)} of random weights")
        source = RandomCheckpoint(engine.spec, seed, dtype)
    else:
        origin = find_origin(known_checkpoint(engine, checkpoint, "verify --against hf"))
        agreed_spec(engine.spec, origin, bool(engine.media.kinds))
        progress(f"transformers loads {origin.path}")
        merged = isinstance(engine.facts.weights, MergedWeights)
        plain = (
            isinstance(origin, CheckpointDirectory)
            and not is_coded(origin.stated)
            and origin.published()
        )
        if plain and not merged:
            model = _load_hf(origin.path, engine.dtype)
            _requantise(model, engine)
            return model
        source = open_weights(engine, origin, ())
    try:
        model = hf_model(engine.spec, source, dtype, attention="eager")
    finally:
        source.close()
    if engine.recipe and not engine.recipe.held:
        _requantise(model, engine)
    return model


def _check_room(engine: Engine) -> int:
    """Return the bytes of the text model's weights; InputError if they do not fit the memory that
    the engine leaves."""
    size = sum(map(math.prod, text_tensors(engine.spec).values())) * ITEMSIZE[engine.dtype]
    held = sum(v.type.nbytes() for v in engine.program.params().values())
    free = device_memory("cpu") - (held if engine.device == "cpu" else 0)
    if size > free:
        raise InputError(
            f"verify --against hf: transformers needs {size_text(size)} for the weights, and the "
            f"engine leaves {size_text(max(free, 0))} of memory; use --against reference"
        )
    return size


def _load_hf(directory: Path, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with refusals_of_transformers(str(directory)):
            model = AutoModelForCausalLM.from_pretrained(
                directory, dtype=torch_dtype(dtype), attn_implementation="eager"
            )
        return model.eval()
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def _requantise(model: Any, engine: Engine) -> None:
    if engine.recipe is None:
        return
    held = dict(model.get_decoder().named_parameters())
    held |= {HEAD: model.get_output_embeddings().weight}
    with torch.no_grad():
        for name in engine.recipe.schemes(weights_of(engine.spec)):
            held[checkpoint_name(name)].copy_(engine.param(name))


def known_checkpoint(engine: Engine, given: str | Path | None, asked: str) -> Path:
    """The given checkpoint, or the one that the engine refers to, or that of the local hub cache.
    InputError, which says what asked for it, where there is none."""
    kept = engine.facts.weights
    linked = kept.path if isinstance(kept, LinkedWeights) else None
    found = given or linked or snapshot_of(engine.spec)
    if not found:
        raise InputError(
            f"{asked}: {engine.path} does not say where its checkpoint is; give --checkpoint DIR, "
            f"or build it again if its weights were random"
        )
    return Path(found)
