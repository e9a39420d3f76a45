"""The folder that `python -m g4ir_vllm.prepare` creates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from serving import CHUNK, ROWS, VOCAB, chat_engine

import g4ir
from g4ir.errors import EngineError, InputError
from g4ir_vllm.config import EngineConfig, engine_folder
from g4ir_vllm.prepare import main, prepare
from tests.engines import add_file
from tests.serve.running import MAX_SEQ, chat_tokenizer


def test_a_folder(engine_folder: Path, tmp_path: Path) -> None:
    out = prepare(engine_folder, tmp_path / "a" / "out")
    config = EngineConfig.from_dict(json.loads((out / "config.json").read_text()))
    assert engine_folder_of(out, config) == engine_folder.resolve()
    assert (config.max_batch, config.prefill_chunk) == (ROWS, CHUNK)
    assert (config.max_position_embeddings, config.vocab_size) == (MAX_SEQ, VOCAB)
    assert config.media_ids == []
    for name in ("tokenizer.json", "chat_template.jinja", "tokenizer_config.json"):
        assert (out / name).read_bytes() == (engine_folder / name).read_bytes()
    said = json.loads((out / "generation_config.json").read_text())
    assert len(said["eos_token_id"]) == 3 and said["temperature"] == 0


def engine_folder_of(out: Path, config: EngineConfig) -> Path:
    return engine_folder(str(out), config)


def test_placeholders_of_media(tmp_path: Path) -> None:
    sizes = {"max_seq": 64, "prefill_chunk": 64, "image_budgets": [70]}
    engine = chat_engine(tmp_path / "engine", "tiny-media", **sizes)
    config = json.loads((prepare(engine, tmp_path / "out") / "config.json").read_text())
    assert len(config["media_ids"]) == 3


def test_what_is_refused(engine_folder: Path, tmp_path: Path) -> None:
    g4ir.build("tiny-ple", tmp_path / "bare", backend="reference", random_weights=0).close()
    with pytest.raises(EngineError, match=r"tokenizer\.json"):
        prepare(tmp_path / "bare", tmp_path / "out")
    g4ir.build("tiny-embedding", tmp_path / "e", backend="reference", random_weights=0).close()
    with pytest.raises(InputError, match="is an encoder"):
        prepare(tmp_path / "e", tmp_path / "out")
    with pytest.raises(EngineError, match="engine directory"):
        prepare(tmp_path, tmp_path / "out")
    with pytest.raises(InputError, match="not an empty folder"):
        prepare(engine_folder, tmp_path)
    assert not (tmp_path / "out").exists()


def test_the_command(
    engine_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main([str(engine_folder), str(out)]) == 0
    printed = capsys.readouterr().out
    assert f"vllm serve {out}" in printed and "no chat template" not in printed
    assert main([str(engine_folder), str(out)]) == 2
    assert "not an empty folder" in capsys.readouterr().err


@pytest.mark.parametrize("config", ({}, {"chat_template": "{{ messages }}"}))
def test_engines_without_a_template_file(
    config: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = tmp_path / "engine"
    g4ir.build("tiny-ple", engine, backend="reference", random_weights=0).close()
    add_file(engine, "tokenizer.json", chat_tokenizer().to_str())
    add_file(engine, "tokenizer_config.json", json.dumps(config))
    assert main([str(engine), str(tmp_path / "out")]) == 0
    assert ("the engine has no chat template" in capsys.readouterr().out) == (not config)
