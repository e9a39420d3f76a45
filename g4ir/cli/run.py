"""`g4ir run`: answer a prompt, or the lines of a file."""

from __future__ import annotations

import json
import sys
import time
from contextlib import AbstractContextManager, closing, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from g4ir.chat.prompt import TextStream
from g4ir.errors import InputError
from g4ir.generate.jsonl import named
from g4ir.model.media import KINDS, MEDIA_SETTINGS, check_there, encode_options
from g4ir.ui import console

from .common import DraftRows, Load, OnEngine, emit
from .talking import Sampling, Screen, Talk, answer_summary, begun, check_turns, summary
from .verb import Text, TokenIds, flag, flag_of

if TYPE_CHECKING:
    from g4ir.engine.engine import Engine
    from g4ir.engine.scheduler import SchedulerConfig
    from g4ir.generate.offline import Failure, OfflineEngine, OfflineRequest, Result

#: setting of media -> the kind that it is for
SETTING_KINDS = {setting: kind for kind, names in MEDIA_SETTINGS.items() for setting in names}


class Run(OnEngine):
    """Answer a prompt, or the lines of a file.

    prompt TEXT: the prompt
    tokens 2,5,7: the prompt as token ids
    input_jsonl FILE: batch of requests, one JSON object per line (`-`: stdin): prompt or tokens;
        optional: id, bos, max_new_tokens, temperature, top_k, top_p, min_p, seed,
        presence_penalty, frequency_penalty, repetition_penalty, logit_bias, min_tokens,
        logprobs, stop, images, videos, audio (lists of paths), image_budget, frames, fps,
        audio_too_long. Batched up to the engine's --max-batch; answers keep the order of the
        lines. An invalid request returns {{"id": ..., "line": ..., "error": ...}}, and the exit
        code is 1
    chat: apply the checkpoint's chat template to the prompt, as a user message
    media FILE: KIND file, inserted at <KIND> in the prompt, or before it; with --chat
        part of the message (repeat)
    image_budget N: maximum soft tokens per image, one of the engine's --image-budget values
    frames N: number of video frames to sample (default 32, or all of fewer)
    fps F: video frames to sample per second; at most --frames if that is given
    audio_too_long: audio above the model's limit (30 s) or the engine's --audio-seconds: truncate
        it with a warning (default), or refuse it
    max_new_tokens N: maximum number of generated tokens (default 64, or what fits;
        with --chat what fits)
    bos: do not prepend <bos> to a raw prompt
    stop IDS: additional stop token ids, such as 1,106
    draft_rows N: speculate only while at most N lines of --input-jsonl are decoded concurrently
        (default 2)
    """

    json: bool = False
    prompt: Text | None = flag(None, one_of=True)
    tokens: TokenIds | None = flag(None, one_of=True)
    input_jsonl: str | None = flag(None, one_of=True)
    chat: bool = False
    talk: Talk
    media: list[tuple[str, str]] = flag((), each=KINDS)
    image_budget: int | None = None
    frames: int | None = None
    fps: float | None = None
    audio_too_long: Literal["cut", "refuse"] | None = None
    sampling: Sampling
    bos: bool | None = flag(None, name="--no-bos")
    stop: TokenIds | None = None
    draft: DraftRows
    load: Load

    def __post_init__(self) -> None:
        if self.bos is not None and (self.chat or self.tokens is not None):
            raise InputError("--no-bos is for raw text: leave it out with --chat and --tokens")
        if self.chat and self.prompt is None:
            raise InputError("--chat is for --prompt: tokens and JSON lines are taken as they are")
        talk = ("system", "tools", "think", "think_budget")
        if not self.chat and (given := [name for name in talk if name in self.given]):
            raise InputError(f"{flag_of(given[0])} is for --chat, which is not given")
        if self.draft.draft_rows is not None and self.input_jsonl is None:
            raise InputError("--draft-rows is for --input-jsonl, which is not given")
        self.talk.check()
        self._check_media()

    def _check_media(self) -> None:
        kinds = {kind for kind, _ in self.media}
        if self.input_jsonl and kinds:
            raise InputError(
                f"--{min(kinds)}: with --input-jsonl each request names its own files, "
                f'such as {{"prompt": "...", "images": ["a.png"]}}'
            )
        for setting, kind in SETTING_KINDS.items():
            if setting in self.given and not self.input_jsonl and kind not in kinds:
                raise InputError(f"{flag_of(setting)} is for --{kind}, which is not given")
        for kind, path in self.media:
            with named(f"--{kind}"):
                check_there(kind, path)

    def __call__(self) -> int:
        from g4ir.engine.scheduler import SchedulerConfig
        from g4ir.generate.offline import check_flags

        config = SchedulerConfig(**self.draft.scheduler())
        flags = {k: vars(self)[k] for k in ("bos", "stop", *SETTING_KINDS)}
        flags |= self.sampling.settings()
        check_flags(flags)
        with self._lines() as lines:  # before a MODEL is built
            found = self.with_engine(self.draft)
            if self.chat:
                check_turns(Path(found.engine))
            with (
                console.Progress() as progress,
                closing(self.load.to_generate(found.engine, progress)) as engine,
            ):
                return found._answer(engine, lines, flags, config, progress)

    def _lines(self) -> AbstractContextManager[Any]:
        if self.input_jsonl == "-":
            return nullcontext(sys.stdin.buffer)
        return nullcontext() if self.input_jsonl is None else Path(self.input_jsonl).open("rb")

    def _answer(
        self,
        engine: Engine,
        lines: Any,
        flags: dict[str, Any],
        config: SchedulerConfig,
        progress: console.Progress,
    ) -> int:
        from g4ir.generate.offline import OfflineEngine

        if self.chat:
            progress.stop()
            self._chat(engine)
            return 0
        offline = OfflineEngine(engine, flags, config)
        if self.input_jsonl is not None:
            progress.stop()
            source = "stdin" if self.input_jsonl == "-" else self.input_jsonl
            answers = map(_log_and_emit, offline.answer_lines(lines, source))
            return 1 if sum(a.failed for a in answers) else 0
        name = "prompt" if self.tokens is None else "tokens"
        request = offline.request({name: vars(self)[name]}, flag_of(name), self.media)
        if self.json:
            progress.stop()
            _log_and_emit(offline.answer(request))
        else:
            progress("reading the prompt")
            _say_summary(_stream(offline, request, progress), self.sampling.seed)
        return 0

    def _chat(self, engine: Engine) -> None:
        """Answer the prompt as a user message."""
        with begun(engine, self.draft, self.talk, self.sampling) as talk:
            talk.stop_ids = frozenset(self.stop or ())
            for kind, path in self.media:
                talk.attach(kind, path, **encode_options(kind, vars(self)))
            if self.json:
                emit(talk.say(self.prompt or "").output())
                return
            screen = Screen(sys.stdout.isatty())
            try:
                turn = talk.say(self.prompt or "", screen)
            finally:
                screen.end()
            console.say(summary(turn, engine.limits.max_seq))


def _log_and_emit(result: Result | Failure) -> Result | Failure:
    emit(result.output())
    print(json.dumps(result.log()), file=sys.stderr, flush=True)
    return result


def _stream(offline: OfflineEngine, request: OfflineRequest, progress: console.Progress) -> Result:
    """Print each piece as it comes: text, or ids without a tokenizer."""
    text = TextStream(offline.codec.vocabulary) if offline.codec else None
    begun, count = time.perf_counter(), 0

    def told(token: int) -> None:
        nonlocal count
        progress.stop()
        print(text.push(token) if text else f"{' ' if count else ''}{token}", end="", flush=True)
        count += 1

    try:
        result = offline.answer(request, told)
    except (KeyboardInterrupt, console.Ended):
        print(text.rest() if text else "", flush=True)
        console.say(f"{count} new tokens in {time.perf_counter() - begun:.3f} s")
        raise
    print(text.rest() if text else "", flush=True)
    for note in result.request.notes:
        console.say(f"note: {note}")
    return result


def _say_summary(r: Result, given: int | None) -> None:
    seed = r.request.sampling.seed
    drawn = f"; drawn with --seed {seed}" if seed not in (None, given) else ""
    console.say(f"{answer_summary(r.counts, r.handle.tally, r.finish_reason)}{drawn}")
