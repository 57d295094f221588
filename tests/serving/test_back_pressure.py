"""A full queue is answered with 503 and a reason; the rollout client comes again until it is served."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest
from served import served
from tiny_models import tiny_model

from areal_mega.rollout.client import GenerateRequest, InferenceClient, ServerFault


async def test_a_full_queue_says_so_and_the_client_copes(tmp_path: Path) -> None:
    folder = tiny_model(tmp_path, "llama", eos_token_id=None)
    with served(folder, "--max-running-requests", "2", "--max-queued-requests", "3") as url:
        # Paused, so that what is sent stays in the queue.
        impatient, patient = InferenceClient(url, timeout_s=60, retries=0), InferenceClient(url, timeout_s=60, retries=7)
        await impatient.pause("in_place")
        requests = [GenerateRequest(input_ids=(5, 6, i), max_new_tokens=20, seed=i) for i in range(12)]
        tasks = [asyncio.create_task(patient.generate([request])) for request in requests]
        await asyncio.sleep(0.5)
        with pytest.raises(ServerFault, match=r"503.*queue is full: 4 samples would wait, 3 may") as caught:
            await impatient.generate([GenerateRequest(input_ids=(9,), max_new_tokens=1)])
        assert not caught.value.is_refusal
        async with aiohttp.ClientSession() as session, session.post(f"{url}/generate", json={"input_ids": [9]}) as answer:
            assert answer.status == 503 and answer.headers["Retry-After"] == "1"
            assert "queue is full" in (await answer.json())["error"]["message"]
        await impatient.resume()
        generations = await asyncio.wait_for(asyncio.gather(*tasks), 60)
        assert all(len(generation.output_ids) == 20 for [generation] in generations)
        await impatient.close()
        await patient.close()
