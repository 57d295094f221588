"""Weight sync as the controller drives it: order of calls, acknowledgement, and that nothing stays paused whatever happens."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fake_workers import recipe, settle

from areal_mega.algorithms.registry import algorithm_of
from areal_mega.config.schema import Recipe
from areal_mega.controller.sync import SyncMismatch, WeightSync
from areal_mega.controller.train import TrainController
from areal_mega.core.errors import DeadlineExceeded
from areal_mega.core.metrics import results
from areal_mega.parallel.layout import RankLayout
from areal_mega.parallel.strategy import parse
from areal_mega.rollout.inference import Capabilities, ServerDigest, one_by_one, parse_version
from areal_mega.sync.digest import combine

SPECS = {
    0: [{"name": "a", "shape": (2,), "dtype": "float32"}, {"name": "b", "shape": (3,), "dtype": "float32"}],
    1: [{"name": "c", "shape": (4,), "dtype": "bfloat16"}, {"name": "d", "shape": (1,), "dtype": "float32"}],
}
"""What the sender of each pipeline stage sends."""
DIGESTS = {name: name * 16 for name in "abcd"}
TIMES = {"gather_s": 0.1, "digest_s": 0.2, "transfer_s": 0.3}
PORT = 4711


class Peer:
    """Does what ``faults[method]`` says: raise an exception, or hang on ``"hang"``."""

    def __init__(self, name: str, events: list[tuple[str, str]]) -> None:
        self.name, self.events = name, events
        self.faults: dict[str, Exception | str] = {}
        self.arguments: dict[str, list[dict[str, Any]]] = {}

    async def do(self, method: str, **kwargs: Any) -> None:
        self.events.append((self.name, method))
        self.arguments.setdefault(method, []).append(kwargs)
        await asyncio.sleep(0)
        fault = self.faults.get(method)
        if isinstance(fault, Exception):
            raise fault
        if fault == "hang":
            await asyncio.Event().wait()


class FakeRank(Peer):
    peer: str
    several = True
    changed: list[str] | None = None

    async def call(self, method: str, *, timeout_s: float, **kwargs: Any) -> Any:
        await self.do(method, **kwargs)
        if method == "sync_plan":
            self.several = kwargs["several"]
            return self.specs
        if method == "sync_host":
            return PORT + self.rank if self.rank == kwargs["rank"] else 0
        if method == "sync_changed":
            return self.changed
        if method not in ("sync_broadcast", "sync_write") or not self.specs:
            return None
        if method == "sync_write":
            os.makedirs(kwargs["folder"])
        digests = {spec["name"]: DIGESTS[spec["name"]] for spec in self.specs}
        return {"version": kwargs["version"], "digests": digests, "nbytes": 20, "saved_bytes": 1, **TIMES}

    @property
    def specs(self) -> list[dict[str, Any]]:
        if self.several:
            return SPECS[self.rank]
        return [] if self.rank else SPECS[0] + SPECS[1]

    @property
    def rank(self) -> int:
        return int(self.name[-1])

    @property
    def address(self) -> str:
        return f"10.0.0.{self.rank}:80"


class FakeServer(Peer):
    base_url = "http://fake"

    def __init__(self, name: str, events: list[tuple[str, str]]) -> None:
        super().__init__(name, events)
        self.paused = False
        self.held = dict(DIGESTS)
        self.version: int | None = None
        self.reports: str | None = None

    async def pause(self, mode: str) -> None:
        self.paused = True  # even where the answer is a failure, it may have paused
        await self.do("pause", mode=mode)

    async def resume(self) -> None:
        await self.do("resume")
        self.paused = False

    async def init_group(self, **kwargs: Any) -> None:
        await self.do("init_group", **kwargs)

    async def destroy_group(self, group_name: str) -> None:
        await self.do("destroy_group", group_name=group_name)

    async def begin_update(self) -> None:
        await self.do("begin_update")

    async def update_bucket(self, **kwargs: Any) -> None:
        await self.do("update_bucket", **kwargs)
        self.version = kwargs["version"] if kwargs["version"] is not None else self.version

    async def update_run(self, buckets: Any, *, version: int, flush_cache: bool) -> None:
        await one_by_one(self, buckets, version=version, flush_cache=flush_cache)  # type: ignore[arg-type]

    async def end_update(self) -> None:
        await self.do("end_update")

    async def update_from_disk(self, path: str, version: int) -> None:
        assert os.listdir(path) == []
        await self.do("update_from_disk", version=version)
        self.version = version

    async def digests(self, kind: str) -> ServerDigest:
        await self.do("digests", kind=kind)
        assert self.version is not None
        return ServerDigest(weight_version=self.version, combined=combine(self.held), tensors=self.held)

    async def checksums(self) -> dict[str, str]:
        await self.do("checksums")
        return {"0/qkv": self.held["a"], "0/norm": "same"}

    async def weight_version(self) -> int:
        await self.do("weight_version")
        return parse_version(self.base_url, self.reports or ("default" if self.version is None else str(self.version)))


class Cast:
    """Two train ranks, two servers, and the sync over them."""

    def __init__(
        self,
        folder: Path,
        *,
        hf_digests: str | None = "xxh3",
        replica_size: int = 1,
        timeout_s: float = 20.0,
        able: Any = None,
        **sync: Any,
    ) -> None:
        self.events: list[tuple[str, str]] = []
        self.ranks = [FakeRank(f"train rank {rank}", self.events) for rank in range(2)]
        for rank in self.ranks:
            rank.peer = rank.name
        self.servers = [FakeServer(f"server rank {rank}", self.events) for rank in range(2)]
        base = recipe(2, 1).model_dump() | {"sync": {"timeout_s": timeout_s, **sync}}
        whole = Recipe.model_validate(base)
        train = TrainController(self.ranks, RankLayout(parse("megatron:d2")), whole, algorithm_of(whole))  # type: ignore[arg-type]
        capabilities = Capabilities(
            engine="e", version="1", weight_version="0", max_context=None, update_sessions=True, version_spans=True,
            hf_digests=hf_digests, routed_experts=False, **(able or {}),
        )  # fmt: skip
        self.folder = folder / "weights"
        self.sync = WeightSync(
            train, dict(enumerate(self.servers)), dict.fromkeys(range(2), capabilities), whole,  # type: ignore[arg-type]
            replica_size=replica_size, backend="gloo", folder=self.folder,
        )  # fmt: skip

    async def connect(self) -> None:
        """Connected, with groups that are formed."""
        await self.sync.connect()
        await self.sync._form_groups()

    async def push(self, version: int = 3) -> dict[str, float]:
        async with asyncio.timeout(20):
            await self.connect()
            self.events.clear()
            return results(await self.sync.push(version))

    def admit(self, rank: int) -> None:
        self.sync.admit(rank, self.servers[rank], self.sync._capabilities[rank])  # type: ignore[arg-type]

    def of(self, name: str) -> list[str]:
        return [method for who, method in self.events if who == name]


@pytest.fixture
def cast(tmp_path: Path) -> Iterator[Cast]:
    cast = Cast(tmp_path)
    yield cast
    assert not any(server.paused for server in cast.servers)
    assert not cast.folder.exists() or not any(cast.folder.iterdir())


async def test_every_sender_has_a_group_with_every_server_rank_in_order(tmp_path: Path) -> None:
    cast = Cast(tmp_path, replica_size=4)
    await cast.connect()
    names = set()
    for sender in range(2):
        join = cast.ranks[sender].arguments["sync_join"][sender]
        assert (join["rank"], join["address"], join["world_size"], join["port"]) == (sender, f"10.0.0.{sender}", 9, PORT + sender)
        joins = [server.arguments["init_group"][sender] for server in cast.servers]
        assert [j["rank_offset"] for j in joins] == [1, 5]
        assert {(j["master_address"], j["master_port"], j["group_name"], j["world_size"]) for j in joins} == {
            (join["address"], join["port"], join["name"], 9)
        }
        names.add(join["name"])
    await cast.connect()
    names |= {join["group_name"] for join in cast.servers[0].arguments["init_group"]}
    assert len(names) == 4  # a group of another membership never has the name of an earlier one


async def test_a_server_that_knows_one_group_hears_one_sender(tmp_path: Path) -> None:
    cast = Cast(tmp_path, able={"several_groups": False})
    await cast.push()
    assert len(cast.servers[0].arguments["init_group"]) == 1
    assert [update["names"] for update in cast.servers[0].arguments["update_bucket"]] == [["a", "b"], ["c"], ["d"]]


async def test_a_sync_in_order(cast: Cast) -> None:
    measured = await cast.push()
    groups = [join["name"] for join in cast.ranks[0].arguments["sync_join"]]
    for server in cast.servers:
        assert cast.of(server.name) == ["pause", "begin_update", *["update_bucket"] * 3, "end_update", "digests", "resume"]
        first, second, last = server.arguments["update_bucket"]
        assert (first["names"], first["dtypes"], first["shapes"]) == (["a", "b"], ["float32", "float32"], [[2], [3]])
        assert (second["names"], second["dtypes"], last["names"]) == (["c"], ["bfloat16"], ["d"])
        assert [update["group_name"] for update in (first, second, last)] == [groups[0], groups[1], groups[1]]
        assert (first["version"], second["version"], last["version"]) == (None, None, 3)  # stamped when the weights are whole
        assert (first["flush_cache"], second["flush_cache"], last["flush_cache"]) == (False, False, True)
    assert [cast.of(rank.name) for rank in cast.ranks] == [["sync_fill", "sync_broadcast"]] * 2
    what = [{"version": 3, "only": None, "digests": "xxh3"}]
    assert cast.ranks[0].arguments["sync_fill"] == cast.ranks[0].arguments["sync_broadcast"] == what
    order = [method for _, method in cast.events]
    assert order.index("pause") > max(i for i, method in enumerate(order) if method == "sync_fill")
    assert order.index("begin_update") > max(i for i, method in enumerate(order) if method == "pause")
    assert order.index("resume") > max(i for i, method in enumerate(order) if method == "digests")
    assert (measured["sync/bytes"], measured["sync/saved_bytes"], measured["sync/gather_s"], measured["sync/version"]) == (40, 2, 0.1, 3)
    parts = [measured[f"sync/{name}_s"] for name in ("pause", "send", "verify", "resume")]
    assert measured["sync/paused_s"] == pytest.approx(sum(parts))
    assert measured["time/sync"] == pytest.approx(sum(parts) + measured["sync/prepare_s"])


async def test_servers_that_prove_what_they_hold_get_what_has_changed(tmp_path: Path) -> None:
    cast = Cast(tmp_path, able={"partial_updates": True})
    cast.ranks[1].changed = ["c"]

    async def sent(version: int) -> tuple[Any, list[list[str]]]:
        before = len(cast.servers[0].arguments.get("update_bucket", []))
        await cast.sync.push(version)
        updates = cast.servers[0].arguments["update_bucket"][before:]
        assert updates[-1]["version"] == version
        assert {tuple(rank.arguments["sync_broadcast"][-1]["only"] or ()) for rank in cast.ranks} == {
            tuple(name for update in updates for name in update["names"]) if cast.ranks[0].changed is not None else ()
        }
        return cast.ranks[0].arguments["sync_changed"][-1]["base"], [update["names"] for update in updates]

    everything = [["a", "b"], ["c"], ["d"]]
    await cast.sync.connect()
    assert await sent(0) == (None, everything)  # rank 0 does not know: nothing was sent before
    cast.ranks[0].changed = []
    assert await sent(1) == (0, [["c"]])
    cast.ranks[1].changed = []
    assert await sent(2) == (1, [["d"]])  # the version travels with something
    # A server that was started again holds nobody knows what; the train ranks must not compare with anything.
    cast.sync.lose(1)
    assert await sent(3) == (2, [["d"]])
    cast.admit(1)
    cast.ranks[0].changed = None
    assert await sent(4) == (None, everything)


async def test_samples_are_compared_once_every_byte_has_been(tmp_path: Path) -> None:
    def compared(cast: Cast) -> list[set[str]]:
        """The kinds of each sync's digests, on the senders and on the servers."""
        asked = zip(*(server.arguments["digests"] for server in cast.servers), strict=False)
        sent = zip(*(rank.arguments["sync_broadcast"] for rank in cast.ranks), strict=True)
        return [{s["digests"] for s in ours} | {a["kind"] for a in theirs} for ours, theirs in zip(sent, asked, strict=True)]

    cast = Cast(tmp_path)
    await cast.sync.connect()
    for version in range(3):
        await cast.sync.push(version)
    assert compared(cast) == [{"xxh3"}, {"xxh3-sampled"}, {"xxh3-sampled"}]
    cast.sync.lose(1)
    cast.admit(1)  # started again
    await cast.sync.push(3)
    await cast.sync.push(4)
    assert compared(cast)[3:] == [{"xxh3"}, {"xxh3-sampled"}]
    whole = Cast(tmp_path, verify="whole")
    await whole.sync.connect()
    for version in range(2):
        await whole.sync.push(version)
    assert compared(whole) == [{"xxh3"}, {"xxh3"}]
    sums = Cast(tmp_path, hf_digests="sums")  # of which there are no sampled ones
    await sums.sync.connect()
    for version in range(2):
        await sums.sync.push(version)
    assert compared(sums) == [{"sums"}, {"sums"}]


async def test_servers_that_prove_nothing_get_everything(cast: Cast) -> None:
    await cast.push(0)
    await cast.sync.push(1)
    assert "sync_changed" not in cast.ranks[0].arguments
    assert [broadcast["only"] for broadcast in cast.ranks[0].arguments["sync_broadcast"]] == [None, None]


@pytest.mark.parametrize("mode", ["in_place", "retract", "abort"])
async def test_pause_mode_and_cache(tmp_path: Path, mode: str) -> None:
    cast = Cast(tmp_path, pause=mode)
    await cast.push()
    for server in cast.servers:
        assert server.arguments["pause"] == [{"mode": mode}]
        assert server.arguments["update_bucket"][-1]["flush_cache"] == (mode != "in_place")


async def test_groups_are_formed_by_the_first_push_of_whoever_is_there_then(tmp_path: Path) -> None:
    """A death while they were formed would be one that nobody survives, and is not to be taken for one."""
    cast = Cast(tmp_path)
    await cast.sync.connect()
    assert "init_group" not in cast.of("server rank 0")
    cast.sync.lose(0)
    await cast.sync.push(1)
    assert "init_group" not in cast.of("server rank 0") and cast.servers[1].version == 1
    assert cast.ranks[0].arguments["sync_join"][0]["world_size"] == 2


async def test_what_a_killed_attempt_left_is_removed(tmp_path: Path) -> None:
    cast = Cast(tmp_path, transport="disk")
    (cast.folder / "v3").mkdir(parents=True)
    (cast.folder / "v2").mkdir()
    await cast.push(3)
    assert not any(cast.folder.iterdir())


async def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    cast = Cast(tmp_path, transport="disk")

    async def fails(method: str, **kwargs: Any) -> Any:
        if method == "sync_write":
            os.makedirs(kwargs["folder"])
            raise RuntimeError("disk full")
        return None if method != "sync_plan" else cast.ranks[0].specs

    cast.ranks[0].call = fails  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="disk full"):
        await cast.push()
    assert not any(cast.folder.iterdir())


async def test_through_a_folder_that_is_gone_afterwards(tmp_path: Path) -> None:
    cast = Cast(tmp_path, transport="disk")
    await cast.push()
    for server in cast.servers:
        assert cast.of(server.name) == ["pause", "update_from_disk", "digests", "resume"]
        assert server.arguments["update_from_disk"] == [{"version": 3}]
    assert "sync_join" not in cast.ranks[0].arguments
    assert not any(cast.folder.iterdir())


FAULTS = [
    ("server rank 1", "pause"),
    ("server rank 0", "begin_update"),
    ("server rank 1", "update_bucket"),
    ("train rank 0", "sync_broadcast"),
    ("train rank 1", "sync_broadcast"),
    ("server rank 0", "end_update"),
    ("server rank 1", "digests"),
]


def peer(cast: Cast, name: str) -> Peer:
    return next(each for each in [*cast.ranks, *cast.servers] if each.name == name)


@pytest.mark.parametrize(("who", "method"), FAULTS)
@pytest.mark.parametrize("besides", [False, True])
async def test_a_failure_resumes_every_server_and_is_told_itself(cast: Cast, who: str, method: str, besides: bool) -> None:
    peer(cast, who).faults[method] = RuntimeError("the cause")
    if besides and method not in ("end_update", "digests"):  # another refuses to let go, too
        cast.servers[0].faults["end_update"] = RuntimeError("a consequence")
    with pytest.raises(RuntimeError, match=r"^the cause$"):
        await cast.push()
    assert all(cast.of(server.name).count("resume") == 1 for server in cast.servers)
    began = [server.name for server in cast.servers if "begin_update" in cast.of(server.name)]
    assert all("end_update" in cast.of(name) for name in began)


async def test_one_server_that_cannot_resume_does_not_keep_the_others_paused(cast: Cast) -> None:
    cast.servers[0].faults["resume"] = RuntimeError("stuck")
    with pytest.raises(RuntimeError, match="stuck"):
        await cast.push()
    assert not cast.servers[1].paused
    cast.servers[0].paused = False


async def test_a_failure_is_not_hidden_by_a_server_that_cannot_resume(cast: Cast, caplog: pytest.LogCaptureFixture) -> None:
    cast.servers[1].faults["update_bucket"] = RuntimeError("the cause")
    cast.servers[0].faults["resume"] = RuntimeError("stuck")
    with pytest.raises(RuntimeError, match="the cause"):
        await cast.push()
    assert "server rank 0, resuming generation after a failed sync: RuntimeError: stuck" in caplog.text
    cast.servers[0].paused = False


@pytest.mark.parametrize("where", ["pause", "begin_update", "update_bucket", "end_update", "digests"])
async def test_a_cancelled_sync_resumes(cast: Cast, where: str) -> None:
    cast.servers[1].faults[where] = "hang"
    work = asyncio.create_task(cast.push())
    await settle()
    assert (cast.servers[1].name, where) in cast.events
    if where == "end_update":
        cast.servers[1].faults.clear()
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work


async def test_other_weights_are_a_mismatch_that_names_server_and_tensors(cast: Cast) -> None:
    cast.servers[1].held |= {"b": "x", "c": "y"}
    with pytest.raises(SyncMismatch, match=r"^server rank 1 holds other weights than the trainer sent: 2 of 4 tensors differ: b, c$"):
        await cast.push()
    cast.servers[1].held = DIGESTS | {"e": "x"}
    with pytest.raises(SyncMismatch, match=r"1 of 4 tensors differ: e \(never sent\)$"):
        await cast.push()


async def test_another_version_is_a_mismatch(tmp_path: Path, cast: Cast) -> None:
    async def keeps_its_version(**kwargs: Any) -> None:
        cast.servers[0].version = 2

    cast.servers[0].update_bucket = keeps_its_version  # type: ignore[method-assign]
    with pytest.raises(SyncMismatch, match="server rank 0 reports weight version 2 after a sync of version 3"):
        await cast.push()


async def test_a_server_without_digests_is_asked_for_its_version(tmp_path: Path) -> None:
    cast = Cast(tmp_path, hf_digests=None)
    await cast.push(0)
    assert cast.ranks[0].arguments["sync_broadcast"][0]["digests"] is None, "nobody would compare them"
    assert "digests" not in cast.of("server rank 0") and "weight_version" in cast.of("server rank 0")
    cast.servers[1].reports = "default"  # as a server says that was never given one
    await cast.push(0)
    with pytest.raises(SyncMismatch, match="server rank 1 reports weight version 0 after a sync of version 1"):
        await cast.push(1)


async def test_the_deadline_names_who_is_missing_and_who_is_silent(tmp_path: Path) -> None:
    cast = Cast(tmp_path, timeout_s=0.2)
    # One frozen server: the train rank that broadcasts waits for it, the other server has its buckets.
    cast.servers[1].faults |= {"update_bucket": "hang", "weight_version": RuntimeError("no answer")}
    cast.ranks[0].faults["sync_broadcast"] = "hang"
    with pytest.raises(DeadlineExceeded) as caught:
        await cast.push()
    assert str(caught.value) == (
        "weight sync: train rank 0, server rank 1 did not finish sending weights within sync.timeout_s=0.2 s; "
        "server rank 1 did not answer a health check either"
    )
    assert not cast.servers[0].paused and not cast.servers[1].paused


async def test_a_lost_server_is_left_out_and_let_in_again(tmp_path: Path) -> None:
    """Every membership has groups of its own, under names of their own: here two, one per sender."""
    cast = Cast(tmp_path, replica_size=2)
    await cast.push(1)
    cast.servers[0].version = None  # another process, with no weights of the trainer's
    cast.sync.lose(0)
    cast.events.clear()
    await cast.sync.push(2)
    assert cast.of("server rank 0") == [] and cast.servers[1].version == 2 and cast.sync.members == (1,)
    assert cast.of("server rank 1")[:4] == ["destroy_group"] * 2 + ["init_group"] * 2 and "sync_leave" in cast.of("train rank 0")
    [*_, join] = cast.servers[1].arguments["init_group"]
    assert (join["rank_offset"], join["world_size"]) == (1, 3)
    cast.admit(0)
    cast.events.clear()
    await cast.sync.push(2)
    assert [server.version for server in cast.servers] == [2, 2]
    assert "destroy_group" not in cast.of("server rank 0"), "it was never in the group before"
    joins = [server.arguments["init_group"][-1] for server in cast.servers]
    assert [(join["rank_offset"], join["world_size"]) for join in joins] == [(1, 5), (3, 5)]
    names = [join["group_name"] for join in cast.servers[1].arguments["init_group"]]
    assert len(set(names)) == 6 and names[-1] == joins[0]["group_name"]
    cast.events.clear()
    await cast.sync.push(3)
    assert "init_group" not in cast.of("server rank 1"), "the same membership keeps its group"


async def test_all_servers_may_be_lost_and_come_back(tmp_path: Path) -> None:
    cast = Cast(tmp_path)
    await cast.push(1)
    for rank in (0, 1):
        cast.sync.lose(rank)
    assert cast.sync.members == ()
    cast.admit(1)
    cast.events.clear()
    await cast.sync.push(1)
    assert cast.of("server rank 0") == [] and "destroy_group" not in cast.of("server rank 1") and cast.servers[1].version == 1


async def test_replicas_without_digests_are_held_against_each_other(tmp_path: Path) -> None:
    cast = Cast(tmp_path, hf_digests=None, able={"checksums": True})
    await cast.push()
    assert "checksums" in cast.of("server rank 0") and "digests" not in cast.of("server rank 0")
    cast.servers[1].held["a"] = "x"
    with pytest.raises(SyncMismatch, match="server rank 1 holds other weights than server rank 0: 1 of 2 differ, first 0/qkv"):
        await cast.push()
    assert not any(server.paused for server in cast.servers)


async def test_the_deadline_of_the_meeting(tmp_path: Path) -> None:
    cast = Cast(tmp_path, timeout_s=0.2)
    cast.servers[0].faults["init_group"] = "hang"
    with pytest.raises(DeadlineExceeded, match=r"server rank 0 did not finish forming the weight-sync group within sync.timeout_s=0.2 s$"):
        await cast.push()


async def test_a_server_that_hangs_while_resuming_is_named(tmp_path: Path) -> None:
    cast = Cast(tmp_path, timeout_s=0.2)
    cast.servers[1].faults["resume"] = "hang"
    with pytest.raises(DeadlineExceeded, match="server rank 1 did not finish resuming generation within"):
        await cast.push()
    assert not cast.servers[0].paused


async def test_a_failed_read_leaves_no_folder(tmp_path: Path) -> None:
    cast = Cast(tmp_path, transport="disk")
    cast.servers[0].faults["update_from_disk"] = RuntimeError("disk")
    with pytest.raises(RuntimeError, match="disk"):
        await cast.push()
    assert not any(cast.folder.iterdir()) and not any(server.paused for server in cast.servers)
