"""Imported, never called."""


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_, **__):
        raise NotImplementedError(f"torchvision's {name} is not in this environment")

    return refuse
