"""Updates that end midway, for any reason: the server must not take them for done, nor take a harmless refusal for damage."""

from __future__ import annotations

import itertools
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engines import Driven, sequence
from tiny_models import tiny_model

from areal_mega.core import points
from areal_mega.core.errors import RunFailed
from areal_mega.serving.updates import Bucket, Updater, UpdateRefused

NAMES = itertools.count()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("cut"), "qwen3", eos_token_id=None)


@pytest.fixture
def driven(model: Path) -> Driven:
    return Driven(model)


@pytest.fixture
def updater(driven: Driven) -> Iterator[Updater]:
    """Alone in its group, so that what it receives is zeros or anything: what counts here is what it takes for complete."""
    updater = Updater(driven.engine, timeout_s=8)
    join(updater)
    yield updater
    for name in list(updater.groups):
        updater.leave(name)


def join(updater: Updater) -> str:
    name = f"cut-{next(NAMES)}"
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    updater.join(address="127.0.0.1", port=port, rank=0, world_size=1, name=name, backend="gloo")
    return name


def bucket(updater: Updater, driven: Driven, names: list[str], version: str | None = None) -> Bucket:
    views = [driven.engine.model.weights.hf[name] for name in names]
    shapes = tuple(tuple(view.shape) for view in views)
    return Bucket(tuple(names), ("float32",) * len(names), shapes, next(iter(updater.groups)), False, version, False, False)


def test_a_session_cut_between_two_buckets_is_not_complete(driven: Driven, updater: Updater) -> None:
    names = list(driven.engine.model.weights.hf)
    updater.begin()
    updater.receive(bucket(updater, driven, names[:3]))
    with pytest.raises(UpdateRefused, match=f"ended after 3 of {len(names)} tensors and no bucket with a weight_version"):
        updater.end()
    assert driven.engine.holding and "incomplete" in driven.engine.broken
    updater.begin()
    updater.receive(bucket(updater, driven, names[:3], "1"))
    with pytest.raises(UpdateRefused, match="left out"):
        updater.end()
    updater.begin()
    updater.receive(bucket(updater, driven, names))
    updater.end()  # all tensors came: there is nothing that a cut could have taken
    assert not driven.engine.holding and not driven.engine.broken
    updater.begin()
    updater.receive(bucket(updater, driven, names[:3], "2"))
    updater.end()
    assert not driven.engine.holding and not driven.engine.broken


def test_a_session_left_before_its_first_bucket_is_closed(driven: Driven, updater: Updater) -> None:
    updater.begin()
    updater.leave(next(iter(updater.groups)))
    join(updater)
    updater.begin()
    updater.receive(bucket(updater, driven, list(driven.engine.model.weights.hf), "3"))
    updater.end()
    assert driven.engine.version == "3" and not driven.engine.broken


def test_an_error_nobody_thought_of_leaves_a_server_that_says_so(driven: Driven, updater: Updater, model: Path) -> None:
    engine, fails = driven.engine, [True]
    engine.model.weights.derive(lambda: 1 // (not fails[0]), "decoder.final_layernorm.weight")
    updater.begin()
    with pytest.raises(ZeroDivisionError):
        updater.receive(bucket(updater, driven, ["model.norm.weight"], "4"))
    assert engine.holding and "a bucket was not loaded to its end (ZeroDivisionError" in engine.broken and engine.version == "0"
    with pytest.raises(UpdateRefused, match="not loaded to its end"):
        updater.end()
    fails[0] = False
    updater.from_disk(str(model), "5", False, False)
    assert not engine.holding and not engine.broken
    fails[0] = True
    with pytest.raises(ZeroDivisionError):
        updater.from_disk(str(model), "6", False, False)
    assert engine.holding and f"{model} could not be read to its end (ZeroDivisionError" in engine.broken and engine.version == "5"


def test_a_place_that_could_not_be_made_leaves_a_server_that_says_so(
    driven: Driven, updater: Updater, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, names = driven.engine, ["model.norm.weight"]

    def settle(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(engine.model.weights, "settle", settle)
    updater.begin()
    with pytest.raises(MemoryError):
        updater.receive(replace(bucket(updater, driven, names, "4"), flat=True))
    assert engine.holding and "Failed to receive weights: MemoryError" in engine.broken and engine.version == "0"


def test_a_bucket_that_came_can_be_held_before_it_is_loaded(driven: Driven, updater: Updater, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[tuple[str, str]] = []
    monkeypatch.setattr(points, "reach", lambda name: held.append((name, driven.engine.version)))
    updater.begin()
    for flat in (True, False):
        updater.receive(replace(bucket(updater, driven, ["model.norm.weight"], "4"), flat=flat))
    assert held == [("sync.received", "0"), ("sync.received", "4")]


def test_files_that_cannot_be_opened_change_nothing(driven: Driven, updater: Updater, model: Path, tmp_path: Path) -> None:
    damaged, engine = tmp_path / "damaged", driven.engine
    shutil.copytree(model, damaged)
    (damaged / "model.safetensors").write_bytes((damaged / "model.safetensors").read_bytes()[:-100])
    with pytest.raises(UpdateRefused, match="truncated or damaged"):
        updater.from_disk(str(damaged), "7", False, False)
    assert not engine.holding and not engine.broken and engine.version == "0"
    names = list(engine.model.weights.hf)
    updater.begin()
    updater.receive(bucket(updater, driven, names[:2]))
    with pytest.raises(UpdateRefused, match="truncated or damaged"):
        updater.from_disk(str(damaged), "7", False, False)
    assert engine.holding, "the open session has replaced a part"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_give_no_logits_are_named_with_their_version(driven: Driven, temperature: float) -> None:
    engine = driven.engine
    with torch.inference_mode():
        engine.model.weights.hf["model.norm.weight"].fill_(float("nan"))
    engine.weights_changed("31")
    driven.submit(sequence("asked", [5, 6], max_new_tokens=2, temperature=temperature))
    with pytest.raises(RunFailed, match=r"weight version 31: logits are not finite \(request asked\).*load other weights"):
        driven.run()
