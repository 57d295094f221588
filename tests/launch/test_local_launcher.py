"""Real processes: started, watched, and all of them gone afterwards, whoever dies first and however."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
from launch_children import FORK, READY, SERVE, SLEEP, STUBBORN, alive, grandchildren, make_run, said, spec, until, until_gone

from areal_mega.core.errors import DeadlineExceeded, UserError, WorkerDied
from areal_mega.launch import processes
from areal_mega.launch.local import LocalLauncher, ProcessSpec
from areal_mega.launch.rundir import RunDir
from areal_mega.rpc.client import PeerUnreachable, RpcClient


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return make_run(tmp_path)


@pytest.fixture
async def launcher(run_dir: RunDir) -> AsyncIterator[LocalLauncher]:
    with LocalLauncher(run_dir, startup_timeout_s=60.0, shutdown_timeout_s=5.0) as launcher:
        yield launcher
    assert processes.members(set(), launcher._marker) == []


async def test_ready_processes_say_where_they_are(launcher: LocalLauncher, run_dir: RunDir) -> None:
    launcher.start([spec(READY, "train", rank, run_dir) for rank in range(2)])
    keys = [("train", 0), ("train", 1)]
    found = await launcher.wait_ready(keys)
    assert {key: (info["pid"], info["hello"]) for key, info in found.items()} == {key: (launcher.pid(*key), "there") for key in keys}


async def test_the_specs_environment_and_cores_reach_the_process_and_its_children(launcher: LocalLauncher, run_dir: RunDir) -> None:
    core = max(os.sched_getaffinity(0))
    code = "import os, subprocess, sys; print('see', os.environ['SHADE'], sorted(os.sched_getaffinity(0)), flush=True)\n"
    code += "if len(sys.argv) == 1: subprocess.run([sys.executable, '-c', sys.orig_argv[2], 'last'])"
    launcher.start([replace(spec(code), env={"SHADE": "blue"}, cpus=(core,))])
    launcher.survive([("train", 0)])
    await asyncio.to_thread(until, lambda: launcher.exit_code("train", 0) is not None, "exit")
    assert run_dir.log_path("train", 0).read_text() == f"see blue [{core}]\n" * 2


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        ("import os; print('last words', flush=True); os.kill(os.getpid(), 9)", "killed by SIGKILL"),
        ("import os; print('last words', flush=True); os.abort()", "killed by SIGABRT"),
        ("import os; print('last words', flush=True); os.kill(os.getpid(), 40)", "killed by signal 40"),
        ("import sys; sys.exit('last words')", "exit code 1"),
        ("print('last words')", "exit code 0"),
        ("raise SystemExit(print('last words') or 7)", "exit code 7"),
    ],
)
async def test_a_death_names_role_rank_cause_log_and_last_lines(launcher: LocalLauncher, run_dir: RunDir, code: str, cause: str) -> None:
    launcher.start([spec(SLEEP, "train", 0), spec(code, "rollout", 3)])
    with pytest.raises(WorkerDied) as caught:
        await asyncio.wait_for(launcher.watch(), 60)
    log = run_dir.log_path("rollout", 3)
    assert str(caught.value) == f"rollout rank 3 died: {cause}; log: {log}; its last lines:\n    last words"
    assert caught.value.rank == 3 and caught.value.cause == cause


async def test_a_loss_that_is_survived_is_told_once_and_its_process_may_start_again(launcher: LocalLauncher) -> None:
    key = ("server", 1)
    launcher.survive([key])
    watching = asyncio.create_task(launcher.watch())
    for number in (1, 2):
        launcher.start([spec(f"import sys; sys.exit('words {number}')", *key)])
        losses: list[tuple[tuple[str, int], Exception]] = []
        async with asyncio.timeout(60):
            while not losses:
                losses = launcher.losses()
                await asyncio.sleep(0.02)
        [(lost, death)] = losses
        assert lost == key and isinstance(death, WorkerDied) and death.last_lines.endswith(f"words {number}")
        assert launcher.losses() == [] and not watching.done()
    launcher.survive([])
    await asyncio.sleep(0.2)
    assert not watching.done(), "what was told of is over"
    launcher.start([spec("import sys; sys.exit('last words')", *key)])
    with pytest.raises(WorkerDied, match="server rank 1 died"):
        await asyncio.wait_for(watching, 60)
    assert launcher.losses() == []


async def test_only_the_end_of_a_long_log_is_shown(launcher: LocalLauncher) -> None:
    launcher.start([spec("import sys\nfor i in range(100000): print('line', i)\nsys.stdout.buffer.write(b'\\xff end'); sys.exit(1)")])
    with pytest.raises(WorkerDied) as caught:
        await asyncio.wait_for(launcher.watch(), 60)
    lines = caught.value.last_lines.splitlines()
    assert len(lines) == 20 and lines[0] == "line 99981" and lines[-1] == "\ufffd end"


async def test_a_process_that_is_killed_on_purpose_has_died_like_any_other(launcher: LocalLauncher) -> None:
    key = ("server", 0)
    launcher.survive([key])
    launcher.start([spec(SLEEP, *key)])
    os.kill(launcher.pid(*key), signal.SIGSTOP)
    await launcher.kill(key)
    losses: list[tuple[tuple[str, int], Exception]] = []
    async with asyncio.timeout(60):
        while not losses:
            losses = launcher.losses()
            await asyncio.sleep(0.02)
    assert losses[0][0] == key and "killed by SIGKILL" in str(losses[0][1])
    await launcher.kill(key)  # it has ended already


async def test_kill_9_during_a_call_tells_who_died(launcher: LocalLauncher, run_dir: RunDir) -> None:
    launcher.start([spec(SERVE, "train", rank, run_dir) for rank in range(2)])
    found = await launcher.wait_ready([("train", 0), ("train", 1)])
    clients = [RpcClient(found["train", rank]["address"], run_dir.token, f"train rank {rank}") for rank in range(2)]

    async def step() -> None:
        async with asyncio.TaskGroup() as group:
            for client in clients:
                group.create_task(client.call("train_step", timeout_s=3600))

    work = asyncio.create_task(launcher.supervise(step()))
    for rank in range(2):
        await asyncio.to_thread(said, run_dir.log_path("train", rank), "working hard")
    os.kill(launcher.pid("train", 1), signal.SIGKILL)
    with pytest.raises(WorkerDied, match=r"train rank 1 died: killed by SIGKILL; log: .*train-1.log; its last lines:\n    working hard"):
        await asyncio.wait_for(work, 60)
    for client in clients:
        await client.close()


async def test_supervised_work_returns_or_raises_as_it_would_alone(launcher: LocalLauncher) -> None:
    launcher.start([spec(SLEEP)])

    async def good() -> int:
        return 7

    async def bad() -> None:
        raise UserError("a typo")

    async def unreachable() -> None:
        raise PeerUnreachable(peer="server 0", address="x:1", method="m", reason="gone")

    assert await launcher.supervise(good()) == 7
    with pytest.raises(UserError, match="a typo"):
        await launcher.supervise(bad())
    with pytest.raises(PeerUnreachable):  # nobody died: the failure itself is the news
        await launcher.supervise(unreachable())


async def test_a_failure_just_before_a_death_is_told_as_the_death(launcher: LocalLauncher, run_dir: RunDir) -> None:
    launcher.start([spec(SLEEP)])
    await asyncio.to_thread(said, run_dir.log_path("train", 0), "asleep")

    async def lose_a_neighbour() -> None:
        asyncio.get_running_loop().call_later(0.2, os.kill, launcher.pid("train", 0), signal.SIGKILL)
        raise ConnectionResetError("gloo: connection closed by peer")

    with pytest.raises(WorkerDied, match="asleep") as caught:
        await launcher.supervise(lose_a_neighbour())
    assert isinstance(caught.value.__cause__, ConnectionResetError)


async def test_a_death_cancels_the_work_and_lets_it_clean_up(launcher: LocalLauncher) -> None:
    launcher.start([spec(SLEEP)])
    resumed = []

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.01)
            resumed.append(True)

    task = asyncio.create_task(launcher.supervise(work()))
    await asyncio.sleep(0.1)
    os.kill(launcher.pid("train", 0), signal.SIGKILL)
    with pytest.raises(WorkerDied):
        await asyncio.wait_for(task, 60)
    assert resumed == [True]


async def test_cancelling_supervision_cancels_the_work(launcher: LocalLauncher) -> None:
    launcher.start([spec(SLEEP)])
    cancelled = asyncio.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.set()
            raise

    task = asyncio.create_task(launcher.supervise(work()))
    await asyncio.sleep(0.1)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled.is_set()


async def test_the_first_death_is_the_one_reported(launcher: LocalLauncher) -> None:
    launcher.start([spec(SLEEP, "train", rank) for rank in range(4)])
    for rank in (2, 0, 3, 1):  # nobody looks meanwhile, as when the loop is busy
        os.kill(launcher.pid("train", rank), signal.SIGKILL)
        until_gone([launcher.pid("train", rank)])
    with pytest.raises(WorkerDied) as caught:
        await launcher.watch()
    assert caught.value.rank == 2


async def test_a_process_that_never_becomes_ready_is_named_with_its_log(run_dir: RunDir) -> None:
    with LocalLauncher(run_dir, startup_timeout_s=0.2, shutdown_timeout_s=5.0) as launcher:
        launcher.start([spec(READY, "train", 0, run_dir), spec(SLEEP, "rollout", 1)])
        await asyncio.to_thread(run_dir.wait_announced, [("train", 0)], 60)
        await asyncio.to_thread(said, run_dir.log_path("rollout", 1), "asleep")
        with pytest.raises(DeadlineExceeded) as caught:
            await launcher.wait_ready([("train", 0), ("rollout", 1)])
    log = run_dir.log_path("rollout", 1)
    first, *rest = str(caught.value).splitlines()
    assert first == "not ready within launch.startup_timeout_s=0.2 s: rollout rank 1"
    assert rest == [f"  rollout rank 1; log: {log}; its last lines:", "    asleep"]


async def test_a_death_during_start_ends_the_wait_at_once(launcher: LocalLauncher) -> None:
    launcher.start([spec(SLEEP, "train", 0), spec("raise SystemExit('no such model')", "train", 1)])
    with pytest.raises(WorkerDied, match=r"train rank 1 died: exit code 1; .*\n    no such model"):
        await launcher.wait_ready([("train", 0), ("train", 1)])


async def test_a_stale_announcement_does_not_make_a_process_ready(run_dir: RunDir) -> None:
    stale = run_dir.path / "rendezvous" / "20200101-000000-abcdef"
    stale.mkdir()
    (stale / "train-0.json").write_text('{"role": "train", "rank": 0, "address": "stale:1"}')
    with LocalLauncher(run_dir, startup_timeout_s=0.5, shutdown_timeout_s=5.0) as launcher:
        launcher.start([spec(SLEEP)])
        with pytest.raises(DeadlineExceeded, match="train rank 0"):
            await launcher.wait_ready([("train", 0)])


async def test_a_users_mistake_found_by_a_worker_is_raised_as_one(launcher: LocalLauncher, run_dir: RunDir) -> None:
    code = "import sys; from areal_mega.launch.rundir import RunDir\n"
    code += "RunDir.open(*sys.argv[1:3]).report_user_error(sys.argv[3], int(sys.argv[4]), 'model.path=x does not exist'); sys.exit(2)"
    launcher.start([spec(code, "train", 0, run_dir)])
    with pytest.raises(UserError, match=r"^train rank 0: model.path=x does not exist$"):
        await launcher.wait_ready([("train", 0)])


async def test_the_death_of_one_that_is_survived_does_not_end_the_watch(launcher: LocalLauncher) -> None:
    launcher.start([spec(SLEEP, "train", 0), spec(SLEEP, "rollout", 0)])
    launcher.survive([("rollout", 0)])
    os.kill(launcher.pid("rollout", 0), signal.SIGKILL)
    await asyncio.to_thread(until_gone, [launcher.pid("rollout", 0)])
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(launcher.watch(), 0.3)
    assert launcher.exit_code("rollout", 0) == -9 and launcher.exit_code("train", 0) is None


def test_stop_ends_the_stubborn_and_the_grandchildren(run_dir: RunDir) -> None:
    launcher = LocalLauncher(run_dir, startup_timeout_s=60.0, shutdown_timeout_s=1.0)
    launcher.start([spec(SLEEP, "train", 0), spec(STUBBORN, "train", 1), spec(FORK, "rollout", 0)])
    below = grandchildren(run_dir.log_path("rollout", 0))
    said(run_dir.log_path("train", 1), "deaf")
    said(run_dir.log_path("train", 0), "asleep")
    pids = [launcher.pid("train", 0), launcher.pid("train", 1), launcher.pid("rollout", 0), *below]
    assert all(map(alive, pids))
    guard = launcher._guard
    assert guard is not None
    launcher.stop()
    assert not any(map(alive, [*pids, guard.pid]))
    assert (launcher.exit_code("train", 0), launcher.exit_code("train", 1)) == (-signal.SIGTERM, -signal.SIGKILL)
    launcher.stop()  # once more does no harm


def test_a_dead_childs_own_children_end_with_it(run_dir: RunDir) -> None:
    with LocalLauncher(run_dir, startup_timeout_s=60.0, shutdown_timeout_s=5.0) as launcher:
        launcher.start([spec(FORK, "server", 0)])
        launcher.survive([("server", 0)])
        inside, outside = grandchildren(run_dir.log_path("server", 0))
        os.kill(launcher.pid("server", 0), signal.SIGKILL)
        until(lambda: launcher.exit_code("server", 0), "exit")
        assert not alive(inside)
    assert not alive(outside)


def test_an_impatient_second_interrupt_still_kills(run_dir: RunDir) -> None:
    launcher = LocalLauncher(run_dir, startup_timeout_s=60.0, shutdown_timeout_s=600.0)
    launcher.start([spec(STUBBORN)])
    said(run_dir.log_path("train", 0), "deaf")
    threading.Timer(0.5, signal.raise_signal, [signal.SIGINT]).start()
    with pytest.raises(KeyboardInterrupt):
        launcher.stop()
    assert not alive(launcher.pid("train", 0))


def test_children_outlive_the_thread_that_asked_for_them(run_dir: RunDir) -> None:
    with LocalLauncher(run_dir, startup_timeout_s=60.0, shutdown_timeout_s=5.0) as launcher:
        thread = threading.Thread(target=launcher.start, args=([spec(SLEEP)],))
        thread.start()
        thread.join()
        said(run_dir.log_path("train", 0), "asleep")
        time.sleep(0.2)
        assert alive(launcher.pid("train", 0))


async def test_a_missing_program_is_one_line(launcher: LocalLauncher) -> None:
    with pytest.raises(UserError, match=r"server rank 0: there is no program /no/such/python; .*rollout.python") as caught:
        launcher.start([ProcessSpec(role="server", rank=0, argv=["/no/such/python", "-V"])])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("role", "setting"), [("train", "launch.train_cpus"), ("server", "launch.rollout_cpus")])
async def test_a_core_that_is_not_there_is_one_line(launcher: LocalLauncher, role: str, setting: str) -> None:
    with pytest.raises(UserError, match=rf"{role} rank 0: {setting} names core 4096; this process may use \[") as caught:
        launcher.start([replace(spec(SLEEP, role), cpus=(0, 4096))])
    assert "\n" not in str(caught.value)


async def test_an_old_kernel_is_one_line(launcher: LocalLauncher, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(pid: int) -> int:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(os, "pidfd_open", missing)
    with pytest.raises(UserError, match=r"needs Linux 5.3 or later") as caught:
        launcher.start([spec(SLEEP)])
    assert "\n" not in str(caught.value)
