"""One real SGLang engine that does what another process tells it: the far end of ``engine.Engine``.

    python -m tests.sglang.engine_process FD '{"model_path": …}' '[{"KVCACHED_CEILING": "4MiB"}, …]'

FD is a socket of JSON lines: a command comes, its answer goes back. The scheduler of each rank is a process of its own,
as in a server. The last argument holds settings of single ranks, for tests of ranks that differ.
"""

from __future__ import annotations

import asyncio
import functools
import json
import os
import socket
import sys
from typing import Any


def run_rank(settings: list[dict[str, str]], *arguments: Any, **named: Any) -> None:
    """A scheduler process: its rank's settings, then SGLang's own function."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    from tests.sglang.windows import read_windows_by_their_own_ids

    rank = arguments[3]
    if settings:
        os.environ.update(settings[rank])
    read_windows_by_their_own_ids()
    run_scheduler_process(*arguments, **named)


class Commands:
    """What can be asked. Prompts are token ids; all sampling is greedy and ignores the end-of-sequence token."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        """Run all at once; what each came to, in the order of the prompts."""
        return self._engine.loop.run_until_complete(self._run(prompts, max_tokens, None))

    def storm(self, prompts: list[list[int]], max_tokens: int, abort_after_seconds: float) -> list[dict[str, Any]]:
        """Run all at once, and after a while abort every second one; what each came to."""
        return self._engine.loop.run_until_complete(self._run(prompts, max_tokens, abort_after_seconds))

    async def _run(
        self, prompts: list[list[int]], max_tokens: int, abort_after_seconds: float | None
    ) -> list[dict[str, Any]]:
        names = [f"{os.urandom(4).hex()}-{number}" for number in range(len(prompts))]
        tasks = [
            asyncio.create_task(
                self._engine.async_generate(input_ids=prompt, sampling_params=_greedy(max_tokens), rid=name)
            )
            for name, prompt in zip(names, prompts, strict=True)
        ]
        if abort_after_seconds is not None:
            await asyncio.sleep(abort_after_seconds)
            for name in names[1::2]:
                self._engine.tokenizer_manager.abort_request(rid=name)
        return [_result(output) for output in await asyncio.gather(*tasks, return_exceptions=True)]

    def flush_cache(self) -> bool:
        return bool(self._engine.flush_cache().success)

    def release(self) -> None:
        self._engine.release_memory_occupation()

    def resume(self) -> None:
        self._engine.resume_memory_occupation()

    def capacity(self) -> int:
        """Tokens of KV cache that the engine believes it has."""
        return int(self._engine.get_server_info()["max_total_num_tokens"])


def _greedy(max_tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}


def _result(output: dict[str, Any] | BaseException) -> dict[str, Any]:
    if isinstance(output, Exception):  # how SGLang hands a refusal, or an abort of its own, to its caller
        message = str(getattr(output, "detail", output))
        return {"tokens": [], "finish": "abort", "message": message, "cached": 0, "retractions": 0}
    if isinstance(output, BaseException):
        raise output
    about = output["meta_info"]
    finish = about["finish_reason"]
    return {
        "tokens": output.get("output_ids", []),
        "finish": finish["type"],
        "message": finish.get("message", ""),
        "cached": about.get("cached_tokens", 0),
        "retractions": about.get("num_retractions", 0),
    }


def main() -> None:
    from sglang.srt.entrypoints.engine import Engine

    channel = socket.socket(fileno=int(sys.argv[1]))
    settings = json.loads(sys.argv[3])
    kind = type(
        "Engine", (Engine,), {"run_scheduler_process_func": staticmethod(functools.partial(run_rank, settings))}
    )
    engine = kind(**json.loads(sys.argv[2]))
    commands = Commands(engine)
    with channel, channel.makefile("rw") as lines:
        print(json.dumps("ready"), file=lines, flush=True)
        for line in lines:
            name, arguments = json.loads(line)
            print(json.dumps(getattr(commands, name)(**arguments)), file=lines, flush=True)
    engine.shutdown()


if __name__ == "__main__":
    main()
