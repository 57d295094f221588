"""Generation that goes on over interruptions: requests of one prompt travel together, and each sample is asked for until it ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from areal_mega.core.errors import DeadlineExceeded
from areal_mega.rollout.continuation import Partial
from areal_mega.rollout.inference import GenerateRequest, Generation, Segment, ServerFault

_RETRY_PAUSE_S = 0.25

Ask = Callable[[Sequence[Partial]], Awaitable[list[Segment]]]
"""One HTTP request for what is left of samples of one prompt; one checked segment each. How, is the engine's protocol."""
Decode = Callable[[Sequence[int]], Awaitable[str | None]]
"""Text of tokens by the server's tokenizer; None where it has none."""


class Generator:
    """Drives samples of one server to their ends.

    Args:
        base_url: for error messages.
        retries: times that a failed request is sent again.
    """

    def __init__(self, base_url: str, *, ask: Ask, decode: Decode, retries: int) -> None:
        self._base_url, self._ask, self._decode, self._retries = base_url, ask, decode, retries
        self._aborts = 0

    def note_abort(self) -> None:
        """This side is about to abort what runs: the samples that come back aborted are at their end, and not interrupted."""
        self._aborts += 1

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Generation]:
        """Generate all; answers stand in the order of the requests.

        Requests with the same prompt travel in one HTTP call, so that the server computes the prompt once. A request that the server
        ends with ``abort`` because of a weight update goes on with its tokens so far and the rest of its budget.

        Raises:
            ServerFault: the server failed, or answered nonsense, ``retries`` + 1 times.
            DeadlineExceeded: no answer in time, as often.
        """
        by_prompt: dict[tuple[int, ...], list[int]] = {}
        for index, request in enumerate(requests):
            by_prompt.setdefault(request.input_ids, []).append(index)
        partials = [Partial(request, self._base_url) for request in requests]
        tasks = [asyncio.create_task(self._complete([partials[i] for i in members])) for members in by_prompt.values()]
        try:
            await asyncio.gather(*tasks)
        except BaseException:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            raise
        return [partial.generation() for partial in partials]

    async def _complete(self, members: Sequence[Partial]) -> None:
        """Drive samples of one prompt to their ends."""
        pending = list(members)
        while pending:
            aborts = self._aborts
            segments = await self._answered(pending)
            for partial, segment in zip(pending, segments, strict=True):
                partial.absorb(segment, stopped_by_us=self._aborts != aborts)
            pending = [p for p in pending if not p.done]
        for partial in members:
            if partial.segments > 1:
                partial.text = await self._joined_text(partial)

    async def _answered(self, pending: Sequence[Partial]) -> list[Segment]:
        """One segment per sample; validated whole, so that a bad answer is asked for again and nothing of it kept."""
        for attempt in range(self._retries + 1):
            try:
                return await self._ask(pending)
            except (ServerFault, DeadlineExceeded) as error:
                if attempt == self._retries or (isinstance(error, ServerFault) and error.is_refusal):
                    raise
                await asyncio.sleep(_RETRY_PAUSE_S * 2**attempt)
        raise AssertionError("unreachable")

    async def _joined_text(self, partial: Partial) -> str:
        """Text of a sample made in several requests: decoded whole, for a token may be part of a character."""
        text = await self._decode(partial.text_ids)
        if text is None:
            return partial.text
        return text[: text.rindex(partial.matched)] if partial.matched and partial.matched in text else text
