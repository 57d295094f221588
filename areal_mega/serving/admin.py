"""Routes that change weights, or show them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web

from areal_mega.serving.http import Frontend, read_json
from areal_mega.serving.protocol import BadRequest, malformed
from areal_mega.serving.updates import Bucket, Updater, UpdateRefused
from areal_mega.serving.weights import DIGESTS
from areal_mega.sync.digest import with_sampled


class Admin:
    """Weight routes over one frontend."""

    def __init__(self, frontend: Frontend, updater: Updater) -> None:
        self._frontend, self._engine, self._updater = frontend, frontend.engine, updater

    async def init_group(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        address, port = _need(body, "master_address", str), _need(body, "master_port", int)
        rank, world = _need(body, "rank_offset", int), _need(body, "world_size", int)
        name, backend = body.get("group_name", "weight_update_group"), body.get("backend", "nccl")

        def join() -> None:
            self._updater.join(address=address, port=port, rank=rank, world_size=world, name=name, backend=backend)

        await self._answered(asyncio.to_thread(join))
        return _success("Succeeded to initialize custom process group.")

    async def destroy_group(self, request: web.Request) -> web.Response:
        name = (await read_json(request)).get("group_name", "weight_update_group")
        await self._on_engine(lambda: self._updater.leave(name))
        return _success("Succeeded to destroy custom process group.")

    async def begin(self, request: web.Request) -> web.Response:
        selector = (await read_json(request, optional=True)).get("selector", "all")
        if selector not in ("all", "target"):
            raise malformed(f"selector must be 'all' or 'target', got {selector!r}: there is no draft model")
        await self._on_engine(self._updater.begin)
        return _success("Success")

    async def end(self, request: web.Request) -> web.Response:
        await self._on_engine(self._updater.end)
        return _success("Success")

    async def update_distributed(self, request: web.Request) -> web.Response:
        """One bucket; or, which SGLang has not, ``buckets``: those of a whole update, in order, and the version with the last one."""
        body = await read_json(request)
        load_format = body.get("load_format")
        if load_format not in (None, "flattened_bucket"):
            raise malformed(f"load_format must be null or 'flattened_bucket', got {load_format!r}")
        asked = _need(body, "buckets", list) if "buckets" in body else [body]
        if not asked:
            raise malformed("buckets is empty")
        buckets = [_bucket(each, body, last=number == len(asked)) for number, each in enumerate(asked, 1)]
        try:
            # All, and at once: of a run nothing is received before its last bucket is known to be right, and while generation is not
            # paused the update itself would wait for running requests.
            for bucket in buckets:
                self._updater.check(bucket)
        except UpdateRefused as refusal:
            raise BadRequest({"success": False, "message": str(refusal)}) from refusal
        message = ""
        for bucket in buckets:
            future = self._engine.call_exclusive(partial(self._updater.receive, bucket))
            message = await self._answered(asyncio.wrap_future(future))
        return _success(message)

    async def update_from_disk(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        path, version = _need(body, "model_path", str), body.get("weight_version")
        flush, abort_all = body.get("flush_cache", True), body.get("abort_all_requests", False)
        future = self._engine.call_exclusive(lambda: self._updater.from_disk(path, version, flush, abort_all))
        message = await self._answered(asyncio.wrap_future(future))
        return web.json_response({"success": True, "message": message, "num_paused_requests": 0})

    async def update_version(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        version = _need(body, "new_version", str)

        def change() -> None:
            if body.get("abort_all_requests", True):
                self._engine.abort(lambda _: True)
            self._engine.set_version(version)

        await self._frontend.command(change)
        return web.json_response({"success": True, "message": f"Weight version updated to {version}", "new_version": version})

    async def weights_by_name(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        name, count = _need(body, "name", str), body.get("truncate_size", 100)
        view = self._engine.model.weights.hf.get(name)
        if view is None:
            raise BadRequest({"error": {"message": f"Get parameter by name failed: {name} is no parameter of this model"}})
        values = await self._frontend.command(lambda: view[: count if view.ndim == 1 else None].float().tolist()[:count])
        return web.json_response(values)

    async def weights_checker(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        action, kind = _need(body, "action", str), body.get("digests", DIGESTS)
        if action != "checksum":
            raise malformed(f"action must be 'checksum', got {action!r}")
        if kind not in with_sampled(DIGESTS):
            raise malformed(f"digests must be {' or '.join(map(repr, with_sampled(DIGESTS)))}, got {kind!r}")
        sums: dict[str, Any] = await self._frontend.command(lambda: self._updater.checksums(kind))
        ranks = [{"checksums": sums["hf_digests"]}]
        return web.json_response({"success": True, "message": "Success.", "ranks": ranks, **sums})

    async def release_memory(self, request: web.Request) -> web.Response:
        """Frees the key-value cache when idle; weights stay, as on a CPU they have nowhere to go."""
        tags = (await read_json(request, optional=True)).get("tags") or ["kv_cache", "weights"]
        if "kv_cache" in tags:
            await self._frontend.command(self._engine.flush_cache)
        return web.json_response(None)

    async def resume_memory(self, request: web.Request) -> web.Response:
        """The cache is allocated again by the next request."""
        await read_json(request, optional=True)
        return web.json_response(None)

    async def _on_engine(self, function: Callable[[], Any]) -> Any:
        return await self._answered(self._frontend.command(function))

    @staticmethod
    async def _answered(work: Any) -> Any:
        try:
            return await work
        except UpdateRefused as refusal:
            raise BadRequest({"success": False, "message": str(refusal)}) from refusal

    def routes(self) -> list[web.RouteDef]:
        post = {
            "/init_weights_update_group": self.init_group,
            "/destroy_weights_update_group": self.destroy_group,
            "/begin_weight_update": self.begin,
            "/end_weight_update": self.end,
            "/update_weights_from_distributed": self.update_distributed,
            "/update_weights_from_disk": self.update_from_disk,
            "/update_weight_version": self.update_version,
            "/get_weights_by_name": self.weights_by_name,
            "/weights_checker": self.weights_checker,
            "/release_memory_occupation": self.release_memory,
            "/resume_memory_occupation": self.resume_memory,
        }
        return [web.post(path, handler) for path, handler in post.items()]


def _bucket(asked: Any, body: dict[str, Any], *, last: bool) -> Bucket:
    if not isinstance(asked, dict):
        raise malformed(f"buckets: each must be a JSON object, got {asked!r}")
    names, dtypes, shapes = _need(asked, "names", list), _need(asked, "dtypes", list), _need(asked, "shapes", list)
    if not len(names) == len(dtypes) == len(shapes):
        raise malformed(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes do not match")
    group = asked.get("group_name", "weight_update_group")
    if not all(type(name) is str for name in (*names, group)):
        raise malformed("names and group_name must be strings")
    if not all(type(shape) is list and all(type(size) is int for size in shape) for shape in shapes):
        raise malformed("shapes must be lists of integers")
    return Bucket(
        names=tuple(names),
        dtypes=tuple(str(d).removeprefix("torch.") for d in dtypes),
        shapes=tuple(tuple(shape) for shape in shapes),
        group=group,
        flat=body.get("load_format") is not None,
        version=body.get("weight_version") if last else None,
        flush=last and body.get("flush_cache", True),
        abort_all=body.get("abort_all_requests", False),
    )


def _need(body: dict[str, Any], name: str, kind: type) -> Any:
    value = body.get(name)
    if type(value) is not kind:
        raise malformed(f"1 validation error: {name}: " + ("Field required" if value is None else f"Input should be a {kind.__name__}"))
    return value


def _success(message: str) -> web.Response:
    return web.json_response({"success": True, "message": message})
