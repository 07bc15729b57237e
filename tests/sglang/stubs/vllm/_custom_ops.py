"""Imported, never called."""


def rotary_embedding(*_, **__):
    raise NotImplementedError("vLLM is not in this environment")
