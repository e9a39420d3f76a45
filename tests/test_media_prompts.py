"""Prompts with media: expansion equal to the reference's processors, and `g4ir run` with files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
import transformers

from g4ir import Engine, load_engine, load_spec
from g4ir.errors import InputError
from g4ir.media.audio import Waveform, prepare_audio
from g4ir.media.images import prepare_image, read_image
from g4ir.media.prompt import check_placeholders, expand_placeholders, expand_text, mark
from g4ir.media.soft import Soft, counts
from g4ir.media.videos import Video, prepare_video, read_footage, video_settings
from g4ir.model.audio import audio_settings
from g4ir.model.images import image_settings
from g4ir.model.media import KINDS, Media, check_budget, check_supported
from g4ir.spec.parts import Tokens
from tests.cases import TABLES, read_table
from tests.cli_tools import g4ir as command
from tests.cli_tools import refused
from tests.cli_tools import tokenizer as plain_tokenizer
from tests.engines import add_file
from tests.media_tools import (
    RATE,
    SPECIAL,
    TOWER,
    UNIFIED,
    made,
    media_engine,
    media_files,
    media_tokenizer,
    noise,
    processor,
)

IDS = Tokens(bos=2, eos=(1,), pad=0, image=10, video=11, audio=12, boi=20, eoi=21, boa=22, eoa=23)


def soft(kind: str, *sizes: int, times: tuple[str, ...] = (), width: int = 4) -> Soft:
    return Soft(kind, tuple(torch.zeros(n, width) for n in sizes), times)


def spelled(text: str) -> list[int]:
    """A stand-in for a tokenizer: a character is its code above 1000."""
    return [1000 + ord(c) for c in text]


def place(ids: list[int], *rest: Any, **more: Any) -> list[int]:
    return expand_placeholders([ids], *rest, **more)[0]


# --- ids and text -----------------------------------------------------------------------------

CLIP = soft("video", 2, 2, times=("00:00", "01:05"))
CASES: dict[str, dict[str, dict[str, Any]]] = read_table("media_prompts.yaml")


@contextmanager
def expected(says: str | None) -> Iterator[None]:
    """A context that raises InputError with this text, if there is one."""
    with pytest.raises(InputError, match=says) if says else nullcontext():
        yield


@pytest.mark.parametrize("case", CASES["place"])
def test_place(case: str) -> None:
    c = CASES["place"][case]
    softs = [CLIP if s == "clip" else soft(s.split()[0], int(s.split()[1])) for s in c["soft"]]
    with expected(c.get("says")):
        runs = (spelled(v) if isinstance(v, str) else [v] for v in c.get("want", []))
        want = [*chain.from_iterable(runs)]
        assert place(c["ids"], softs, IDS, spelled) == want
        assert place(want, softs, IDS, spelled) == want


#: tables of refusals, and what refuses
CHECKS = {
    "given": lambda c: check_placeholders(c["ids"], c["kinds"], IDS),
    "taken": lambda c: check_supported(c["kind"], Media(tuple(c["of"])), load_spec(c["variant"])),
}


@pytest.mark.parametrize(("table", "case"), [(t, c) for t in CHECKS for c in CASES[t]])
def test_what_is_taken(table: str, case: str) -> None:
    c = CASES[table][case]
    with expected(c.get("says")):
        CHECKS[table](c)


def spell(token: int) -> str:
    return SPECIAL[next(k for k in SPECIAL if getattr(IDS, k) == token)]


@pytest.mark.parametrize("case", CASES["mark"])
def test_mark(case: str) -> None:
    c = CASES["mark"][case]
    with expected(c.get("says")):
        found, note = mark(c["text"], c["kinds"], KINDS, IDS, spell, "<bos>")
        assert found == c["want"]
        assert (note is None) == ("note" not in c) and re.search(c.get("note", ""), note or "")


def test_marks_and_placeholders_that_a_variant_lacks() -> None:
    tokens = replace(IDS, boi=None, eoa=None)
    softs = [soft("image", 2), soft("audio", 2)]
    assert place([10, 5, 12], softs, tokens) == [10, 10, 21, 5, 22, 12, 12]
    with pytest.raises(InputError, match="video: 1 given, but the engine has no placeholder"):
        place([5], [CLIP], replace(IDS, video=None))


def test_media_of_a_batch_go_row_by_row() -> None:
    softs = [soft("image", n) for n in (1, 2, 3)]
    rows = expand_placeholders([[10, 5], [6], [10, 10]], softs, IDS)
    assert rows == [[20, 10, 21, 5], [6], [20, 10, 10, 21, 20, 10, 10, 10, 21]]
    assert expand_placeholders([[10] * 2, [10] * 4], softs, IDS) == [[10] * 2, [10] * 4]


def test_ids_and_markers_of_kinds_that_are_not_taken_are_text() -> None:
    ids = [2, 11, 10, 12, 12]
    assert place(ids, [soft("image", 2)], IDS, kinds=("image",)) == [2, 11, 20, 10, 10, 21, 12, 12]
    assert place(ids, [], IDS, kinds=()) == ids
    check_placeholders(ids, ["image"], IDS, ("image",))
    text = r"the <video> tag, \<video>, <image>"
    want = r"the <video> tag, \<video>, <|image|>"
    assert mark(text, ["image"], ("image",), IDS, spell) == (want, None)
    assert mark(text, [], (), IDS, spell) == (text, None)


def test_budgets_that_an_engine_has() -> None:
    """What is advised keeps the others and the default, and can be built."""
    media = Media(("image",), budgets=(70, 280), default=280)
    check_budget(70, media)
    with pytest.raises(InputError, match=r"built for 70, 280: .* `--image-budget 280,70,140`"):
        check_budget(140, media)
    with pytest.raises(InputError, match=r"budget 100: this engine was .* choose from them$"):
        check_budget(100, media)


# --- the reference's processors ---------------------------------------------------------------

RATES = 0.7  # frames per second of the videos


@cache
def reference(variant: str) -> tuple[Any, Any, Tokens]:
    """The processor with a small tokenizer, the tokenizer, and its special tokens."""
    image = processor(variant)
    name = type(image).__name__.removesuffix("ImageProcessor")
    tokenizer, tokens = media_tokenizer(Tokens(), 96)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<bos>",
        eos_token="<eos>",
        pad_token="<pad>",
        extra_special_tokens={f"{k}_token": v for k, v in SPECIAL.items() if k != "video"},
    )
    extractor = getattr(transformers, f"{name}AudioFeatureExtractor")()
    made = getattr(transformers, f"{name}Processor")
    return made(extractor, image, fast, processor(variant, "video")), tokenizer, tokens


PICTURES = [noise(60, 200, 3), noise(96, 48, 3, seed=1)]
FRAMES = noise(40, 48, 64, 3)
SOUNDS = [np.sin(np.arange(n, dtype=np.float32)) for n in (5_000, 20_001)]
PROMPTS: dict[str, tuple[str, str]] = TABLES["media prompts"]["prompts"]


def ours(variant: str, kinds: str) -> dict[str, list[Soft]]:
    """As many soft tokens as our preprocessors say."""
    spec = load_spec(variant)
    pictures = [prepare_image(p, image_settings(spec)).soft_tokens for p in PICTURES]
    clip = prepare_video(Video(FRAMES, RATES), video_settings(spec))
    sounds = [prepare_audio(Waveform(s, RATE), audio_settings(spec)).soft_tokens for s in SOUNDS]
    film = soft("video", *[clip.soft_tokens] * len(clip.times), times=clip.times)
    return {
        "i": [soft("image", n) for n in pictures[: kinds.count("i")]],
        "v": [film] * kinds.count("v"),
        "a": [soft("audio", n) for n in sounds[: kinds.count("a")]],
    }


def theirs(variant: str, kinds: str, text: str) -> list[int]:
    processor, _, _ = reference(variant)
    given: dict[str, Any] = {"text": [text]}
    if "i" in kinds:
        given["images"] = [PICTURES[: kinds.count("i")]]
    if "v" in kinds:
        count = kinds.count("v")
        given["videos"] = [FRAMES] * count
        given["video_metadata"] = [{"total_num_frames": len(FRAMES), "fps": RATES}] * count
    if "a" in kinds:
        given["audio"] = SOUNDS[: kinds.count("a")]
    (ids,) = processor(**given)["input_ids"]
    return list(ids)


@pytest.mark.parametrize("variant", (TOWER, UNIFIED))
@pytest.mark.parametrize("case", PROMPTS)
def test_prompts_are_the_processors(variant: str, case: str) -> None:
    """Text, and ids where no word reaches into a frame's time."""
    kinds, text = PROMPTS[case]
    want = theirs(variant, kinds, text)
    _, tokenizer, tokens = reference(variant)
    softs = [s for group in ours(variant, kinds).values() for s in group]

    def plain(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    expanded = expand_text(text, softs, tokens, tokenizer.id_to_token)
    assert place(plain(expanded), softs, tokens, plain) == want
    if "v" not in kinds or case == "video first":
        assert place(plain(text), softs, tokens, plain) == want


# --- g4ir run ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    """Takes every kind."""
    return load_engine(media_engine(tmp_path_factory.mktemp("engines") / "media"))


@pytest.fixture
def engine(loaded: Engine, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Commands take the one that is loaded, which saves seconds."""
    monkeypatch.setattr("g4ir.builder.load.load_engine", lambda *words, **options: loaded)
    monkeypatch.setattr(Engine, "close", lambda self: None)
    return loaded.path


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """a.png, b.jpg, c.mp4, d.wav, in the current directory."""
    folder = media_files(tmp_path / "files")
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The other kind of model, without a tokenizer."""
    return made(tmp_path_factory.mktemp("bare") / "e", "tiny-unified")


def answered(*words: str | Path) -> tuple[list[int], dict[str, Any]]:
    """The new tokens of a run, and what its log says."""
    outcome = command("run", *words, "--max-new-tokens", "6", "--json")
    assert outcome.code == 0, outcome.err
    return json.loads(outcome.out)["tokens"], json.loads(outcome.err.splitlines()[-1])


def generated(engine: Engine, ids: list[int], **media: Any) -> list[int]:
    return engine.generate(ids, 6, **media)


def test_run_with_an_image(engine: Path, loaded: Engine, files: Path) -> None:
    image = loaded.spec.tokens.image
    got, log = answered(engine, "--tokens", f"2,5,{image},7", "--image", "a.png")
    assert got == generated(loaded, [2, 5, image, 7], images=["a.png"])
    assert got == generated(loaded, [2, 5, image, 7], images=[read_image("a.png")])
    with PIL.Image.open("a.png") as pixels:
        assert got == generated(loaded, [2, 5, image, 7], images=[pixels.convert("RGBA")])
    with pytest.raises(InputError, match="or a Pillow image"):
        generated(loaded, [2, 5, image, 7], images=[5])
    soft = loaded.encode("image", "a.png")
    assert got == generated(
        loaded, place([2, 5, image, 7], [soft], loaded.spec.tokens), images=[files / "a.png"]
    )
    assert got != generated(loaded, [2, 5, image, 7], images=["b.jpg"])
    assert log["soft_tokens"] == {"image": soft.count} and log["prompt_tokens"] == soft.count + 5
    assert 0 < log["encode_s"] < log["time_to_first_token_s"]


def test_run_text_with_every_kind(engine: Path, loaded: Engine, files: Path) -> None:
    """In the text's own order, and equal to what is made of its ids."""
    text = "<bos>see <audio> 00 <video>, <image> or <image>?"
    media = ("--image", "a.png", "--audio", "d.wav", "--video", "c.mp4", "--image", "b.jpg")
    got, log = answered(engine, "--prompt", text, *media, "--set", "frames=2")
    softs = [loaded.encode("image", "a.png"), loaded.encode("audio", "d.wav")]
    softs += [loaded.encode("video", "c.mp4", frames=2), loaded.encode("image", "b.jpg")]
    assert softs[2].times == ("00:00", "00:01") and log["soft_tokens"] == counts(softs)
    tokenizer = loaded.tokenizer()
    for kind, string in SPECIAL.items():
        text = text.replace(f"<{kind}>", string) if kind in KINDS else text
    ids = tokenizer.encode(expand_text(text, softs, loaded.spec.tokens, tokenizer.id_to_token)).ids
    assert log["prompt_tokens"] == len(ids) and "notes" not in log
    clip = read_footage("c.mp4", video_settings(loaded.spec), 2)
    assert got == generated(loaded, ids, images=["a.png", "b.jpg"], audio=["d.wav"], videos=[clip])


def test_run_without_a_tokenizer(bare: Path, files: Path) -> None:
    tokens = load_spec("tiny-unified").tokens
    words = ("--tokens", f"2,{tokens.video},5", "--video", "c.mp4", "--set", "frames=2")
    got, log = answered(bare, *words)
    assert log["notes"] == ["no tokenizer: the frames of videos come without their times"]
    engine = load_engine(bare)
    clip = read_footage("c.mp4", video_settings(engine.spec), 2)
    assert got == generated(engine, [2, tokens.video, 5], videos=[clip])
    assert log["prompt_tokens"] == log["soft_tokens"]["video"] + 6


@pytest.mark.parametrize(("media", "words"), TABLES["media prompts"]["refused"])
def test_generate_refuses(loaded: Engine, files: Path, media: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        loaded.generate([2, loaded.spec.tokens.audio], 6, **media)
    with pytest.raises(InputError, match=r"video: the prompt has 1 placeholders .* 0 media"):
        loaded.generate([2, loaded.spec.tokens.video], 6)


# --- JSON lines -------------------------------------------------------------------------------


def test_lines_with_each_kind_of_media(engine: Path, files: Path, tmp_path: Path) -> None:
    """Answered as by flags."""
    lines: list[tuple[dict[str, Any], str]] = TABLES["media prompts"]["lines"]
    file = tmp_path / "in.jsonl"
    file.write_text("\n".join(json.dumps(line) for line, _ in lines))
    outcome = command("run", engine, "--input-jsonl", file, "--max-new-tokens", "6")
    logs = [line for line in outcome.err.splitlines() if not line.startswith("g4ir: loading ")]
    found = (map(json.loads, texts) for texts in (outcome.out.splitlines(), logs))
    kinds = []
    for (line, words), answer, log in zip(lines, *found, strict=True):
        budget = ("--set", "image_budget=140") if "image_budget" in line else ()
        got, alone = answered(engine, "--prompt", line["prompt"], *words.split(), *budget)
        assert answer["tokens"] == got and log.get("notes") == alone.get("notes")
        kinds.append([*log.get("soft_tokens", {})])
    assert outcome.code == 0 and kinds == [["image"], ["video"], ["audio"], []]


# --- what is refused --------------------------------------------------------------------------


def test_engines_that_take_less(tmp_path: Path, files: Path) -> None:
    deaf = made(tmp_path / "deaf", "tiny-media", media="image")
    message = refused("run", deaf, "--tokens", "2,5", "--audio", "d.wav")
    assert "--audio: this engine takes text, image, no audio" in message
    assert "`g4ir build --media image,audio`" in message
    text = made(tmp_path / "e", "tiny-dense")
    message = refused("run", text, "--tokens", "2,5", "--image", "a.png")
    assert "takes text, no image, and tiny-dense takes text alone" in message


def test_a_tokenizer_without_the_special_tokens(bare: Path, files: Path, tmp_path: Path) -> None:
    shutil.copytree(bare, tmp_path / "e")
    add_file(tmp_path / "e", "tokenizer.json", plain_tokenizer().to_str())
    message = refused("run", tmp_path / "e", "--prompt", "<image>", "--image", "a.png")
    assert f"no special token {load_spec('tiny-unified').tokens.image}," in message
    message = refused("run", bare, "--prompt", "<image>", "--image", "a.png")
    assert "tokenizer.json" in message and "token ids" in message
