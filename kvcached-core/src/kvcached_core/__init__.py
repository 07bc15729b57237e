"""The parts every kvcached plugin is made of."""

__version__ = "0.1.0"
