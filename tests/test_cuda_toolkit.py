"""What the C++ part of CUDA programs needs, found or missed, in file systems made for it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils import cpp_extension

from g4ir.backends.cuda import toolkit as cuda_toolkit
from g4ir.backends.cuda.toolkit import HEADERS, toolchain, toolkit
from g4ir.errors import MissingError, check_all

NOTHING: tuple[list[Path], list[Path]] = ([], [])


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_toolkit, "cache_root", lambda: tmp_path / "kept")


def headers(folder: Path, includes: str = "") -> Path:
    """Headers, the last of which includes another file."""
    folder.mkdir(parents=True)
    for name in HEADERS:
        (folder / name).write_text("")
    if includes:
        (folder / HEADERS[-1]).write_text(f"#include <{includes}>\n")
    return folder


def library(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["gcc", "-shared", "-x", "c", "/dev/null", "-o", str(path)], check=True)
    return path


def test_what_torch_finds_itself_is_left_alone(tmp_path: Path) -> None:
    include, driver = headers(tmp_path / "cuda/include"), library(tmp_path / "lib/libcuda.so")
    assert toolkit(([include], [driver.parent]), tmp_path, tmp_path, []) is None
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize(
    ("place", "whose"),
    [
        ("usr/local/cuda/include", "root"),
        ("nvidia/cu13/include", "wheels"),
        ("triton/backends/nvidia/include", "wheels"),
    ],
)
def test_headers_and_driver_elsewhere(tmp_path: Path, place: str, whose: str) -> None:
    """They are made a toolkit, once; a driver by another name is linked with as libcuda.so."""
    include = headers(tmp_path / whose / place)
    headers(tmp_path / "root/usr/local/cuda-8", includes="gone.h")
    driver = library(tmp_path / "driver/libcuda.so.1")
    missing = tmp_path / "gone" / "libcuda.so.1"
    found = [
        toolkit(NOTHING, tmp_path / "root", tmp_path / "wheels", [missing, driver])
        for _ in range(2)
    ]
    home = found[0]
    assert home and found[1] == home
    assert (home / "include").resolve() == include
    assert (home / "lib64/libcuda.so").resolve() == driver
    assert [p.name for p in (tmp_path / "kept/cuda").iterdir()] == [home.name]
    # This is a toolkit that torch itself would have been content with.
    torchs = [home / "include"], [home / "lib64"]
    assert toolkit(torchs, tmp_path / "nowhere", tmp_path / "nowhere", []) is None


def test_a_driver_in_its_usual_place(tmp_path: Path) -> None:
    headers(tmp_path / "nvidia/cu13/include")
    driver = library(tmp_path / "usr/local/nvidia/lib64/libcuda.so.1")
    home = toolkit(NOTHING, tmp_path, tmp_path, [])
    assert home and (home / "lib64/libcuda.so").resolve() == driver


def test_a_driver_that_moved(tmp_path: Path) -> None:
    """Links into what has gone are made again."""
    headers(tmp_path / "nvidia/cu13/include")
    driver = library(tmp_path / "a/libcuda.so.1")
    link = tmp_path / "link.so"
    link.symlink_to(driver)
    home = toolkit(NOTHING, tmp_path, tmp_path, [link])
    driver.unlink()
    link.unlink()
    link.symlink_to(library(tmp_path / "b/libcuda.so.1"))
    assert toolkit(NOTHING, tmp_path, tmp_path, [link]) == home
    assert home and (home / "lib64/libcuda.so").exists()


def test_headers_that_include_what_is_not_there(tmp_path: Path) -> None:
    """Wheels of torch have cuda.h, but not all that it needs: that is no toolkit."""
    include = headers(tmp_path / "nvidia/cu13/include", includes="crt/host_defines.h")
    with pytest.raises(MissingError, match=r"all of CUDA's headers.*nvidia-cuda-crt") as e:
        toolkit(NOTHING, tmp_path, tmp_path, [library(tmp_path / "libcuda.so.1")])
    assert str(include) in str(e.value) and e.value.exit_code == 3
    (include / "crt").mkdir()
    (include / "crt" / "host_defines.h").write_text("")
    assert toolkit(NOTHING, tmp_path, tmp_path, [tmp_path / "libcuda.so.1"])


def test_no_driver_to_link_with(tmp_path: Path) -> None:
    headers(tmp_path / "nvidia/cu13/include")
    with pytest.raises(MissingError, match=r"no libcuda\.so\.1.*ldconfig -p.*/lib64"):
        toolkit(([], [tmp_path / "lib64"]), tmp_path, tmp_path, [])


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    headers(tmp_path / "nvidia/cu13/include")
    (tmp_path / "kept").write_text("a file")
    with pytest.raises(MissingError, match=r"kept.*cannot be written.*CUDA_HOME"):
        toolkit(NOTHING, tmp_path, tmp_path, [library(tmp_path / "libcuda.so.1")])


def test_it_is_asked_before_anything_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise MissingError("no headers")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(cuda_toolkit, "find_toolkit", missing)
    with pytest.raises(MissingError, match="no headers"):
        check_all(*toolchain())


def test_torch_is_given_the_toolkit_and_gets_its_own_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_toolkit, "find_toolkit", lambda: tmp_path)
    before = cpp_extension.CUDA_HOME
    with cuda_toolkit.toolkit_found():
        assert str(tmp_path) == cpp_extension.CUDA_HOME
        assert str(tmp_path / "include") in cpp_extension.include_paths("cuda")
    assert before == cpp_extension.CUDA_HOME
