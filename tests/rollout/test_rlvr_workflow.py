"""RLVRWorkflow: own seeds, one template, what was sampled is what is trained, members without a reward dropped and counted."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from rollout_fakes import FakeEngine, FakeScorer, context, prompts
from tiny_models import tiny_tokenizer

from areal_mega.core.errors import UserError
from areal_mega.core.types import Prompt, sampling_seed
from areal_mega.data.tokenizer import load_tokenizer
from areal_mega.rewards.result import RewardResult
from areal_mega.rollout.load import load_workflow
from areal_mega.rollout.rlvr import RLVRWorkflow
from areal_mega.rollout.workflow import drops


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return tiny_tokenizer()


def counting() -> Counter[str]:
    counter: Counter[str] = Counter()
    drops.set(counter)
    return counter


async def test_members_share_the_prompt_and_nothing_else(tokenizer: Any) -> None:
    engine, scorer = (
        FakeEngine(),
        FakeScorer(RewardResult(value=0.0, status="ok", scores={"correct": 0.0}), RewardResult(value=1.0, status="ok")),
    )
    workflow = RLVRWorkflow(context(tokenizer, scorer, group_size=4, stop=("\n",), top_k=5))
    (prompt,) = prompts(1)
    trajectories = await workflow.arun_episode(engine, prompt)
    assert trajectories is not None and len(trajectories) == 4
    assert [r.seed for r in engine.asked] == [sampling_seed(7, "p0", 0, member) for member in range(4)]
    assert len({r.seed for r in engine.asked}) == 4
    assert {r.input_ids for r in engine.asked} == {tuple(tokenizer.encode("0+0=", add_special_tokens=False))}
    assert {(r.max_new_tokens, r.temperature, r.top_k, r.stop, r.stop_token_ids) for r in engine.asked} == {(8, 1.0, 5, ("\n",), (1,))}
    assert [t.reward for t in trajectories] == [0.0, 1.0, 0.0, 1.0], "0.0 is a reward, not a missing one"
    assert [t.member for t in trajectories] == [0, 1, 2, 3]
    assert trajectories[0].scores == {"correct": 0.0}


async def test_arrays_are_aligned_to_their_own_token(tokenizer: Any) -> None:
    engine = FakeEngine(version=9)
    trajectories = await RLVRWorkflow(context(tokenizer)).arun_episode(engine, prompts(1)[0])
    assert trajectories is not None
    t = trajectories[0]
    before = len(engine.asked[0].input_ids)
    assert t.input_ids[:before].tolist() == list(engine.asked[0].input_ids) and t.input_ids[-1] == 1
    assert t.loss_mask.tolist() == [False] * before + [True] * 4
    np.testing.assert_array_equal(t.logprobs, np.float32([0.0] * before + [-0.5, -1.5, -2.5, -3.5]))
    assert t.versions.tolist() == [-1] * before + [9] * 4


async def test_verifier_sees_the_answer_without_special_tokens(tokenizer: Any) -> None:
    scorer = FakeScorer()
    row = {"id": "c", "messages": [{"role": "user", "content": "2+2?"}], "answer": "4"}
    await RLVRWorkflow(context(tokenizer, scorer)).arun_episode(FakeEngine(), Prompt(id="c", epoch=1, row=row))
    prompt_text, completion, given = scorer.asked[0]
    assert prompt_text == "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert "<|" not in completion and len(completion) >= 1
    assert given == row


async def test_truncation_comes_from_the_server(tokenizer: Any) -> None:
    engine = FakeEngine()
    engine.change = {1: {"finish_reason": "length"}}
    trajectories = await RLVRWorkflow(context(tokenizer)).arun_episode(engine, prompts(1)[0])
    assert trajectories is not None and [t.finish_reason for t in trajectories] == ["stop", "length"]


async def test_members_without_a_reward_are_dropped_and_counted(tokenizer: Any) -> None:
    counter = counting()
    scorer = FakeScorer(
        RewardResult(value=None, status="timeout", message="slow"),
        RewardResult(value=0.0, status="unparsed", scores={"parsed": 0.0}),
        RewardResult(value=None, status="error", message="broken"),
    )
    trajectories = await RLVRWorkflow(context(tokenizer, scorer, group_size=3)).arun_episode(FakeEngine(), prompts(1)[0])
    assert trajectories is not None
    assert [(t.member, t.reward, t.scores) for t in trajectories] == [(1, 0.0, {"parsed": 0.0})]
    assert counter == {"reward timeout: slow": 1, "reward error: broken": 1}


async def test_aborted_members_are_dropped_and_counted(tokenizer: Any) -> None:
    counter, engine, scorer = counting(), FakeEngine(), FakeScorer()
    engine.change = {0: {"finish_reason": "abort"}}
    trajectories = await RLVRWorkflow(context(tokenizer, scorer)).arun_episode(engine, prompts(1)[0])
    assert trajectories is not None and [t.member for t in trajectories] == [1]
    assert counter == {"generation aborted": 1} and len(scorer.asked) == 1


@pytest.mark.parametrize(
    ("path", "kwargs", "message"),
    [
        ("areal_mega.rollout.rlvr.RLVRWorkflo", {}, "did you mean 'RLVRWorkflow'"),
        ("areal_mega.rollout.store.TrajectoryStore", {}, "not a subclass"),
        ("areal_mega.rollout.rlvr.RLVRWorkflow", {"turns": 3}, "turns"),
        ("nowhere.Workflow", {}, "no module named 'nowhere'"),
    ],
)
def test_wrong_workflows_are_one_line(path: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        load_workflow(path, kwargs, context())
    assert "\n" not in str(raised.value)


def test_workflow_of_the_recipe_gets_its_kwargs() -> None:
    workflow = load_workflow("rollout_fakes:ScriptedWorkflow", {"script": {"p0": None}}, context())
    assert getattr(workflow, "script") == {"p0": None}  # noqa: B009


def test_missing_model_folder_is_one_line(tmp_path: Any) -> None:
    with pytest.raises(UserError, match="does not exist"):
        load_tokenizer(str(tmp_path / "nothing"))
    with pytest.raises(UserError, match="no tokenizer can be loaded") as raised:
        load_tokenizer(str(tmp_path))
    assert "\n" not in str(raised.value)
