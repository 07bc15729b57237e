"""One real vLLM engine that does what another process tells it: the far end of ``engine.Engine``.

    python -m tests.vllm.engine_process FD '{"model": …}'

FD is a socket of JSON lines: a command comes, its answer goes back. The engine and its scheduler are in this process;
between commands its main thread waits, as an idle server's does.
"""

from __future__ import annotations

import dataclasses
import json
import socket
import sys
from typing import Any

from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind


class Commands:
    """What can be asked. Prompts are token ids; all sampling is greedy and ignores the end-of-sequence token."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm
        self._engine = llm.llm_engine
        self._scheduler = self._engine.engine_core.engine_core.scheduler

    def generate(self, prompts: list[list[int]], max_tokens: int) -> list[dict[str, Any]]:
        """Run all at once; what each came to, in the order of the prompts."""
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(requests, _greedy(max_tokens), use_tqdm=False)
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "finish": output.outputs[0].finish_reason,
                "cached": output.num_cached_tokens,
            }
            for output in outputs
        ]

    def storm(self, prompts: list[list[int]], max_tokens: int, abort_after_steps: int) -> list[list[int] | None]:
        """Add all, and after some steps abort every second one; the tokens of the others."""
        params = _greedy(max_tokens)
        params.output_kind = RequestOutputKind.FINAL_ONLY
        names = [f"storm-{number}" for number in range(len(prompts))]
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.add_request(name, {"prompt_token_ids": prompt}, params)
        tokens: dict[str, list[int]] = {}
        for _ in range(abort_after_steps):
            tokens |= _finished(self._engine.step())
        self._engine.abort_request(names[1::2])
        while self._engine.has_unfinished_requests():
            tokens |= _finished(self._engine.step())
        return [tokens.get(name) for name in names]

    def reset_prefix_cache(self) -> bool:
        return self._llm.reset_prefix_cache()

    def metrics(self) -> dict[str, float]:
        """vLLM's own counters and gauges."""
        return {metric.name: metric.value for metric in self._llm.get_metrics() if hasattr(metric, "value")}

    def usage(self) -> float:
        return self._scheduler.get_kv_cache_usage()

    def agent(self) -> dict[str, float]:
        """`AgentStatistics` of an elastic engine."""
        return dataclasses.asdict(self._scheduler.agent_statistics)


def _greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)


def _finished(outputs: list[Any]) -> dict[str, list[int]]:
    return {output.request_id: list(output.outputs[0].token_ids) for output in outputs if output.finished}


def main() -> None:
    channel = socket.socket(fileno=int(sys.argv[1]))
    commands = Commands(LLM(**json.loads(sys.argv[2])))
    with channel, channel.makefile("rw") as lines:
        print(json.dumps("ready"), file=lines, flush=True)
        for line in lines:
            name, arguments = json.loads(line)
            print(json.dumps(getattr(commands, name)(**arguments)), file=lines, flush=True)
    commands._engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
