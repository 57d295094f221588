"""Every fault of an inference server in every phase: what docs/faults.md says comes of it, soon, and of every prompt exactly one group.

The server is a real embedded server in its own process, behind a proxy that breaks it; see `fault_proxy` and `fault_world`.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from fault_world import BATCH, GROUP, Run, World
from tiny_models import tiny_model

from areal_mega.controller import sync as sync_module
from areal_mega.controller.rollout import ReadyBatch
from areal_mega.controller.sync import SyncMismatch
from areal_mega.core.errors import DeadlineExceeded, RunFailed
from areal_mega.rollout.inference import ServerFault

PAGE = Path(__file__).parent.parent.parent / "docs" / "faults.md"
PHASES = ("idle", "prefill", "decode", "paused", "mid-update")
RESTARTED, ELSEWHERE, LATE, ENDS = "restarted", "elsewhere", "later", "the run ends"
OUTCOMES: dict[str, tuple[str, ...]] = {
    "hangs": (RESTARTED, RESTARTED, RESTARTED, ENDS, ENDS),
    "dies": (RESTARTED, RESTARTED, RESTARTED, ENDS, ENDS),
    "is slow": (LATE, LATE, LATE, LATE, LATE),
    "malformed JSON": (ELSEWHERE, ELSEWHERE, ELSEWHERE, ELSEWHERE, ENDS),
    "NaN": (ELSEWHERE, ELSEWHERE, ELSEWHERE, ELSEWHERE, ELSEWHERE),
    "old version": (ELSEWHERE, ELSEWHERE, ELSEWHERE, ELSEWHERE, ENDS),
    "too few samples": (ELSEWHERE, ELSEWHERE, ELSEWHERE, ELSEWHERE, ELSEWHERE),
}
NAMES = {
    "hangs": r"server rank 0 died: killed, for it did not answer a health check within launch.server_health_timeout_s",
    "dies": r"server rank 0 died: killed by SIGKILL",
    "malformed JSON": r"/generate answered malformed JSON",
    "NaN": r"/generate answered a log-probability that is not a finite number",
    "old version": r"the server used weights of version \d+ although it had confirmed version \d+ before",
    "too few samples": rf"/generate answered {GROUP - 1} samples where {GROUP} were asked for",
}
"""How a fault that the run survives is named."""
ENDINGS = {
    "hangs": r"weight sync: server rank 0 did not finish reading weights within .*; server rank 0 did not answer a health check",
    "dies": r"server rank 0 died: killed by SIGKILL",
    "malformed JSON": r"/update_weights_from_disk answered malformed JSON",
    "old version": r"server rank 0 reports weight version \d+ after a sync of version \d+",
}
CELL_S = 120.0
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"), "qwen3", eos_token_id=None)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def world(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    world = World(model, tmp_path_factory.mktemp("run"))
    try:
        await world.start()
        yield world
    finally:
        await world.close()


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sync_module, "_HEALTH_S", 1.0)
    monkeypatch.setattr(sync_module, "_RELEASE_S", 1.0)


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("fault", OUTCOMES)
async def test_fault(world: World, fault: str, phase: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = OUTCOMES[fault][PHASES.index(phase)]
    async with asyncio.timeout(CELL_S), world.run(health_s=3.0 if fault == "hangs" else 60.0) as run:
        if expected == ENDS:
            with pytest.raises((RunFailed, DeadlineExceeded, ServerFault), match=ENDINGS[fault]):
                await scene(world, run, fault, phase)
        else:
            ready = await scene(world, run, fault, phase)
            assert outcome(run) == expected
            if expected != LATE:
                assert re.search(NAMES[fault], caplog.text + "\n".join(run.said))
            assert sorted(run.trained) == prompts(run)
            assert all(len(group.samples) == GROUP for group in ready.groups)
        assert places(run) == dict.fromkeys(prompts(run), 1)
        assert world.proxy.hits, "the fault met nobody"
        assert run.counts["late"] == run.counts["poisoned"] == 0
        if expected == RESTARTED:
            await back(world, run)


async def scene(world: World, run: Run, fault: str, phase: str) -> ReadyBatch:
    """Let the fault happen in its phase, and wait for a batch."""
    await world.proxy.arm(fault, phase)
    if phase == "idle" and fault in ("hangs", "dies"):
        while not run.keeper.restarts:
            await asyncio.sleep(0.05)
            assert not run.listener.done(), run.listener
    batch = asyncio.create_task(run.batch())
    try:
        if phase in ("paused", "mid-update"):
            while not (world.proxy.held or await running(world)):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            run.version += 1
            await run.beside(run.push())
        return await batch
    finally:
        batch.cancel()
        await asyncio.gather(batch, return_exceptions=True)


async def running(world: World) -> bool:
    """The server behind the proxy generates."""
    state = await world.truth[0]._transport.request("GET", "/server_info")
    return bool(state["internal_states"][0]["running"])


def outcome(run: Run) -> str:
    if run.keeper.restarts:
        assert run.counts["failed"] == run.counts["retried"] == 0, "prompts of a server that is gone have not failed"
        return RESTARTED
    if run.counts["failed"]:
        assert run.counts["retried"] == run.counts["failed"]
        return ELSEWHERE
    return LATE


async def back(world: World, run: Run) -> None:
    """The server that was started again gets the weights, and prompts."""
    world.proxy.clear()
    await run.beside(run.keeper.revived())
    await run.beside(run.push())
    assert await world.truth[0].weight_version() == run.version
    ready = await run.batch()
    assert {group.worker for group in ready.groups} == {client.address for client in world.clients}
    assert f"server rank 0 is back, with weights of version {run.version}" in run.said


def prompts(run: Run) -> list[str]:
    """Ids of the first batch."""
    return [row["id"] for row in run.rollout._dispatch._stream._rows[:BATCH]]


def places(run: Run) -> dict[str, int]:
    """How often each prompt has been in a batch, or would be generated again from a checkpoint of now."""
    returned = run.rollout.state()["dispatch"]["stream"]["returned"]
    return dict(Counter([*run.trained, *(id_ for id_, _ in returned)]))


async def test_a_server_that_fails_again_and_again_is_started_again(world: World) -> None:
    async with asyncio.timeout(CELL_S), world.run() as run:
        await world.proxy.arm("malformed JSON", "idle")
        for _ in range(2):
            await run.batch()
        while not run.keeper.restarts:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert re.search(r"server rank 0 died: killed, for it failed attempt after attempt; last: .*malformed JSON", run.said[0])
        await back(world, run)


async def test_with_no_restart_left_the_run_goes_on_with_the_other(world: World) -> None:
    async with asyncio.timeout(CELL_S), world.run(restarts=1) as run:
        run.keeper.restarts = 1  # used up before
        await world.proxy.arm("dies", "decode")
        ready = await run.batch()
        assert sorted(group.prompt.id for group in ready.groups) == prompts(run)
        assert "all 1 restarts are used: the run goes on with 1 of 2 replicas" in run.said[0]
        run.version += 1
        await run.beside(run.push())
        ready = await run.batch()
        assert {group.worker for group in ready.groups} == {world.clients[1].address}


async def test_weights_that_are_not_those_sent_end_the_run(world: World) -> None:
    async with asyncio.timeout(CELL_S), world.run() as run:
        await world.proxy.arm("other weights", "idle")
        run.version += 1
        with pytest.raises(SyncMismatch, match=r"server rank 0 holds other weights than the trainer sent: 1 of \d+ tensors differ"):
            await run.beside(run.push())


async def test_the_page_says_what_the_matrix_shows() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.read_text().splitlines() if line.startswith("|")]
    table = {row[0]: tuple(row[1:]) for row in rows}
    assert table["the server"] == PHASES
    assert {fault: table[fault] for fault in OUTCOMES} == OUTCOMES
