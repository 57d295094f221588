from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from areal_mega.serving.admission import Candidate, Pick, admit


@st.composite
def queues(draw: st.DrawFn) -> list[Candidate]:
    prompts = [(bytes([i]), draw(st.integers(1, 20))) for i in range(4)]
    queue = []
    for _ in range(draw(st.integers(0, 12))):
        key, length = draw(st.sampled_from(prompts))
        extra = draw(st.sampled_from([b"", b"x", b"yy"]))
        queue.append(Candidate(length + len(extra), key, key + extra, length))
    return queue


@given(queues(), st.integers(0, 60), st.integers(0, 8), st.integers(1, 40), st.dictionaries(st.integers(0, 3), st.integers(1, 20)))
def test_invariants(queue: list[Candidate], budget: int, rows: int, tokens: int, live: dict[int, int]) -> None:
    def fits(count: int, length: int) -> bool:
        return count <= rows and count * length <= tokens

    picks = admit(queue, budget=budget, fits=fits, shared=lambda key: live.get(key[0], 0))
    assert len(picks) <= rows
    assert sum(p.count for p in picks) <= budget
    if picks:
        assert fits(len(picks), max(queue[p.index].length for p in picks) + 1)
    indices = [p.index for p in picks]
    assert indices == sorted(set(indices))
    for number, pick in enumerate(picks):
        check(pick, picks[:number], queue, last=number == len(picks) - 1)
    if queue and budget > 0 and fits(1, queue[0].length + 1):
        assert picks and picks[0].index == 0, "the head of the queue starts whenever it fits"


def check(pick: Pick, before: list[Pick], queue: list[Candidate], *, last: bool) -> None:
    candidate = queue[pick.index]
    if pick.leader is not None:
        leader = before[pick.leader]
        assert queue[leader.index].context == candidate.context and leader.leader is None
        assert pick.count == 0 and pick.cached == candidate.length
        return
    assert 0 <= pick.cached < candidate.length and pick.cached <= candidate.prompt_length
    assert pick.count >= 1
    assert pick.cached + pick.count == candidate.length or last, "only the last pick may be partial"
    fresh = [p for p in before if p.leader is None and p.cached == 0 and queue[p.index].key == candidate.key]
    assert pick.cached or not fresh, "a prompt is computed once"


def test_no_more_of_the_queue_is_read_than_fits() -> None:
    def queue():  # type: ignore[no-untyped-def]
        yield Candidate(3, b"a", b"a", 3)
        yield Candidate(3, b"b", b"b", 3)
        raise AssertionError("read too far")

    assert len(admit(queue(), budget=10, fits=lambda count, length: count <= 1, shared=lambda key: 0)) == 1


def test_a_prompt_of_one_token_waits_too_while_it_is_computed() -> None:
    queue = [Candidate(2, b"a", b"ax", 1), Candidate(1, b"a", b"a", 1)]
    picks = admit(queue, budget=3, fits=lambda count, length: True, shared=lambda key: 0)
    assert picks == [Pick(0, 0, 2)]
