"""Engines that take media: verify, verify --each-pass and bench of them; what their builds raise,
compare, refuse and advise before anything is made."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import g4ir
from g4ir.bench.runners import Workload, draw_tokens
from g4ir.builder.build import prepare
from g4ir.check.logits import verify_engine
from g4ir.check.media import HEAD, check_media
from g4ir.check.passes import verify_each_pass
from g4ir.check.tokens import random_ids
from g4ir.engine.engine import Engine
from g4ir.errors import PlanError, SpecError, WeightsError
from g4ir.model.audio import MelSettings
from g4ir.model.media import KINDS
from g4ir.plan.footprint import reserve
from g4ir.plan.options import BuildOptions
from g4ir.spec.record import Spec, load_spec
from tests import cli_tools as cli
from tests.cases import TABLES
from tests.engines import random_checkpoint
from tests.test_stages import attrs, break_pass, nodes

LIMITS: Mapping[str, Any] = {"backend": "reference", "max_seq": 136, "prefill_chunk": 70}
NAMES = ("tiny-media", "tiny-unified")
#: the graphs that nothing but media goes through, and of which the smallest of each part is run
SMALLEST = {
    "tiny-media": ("vision_70", "audio_125"),
    "tiny-unified": ("prefill_media", "vision_70", "audio_4000"),
}
HOLDERS = {"image": 500, "video": 501, "audio": 502}
#: of text, where it is not what is checked
FEW = (5, 6, 7, 8, 9, 10)


@pytest.fixture(scope="module")
def built(make_engine: Any) -> dict[str, Engine]:
    """Engines that take all media."""
    return {n: make_engine(n, random_weights=1, **LIMITS) for n in NAMES}


@pytest.fixture(params=NAMES)
def engine(request: pytest.FixtureRequest, built: dict[str, Engine]) -> Engine:
    return built[request.param]


def test_random_tokens_are_no_placeholders(engine: Engine, make_engine: Any) -> None:
    """All others are drawn; every engine of a spec is given the same."""
    ids = random_ids(engine, (3, 20_000), 0)
    assert set(ids.unique().tolist()) == set(range(512)) - set(HOLDERS.values())
    w = Workload(20_000, 2, batch=2)
    drawn = draw_tokens(w, engine)
    assert not torch.isin(drawn, torch.tensor([*HOLDERS.values()])).any()
    text = make_engine("tiny-media", random_weights=1, media="none", **LIMITS)
    assert torch.equal(drawn, draw_tokens(w, text))


def test_verify_against_transformers(built: dict[str, Engine]) -> None:
    """Media against the interpreter all the same."""
    said = cli.ok("verify", built["tiny-media"].path, "--against", "hf")
    assert all(name in said for name in SMALLEST["tiny-media"])


def test_report(engine: Engine) -> None:
    report = verify_engine(engine)
    media, name = report.media, engine.spec.name
    assert report.ok and media
    *towers, prompt = media.parts
    parts = {t.name for t in towers} | prompt.report.phases.keys()
    assert parts == {"prefill", "decode", *SMALLEST[name]}
    soft, chunk = (
        int(re.search(r, prompt.about)[1]) for r in (r"(\d+) of image", r"of (\d+), thr")
    )
    assert HEAD < chunk < HEAD + soft, "a chunk would cut the picture"
    longer = ("audio_250", "audio_500", "audio_750")
    assert media.not_run == (longer if name == "tiny-media" else ())
    plain = json.loads(json.dumps(report.to_dict()))["media"]
    assert plain["ok"] is True and plain["failed"] is None
    assert plain["parts"][0]["name"] == "vision_70" and "image, 60 of 70" in towers[0].text()


def test_tolerance_of_16_bits(tmp_path: Path) -> None:
    options = {**LIMITS, "dtype": "bfloat16", "audio_seconds": [1]}
    media = check_media(g4ir.build("tiny-media", tmp_path / "e", random_weights=1, **options))
    assert media.ok and not media.not_run and media.parts[-1].name == "prompt"


@pytest.mark.parametrize("name, param, tower", TABLES["media checks"]["wrong towers"])
def test_a_wrong_tower_is_named(
    built: dict[str, Engine], monkeypatch: pytest.MonkeyPatch, name: str, param: str, tower: str
) -> None:
    engine = built[name]
    weights = engine.runtime.params  # type: ignore[attr-defined]
    monkeypatch.setitem(weights, param, weights[param] + 0.3 * weights[param].flip(0))
    report = verify_engine(engine, tokens=FEW)
    assert not report.ok and report.text_ok and report.media
    assert report.media.failed == tower and report.to_dict()["media"]["failed"] == tower
    failed = [p.name for p in report.media.parts if p.failed]
    assert failed == [tower], "the prompt is given the interpreter's"
    (line,) = (x for x in report.text().splitlines() if "FAILED, " in x)
    assert tower in line and report.text().endswith("FAILED")


#: engines, their phases and towers, and a feed that these get wrong: padding that is seen, nothing
#: that is seen both ways, and caches that a picture left in disorder
WRONG_FEEDS = [
    ("tiny-media", "vision_70", "positions", lambda t: t.clamp(min=0)),
    ("tiny-media", "audio_125", "mask", torch.ones_like),
    ("tiny-unified", "prefill_media", "block_ids", lambda t: torch.full_like(t, -1)),
    ("tiny-media", "decode", "positions", lambda t: t + 1),
]


@pytest.mark.parametrize("case", WRONG_FEEDS, ids=lambda case: case[1])
def test_wrong_feeds_are_named(
    built: dict[str, Engine], monkeypatch: pytest.MonkeyPatch, case: Any
) -> None:
    name, part, feed, change = case
    engine, method = built[name], "run" if part in ("prefill_media", "decode") else "encode"
    inner = getattr(engine.runtime, method)

    def blind(called: str, feeds: dict[str, Any], *rest: Any) -> Any:
        wrong = {feed: change(feeds[feed])} if called == part else {}
        return inner(called, {**feeds, **wrong}, *rest)

    monkeypatch.setattr(engine.runtime, method, blind)
    report = verify_engine(engine, tokens=FEW)
    assert not report.ok and report.text_ok == (part != "decode")
    assert report.media and report.media.failed == part
    (wrong,) = (p for p in report.media.parts if p.failed)
    assert wrong.name == (part if method == "encode" else "prompt")
    if part == "prefill_media":
        assert "%L0.attn.out" in wrong.text() and wrong.text() in report.text()


def test_each_pass(engine: Engine) -> None:
    report = verify_each_pass(engine)
    assert report.ok and report.media == SMALLEST[engine.spec.name]
    longer = ("audio_250", "audio_500", "audio_750")
    assert report.left_out == (longer if engine.spec.name == "tiny-media" else ())
    assert report.to_dict()["left_out"] == report.left_out
    for name in (*report.media, *report.left_out):
        assert name in report.text().split("share_rope_tables")[0]


def test_each_pass_with_packed_weights(tmp_path: Path) -> None:
    """Of the towers too, with and without the checkpoint."""
    checkpoint = random_checkpoint(tmp_path / "c", "tiny-media", media=KINDS)
    engine = g4ir.build(None, tmp_path / "e", checkpoint=checkpoint, audio_seconds=[1], **LIMITS)
    report = verify_each_pass(engine, FEW, checkpoint)
    assert report.ok and report.media == ("vision_70", "audio_25") and not report.unknown
    report = verify_each_pass(engine, FEW)
    assert report.ok and report.media == ("vision_70",)
    assert report.unknown == ("audio_25",), "its relative keys are made when it is built"
    assert "without --checkpoint DIR: audio_25" in report.text()


def test_broken_pass_of_one_graph(
    built: dict[str, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    worse = nodes(attrs("norm_residual", eps=0.5))
    broken = "fuse_norm_residual"
    break_pass(monkeypatch, broken, lambda g: worse(g) if g.name == "vision_70" else g)
    culprit = verify_each_pass(built["tiny-media"], FEW).culprit
    assert culprit and culprit.name == broken and culprit.first
    assert culprit.first.phase == "vision_70"


# --- builds --------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {"random_weights": 0, "backend": "reference", "max_seq": 256}


def prepared(variant: str, **options: Any) -> Any:
    return prepare(load_spec(variant), BuildOptions(**OPTIONS | options))


# --- the prefill chunk ------------------------------------------------------------------------


def test_a_chunk_holds_the_largest_picture(caplog: pytest.LogCaptureFixture) -> None:
    """Where its tokens see each other; with a note."""
    with caplog.at_level(logging.WARNING):
        assert prepared("tiny-unified", prefill_chunk=16).config.limits.prefill_chunk == 70
        assert "prefill-chunk 16 is raised to 70" in caplog.text
        caplog.clear()
        assert prepared("tiny-unified", prefill_chunk=96).config.limits.prefill_chunk == 96
        assert prepared("tiny-media", prefill_chunk=16).config.limits.prefill_chunk == 16
        options = {"prefill_chunk": 16, "media": "audio"}
        assert prepared("tiny-unified", **options).config.limits.prefill_chunk == 16
    assert not caplog.text
    with caplog.at_level(logging.WARNING):
        short = prepared("tiny-unified", max_seq=64, prefill_chunk=16)
    assert short.config.limits.prefill_chunk == 64
    assert "max-seq 64: an image of 70 soft tokens, as built for, does not fit" in caplog.text


# --- spec and checkpoint ----------------------------------------------------------------------


@pytest.mark.parametrize("key, value", [("vision.rope_theta", 50.0), ("tokens.eoa", 499)])
def test_towers_are_those_of_the_checkpoint(tmp_path: Path, key: str, value: Any) -> None:
    """What leaves shapes alone is compared too, as far as the media that are taken need it."""
    spec = load_spec("tiny-media")
    part, _, name = key.partition(".")
    other = replace(spec, **{part: replace(getattr(spec, part), **{name: value})})
    checkpoint = random_checkpoint(tmp_path / "c", spec, media=KINDS)
    check_without_media(other, checkpoint, SpecError, key)


def test_a_checkpoint_without_towers_says_so(tmp_path: Path) -> None:
    checkpoint = random_checkpoint(tmp_path / "c", "tiny-media")
    check_without_media(load_spec("tiny-media"), checkpoint, WeightsError, "--media none")


def check_without_media(spec: Spec, checkpoint: Path, error: type[Exception], says: str) -> None:
    given = {"checkpoint": checkpoint, "backend": "reference", "max_seq": 256}
    with pytest.raises(error, match=says):
        prepare(spec, BuildOptions(**given))
    prepare(spec, BuildOptions(media="none", **given)).source.close()


# --- sound ------------------------------------------------------------------------------------


@pytest.mark.parametrize("soft", (1, 2, 13, 63, 125, 250, 750))
def test_limits_of_sound_are_exact(soft: int) -> None:
    """The longest clip of so many soft tokens, to the padding's multiple."""
    settings = MelSettings(bins=128).limited_to(soft)
    assert settings.soft_tokens(settings.max_samples) <= soft
    if soft < 750:
        assert settings.soft_tokens(settings.max_samples + settings.pad_multiple) > soft


# --- memory -----------------------------------------------------------------------------------


def test_leaving_media_out_is_advised_where_that_fits() -> None:
    """The towers of e2b before a tiny text model."""
    spec = replace(load_spec("tiny-media"), vision=load_spec("e2b").vision)
    text = prepare(spec, BuildOptions(media="none", **OPTIONS))
    memory = 1 << 30
    while memory - reserve(memory) < text.param_bytes() + (64 << 20):
        memory += 1 << 28
    with pytest.raises(PlanError, match="--media none"):
        prepare(spec, BuildOptions(memory=memory, media="image", image_budgets=[280], **OPTIONS))


def test_a_chunk_that_would_be_raised_again_is_not_advised() -> None:
    spec = load_spec("tiny-unified")
    with pytest.raises(PlanError) as refused:
        prepare(spec, BuildOptions(memory=1 << 20, **OPTIONS | {"prefill_chunk": 256}))
    assert "--prefill-chunk 64" not in str(refused.value)
