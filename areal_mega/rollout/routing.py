"""Which replica a prompt goes to: the one with the fewest tokens outstanding, less what it holds of the prompt's prefix. Pure.

All members of a group and all turns of an episode run on one replica, because one rollout worker runs them against its own server:
their shared prefix is prefilled once. Between prompts, a prefix (a system prompt, a document, the prompt itself when it is tried again)
counts as held by the replicas that got it since the last weight update, for an update makes every cached prefix worthless.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from areal_mega.core.types import Group, Prompt

_BLOCK = 256
"""Characters of one block of a prefix: about a page of a server's KV cache."""
_MOST_BLOCKS = 128
"""Blocks of one prompt that are looked at (32 k characters)."""
_MEMORY = 65_536
"""Blocks remembered per replica; the oldest are forgotten."""
_FADE = 0.02
"""Weight of one more group in the running means of lengths."""


@dataclass
class Replica:
    """What is under way at one replica. ``prompts`` episodes, ``tokens`` expected of them; ``faults_in_a_row`` of its server, and the last.

    ``down``: it has no server at the moment, and is given nothing.
    """

    name: str
    prompts: int = 0
    tokens: float = 0.0
    faults_in_a_row: int = 0
    last_fault: str = ""
    down: bool = False
    held: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    """Blocks of prefixes, least recently used first."""


@dataclass(frozen=True, slots=True)
class Route:
    """A choice: the replica, and the tokens that it is expected to compute."""

    replica: str
    tokens: float


class Router:
    """Loads of all replicas.

    Args:
        max_prompts: episodes that one replica is given at once.
        group_size: samples of one prompt.
        expected_tokens: of one answer, before any was seen.
    """

    def __init__(self, max_prompts: int, *, group_size: int, expected_tokens: float) -> None:
        assert max_prompts > 0
        self._max_prompts, self._group_size = max_prompts, group_size
        self.replicas: dict[str, Replica] = {}
        self.answer_tokens = expected_tokens
        """Running mean of an answer's length."""
        self.chars_per_token = 4.0
        """Running mean over prompts: the controller never tokenises."""

    def joined(self, name: str) -> None:
        assert name not in self.replicas, f"{name} is a replica already"
        self.replicas[name] = Replica(name)

    def lost(self, name: str) -> None:
        del self.replicas[name]

    def forget_prefixes(self) -> None:
        """The weights changed: no server has a usable prefix any more."""
        for replica in self.replicas.values():
            replica.held.clear()

    @property
    def free(self) -> int:
        """Prompts that may be given to replicas now."""
        return sum(self._max_prompts - replica.prompts for replica in self.replicas.values() if not replica.down)

    def route(self, prompt: Prompt, avoid: Collection[str] = ()) -> Route:
        """Choose a replica for ``prompt`` and count it there. There must be a free one; those to ``avoid`` are taken only alone."""
        open_ = [replica for replica in self.replicas.values() if replica.prompts < self._max_prompts and not replica.down]
        assert open_, "no replica has room"
        candidates = [replica for replica in open_ if replica.name not in avoid] or open_
        blocks = prefix_blocks(prompt.row)
        whole = prompt_chars(prompt.row) / self.chars_per_token + self._group_size * self.answer_tokens
        costs = {replica.name: whole - self._held_tokens(replica, blocks) for replica in candidates}
        best = min(candidates, key=lambda replica: (replica.tokens + costs[replica.name], replica.prompts))
        best.prompts += 1
        best.tokens += costs[best.name]
        for block in blocks:
            best.held[block] = None
            best.held.move_to_end(block)
        while len(best.held) > _MEMORY:
            best.held.popitem(last=False)
        return Route(best.name, costs[best.name])

    def ended(self, route: Route) -> None:
        """What ``route`` counted is no longer under way. A replica that was lost has no count any more."""
        replica = self.replicas.get(route.replica)
        if replica is not None:
            replica.prompts -= 1
            replica.tokens = max(0.0, replica.tokens - route.tokens) if replica.prompts else 0.0

    def learn(self, group: Group) -> None:
        """Correct the running means by a finished group."""
        answers = [sample.length - sample.prompt_length for sample in group.samples]
        self.answer_tokens += _FADE * (sum(answers) / len(answers) - self.answer_tokens)
        chars, tokens = prompt_chars(group.prompt.row), group.samples[0].prompt_length
        if chars and tokens:
            self.chars_per_token += _FADE * (chars / tokens - self.chars_per_token)

    def _held_tokens(self, replica: Replica, blocks: Sequence[bytes]) -> float:
        held = 0
        for block in blocks:
            if block not in replica.held:
                break
            held += 1
        return held * _BLOCK / self.chars_per_token


def prompt_text(row: Mapping[str, Any]) -> str:
    """What the server will see of a row, before any chat template."""
    return row["prompt"] if "prompt" in row else json.dumps(row.get("messages", ""), ensure_ascii=False)


def prompt_chars(row: Mapping[str, Any]) -> int:
    return len(prompt_text(row))


def prefix_blocks(row: Mapping[str, Any]) -> list[bytes]:
    """A digest for each whole block of the prompt, over everything up to its end: equal digests are equal prefixes."""
    text = prompt_text(row)
    digest = hashlib.blake2b(digest_size=8)
    blocks = []
    for start in range(0, min(len(text) // _BLOCK, _MOST_BLOCKS) * _BLOCK, _BLOCK):
        digest.update(text[start : start + _BLOCK].encode())
        blocks.append(digest.digest())
    return blocks
