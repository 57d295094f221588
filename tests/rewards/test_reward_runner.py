"""Verifier processes: isolation, time-outs that fire, and rewards that stay with their samples."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from areal_mega.core.errors import UserError
from areal_mega.rewards.runner import RewardRunner

HERE = str(Path(__file__).parent)


@pytest.fixture(autouse=True)
def samples_importable(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", [HERE, *sys.path])
    yield


def runner(timeout_s: float = 60.0, workers: int = 1, name: str = "behave", **kwargs: float) -> RewardRunner:
    return RewardRunner(f"reward_samples:{name}", kwargs, timeout_s=timeout_s, workers=workers)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def wait_gone(pid: int) -> None:
    for _ in range(400):
        if not alive(pid):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"process {pid} is still there")


async def test_many_rewards_stay_with_their_samples() -> None:
    async with runner(name="echo", workers=2, scale=2.0) as verifier:
        results = await asyncio.gather(*(verifier.score("", str(i), {}) for i in range(100)))
    assert [r.value for r in results] == [2.0 * i for i in range(100)]
    assert verifier.counts == {"ok": 100}


@pytest.mark.parametrize("stuck", ["spin", "c code", "sleep"])
async def test_timeout_fires_whatever_the_verifier_is_stuck_in(stuck: str) -> None:
    async with runner(timeout_s=2.0) as verifier:
        before = await verifier.score("", "pid", {})
        result = await verifier.score("", stuck, {})
        assert (result.status, result.value) == ("timeout", None)
        assert before.value is not None
        await wait_gone(int(before.value))
        after = await verifier.score("", "3", {})
        assert (after.status, after.value) == ("ok", 3.0)
    assert verifier.counts == {"ok": 2, "timeout": 1}


async def test_one_stuck_verifier_does_not_stop_others() -> None:
    async with runner(timeout_s=3600.0, workers=2) as verifier:
        stuck = asyncio.create_task(verifier.score("", "sleep", {}))
        await asyncio.sleep(0)
        results = [await verifier.score("", str(i), {}) for i in range(20)]
        assert [r.value for r in results] == [float(i) for i in range(20)]
        assert not stuck.done()
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck


async def test_cancelled_verification_does_not_shift_the_next_reward() -> None:
    async with runner() as verifier:
        stuck = asyncio.create_task(verifier.score("", "sleep", {}))
        await asyncio.sleep(0.2)
        stuck.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stuck
        assert (await verifier.score("", "7", {})).value == 7.0


WHAT_A_VERIFIER_MAY_DO = {
    "raise": ("error", None, "this verifier is broken"),
    "die": ("error", None, "died"),
    "exit": ("error", None, "died"),
    "none": ("error", None, "returned None"),
    "nan": ("error", None, "returned nan"),
    "text": ("error", None, "returned '1.0'"),
    "no reward": ("error", None, "without 'reward'"),
    "print": ("ok", 0.25, ""),
    "read": ("ok", 0.0, ""),
    "zero": ("ok", 0.0, ""),
    "unparsed": ("unparsed", 0.0, ""),
    "scores": ("ok", 0.5, ""),
}


async def test_what_a_verifier_may_do() -> None:
    async with runner() as verifier:
        for completion, (status, value, message) in WHAT_A_VERIFIER_MAY_DO.items():
            result = await verifier.score("", completion, {})
            assert (result.status, result.value) == (status, value), completion
            assert message in result.message
            assert (await verifier.score("", "1", {})).value == 1.0, f"after {completion}"


async def test_scores_are_named_parts() -> None:
    async with runner() as verifier:
        assert (await verifier.score("", "scores", {})).scores == {"correct": 1.0, "parsed": 1.0}


async def test_timeout_kills_what_the_verifier_started(tmp_path: Path) -> None:
    async with runner(timeout_s=3.0) as verifier:
        result = await verifier.score("", "spawn", {"file": str(tmp_path / "pid")})
        assert result.status == "timeout"
        await wait_gone(int((tmp_path / "pid").read_text()))


async def test_close_leaves_no_process() -> None:
    verifier = runner()
    await verifier.start()
    pid = (await verifier.score("", "pid", {})).value
    assert pid is not None and alive(int(pid))
    await verifier.close()
    assert not alive(int(pid))


@pytest.mark.parametrize("stuck", [False, True])
async def test_verifier_dies_with_its_parent(tmp_path: Path, stuck: bool) -> None:
    script = f"""
import asyncio, os, sys
sys.path.insert(0, {HERE!r})
from areal_mega.rewards.runner import RewardRunner
async def main():
    runner = RewardRunner("reward_samples:behave", {{}}, timeout_s=3600, workers=1)
    await runner.start()
    print(int((await runner.score("", "pid", {{}})).value), flush=True)
    if {stuck}:
        asyncio.create_task(runner.score("", "spin", {{}}))
    await asyncio.sleep(0.2)
    os.kill(os.getpid(), 9)
asyncio.run(main())
"""
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    await wait_gone(int(output))


@pytest.mark.parametrize(
    ("path", "kwargs", "message"),
    [
        ("no_such_module.reward", {}, "no module named 'no_such_module'"),
        ("reward_samples:ech", {}, "did you mean 'echo'"),
        ("reward_samples:echo", {"factor": 2.0}, "factor"),
        ("reward_samples:coroutine", {}, "plain function"),
        ("reward_samples:HERE", {}, "reward_samples"),
        ("nonsense", {}, "import path"),
    ],
)
async def test_wrong_reward_is_one_line_at_start(path: str, kwargs: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        await RewardRunner(path, kwargs, timeout_s=1.0, workers=1).start()
    assert "\n" not in str(raised.value)


async def test_reward_module_that_fails_to_import_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_reward.py").write_text("import a_dependency_that_is_missing\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RuntimeError, match="a_dependency_that_is_missing"):
        await RewardRunner("broken_reward.f", {}, timeout_s=1.0, workers=1).start()


async def test_failed_restart_reaches_everyone_who_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "vanishing_reward.py"
    module.write_text("import os\ndef f(prompt, completion, row):\n    os._exit(1)\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    verifier = RewardRunner("vanishing_reward.f", {}, timeout_s=60.0, workers=1)
    await verifier.start()
    module.unlink()
    try:
        assert (await verifier.score("", "", {})).status == "error"
        for _ in range(2):
            with pytest.raises(UserError, match="vanishing_reward"):
                await verifier.score("", "", {})
    finally:
        await verifier.close()


async def test_gsm8k_reward_in_its_own_process() -> None:
    async with RewardRunner("areal_mega.rewards.gsm8k.gsm8k_reward", {"format_reward": 0.5}, timeout_s=60.0, workers=1) as verifier:
        result = await verifier.score("", "#### 42", {"answer": "42"})
    assert (result.status, result.value) == ("ok", 1.5)
    assert result.scores == {"correct": 1.0, "parsed": 1.0, "format": 1.0}


async def test_a_verifier_that_hangs_on_everything_is_told_to_the_user() -> None:
    async with runner(timeout_s=0.2) as verifier:
        for prompt in ("a", "a", "b", "c"):
            assert (await verifier.score(prompt, "sleep", {})).status == "timeout"
        with pytest.raises(UserError) as caught:
            await verifier.score("d", "sleep", {})
    assert str(caught.value) == (
        "reward 'reward_samples:behave': none of its first 5 verifications (4 prompts) ended within reward.timeout_s=0.2 s; "
        "raise it, or mend the function if it hangs"
    )


async def test_a_verifier_that_ever_ended_is_only_slow() -> None:
    async with runner(timeout_s=0.3) as verifier:
        while (await verifier.score("a", "1", {})).status != "ok":  # a busy machine may take that long for the first
            pass
        for prompt in "bcdef":
            assert (await verifier.score(prompt, "sleep", {})).status == "timeout"
