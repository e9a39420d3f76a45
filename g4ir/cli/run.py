"""`g4ir run`: answer a prompt, or the lines of a file."""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from g4ir.errors import InputError
from g4ir.model.media import LISTS, encode_options
from g4ir.ui import console

from .common import Draft, Load, MediaFlags, OnDisk, OnEngine, emit, folder_drafts, output
from .talking import Sampling, Screen, Talk, answer_summary, chat_summary, open_chat
from .verb import TokenIds, argument, flag, flag_of, json_flag, setting

if TYPE_CHECKING:
    from g4ir.engine.engine import Engine
    from g4ir.generate.offline import Failure, OfflineEngine, OfflineRequest, Result


class Run(OnEngine):
    """Answer a prompt, or the lines of a file."""

    text: str | None = argument("the prompt", "TEXT", "?")
    prompt: str | None = flag("the prompt, instead of TEXT", None, "TEXT", short=("-p",))
    tokens: TokenIds | None = flag("the prompt as token ids", None, "2,5,7")
    input_jsonl: str | None = flag("requests, one JSON object per line (guide.md)", None, "FILE")
    stop: TokenIds | None = flag("additional stop token ids, such as 1,106", None, "IDS")
    json: bool = json_flag()
    load: Load
    chat: bool = flag("apply the chat template to the prompt", False, title="conversation")
    talk: Talk
    media: MediaFlags
    dump: str | None = flag("write values of the graph, such as L*.out; no answer", None, "NAMES")
    dump_to: str | None = flag("safetensors file of --dump", None, "FILE")
    bos: bool | None = setting("off: no <bos> before a raw prompt")
    sampling: Sampling
    draft: Draft
    disk: OnDisk

    def __post_init__(self) -> None:
        if self.text is not None:  # `dataclasses.replace` copies both fields
            if self.prompt not in (None, self.text):
                raise InputError("give TEXT or --prompt, not both")
            object.__setattr__(self, "prompt", self.text)
        sources = ("prompt", "tokens", "input_jsonl")
        first, *more = [flag_of(x) for x in sources if vars(self)[x] is not None] or [""]
        message = f"one of the arguments TEXT {' '.join(map(flag_of, sources))} is required"
        if more:
            message = f"argument {more[0]}: not allowed with argument {first}"
        if more or not first:
            raise InputError(f"{message} (see g4ir run --help)")
        if self.bos is not None and (self.chat or self.tokens is not None):
            raise InputError("--set bos is for raw text: leave it out with --chat and --tokens")
        if self.chat and self.prompt is None:
            raise InputError("--chat is for a text: leave it out with --tokens and --input-jsonl")
        talk = ("system", "tools", "think", "think_budget")
        if not self.chat and (talk_flags := [name for name in talk if name in self.explicit]):
            raise InputError(f"{flag_of(talk_flags[0])} is for --chat, which is not given")
        example = '{"prompt": "...", "images": ["a.png"]}'
        self.media.check(self.input_jsonl and "--input-jsonl", example)
        self._check_dump()

    def _check_dump(self) -> None:
        if (self.dump is None) != (self.dump_to is None):
            raise InputError("--dump NAMES and --dump-to FILE go together")
        excluded = {"--chat": self.chat, "--input-jsonl": self.input_jsonl}
        if self.dump is not None and (first := next((k for k, v in excluded.items() if v), None)):
            raise InputError(f"--dump is for a raw prompt or --tokens: leave out {first}")
        if self.dump_to is not None and not Path(self.dump_to).absolute().parent.is_dir():
            raise InputError(f"--dump-to {self.dump_to}: its directory does not exist")

    def __call__(self) -> int:
        from g4ir.engine.scheduler import SchedulerConfig
        from g4ir.generate.offline import OfflineEngine, check_flags

        draft = folder_drafts(self.engine, self.draft)
        config = SchedulerConfig(prefix_disk=self.disk.prefix_disk, **draft.scheduler())
        flags = {"bos": self.bos, "stop": self.stop} | self.media.settings()
        flags |= self.sampling.settings()
        check_flags(flags)
        with ExitStack() as opened:
            lines = sys.stdin.buffer if self.input_jsonl == "-" else None
            if lines is None and self.input_jsonl is not None:  # before the engine is built
                lines = opened.enter_context(Path(self.input_jsonl).open("rb"))
            path = self.engine_path(draft, media=self.media.files)
            progress = opened.enter_context(console.Progress())
            engine = opened.enter_context(closing(self.load.to_generate(path, progress)))
            if self.chat:
                progress.stop()
                return self._chat(engine, draft)
            offline = OfflineEngine(engine, flags, config)
            if self.dump is not None:
                return self._dump(offline, progress)
            return self._answer(offline, progress) if lines is None else self._lines(offline, lines)

    def _lines(self, offline: OfflineEngine, lines: Any) -> int:
        source = "stdin" if self.input_jsonl == "-" else str(self.input_jsonl)
        answers = map(_log_and_emit, offline.answer_lines(lines, source))
        return 1 if sum(a.failed for a in answers) else 0

    def _answer(self, offline: OfflineEngine, progress: console.Progress) -> int:
        name = "prompt" if self.tokens is None else "tokens"
        request = offline.request({name: vars(self)[name]}, flag_of(name), self.media.files)
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

    def _dump(self, offline: OfflineEngine, progress: console.Progress) -> int:
        """Write the values of --dump to a file, and print their names, dtypes and shapes."""
        from g4ir.generate.dump import write_values

        name = "prompt" if self.tokens is None else "tokens"
        fields = {name: vars(self)[name], "max_new_tokens": 1}
        tokens = offline.request(fields, flag_of(name), self.media.files).tokens
        media = {n: [p for k, p in self.media.files if k == kind] for n, kind in LISTS.items()}
        plan = offline.engine.inspect(tokens, (self.dump or "").split(","), "prefill", **media)
        progress(f"{len(plan.ids)} tokens through the plain graph")
        types = write_values(Path(self.dump_to or ""), plan)
        progress.stop()
        rows = {k: {"dtype": t.dtype, "shape": [*t.shape]} for k, t in types.items()}
        lines = [f"{k}  {t}\n" for k, t in types.items()]
        return output(self.json, rows, "".join(lines))

    def _chat(self, engine: Engine, draft: Draft) -> int:
        """Answer the prompt as a user message."""
        with open_chat(engine, draft, self.disk, self.talk, self.sampling) as talk:
            talk.stop_ids = frozenset(self.stop or ())
            for kind, path in self.media.files:
                talk.attach(kind, path, **encode_options(kind, self.media.settings()))
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
    """Answer a request, printing the text of each token as it is generated, or token ids without a
    tokenizer; return the result."""
    from g4ir.chat.prompt import TextStream

    text = TextStream(offline.codec.vocabulary) if offline.codec else None
    between = ""

    def print_token(token: int) -> None:
        nonlocal between
        progress.stop()
        print(text.push(token) if text else f"{between}{token}", end="", flush=True)
        between = " "

    try:
        result = offline.answer(request, print_token)
    except (KeyboardInterrupt, console.Ended):
        print(text.flush() if text else "", flush=True)
        raise
    print(text.flush() if text else "", flush=True)
    for note in result.request.notes:
        console.say(f"note: {note}")
    return result
