"""OpenAI's routes, as SGLang answers them: for people and their tools. Rollouts use ``/generate``."""

from __future__ import annotations

import time
import uuid
from typing import Any

from aiohttp import web

from areal_mega.serving import answers
from areal_mega.serving.http import Frontend, read_json
from areal_mega.serving.protocol import GenerateCall, malformed, parse_generate, refused
from areal_mega.serving.sequence import Sequence

_SAMPLING = ("temperature", "top_p", "top_k", "min_p", "stop", "n", "stop_token_ids", "ignore_eos", "skip_special_tokens", "min_tokens")


class OpenAI:
    """Chat completions, completions and the model list over one frontend."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def models(self, request: web.Request) -> web.Response:
        info, facts = self._frontend.info, self._frontend.facts
        card = {
            "id": info.served_name,
            "object": "model",
            "created": int(info.started),
            "owned_by": "areal-mega",
            "root": info.model_path,
            "parent": None,
            "max_model_len": facts.context_length,
        }
        return web.json_response({"object": "list", "data": [card]})

    async def chat(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        self._frontend.need_tokenizer()
        messages = body.get("messages")
        if not isinstance(messages, list) or not messages:
            raise malformed("messages must be a non-empty list")
        if body.get("input_ids") is not None:
            ids = body["input_ids"]
        elif self._frontend.text.can_chat:
            ids = self._frontend.text.chat(messages, **(body.get("chat_template_kwargs") or {}))
        else:
            raise refused("the model's tokenizer has no chat template; use /v1/completions")
        top = body.get("top_logprobs") or 0
        call = self._call(body, ids, body.get("max_completion_tokens") or body.get("max_tokens"), bool(body.get("logprobs")), top)
        await self._frontend.run(call)
        choices = [self._chat_choice(i, s, body) for i, s in enumerate(call.sequences)]
        return web.json_response(self._envelope("chat.completion", body, call, choices))

    async def completions(self, request: web.Request) -> web.Response:
        body = await read_json(request)
        self._frontend.need_tokenizer()
        prompt = body.get("prompt")
        ids = self._frontend.text.encode(prompt) if isinstance(prompt, str) else prompt
        logprobs = body.get("logprobs")
        call = self._call(body, ids, body.get("max_tokens", 16), logprobs is not None, int(logprobs or 0))
        await self._frontend.run(call)
        choices = [self._text_choice(i, s, logprobs is not None) for i, s in enumerate(call.sequences)]
        return web.json_response(self._envelope("text_completion", body, call, choices))

    def _call(self, body: dict[str, Any], ids: Any, most: int | None, logprobs: bool, top: int) -> GenerateCall:
        if body.get("stream"):
            raise refused("streaming is served on /generate only")
        sampling = {name: body[name] for name in _SAMPLING if body.get(name) is not None and name != "min_tokens"}
        limit = self._frontend.facts.context_length - (len(ids) if isinstance(ids, list) else 0)
        sampling["max_new_tokens"] = most if most is not None else max(limit, 0)
        if body.get("min_tokens"):
            sampling["min_new_tokens"] = body["min_tokens"]
        if body.get("seed") is not None:
            sampling["sampling_seed"] = body["seed"]
        request = {"input_ids": ids, "sampling_params": sampling, "return_logprob": logprobs, "top_logprobs_num": top}
        return parse_generate(request | ({"rid": body["rid"]} if body.get("rid") else {}), self._frontend.facts)

    def _envelope(self, kind: str, body: dict[str, Any], call: GenerateCall, choices: list[dict[str, Any]]) -> dict[str, Any]:
        prompt = len(call.sequences[0].prompt)
        made = sum(len(s.output_ids) for s in call.sequences)
        first = call.sequences[0]
        return {
            "id": first.rid if len(call.sequences) == 1 else uuid.uuid4().hex,
            "object": kind,
            "created": int(time.time()),
            "model": body.get("model") or self._frontend.info.served_name,
            "choices": choices,
            "usage": {
                "prompt_tokens": prompt,
                "total_tokens": prompt + made,
                "completion_tokens": made,
                "prompt_tokens_details": None,
                "reasoning_tokens": 0,
                "completion_tokens_details": None,
            },
            "metadata": {"weight_version": self._frontend.engine.version, "weight_versions": first.version_spans()},
        }

    def _finish(self, sequence: Sequence) -> dict[str, Any]:
        assert sequence.finish is not None
        return {"finish_reason": sequence.finish["type"], "matched_stop": sequence.finish.get("matched")}

    def _chat_choice(self, index: int, sequence: Sequence, body: dict[str, Any]) -> dict[str, Any]:
        text, ids = self._frontend.text, sequence.output_ids.tolist()
        content = answers.output_text(sequence, text, ids)
        choice: dict[str, Any] = {
            "index": index,
            "message": {"role": "assistant", "content": content, "reasoning_content": None},
            "logprobs": {"content": self._token_logprobs(sequence)} if sequence.wanted.logprobs else None,
            **self._finish(sequence),
        }
        if body.get("return_token_ids"):
            choice["response_token_ids"] = ids
        if body.get("return_prompt_token_ids"):
            choice["prompt_token_ids"] = sequence.prompt.tolist()
        return choice

    def _token_logprobs(self, sequence: Sequence) -> list[dict[str, Any]]:
        def entry(token: int, logprob: float) -> dict[str, Any]:
            piece = self._frontend.text.piece(token)
            return {"token": piece, "bytes": list(piece.encode()), "logprob": answers.finite(logprob)}

        tops: list[list[tuple[float, int]]] = sequence.top_logprobs or [[] for _ in range(len(sequence.output_ids))]
        pairs = zip(sequence.output_ids.tolist(), sequence.output_logprobs.tolist(), tops, strict=True)
        return [entry(t, lp) | {"top_logprobs": [entry(tt, tlp) for tlp, tt in top]} for t, lp, top in pairs]

    def _text_choice(self, index: int, sequence: Sequence, logprobs: bool) -> dict[str, Any]:
        text, ids = self._frontend.text, sequence.output_ids.tolist()
        block = None
        if logprobs:
            block = {
                "text_offset": [-1] * len(ids),
                "token_logprobs": [answers.finite(lp) for lp in sequence.output_logprobs.tolist()],
                "tokens": [text.piece(t) for t in ids],
                "top_logprobs": [{text.piece(t): answers.finite(lp) for lp, t in top} for top in sequence.top_logprobs],
            }
        return {"index": index, "text": answers.output_text(sequence, text, ids), "logprobs": block, **self._finish(sequence)}

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/v1/models", self.models),
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completions),
        ]
