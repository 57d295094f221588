"""Runs a reward function in isolated processes, with a time-out that fires whatever the function is stuck in.

A time-out inside a thread cannot stop C code, and an alarm works only in the main thread of the main interpreter; killing a
process always works. Each verifier process serves one request at a time, so a slow one holds up nobody but itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections import Counter
from collections.abc import Mapping
from typing import Any

from areal_mega.core.errors import DeadlineExceeded, UserError
from areal_mega.rewards.child import LENGTH
from areal_mega.rewards.result import RewardResult
from areal_mega.rpc.codec import decode, encode

log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
"""For importing the reward function's module. It does not count against the time of any sample."""

HANGS_AFTER = 4
"""Prompts. Where a verification of so many timed out and none ever ended, the reward function is taken to hang on everything."""

_BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from areal_mega.rewards.child import main; main(int(sys.argv[2]))"


class RewardRunner:
    """A pool of verifier processes for one reward function.

    Args:
        path: import path of the reward function, see `areal_mega.rewards`.
        kwargs: passed to it at every call.
        timeout_s: a verification that takes longer is killed with its process (and that process's own children), in seconds.
        workers: verifications at once.
    """

    def __init__(self, path: str, kwargs: Mapping[str, Any], *, timeout_s: float, workers: int) -> None:
        self._path, self._kwargs = path, dict(kwargs)
        self._timeout_s, self._workers = timeout_s, workers
        self._idle: asyncio.Queue[_Child | Exception] = asyncio.Queue()
        self._children: set[_Child] = set()
        self._replacements: set[asyncio.Task[None]] = set()
        self._closed = False
        self._slow_prompts: set[str] = set()
        """Prompts whose verification timed out before any verification had ended."""
        self.counts: Counter[str] = Counter()
        """Verifications so far by status."""

    async def start(self) -> None:
        """Start the processes.

        Raises:
            UserError: the reward function cannot be imported or does not take its kwargs.
            DeadlineExceeded: importing it takes longer than two minutes.
        """
        starts = [asyncio.create_task(self._spawn()) for _ in range(self._workers)]
        try:
            for child in await asyncio.gather(*starts):
                self._idle.put_nowait(child)
        except BaseException:
            await asyncio.gather(*starts, return_exceptions=True)
            await self.close()
            raise

    async def score(self, prompt: str, completion: str, row: Mapping[str, Any]) -> RewardResult:
        """Verify one completion; waits for a free process first (that wait does not count against ``timeout_s``).

        Raises:
            UserError: every verification so far, of several prompts, timed out.
        """
        assert not self._closed, "the reward runner is closed"
        child = await self._idle.get()
        if isinstance(child, Exception):
            self._idle.put_nowait(child)  # so that everyone who waits hears of it
            raise child
        try:
            async with asyncio.timeout(self._timeout_s):
                result = await child.ask(prompt, completion, row)
        except TimeoutError:
            self._replace(child)
            result = RewardResult(
                value=None, status="timeout", message=f"the verifier took longer than {self._timeout_s:g} s and was killed"
            )
        except (asyncio.IncompleteReadError, ConnectionError):
            self._replace(child)
            result = RewardResult(value=None, status="error", message="the verifier's process died")
        except BaseException:
            # Its answer may still come: given to the next request, it would shift every later reward by one.
            self._replace(child)
            raise
        else:
            self._idle.put_nowait(child)
        self.counts[result.status] += 1
        if result.status == "timeout":
            self._check_hanging(prompt)
        return result

    def _check_hanging(self, prompt: str) -> None:
        """One slow sample is dropped; a function that never ends would drop them all, one time-out after the other, for hours."""
        timeouts = self.counts["timeout"]
        if timeouts < self.counts.total():
            return
        self._slow_prompts.add(prompt)
        if len(self._slow_prompts) >= HANGS_AFTER:
            raise UserError(
                f"reward '{self._path}': none of its first {timeouts} verifications ({len(self._slow_prompts)} prompts) ended within "
                f"reward.timeout_s={self._timeout_s:g} s; raise it, or mend the function if it hangs"
            )

    async def close(self) -> None:
        """End all processes. Returns when they are gone."""
        self._closed = True
        for task in self._replacements:
            task.cancel()
        await asyncio.gather(*self._replacements, return_exceptions=True)
        children = list(self._children)
        for child in children:
            child.kill()
        await asyncio.gather(*(child.gone() for child in children))
        self._children.clear()

    async def __aenter__(self) -> RewardRunner:
        await self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.close()

    def _replace(self, child: _Child) -> None:
        child.kill()
        if not self._closed:
            task = asyncio.create_task(self._replacement(child))
            self._replacements.add(task)
            task.add_done_callback(self._replacements.discard)

    async def _replacement(self, old: _Child) -> None:
        await old.gone()
        self._children.discard(old)
        try:
            self._idle.put_nowait(await self._spawn())
        except Exception as error:  # handed to whoever asks for a verification next: without this process there may be none
            log.error("a verifier process could not be started again: %s", error)
            self._idle.put_nowait(error)

    async def _spawn(self) -> _Child:
        child = await _Child.start()
        self._children.add(child)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                await child.set_up(self._path, self._kwargs)
        except TimeoutError:
            child.kill()
            raise DeadlineExceeded(f"reward '{self._path}': its verifier process was not ready after {START_TIMEOUT_S:g} s") from None
        except BaseException:
            child.kill()
            raise
        return child


class _Child:
    """One verifier process and its protocol, see `areal_mega.rewards.child`."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._asked = 0

    @classmethod
    async def start(cls) -> _Child:
        paths = [path or os.getcwd() for path in sys.path]
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-c", _BOOT, json.dumps(paths), str(os.getpid())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            process_group=0,  # a verifier may start processes of its own: they are killed with it
        )
        return cls(process)

    async def set_up(self, path: str, kwargs: dict[str, Any]) -> None:
        await self._write({"path": path, "kwargs": kwargs})
        try:
            answer = await self._read()
        except asyncio.IncompleteReadError:
            raise RuntimeError(f"reward '{path}': its verifier process died while it started (exit code {await self.gone()})") from None
        if "user_error" in answer:
            raise UserError(answer["user_error"])
        if not answer["ready"]:
            raise RuntimeError(f"reward '{path}' failed while it was imported:\n{answer['traceback']}")

    async def ask(self, prompt: str, completion: str, row: Mapping[str, Any]) -> RewardResult:
        self._asked += 1
        await self._write({"id": self._asked, "prompt": prompt, "completion": completion, "row": dict(row)})
        answer = await self._read()
        number = answer.pop("id")
        assert number == self._asked, f"verifier answered request {number} instead of {self._asked}"
        return RewardResult(**answer)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def gone(self) -> int:
        return await self._process.wait()

    async def _write(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        body = encode(message)
        self._process.stdin.write(LENGTH.pack(len(body)) + body)
        await self._process.stdin.drain()

    async def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        (size,) = LENGTH.unpack(await self._process.stdout.readexactly(LENGTH.size))
        return decode(await self._process.stdout.readexactly(size))
