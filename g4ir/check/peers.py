"""Peers that an engine is compared with: the interpreter on the same weights, or transformers."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from g4ir.engine.artefact import linked_path
from g4ir.engine.build import agreed_spec
from g4ir.engine.engine import Engine
from g4ir.errors import InputError, MissingError
from g4ir.ir.distance import LocalError, local_errors
from g4ir.model.names import HEAD, checkpoint_name
from g4ir.model.tensors import text_tensors
from g4ir.ops.types import ITEMSIZE, torch_dtype
from g4ir.quant.rewrite import weights_of
from g4ir.ui.progress import Progress
from g4ir.ui.units import size_text
from g4ir.weights.formats import is_coded
from g4ir.weights.hub import hub_snapshot
from g4ir.weights.origin import Directory, Origin, find_origin
from g4ir.weights.random import RandomCheckpoint
from g4ir.weights.write import write_checkpoint

from .hf import cache_argument, hf_model, rows_kept
from .reference import reference_engine, wide_engine
from .rounded import round_activations, rounding_caches
from .tokens import positions_of, split_steps
from .watch import Place, watched
from .wide import other_attention, wide_model

if TYPE_CHECKING:
    import torch


#: value -> index of a token -> the value's row there, f32[hidden]
Rows = dict[str, dict[int, "torch.Tensor"]]
#: logits of a run, and the outputs of its layers
Shown = tuple["torch.Tensor", "Rows"]
#: names of what is compared layer by layer
LAYER_OUT, FINAL = re.compile(r"L\d+\.out"), "final.norm"
#: random weights up to this many bytes are written to disk for transformers
TEMPORARY_BYTES = 1 << 30


class Peer(Protocol):
    """A model that an engine is compared with, one row at a time."""

    def logits(
        self,
        tokens: torch.Tensor,
        turns: Sequence[int],
        every: bool,
        ends: Sequence[int] = (),
        layers: Rows | None = None,
    ) -> torch.Tensor:
        """i64[T] -> f32[N, vocab] after every token, or at the end of each turn. The outputs of
        the layers at the tokens `ends`, the ends of the chunks, go into `layers`."""

    def wide(self, tokens: torch.Tensor, turns: Sequence[int], every: bool) -> torch.Tensor:
        """Return `logits` in float64 on the same weights."""

    def other(self, tokens: torch.Tensor, turns: Sequence[int], every: bool) -> torch.Tensor:
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
        self,
        tokens: torch.Tensor,
        turns: Sequence[int],
        every: bool,
        ends: Sequence[int] = (),
        layers: Rows | None = None,
    ) -> torch.Tensor:
        import torch

        def keep(place: Place, name: str, t: torch.Tensor) -> None:
            if layers is not None and (name == FINAL or LAYER_OUT.fullmatch(name)):
                # After the last layer whose K and V are read later, a chunk goes on with its end.
                rows, first = t[0].float().cpu(), place.end + 1 - t.shape[1]
                kept = {first + i: row for i, row in enumerate(rows) if first + i in wanted}
                layers.setdefault(name, {}).update(kept)

        wanted = set(ends)

        session = watched(self.engine, keep) if layers is not None else self.engine.session()
        rows = [session.prefill(t[None], all_logits=every)[0] for t in tokens.split(list(turns))]
        return torch.cat(rows) if every else torch.stack(rows)

    def in_rounds(self, tokens: torch.Tensor, turns: Sequence[int]) -> torch.Tensor:
        """Return the logits after each single step at the end of the turns, where these are
        verified in rounds: half of each is right, the rest is wrong and taken back."""
        import torch

        session, most = self.engine.session(), self.engine.draft_tokens + 1
        long, steps = split_steps(turns)
        at, rows = len(tokens) - steps, []
        for t in tokens[:at].split(long):
            session.prefill(t[None])
        wrong = tokens.flip(0).repeat(most)
        while at < len(tokens):
            right = tokens[at : at + (most + 1) // 2]
            given = torch.cat((right, wrong))[: min(most, self.engine.limits.max_seq - at)]
            rows.append(session.verify(given[None])[0, : len(right)])
            at += len(right)
            session.truncate([at])
        return torch.cat(rows)

    def wide(self, tokens: torch.Tensor, turns: Sequence[int], every: bool) -> torch.Tensor:
        return EnginePeer(wide_engine(self.engine)).logits(tokens, turns, every)

    def other(self, tokens: torch.Tensor, turns: Sequence[int], every: bool) -> torch.Tensor:
        """Return the logits that are made token by token."""
        return self.logits(tokens, [1] * len(tokens), False)[positions_of(turns, every)]

    def greedy(
        self, prompt: torch.Tensor, count: int, readable: int
    ) -> tuple[list[int], torch.Tensor]:
        import torch

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
        self,
        tokens: torch.Tensor,
        turns: Sequence[int],
        every: bool,
        ends: Sequence[int] = (),
        layers: Rows | None = None,
    ) -> torch.Tensor:
        import torch

        device = self.model.device
        where = torch.tensor(positions_of(turns, every), device=device)
        with torch.no_grad(), _hooked(self.model.get_decoder(), ends, layers):
            ids = tokens[None].to(device)
            past = {cache_argument(self.model.forward): self.caches()} if self.caches else {}
            out = self.model(input_ids=ids, use_cache=False, logits_to_keep=where, **past)
        rows: torch.Tensor = out.logits[0]
        return rows.float() if rows.dtype in (torch.bfloat16, torch.float16) else rows

    def wide(self, tokens: torch.Tensor, turns: Sequence[int], every: bool) -> torch.Tensor:
        with wide_model(self.model):
            return self.logits(tokens, turns, every)

    def other(self, tokens: torch.Tensor, turns: Sequence[int], every: bool) -> torch.Tensor:
        """Return logits of the other attention: one product where eager has two, or the reverse."""
        with other_attention(self.model):
            return self.logits(tokens, turns, every)

    def local(
        self,
        tokens: torch.Tensor,
        turns: Sequence[int],
        every: bool,
        own: Shown,
        theirs: Shown,
        dtype: str,
    ) -> tuple[LocalError, ...]:
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
            given = {i + 1: rows[n] for i in range(count) if (n := f"L{i}.out") in rows}
            margins: dict[int, torch.Tensor] = {}
            made: Rows = {}
            with wide_model(self.model, given, margins):
                head = self.logits(tokens, turns, every, range(len(tokens)), made)
            sides.append((logits, rows, head, made, margins))
        return local_errors(count, positions_of(turns, every), *sides, dtype=dtype)

    def greedy(
        self, prompt: torch.Tensor, count: int, readable: int
    ) -> tuple[list[int], torch.Tensor]:
        import torch
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
    with _temporary_folder() as folder:
        with _room_in(folder):
            directory = _checkpoint(engine, checkpoint, folder / "checkpoint", progress)
        origin = find_origin(directory)
        agreed_spec(engine.spec, origin, bool(engine.media.kinds))
        progress(f"transformers loads {directory}")
        model = _model(engine, origin)
        round_activations(engine, model)
        yield HfPeer(model, rounding_caches(engine, model))


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """A context that gives a folder, which vanishes at the end."""
    with _room_in("none that can be written to"):
        made = tempfile.TemporaryDirectory(prefix="g4ir-verify-", ignore_cleanup_errors=True)
    with made as folder:
        yield Path(folder)


@contextmanager
def _room_in(folder: str | Path) -> Iterator[None]:
    """A context that raises MissingError where a temporary folder cannot take what is written."""
    try:
        yield
    except OSError as e:
        raise MissingError(
            f"temporary folder: {folder}: {e.strerror or e}; make room there, or set TMPDIR to "
            f"another folder"
        ) from e


def need_transformers(asked: str) -> None:
    """MissingError, which says what asked for it, where transformers does not know the model."""
    try:
        from transformers import Gemma4ForCausalLM  # noqa: F401
    except ImportError as e:
        raise MissingError(
            f"{asked} needs transformers 5.17 or newer: `pip install 'g4ir[hf]'`"
        ) from e


def _model(engine: Engine, origin: Origin) -> Any:
    """Return the transformers model with the weights that the engine should compute with."""
    if isinstance(origin, Directory) and not is_coded(origin.stated):
        model = _load_hf(origin.path, engine.dtype)
        _requantise(model, engine)
        return model
    source = origin.open(engine.spec, (), engine.dtype)
    try:
        model = hf_model(engine.spec, source, torch_dtype(engine.dtype), attention="eager")
    finally:
        source.close()
    if engine.recipe and not engine.recipe.held:
        _requantise(model, engine)
    return model


def _load_hf(directory: Path, dtype: str) -> Any:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch_dtype(dtype), attn_implementation="eager"
        )
        return model.eval()
    except (OSError, ValueError, RuntimeError, KeyError) as e:
        raise InputError(f"transformers cannot load {directory}: {e}") from e
    finally:
        logging.set_verbosity(level)
        logging.enable_progress_bar()


def _requantise(model: Any, engine: Engine) -> None:
    """Give the model the weights that a quantised engine computes with."""
    import torch

    if engine.recipe is None:
        return
    held = dict(model.get_decoder().named_parameters())
    held |= {HEAD: model.get_output_embeddings().weight}
    with torch.no_grad():
        for name in engine.recipe.schemes(weights_of(engine.spec)):
            held[checkpoint_name(name)].copy_(engine.param(name))


def _checkpoint(
    engine: Engine, given: str | Path | None, temporary: Path, progress: Progress
) -> Path:
    """The checkpoint whose weights transformers has."""
    kept = engine.manifest["weights"]
    if given is None and kept["kind"] == "random":
        return _write_random(engine, kept["seed"], temporary, progress)
    return known_checkpoint(engine, given, "verify --against hf")


def known_checkpoint(engine: Engine, given: str | Path | None, asked: str) -> Path:
    """The given checkpoint, or the one that the engine refers to, or that of the local hub cache.
    InputError, which says what asked for it, where there is none."""
    kept = engine.manifest["weights"]
    linked = linked_path(kept["directory"], kept["files"]) if "directory" in kept else None
    found = given or linked or (engine.spec.hub and hub_snapshot(engine.spec.hub))
    if not found:
        raise InputError(
            f"{asked}: {engine.path} does not say where its checkpoint is; give --checkpoint DIR"
        )
    return Path(found)


def _write_random(engine: Engine, seed: int, directory: Path, progress: Progress) -> Path:
    count = sum(math.prod(shape) for shape in text_tensors(engine.spec).values())
    size = count * ITEMSIZE[engine.dtype]
    if size > TEMPORARY_BYTES:
        raise InputError(
            f"verify --against hf: the random weights are {size_text(size)}, and up to "
            f"{size_text(TEMPORARY_BYTES)} are written for transformers; use --against reference"
        )
    progress(f"writing {size_text(size)} of random weights")
    source = RandomCheckpoint(engine.spec, seed, torch_dtype(engine.dtype))
    return write_checkpoint(directory, engine.spec, source)
