"""Stands in for torchvision, which has no build for the CPU build of torch 2.13.

SGLang and transformers import names of it for image inputs. No test has any: a call of one is an error.
"""

__version__ = "0.28.0"
