"""What vLLM makes of flags in this environment, without starting an engine.

    python -m tests.vllm.probe '[{"model": …}, …]'

Prints one JSON object: the platform's class, and per set of flags the worker and scheduler that it would use, or the
code with which it ended.
"""

from __future__ import annotations

import json
import sys
from typing import Any


def main() -> None:
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.platforms import current_platform

    found = {
        "platform": type(current_platform).__name__,
        "is_cpu": current_platform.is_cpu(),
        "is_out_of_tree": current_platform.is_out_of_tree(),
        "configs": [_config(flags) for flags in json.loads(sys.argv[1])],
    }
    print(json.dumps(found))


def _config(flags: dict[str, Any]) -> dict[str, Any]:
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs

    if "kv_transfer_config" in flags:
        flags["kv_transfer_config"] = KVTransferConfig(**flags["kv_transfer_config"])
    try:
        config = EngineArgs(**flags).create_engine_config()
    except SystemExit as end:
        return {"exit": end.code}
    return {
        "worker": config.parallel_config.worker_cls,
        "scheduler": config.scheduler_config.scheduler_cls,
        "capacity": config.cache_config.kv_cache_memory_bytes,
    }


if __name__ == "__main__":
    main()
