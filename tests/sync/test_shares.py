"""Who sends what: every tensor once, whole, by ranks that no other sender needs."""

from __future__ import annotations

import json
from functools import lru_cache
from math import prod

import pytest
from tiny_models import tiny_config

from areal_mega.models.ownership import Ownership
from areal_mega.models.registry import family_for
from areal_mega.parallel.layout import RankLayout
from areal_mega.parallel.strategy import parse
from areal_mega.sync.plan import fused_groups
from areal_mega.sync.shares import share_of, shares

DENSE = ["d1", "d4", "t2p2", "t2c2d2", "p2v2d2"]
EXPERTS = [
    *("d2e2", "d8e4", "d4e8c2", "t2p2e2d2", "t2p2e4d2", "t4e2", "d4t2p2e8"),
    *("(attn:d4|ffn:e2t2)", "(attn:d4t2|ffn:e4t2)", "(attn:d8|ffn:e2t4)", "(attn:d2t4|ffn:e4t2)", "(attn:t4d2|ffn:e8t1)"),
]


@lru_cache
def ownership(family: str, strategy: str) -> Ownership:
    """Of a tiny model with eight layers and eight experts."""
    hf = json.loads(tiny_config(family, num_hidden_layers=8).to_json_string(use_diff=False))
    return Ownership(family_for(hf).table(hf), RankLayout(parse(f"megatron:{strategy}")))


@pytest.mark.parametrize("most", [1, 2, 3, 8])
@pytest.mark.parametrize(
    ("family", "strategy"), [("qwen3", s) for s in DENSE] + [(f, s) for f in ("qwen3_moe", "deepseek_v3") for s in EXPERTS]
)
def test_shares(family: str, strategy: str, most: int) -> None:
    owned = ownership(family, strategy)
    found = shares(owned, most)
    home = {name: number for number, share in enumerate(found) for name in share.names}
    assert sorted(home) == sorted(hf.name for hf in owned.table.hf_tensors) and len(home) == sum(len(share.names) for share in found)
    ranks = [rank for share in found for rank in share.ranks]
    assert len(set(ranks)) == len(ranks) and [share.root for share in found] == sorted(share.ranks[0] for share in found)
    stage = {share.root: owned.layout.coords(share.root).pp for share in found}
    assert all(list(stage.values()).count(each) <= most for each in stage.values())
    for group in fused_groups(owned.table.hf_tensors):
        assert len({home[hf.name] for hf in group}) == 1
    for param in owned.table.exported:
        share = found[home[param.hf[0].name]]
        assert all(home[hf.name] == home[param.hf[0].name] for hf in param.hf)
        assert all(set(owned.holders(param, part)) & set(share.ranks) for part in range(owned.sources(param)))
    for rank in range(owned.layout.world_size):
        mine = share_of(rank, found)
        assert rank in mine.ranks and (mine in found or not mine.names)


@pytest.mark.parametrize(
    ("strategy", "most", "senders"),
    [
        ("d2e2", 8, {0: (0,), 1: (1,)}),  # each its own experts: nothing is gathered
        ("d2e2", 1, {0: (0, 1)}),
        ("d4e2", 8, {0: (0,), 1: (1,)}),  # the second replica of the experts sends nothing
        ("t2p2e2d2", 8, {0: (0, 1), 4: (4, 5)}),
        ("t2p2e4d2", 8, {0: (0, 1), 2: (2, 3), 4: (4, 5), 6: (6, 7)}),
        ("d8e8", 3, {0: (0, 1), 2: (2, 3, 4), 5: (5, 6, 7)}),
    ],
)
def test_who_sends(strategy: str, most: int, senders: dict[int, tuple[int, ...]]) -> None:
    found = shares(ownership("qwen3_moe", strategy), most)
    assert {share.root: share.ranks for share in found} == senders


def test_bytes_are_even() -> None:
    owned = ownership("qwen3_moe", "d4e4")
    sizes = {hf.name: prod(hf.shape) for hf in owned.table.hf_tensors}
    sent = [sum(sizes[name] for name in share.names) for share in shares(owned, 8)]
    assert len(sent) == 4 and max(sent) - min(sent) <= max(sizes.values())
