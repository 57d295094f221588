"""The array's tasks, its script, and what is read from squeue: pure parts."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_mega.config.checks import check_recipe
from areal_mega.config.loader import load_recipe
from areal_mega.config.schema import Recipe
from areal_mega.core.errors import RunFailed, UserError
from areal_mega.launch.slurm import jobs
from areal_mega.launch.slurm.meeting import ArrayTask, Meeting, Presence
from areal_mega.launch.slurm.script import render
from areal_mega.launch.slurm.task import check_array, requeue_all
from areal_mega.launch.slurm.tasks import plan_tasks
from areal_mega.parallel.strategy import parse

ROOT = Path(__file__).resolve().parents[2]


@given(st.integers(1, 20), st.integers(1, 9), st.sampled_from([1, 2, 4]), st.integers(1, 8), st.booleans())
def test_every_process_has_its_own_slots_within_its_task(dp: int, replicas: int, tp: int, slots: int, apart: bool) -> None:
    train, rollout = parse(f"megatron:d{dp}"), parse(f"sglang:d{replicas}t{tp}")
    if tp > slots:
        with pytest.raises(UserError, match="cannot span tasks"):
            plan_tasks(train, rollout, slots, apart=apart)
        return
    plan = plan_tasks(train, rollout, slots, apart=apart)
    used = [(plan.task_of[key], slot) for key, owned in plan.slots.items() for slot in owned]
    assert len(used) == len(set(used)) == dp + replicas * tp
    assert all(0 <= slot < slots for _, slot in used)
    assert {task for task, _ in used} == set(range(plan.tasks))
    roles = [{role for role, _ in plan.keys(task) if role != "rollout"} for task in range(plan.tasks)]
    if apart or dp + replicas * tp > slots:
        assert all(len(role) == 1 for role in roles), "the array index decides the role"
        assert [role == {"train"} for role in roles] == [task < plan.train_tasks for task in range(plan.tasks)]
    else:
        assert plan.tasks == 1
    assert all(plan.task_of["rollout", replica] == plan.task_of["server", replica] for replica in range(replicas))


def test_the_script_in_the_repository_is_what_its_recipe_says() -> None:
    (script,) = render(load_recipe(ROOT / "recipes/gsm8k_grpo.yaml"), recipe_path="recipes/gsm8k_grpo.yaml")
    assert (ROOT / "slurm" / script.file_name("gsm8k_grpo")).read_text() == script.text, (
        "run `areal-mega slurm render recipes/gsm8k_grpo.yaml --out slurm`"
    )


def recipe(**slurm: object) -> Recipe:
    return Recipe.model_validate(
        {
            "run": {"name": "r", "steps": 1},
            "model": {"path": "m"},
            "rollout": {"strategy": "sglang:d2t2"},
            "train": {"strategy": "megatron:d2t2"},
            "launch": {"slurm": {"slots_per_task": 4} | slurm},
        }
    )


EVERY = {
    "partition": "gpu", "account": "me", "qos": "high", "time": "1:00:00", "constraint": "h100", "gres": "gpu:4", "reservation": "res",
    "cpus_per_task": 8, "mem": "100G", "exclude": "bad1", "mail_type": "END", "mail_user": "me@there",
}  # fmt: skip


@pytest.mark.parametrize("option", sorted(EVERY))
def test_every_option_reaches_the_script(option: str) -> None:
    (script,) = render(recipe(**{option: EVERY[option]}), recipe_path="r.yaml")
    assert f"#SBATCH --{option.replace('_', '-')}={EVERY[option]}\n" in script.text


def test_scripts_are_shell_and_quote_what_they_pass(tmp_path: Path) -> None:
    settings = recipe(requeue=False, extra=["--exclusive"], setup=["echo ready"], output="o-%j", signal_s=60)
    (script,) = render(settings, recipe_path="my recipe.yaml", overrides=["run.name=a b"])
    for line in ("#SBATCH --no-requeue", "#SBATCH --exclusive", "echo ready", "#SBATCH --output=o-%j", "#SBATCH --signal=B:USR1@60"):
        assert line in script.text.splitlines()
    path = tmp_path / "areal-mega"
    path.write_text('#!/bin/sh\nfor word; do echo "$word"; done\n')
    path.chmod(0o755)
    (tmp_path / "s.sh").write_text(script.text)
    done = subprocess.run(
        ["bash", "s.sh", "run.steps=2"], cwd=tmp_path, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert done.stdout.splitlines() == ["ready", "slurm", "task", "my recipe.yaml", "run.name=a b", "run.steps=2"]


def test_another_partition_for_the_rollout_makes_two_arrays() -> None:
    train, rollout = render(recipe(partition="big", gres="gpu:4", rollout={"partition": "small"}), recipe_path="r.yaml")
    assert "--partition=big" in train.text and "--array=0-0" in train.text and "--gres=gpu:4" in train.text
    assert "--partition=small" in rollout.text and "--array=0-0" in rollout.text and "--gres=gpu:4" in rollout.text
    assert "--first-task=1" in rollout.text and "--first-task" not in train.text
    assert (train.file_name("x"), rollout.file_name("x")) == ("x.train.sbatch", "x.rollout.sbatch")


@pytest.mark.parametrize(
    ("container", "words"),
    [
        ("none", "exec areal-mega slurm task"),
        ("apptainer", "exec apptainer exec --nv --bind=/data 'my image.sif' areal-mega slurm task"),
        ("pyxis", "exec srun --container-image='my image.sif' --bind=/data areal-mega slurm task"),
    ],
)
def test_containers(container: str, words: str) -> None:
    settings = {} if container == "none" else {"image": "my image.sif", "container_args": ["--bind=/data"]}
    (script,) = render(recipe(container=container, **settings), recipe_path="r.yaml")
    assert words in script.text
    # Only a process that takes the batch shell's place gets its signals.
    assert ("--signal=USR1@" if container == "pyxis" else "--signal=B:USR1@") in script.text


def test_a_task_size_is_needed() -> None:
    with pytest.raises(UserError, match=r"launch\.slurm\.slots_per_task is not set"):
        render(recipe(slots_per_task=None), recipe_path="r.yaml")


def test_squeue_lines_are_read() -> None:
    text = "12_0|RUNNING|n0|None\n12_3|PENDING||Resources\n13|COMPLETED|n[1-2]|None\n"
    first, second, third = jobs.parse_squeue(text)
    assert (first.job, first.index, first.state, first.nodes) == ("12", 0, "RUNNING", "n0")
    assert second.waits and str(second) == "Slurm task 12_3: PENDING (Resources)"
    assert third.ended and third.index == 0


def test_every_state_of_slurm_is_one_of_three_kinds() -> None:
    kinds = (jobs.WAITING, jobs.ALIVE, jobs.ENDED)
    assert sum(map(len, kinds)) == len(frozenset.union(*kinds)) == 24


def test_a_task_knows_who_it_is_by_what_slurm_sets() -> None:
    env = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}
    assert ArrayTask.current(env, 0) == ArrayTask("7", 2, "7_2")
    assert ArrayTask.current(env | {"AREAL_MEGA_JOB": "6"}, 4) == ArrayTask("6", 6, "7_2")
    with pytest.raises(UserError, match="not a task of a Slurm array"):
        ArrayTask.current({"SLURM_JOB_ID": "7"}, 0)


def test_a_meeting_belongs_to_one_submission(tmp_path: Path) -> None:
    whole = recipe().model_copy(update={"run": recipe().run.model_copy(update={"root": str(tmp_path)})})
    here = Presence(task=1, incarnation="a", address="h:1", token="t", host="h", job="8_1", devices="0,1")
    Meeting(whole, "8").enter(here)
    assert Meeting(whole, "8").present() == {1: here}
    assert Meeting(whole, "9").present() == {}, "a stale file of an earlier submission is never read"
    (path,) = (tmp_path / ".tasks" / "r" / "8").glob("*.json")
    assert path.stat().st_mode & 0o077 == 0, "it holds a secret"
    assert json.loads(path.read_text())["host"] == "h"
    assert Meeting(whole, "8").recorded_jobs() == ("8",)
    Meeting(whole, "8").record_jobs(["8", "9"])
    assert Meeting(whole, "8").recorded_jobs() == ("8", "9")


def test_an_unwritable_root_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    whole = recipe().model_copy(update={"run": recipe().run.model_copy(update={"root": str(tmp_path / "file")})})
    with pytest.raises(UserError, match=r"set run\.root to a folder that every node can write"):
        Meeting(whole, "8").enter(Presence(task=0, incarnation="a", address="h:1", token="t", host="h", job="8_0", devices=None))


def test_a_container_needs_an_image() -> None:
    with pytest.raises(UserError, match="a container needs an image"):
        check_recipe(recipe(container="apptainer"))


def array(tasks: int, **env: str) -> dict[str, str]:
    return {"SLURM_ARRAY_JOB_ID": "9", "SLURM_ARRAY_TASK_COUNT": str(tasks), **env}


def test_an_array_has_the_tasks_of_its_recipe_or_joins_a_run_with_fewer() -> None:
    whole = recipe(slots_per_task=4)  # one train task, one rollout task
    check_array(whole, array(2), 0)
    check_array(whole, array(2, AREAL_MEGA_JOB="9"), 0)
    check_array(whole, array(1, AREAL_MEGA_JOB="7"), 0)
    for refused in (array(1), array(3), array(1, AREAL_MEGA_JOB=""), array(1, AREAL_MEGA_JOB="9"), array(3, AREAL_MEGA_JOB="7")):
        with pytest.raises(UserError, match=r"the array has \d tasks?, but .* make 2; submit with --array=0-1"):
            check_array(whole, refused, 0)


class QueuedTasks:
    """Four tasks: one of training, a rollout task that runs, one that is in the queue, one that was cancelled, and one that never came."""

    plan = plan_tasks(parse("megatron:d1"), parse("sglang:d4"), 1)
    known: ClassVar[dict[int, str]] = {0: "RUNNING", 1: "RUNNING", 2: "PENDING", 3: "CANCELLED"}

    def job(self, task: int) -> str | None:
        return f"9_{task}" if task in self.known else None

    async def states(self, *, fresh: bool = False) -> dict[int, jobs.TaskState]:
        return {task: jobs.TaskState("9", task, state, "", "") for task, state in self.known.items()}


def test_what_goes_back_into_the_queue_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def requeue(slurm: jobs.Slurm, job: str) -> None:
        asked.append(job)
        if job == "9_1":
            raise RunFailed("refused")

    monkeypatch.setattr(jobs.Slurm, "requeue", requeue)
    requeue_all(QueuedTasks())  # type: ignore[arg-type]
    assert asked == ["9_1", "9_0"], "the run can do without a rollout task"
    monkeypatch.setattr(QueuedTasks, "plan", plan_tasks(parse("megatron:d2"), parse("sglang:d3"), 1))
    with pytest.raises(RunFailed, match="refused"):
        requeue_all(QueuedTasks())  # type: ignore[arg-type]
