"""An inference server or a rollout worker is killed in the middle of a run: it is started again, and nothing is lost."""

from __future__ import annotations

import json
import os
import re
import signal
from collections import Counter
from pathlib import Path

import pytest
from programs import started

from areal_mega.config.loader import load_recipe
from areal_mega.core.points import ENV
from areal_mega.data.registry import load_rows
from areal_mega.data.stream import PromptStream


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("servers", "every"), [(1, 1), (2, 2)])
def test_a_killed_server_comes_back_with_the_current_weights(tmp_path: Path, servers: int, every: int) -> None:
    """With one server everything waits for it; with two the other goes on, and a sync may find it missing."""
    steps = 24
    changes = {
        "run": {"steps": steps},
        "rollout": {"strategy": f"embedded:d{servers}"},
        "sync": {"every_steps": every},
        "eval": {"at_start": False, "every_steps": steps},
    }
    with started(tmp_path, changes, **{ENV: str(tmp_path)}) as running:
        running.until_step(4)
        running.hold("train.loaded", tmp_path, lambda: os.kill(running.worker("server"), signal.SIGKILL))
        run = running.finish()
        running.until_gone(10.0)
    assert run.code == 0, run.explain()
    assert re.search(r"server rank 0 died: killed by SIGKILL; .* it is started again \(1 of 2\)", run.out), run.explain()
    back = re.search(r"server rank 0 is back, with weights of version (\d+)", run.out)
    assert back is not None, run.explain()
    records = [json.loads(line) for line in (run.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(steps + 1))
    assert all(record["metrics"]["batch/groups"] == 4 for record in records[1:])
    versions = [record["metrics"]["sync/version"] for record in records if "sync/version" in record["metrics"]]
    assert versions == sorted(versions) and versions[-1] >= steps // every >= int(back[1])
    # A prompt that was lost would have been taken for failed, and one that was doubled for late.
    assert records[-1]["metrics"]["rollout/failed"] == 0 and records[-1]["metrics"]["rollout/retried"] == 0
    held = re.findall(r"version \d+, digest \w+: (\d+) servers hold it", run.log("controller"))
    assert held[0] == held[-1] == str(servers)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("replicas", "point"), [(1, "rollout.batch"), (2, "train.loaded")])
def test_a_killed_worker_loses_what_it_held_and_no_prompt(tmp_path: Path, replicas: int, point: str) -> None:
    """With one replica the run waits for its worker, and makes a batch anew that nobody had fetched; with two the other goes on."""
    steps = 24
    changes = {"run": {"steps": steps}, "rollout": {"strategy": f"embedded:d{replicas}"}, "eval": {"at_start": False, "every_steps": steps}}
    with started(tmp_path, changes, **{ENV: str(tmp_path)}) as running:
        running.until_step(4)
        running.hold(point, tmp_path, lambda: os.kill(running.worker("rollout"), signal.SIGKILL))
        run = running.finish()
        running.until_gone(10.0)
    assert run.code == 0, run.explain()
    assert re.search(r"rollout rank 0 died: killed by SIGKILL; .* it is started again \(1 of 2\)", run.out), run.explain()
    if replicas == 1:
        assert re.search(r"rollout rank 0 is back; its server has weights of version \d+", run.out), run.explain()
        assert re.search(r"step \d+: 4 of 4 groups were lost with their rollout worker; generated again", run.out), run.explain()
    assert [record["step"] for record in run.steps] == list(range(steps + 1))
    assert run.metrics[-1]["rollout/failed"] == 0
    assert len(list((run.run_dir / "rendezvous").iterdir())) == 1, "one attempt"
    trained = [json.loads(line)["prompts"] for line in (run.run_dir / "trained.jsonl").read_text().splitlines()]
    assert Counter((id_, epoch) for prompts in trained for id_, epoch in prompts) == undisturbed(tmp_path, steps)


def undisturbed(root: Path, steps: int) -> Counter[tuple[str, int]]:
    """The prompts of a run that nothing happens to: the first ones of its stream."""
    recipe = load_recipe(root / "recipe.yaml")
    stream = PromptStream(load_rows(recipe.data.train), seed=recipe.run.seed, shuffle=recipe.data.shuffle)
    return Counter((prompt.id, prompt.epoch) for prompt in stream.next(steps * recipe.train.batch_size))


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_server_that_keeps_dying_ends_the_run(tmp_path: Path) -> None:
    with started(tmp_path, {"run": {"steps": 1_000_000}, "eval": {"at_start": False}, "launch": {"server_restarts": 1}}) as running:
        running.until_step(2)
        os.kill(running.worker("server"), signal.SIGKILL)
        log = running.run_dir / "logs" / "controller-0.log"
        running.until(lambda: len(re.findall(r"started server rank 0 as pid (\d+)", log.read_text())) == 2, "the restart")
        os.kill(int(re.findall(r"started server rank 0 as pid (\d+)", log.read_text())[1]), signal.SIGKILL)
        run = running.finish(timeout_s=60.0)
        running.until_gone(10.0)
    assert run.code == 1 and run.err.startswith("error: server rank 0 died: killed by SIGKILL"), run.explain()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_that_hangs_is_killed_and_the_run_goes_on(tmp_path: Path) -> None:
    """A stopped process still accepts connections, and answers none. Without it the other generates, and the last sync goes to that one."""
    steps = 24
    changes = {
        "run": {"steps": steps},
        "rollout": {"strategy": "embedded:d2"},
        "sync": {"every_steps": 1000},
        "eval": {"at_start": False},
        "launch": {"server_health_timeout_s": 10.0},
    }
    with started(tmp_path, changes) as running:
        running.until_step(2)
        os.kill(running.worker("server"), signal.SIGSTOP)
        run = running.finish()
        running.until_gone(10.0)
    assert run.code == 0, run.explain()
    assert re.search(
        r"server rank 0 died: killed, for it did not answer a health check within launch.server_health_timeout_s=10 s;", run.out
    )
    assert [record["step"] for record in run.steps] == list(range(steps + 1))
    assert all(record["metrics"]["batch/groups"] == 4 for record in run.steps[1:])
    assert run.metrics[-1]["rollout/failed"] == 0
