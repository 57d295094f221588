"""Runs as arrays of a real Slurm."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lab import SlurmLab
from programs import BASE, REPO
from submitted import SETTINGS, Submitted, areal_mega, launch, recipe

from areal_mega.core.points import ENV
from areal_mega.launch.slurm.jobs import Slurm

pytestmark = pytest.mark.usefixtures("slurm")


def flat(settings: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, dict) and name not in ("kwargs", "train", "valid"):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}={json.dumps(value)}"


def test_the_script_of_the_repository_trains_on_two_tasks(tmp_path: Path, runs: list[Submitted]) -> None:
    """`sbatch slurm/gsm8k_grpo.sbatch` in its CPU form: the same script, with settings after its name."""
    settings = {key: value for key, value in BASE.items() if key not in ("data", "train")}
    words = [*flat(settings), *flat({"optimizer": {"lr": 1e-3}}, "train."), f"run.root={tmp_path / 'runs'}", "rollout.server_args=[]"]
    words += [f"data.{name}={json.dumps(BASE['data'][name])}" for name in ("train", "valid")]
    words += [
        "train.strategy=megatron:d2",
        "train.batch_size=4",
        "data.max_prompt_tokens=8",
        "train.microbatch_tokens=64",
        "train.minibatches=1",
    ]
    words += ["train.optimizer.warmup_steps=0", "launch.device=cpu", "launch.slurm.slots_per_task=2"]
    script = (REPO / "slurm/gsm8k_grpo.sbatch").read_text()
    script = script.replace("\nset -euo", f"\n{SETTINGS['setup'][0]}\nset -- {shlex.join(words)}\nset -euo")
    script = script.replace("slurm-%x-%A_%a.out", str(tmp_path / "task-%a.out"))
    run = Submitted(tmp_path, [Slurm().submit(script, directory=str(REPO))])
    runs.append(run)
    run.until(lambda: (run.run_dir / "logs" / "server-0.log").exists(), "the server's log")
    seen = environments(run)
    states = run.until_ended()
    assert [task.state for task in states] == ["COMPLETED"] * 2, run.explain()
    assert [record["step"] for record in run.steps()] == [0, 1, 2]
    assert run.steps()[-1]["metrics"]["sync/version"] == 2
    gpus = [seen[key].split(",") for key in (("train", 0), ("train", 1), ("server", 0))]
    assert [len(names) for names in gpus] == [1, 1, 1], seen
    if len({task.nodes for task in states}) == 1:
        assert len({name for names in gpus for name in names}) == 3, f"on one node no two processes share a GPU: {seen}"


def environments(run: Submitted) -> dict[tuple[str, int], str]:
    """CUDA_VISIBLE_DEVICES of the processes of a run, from the kernel."""
    found: dict[tuple[str, int], str] = {}
    keys = [("train", 0), ("server", 0)]

    def look() -> bool:
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                argv = Path(f"/proc/{name}/cmdline").read_bytes().decode().split("\0")
                env = dict(part.split("=", 1) for part in Path(f"/proc/{name}/environ").read_bytes().decode().split("\0") if "=" in part)
            except OSError:
                continue
            if env.get("SLURM_ARRAY_JOB_ID") == run.jobs[0] and "areal_mega.launch.worker" in argv and f"--run-dir={run.run_dir}" in argv:
                role = argv[argv.index("areal_mega.launch.worker") + 1]
                found[role, int(argv[argv.index("areal_mega.launch.worker") + 2].partition("=")[2])] = env["CUDA_VISIBLE_DEVICES"]
            elif env.get("SLURM_ARRAY_JOB_ID") == run.jobs[0] and "areal_mega.serving" in argv:
                found["server", 0] = env["CUDA_VISIBLE_DEVICES"]
        return all(key in found for key in keys)

    run.until(look, "a train rank and a server")
    return found


def test_four_nodes_two_for_each_role(tmp_path: Path, runs: list[Submitted], slurm: SlurmLab | None) -> None:
    changes = {"train": {"strategy": "megatron:d2"}, "rollout": {"strategy": "embedded:d2"}}
    run = launch(tmp_path, recipe(tmp_path, changes, extra=["--exclusive"]))
    runs.append(run)
    run.until_step(1)
    nodes = [task.nodes for task in run.tasks()]
    assert len(set(nodes)) == 4, nodes
    shown = areal_mega("status", str(run.run_dir)).stdout
    assert "running" in shown and "RUNNING on" in shown and "last step: " in shown
    states = run.until_ended()
    assert [task.state for task in states] == ["COMPLETED"] * 4, run.explain()
    assert [record["step"] for record in run.steps()] == [0, 1, 2]
    hosts = {path.stem: json.loads(path.read_text())["host"] for path in (run.run_dir / "rendezvous").glob("*/*.json")}
    assert len({hosts["train-0"], hosts["train-1"], hosts["rollout-0"], hosts["rollout-1"]}) == 4, hosts
    assert "not running" in areal_mega("status", str(run.run_dir)).stdout


def test_stop_ends_a_run_and_a_second_of_its_name_is_refused_meanwhile(tmp_path: Path, runs: list[Submitted]) -> None:
    path = recipe(tmp_path, {"run": {"steps": 500}})
    run = launch(tmp_path, path)
    runs.append(run)
    run.until_step(0)
    again = areal_mega("launch", str(path), "--on", "slurm")
    assert again.returncode == 2 and "is under way" in again.stderr
    done = areal_mega("stop", str(run.run_dir))
    assert done.returncode == 0 and "cancelled Slurm job" in done.stdout, done.stderr
    assert [task.state for task in run.tasks()] == ["CANCELLED"] * 2


def test_a_task_that_never_starts_is_named_within_the_deadline(tmp_path: Path, runs: list[Submitted], slurm: SlurmLab | None) -> None:
    """The rollout array waits for a node that is held back."""
    Slurm._run(["scontrol", "update", "nodename=n3", "state=drain", "reason=test"])
    try:
        path = recipe(tmp_path, queue_timeout_s=15.0, rollout={"constraint": None, "exclude": "n[0-2]"})
        run = launch(tmp_path, path)
        runs.append(run)
        run.until(lambda: run.tasks()[0].ended, "the end of the train task")
        assert run.tasks()[0].state == "FAILED"
        assert "tasks missing after launch.slurm.queue_timeout_s=15 s: task 1 (inference replica 0): Slurm task" in run.output(0), (
            run.explain()
        )
        assert "PENDING" in run.output(0)
    finally:
        Slurm._run(["scontrol", "update", "nodename=n3", "state=resume"])


def test_a_run_whose_only_rollout_task_was_cancelled_ends(tmp_path: Path, runs: list[Submitted]) -> None:
    points, point = tmp_path / "points", "rollout.batch"
    points.mkdir()
    setup = [*SETTINGS["setup"], f"export {ENV}={shlex.quote(str(points))}"]
    run = launch(tmp_path, recipe(tmp_path, {"run": {"steps": 500}}, setup=setup))
    runs.append(run)
    run.until_step(0)
    # Held between two syncs: a task that is lost in the middle of one ends the run for that reason, and says less.
    (points / point).touch()
    run.until((points / f"{point}.reached").exists, "a batch")
    Slurm().cancel([f"{run.jobs[0]}_1"])
    run.until(lambda: "task 1 was told to end" in run.output(0), "the loss")
    (points / f"{point}.reached").unlink()
    run.until(lambda: run.tasks()[0].ended, "the end of the train task")
    assert "task 1 was told to end (preempted, requeued or cancelled): inference replica 0" in run.output(0), run.explain()
    assert "no replica is left, and none will come by itself: task 1 (inference replica 0): Slurm task" in run.output(0), run.explain()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"partition": "absent"}, "sbatch refuses: "),
        ({"rollout": {"qos": "none"}, "account": "x", "partition": "absent"}, "sbatch refuses: "),
    ],
)
def test_what_slurm_refuses_is_one_line(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    done = areal_mega("launch", str(recipe(tmp_path, None, **settings)), "--on", "slurm")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and message in done.stderr, done.stderr


def test_an_array_of_another_size_is_one_line(tmp_path: Path, runs: list[Submitted]) -> None:
    path = recipe(tmp_path)
    script = areal_mega("slurm", "render", str(path)).stdout.replace("--array=0-1", "--array=0-2")
    run = Submitted(tmp_path, [Slurm().submit(script)])
    runs.append(run)
    run.until(lambda: "error: " in run.output(0), "the refusal")
    assert "the array has 3 tasks" in run.output(0) and "make 2; submit with --array=0-1" in run.output(0)
    assert not (tmp_path / "runs").exists(), "nothing has begun"


def test_a_host_name_that_does_not_resolve_is_one_line(tmp_path: Path, runs: list[Submitted]) -> None:
    setup = [*SETTINGS["setup"], "export AREAL_MEGA_HOST=no-such-host.invalid"]
    run = launch(tmp_path, recipe(tmp_path, setup=setup, queue_timeout_s=20.0))
    runs.append(run)
    run.until(lambda: any(task.ended for task in run.tasks()), "the end of a task")
    run.until(lambda: "does not resolve" in run.output(1), "the reason")
    assert "error: node n" in run.output(1) and "AREAL_MEGA_HOST" in run.output(1)
