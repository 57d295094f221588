"""Whatever dies or is wrong, the run ends soon, says why, and leaves no process behind."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from programs import Running, started, train, write_recipe

from areal_mega import Trainer
from areal_mega.core.errors import UserError

ENDLESS: dict[str, Any] = {"run": {"steps": 1_000_000}, "eval": {"at_start": False}, "launch": {"server_restarts": 0}}


@pytest.fixture
def training(tmp_path: Path) -> Iterator[Running]:
    """A run in the middle of its training."""
    with started(tmp_path, ENDLESS) as running:
        running.until_step(2)
        assert len(running.living()) >= 5  # controller, train rank, rollout worker with its verifier, server
        yield running


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("role", ["train", "rollout", "server"])
def test_a_killed_process_ends_the_run_and_is_named(training: Running, role: str) -> None:
    os.kill(training.worker(role), signal.SIGKILL)
    run = training.finish(timeout_s=30.0)
    training.until_gone(1.0)
    assert run.code == 1
    first, *last_lines = run.err.splitlines()
    log = run.run_dir / "logs" / f"{role}-0.log"
    assert first == f"error: {role} rank 0 died: killed by SIGKILL; log: {log}; its last lines:"
    assert last_lines and all(line.startswith("    ") for line in last_lines)
    assert last_lines[-1].strip() == log.read_text().splitlines()[-1].strip()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_killed_controller_leaves_nothing(training: Running) -> None:
    os.kill(training.pid, signal.SIGKILL)
    training.until_gone(30.0)
    assert training.finish(timeout_s=10.0).code == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_ctrl_c_ends_everything_in_order(training: Running) -> None:
    os.killpg(training.pid, signal.SIGINT)  # as a terminal does
    run = training.finish(timeout_s=60.0)
    training.until_gone(1.0)
    assert run.code == 130, run.explain()
    assert "Traceback" not in run.err and "never retrieved" not in run.err
    assert [record["step"] for record in run.steps] == list(range(len(run.steps)))  # no step half-written
    # The directory is free again: another run may replace it.
    with pytest.raises(UserError, match=r"exists; choose another run\.name, or set run.overwrite=true"):
        Trainer(write_recipe(run.run_dir.parents[1])).train()


# --- prompts that never give a group (more of them, without processes, in tests/controller/test_broken_prompts.py)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_whose_verifier_hangs_ends_and_says_so(tmp_path: Path) -> None:
    reward = {"path": "e2e_parts.hanging_reward", "timeout_s": 0.5}
    run = train(tmp_path, {"reward": reward, "eval": {"at_start": False}, "rollout": {"group_size": 2}})
    assert run.code == 2, run.explain()
    assert run.err.startswith("error: reward 'e2e_parts.hanging_reward': none of its first ") and run.err.count("\n") == 1
    assert "reward.timeout_s" in run.err


# --- mistakes in the recipe, its data, its model, its machine


def jsonl(path: Path, *rows: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "a typo": ({"train": {"batchsize": 4}}, "unknown key 'train.batchsize'; did you mean 'train.batch_size'?"),
    "experts that do not divide": (
        {"train": {"strategy": "megatron:d3e3"}},
        "train.strategy megatron:d3e3: the model has 8 experts, which do not divide by expert parallelism 3; 1, 2, 4, 8 would",
    ),
    "layers that do not divide": (
        {"train": {"strategy": "megatron:d1p4"}},
        "train.strategy megatron:d1p4: the model has 2 layers, which do not divide by pipeline parallelism 4: 2/4 is not a whole number; "
        "use pipeline parallelism of 1 or 2",
    ),
    "heads that do not divide": ({"train": {"strategy": "megatron:d1t3"}}, "4 attention heads do not split over 3 ranks"),
    "ranks that do not divide": ({"train": {"strategy": "megatron:d2e4"}}, "2/4 is not a whole number; legal: "),
    "more ranks than slots": (
        {"launch": {"slots": 2}, "train": {"strategy": "megatron:d2e2"}},
        "train.strategy megatron:d2e2 takes 2 + rollout.strategy embedded:d1 takes 1 = 3 slots, but launch.slots is 2",
    ),
    "no model": (
        {"model": {"path": "/nowhere/model"}},
        "model folder /nowhere/model does not exist; give an existing folder or a hub name",
    ),
    "no reference": (
        {"model": {"reference_path": "/nowhere/reference"}},
        "model folder /nowhere/reference does not exist; give an existing folder or a hub name",
    ),
    "a host of another machine": (
        {"launch": {"host": "192.0.2.1"}},
        "cannot listen on 192.0.2.1:0: Cannot assign requested address; set launch.host to an address of this machine",
    ),
    "a host that does not exist": (
        {"launch": {"host": "no.such.host.invalid"}},
        "cannot listen on no.such.host.invalid: the name does not resolve",
    ),
    "a run root below a file": (
        {"run": {"root": "/dev/null/runs"}},
        "cannot make the run directory /dev/null/runs/e2e: Not a directory; set run.root",
    ),
    "a name with a slash": ({"run": {"name": "a/b"}}, "run.name='a/b' is not a plain folder name"),
    "no data file": ({"data": {"train": {"loader": "jsonl", "path": "/nowhere/rows.jsonl"}}}, "/nowhere/rows.jsonl"),
    "a sample too long for a micro-batch": ({"train": {"microbatch_tokens": 8}}, "do not fit into train.microbatch_tokens 8"),
    "a prompt too long": ({"data": {"max_prompt_tokens": 3}}, "has 6 tokens and data.max_prompt_tokens is 3; raise it by 3"),
    "kl to no reference": ({"algorithm": {"kl": {"coef": 0.1}}}, "model.reference_path is not set"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_found_before_anything_starts(tmp_path: Path, case: str) -> None:
    changes, message = MISTAKES[case]
    with pytest.raises(UserError) as caught:
        Trainer(write_recipe(tmp_path, changes)).train()
    said = re.sub(r" \[[^]]*\]", "", str(caught.value))  # without file and line of each setting
    assert message in said
    assert "\n" not in said
    assert not (tmp_path / "runs").exists()


def test_a_row_without_an_answer_is_named_with_file_and_line(tmp_path: Path) -> None:
    rows = jsonl(tmp_path / "rows.jsonl", {"prompt": "1+1=", "answer": "2"}, {"prompt": "1+2="})
    changes = {"data": {"train": {"loader": "jsonl", "path": str(rows)}}}
    with pytest.raises(UserError, match=rf"{rows}:2|{rows}, line 2") as caught:
        Trainer(write_recipe(tmp_path, changes)).train()
    assert "no `answer`" in str(caught.value) and "\n" not in str(caught.value)


def test_rows_of_a_script_are_checked_like_those_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="train_dataset, row 1: no `answer`"):
        Trainer(write_recipe(tmp_path), train_dataset=[{"prompt": "1+1=", "answer": 2}, {"prompt": "1+2="}]).train()
    with pytest.raises(UserError, match="valid_dataset has no rows"):
        Trainer(write_recipe(tmp_path), valid_dataset=[]).train()
    assert not (tmp_path / "runs").exists()


def test_an_existing_run_directory_is_not_touched(tmp_path: Path) -> None:
    held = tmp_path / "runs/e2e/metrics.jsonl"
    held.parent.mkdir(parents=True)
    held.write_text("dear\n")
    with pytest.raises(UserError, match=r"exists; choose another run\.name, or set run.overwrite=true to replace it"):
        Trainer(write_recipe(tmp_path)).train()
    with pytest.raises(UserError, match="is not a run directory"):
        Trainer(write_recipe(tmp_path, {"run": {"overwrite": True}})).train()
    assert held.read_text() == "dear\n"


def test_on_the_command_line_a_mistake_is_one_line_with_its_origin_and_exit_2(tmp_path: Path) -> None:
    run = train(tmp_path, {}, "train.strategy=megatron:d3e3")
    assert (run.code, run.out) == (2, "")
    assert run.err == (
        "error: train.strategy [override train.strategy=megatron:d3e3] megatron:d3e3: the model has 8 experts, which do not divide by "
        "expert parallelism 3; 1, 2, 4, 8 would\n"
    )
    run = train(tmp_path, {"train": {"batchsize": 4}})
    assert (run.code, run.out) == (2, "")
    assert run.err.count("\n") == 1 and "did you mean 'train.batch_size'?" in run.err and "recipe.yaml:" in run.err


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": {"path": "e2e_parts.no_such_reward"}}, r"rollout rank 0: reward '.*no_such_reward': module 'e2e_parts' has no "),
        ({"rollout": {"server_args": ["--no-such-flag"]}}, r"server rank 0: .*--no-such-flag.*\(log: .*server-0\.log\)"),
    ],
)  # fmt: skip
def test_a_mistake_that_a_process_finds_is_one_line_and_exit_2(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    run = train(tmp_path, changes)
    assert run.code == 2, run.explain()
    assert run.err.count("\n") == 1
    assert re.search(message, run.err)
