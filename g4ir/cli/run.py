"""`g4ir run`: answer a prompt, or the lines of a file."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from g4ir.errors import InputError
from g4ir.model.media import KINDS, MEDIA_SETTINGS, check_file, encode_options
from g4ir.ui import console

from .common import Draft, Load, OnEngine, emit
from .talking import Sampling, Screen, Talk, answer_summary, begun, chat_summary
from .verb import Text, TokenIds, flag, flag_of

if TYPE_CHECKING:
    from g4ir.engine.engine import Engine
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
    draft: Draft
    load: Load

    def __post_init__(self) -> None:
        if self.bos is not None and (self.chat or self.tokens is not None):
            raise InputError("--no-bos is for raw text: leave it out with --chat and --tokens")
        if self.chat and self.prompt is None:
            raise InputError("--chat is for --prompt: tokens and JSON lines are taken as they are")
        talk = ("system", "tools", "think", "think_budget")
        if not self.chat and (given := [name for name in talk if name in self.given]):
            raise InputError(f"{flag_of(given[0])} is for --chat, which is not given")
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
            try:
                check_file(kind, path)
            except InputError as e:
                raise InputError(f"--{kind}: {e}") from None

    def __call__(self) -> int:
        from g4ir.engine.scheduler import SchedulerConfig
        from g4ir.generate.offline import OfflineEngine, check_flags

        config = SchedulerConfig(**self.draft.scheduler())
        flags = {k: vars(self)[k] for k in ("bos", "stop", *SETTING_KINDS)}
        flags |= self.sampling.settings()
        check_flags(flags)
        with ExitStack() as opened:
            lines = sys.stdin.buffer if self.input_jsonl == "-" else None
            if lines is None and self.input_jsonl is not None:  # before a MODEL is built
                lines = opened.enter_context(Path(self.input_jsonl).open("rb"))
            path = self.with_engine(self.draft).engine
            progress = opened.enter_context(console.Progress())
            engine = opened.enter_context(closing(self.load.to_generate(path, progress)))
            if self.chat:
                progress.stop()
                return self._chat(engine)
            offline = OfflineEngine(engine, flags, config)
            return self._answer(offline, progress) if lines is None else self._lines(offline, lines)

    def _lines(self, offline: OfflineEngine, lines: Any) -> int:
        source = "stdin" if self.input_jsonl == "-" else str(self.input_jsonl)
        answers = map(_log_and_emit, offline.answer_lines(lines, source))
        return 1 if sum(a.failed for a in answers) else 0

    def _answer(self, offline: OfflineEngine, progress: console.Progress) -> int:
        name = "prompt" if self.tokens is None else "tokens"
        request = offline.request({name: vars(self)[name]}, flag_of(name), self.media)
        if self.json:
            progress.stop()
            _log_and_emit(offline.answer(request))
            return 0
        progress("reading the prompt")
        r = _stream(offline, request, progress)
        seed = r.request.sampling.seed
        drawn = f"; drawn with --seed {seed}" if seed not in (None, self.sampling.seed) else ""
        console.say(f"{answer_summary(r.counts, r.handle.tally, r.finish_reason)}{drawn}")
        return 0

    def _chat(self, engine: Engine) -> int:
        """Answer the prompt as a user message."""
        with begun(engine, self.draft, self.talk, self.sampling) as talk:
            talk.stop_ids = frozenset(self.stop or ())
            for kind, path in self.media:
                talk.attach(kind, path, **encode_options(kind, vars(self)))
            if self.json:
                emit(talk.say(self.prompt or "").output())
                return 0
            screen = Screen(sys.stdout.isatty())
            try:
                turn = talk.say(self.prompt or "", screen)
            finally:
                screen.end()
            console.say(chat_summary(turn, talk))
        return 0


def _log_and_emit(result: Result | Failure) -> Result | Failure:
    emit(result.output())
    print(json.dumps(result.log()), file=sys.stderr, flush=True)
    return result


def _stream(offline: OfflineEngine, request: OfflineRequest, progress: console.Progress) -> Result:
    """Print each piece as it comes: text, or ids without a tokenizer."""
    from g4ir.chat.prompt import TextStream

    text = TextStream(offline.codec.vocabulary) if offline.codec else None
    between = ""

    def told(token: int) -> None:
        nonlocal between
        progress.stop()
        print(text.push(token) if text else f"{between}{token}", end="", flush=True)
        between = " "

    try:
        result = offline.answer(request, told)
    except (KeyboardInterrupt, console.Ended):
        print(text.flush() if text else "", flush=True)
        raise
    print(text.flush() if text else "", flush=True)
    for note in result.request.notes:
        console.say(f"note: {note}")
    return result
