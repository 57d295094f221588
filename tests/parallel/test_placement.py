from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_mega.core.errors import UserError
from areal_mega.parallel.placement import Placement, place
from areal_mega.parallel.strategy import ParallelStrategy, parse

SMALL = st.integers(1, 4)


@given(SMALL, SMALL, SMALL, SMALL, SMALL, st.integers(0, 3))
def test_every_process_owns_its_own_slots(dp: int, tp: int, pp: int, replicas: int, server_tp: int, spare: int) -> None:
    train = ParallelStrategy("megatron", dp=dp, tp=tp, pp=pp)
    rollout = ParallelStrategy("sglang", dp=replicas, tp=server_tp)
    needed = train.world_size + rollout.world_size
    placement = place(train, rollout, needed + spare, "cuda")
    assert set(placement.owned) == {("train", r) for r in range(train.world_size)} | {("server", r) for r in range(replicas)}
    assert all(len(placement.slots("train", r)) == 1 for r in range(train.world_size))
    assert all(len(placement.slots("server", r)) == server_tp for r in range(replicas))
    taken = [slot for slots in placement.owned.values() for slot in slots]
    assert sorted(taken) == list(range(needed)) and placement.used == needed
    assert place(train, rollout, None, "cpu") == placement


@given(SMALL, SMALL, SMALL, SMALL, st.integers(1, 31))
def test_what_does_not_fit_is_refused_with_the_sum(dp: int, tp: int, replicas: int, server_tp: int, slots: int) -> None:
    train, rollout = ParallelStrategy("megatron", dp=dp, tp=tp), ParallelStrategy("sglang", dp=replicas, tp=server_tp)
    needed = train.world_size + rollout.world_size
    if needed <= slots:
        place(train, rollout, slots, "cuda")
        return
    with pytest.raises(UserError) as error:
        place(train, rollout, slots, "cuda")
    message = str(error.value)
    assert f"takes {train.world_size} + rollout" in message
    assert f"takes {rollout.world_size} = {needed} GPUs, but launch.slots is {slots};" in message
    assert "\n" not in message


def test_remedies_are_legal() -> None:
    with pytest.raises(UserError, match="rollout with d2 fits"):
        place(parse("megatron:d4"), parse("sglang:d4t2"), 8, "cuda")
    with pytest.raises(UserError, match="train with d4 and rollout with d1 fit"):
        # d7 would fill the machine, but eight-way experts need tp*dp divisible by 8.
        place(parse("megatron:d8t2e8"), parse("sglang:d1"), 15, "cuda")
    with pytest.raises(UserError, match="one replica of each takes 8 \\+ 8 = 16"):
        place(parse("megatron:t8"), parse("sglang:t8"), 8, "cuda")


def test_roles_take_only_their_own_engines() -> None:
    with pytest.raises(UserError, match="engine sglang does not train"):
        place(parse("sglang:d1"), parse("sglang:d1"), 8)
    with pytest.raises(UserError, match="engine megatron does not serve"):
        place(parse("megatron:d1"), parse("megatron:d1"), 8)
    assert place(parse("megatron:d1"), parse("vllm:d2t2"), 8).slots("server", 1) == (3, 4)


def test_overlapping_slots_are_refused() -> None:
    with pytest.raises(UserError, match="slot 1 is given to train 1 and to server 0"):
        Placement({("train", 0): (0,), ("train", 1): (1,), ("server", 0): (1, 2)})
