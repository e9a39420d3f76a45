"""Builds that take media: what is raised, compared, refused and advised before anything is made."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from g4ir.builder.build import prepare
from g4ir.errors import PlanError, SpecError, WeightsError
from g4ir.model.audio import MelSettings
from g4ir.model.media import KINDS
from g4ir.plan.footprint import reserve
from g4ir.plan.options import BuildOptions
from g4ir.spec.record import Spec, load_spec
from tests.engines import random_checkpoint

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
