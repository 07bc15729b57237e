"""Text that is the same everywhere: an invented vocabulary, documents made of it, and a tokenizer trained on it.

Nothing here depends on the machine's dictionaries or on the Python release, so two hosts ask an engine the same
questions. A document of n words is a prompt of about 1.4 n tokens, as English is.
"""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections.abc import Iterator
from pathlib import Path

NUM_WORDS = 1000
VOCABULARY_SIZE = 2560  # fewer than the vocabulary could fill: every id of a model has a text
END_OF_TEXT = "<|endoftext|>"

_ONSETS = [
    "b",
    "c",
    "d",
    "f",
    "g",
    "h",
    "j",
    "k",
    "l",
    "m",
    "n",
    "p",
    "r",
    "s",
    "t",
    "v",
    "w",
    "z",
    "br",
    "ch",
    "cl",
    "dr",
    "fl",
    "gr",
    "pl",
    "sh",
    "sl",
    "st",
    "th",
    "tr",
]
_VOWELS = ["a", "e", "i", "o", "u", "ai", "ea", "ou"]
_CODAS = ["", "", "n", "r", "s", "l", "t", "m"]


def _numbers(seed: str) -> Iterator[int]:
    """Endless 32-bit numbers that depend on the seed alone."""
    for count in itertools.count():
        yield from struct.unpack("<8I", hashlib.sha256(f"{seed}/{count}".encode()).digest())


def _invent_words() -> list[str]:
    numbers = _numbers("words")
    words: dict[str, None] = {}
    while len(words) < NUM_WORDS:
        syllables = 1 + next(numbers) % 3
        parts = [
            options[next(numbers) % len(options)] for _ in range(syllables) for options in (_ONSETS, _VOWELS, _CODAS)
        ]
        words.setdefault("".join(parts))
    return list(words)


WORDS = tuple(_invent_words())


def document(num_words: int, seed: str) -> str:
    """Sentences of exactly ``num_words`` words; another seed gives a text that shares no long run with this one."""
    numbers = _numbers(seed)
    words = [WORDS[next(numbers) % NUM_WORDS] for _ in range(num_words)]
    return " ".join(word + "." if place % 12 == 0 else word for place, word in enumerate(words, 1))


def save_tokenizer(directory: Path, *, max_length: int) -> None:
    """Train a byte-level BPE tokenizer on the vocabulary and save it for ``transformers``.

    ``END_OF_TEXT`` is token 0. Byte-level: whatever a model with random weights says has a text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((document(2000, f"corpus {part}") for part in range(20)), trainer)
    saved = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        model_max_length=max_length,
    )
    saved.chat_template = "{% for m in messages %}{{m['role']}}: {{m['content']}}\n{% endfor %}assistant:"
    saved.save_pretrained(directory)
