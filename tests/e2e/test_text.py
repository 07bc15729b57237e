"""What the servers are asked, and the models that answer, are the same wherever they are made."""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path

import pytest

from tests.e2e import phases
from tests.models.families import MATRIX_FAMILIES, make_model
from tests.models.text import WORDS, document


def test_a_document_is_the_same_on_every_machine() -> None:
    assert len(set(WORDS)) == 1000
    assert hashlib.sha256(document(2000, "seed").encode()).hexdigest().startswith("ad0aa747a6488c20")
    assert document(20, "a") != document(20, "b")


def test_prompts_have_the_lengths_of_the_matrix() -> None:
    lengths = [len(text.split()) for _, text in phases.generation_prompts()]
    assert lengths[6:] == [300, 900, 1800]
    assert max(lengths[:6]) < 20
    questions = [text for _, text in phases.question_prompts()]
    assert len({" ".join(text.split()[:1300]) for text in questions}) == 1
    assert len(set(questions)) == 4


def test_filling_prompts_share_no_prefix() -> None:
    texts = [text for _, text in phases.fill_prompts()]
    assert all(one[:20] != other[:20] for one, other in itertools.combinations(texts, 2))


@pytest.mark.parametrize("family", MATRIX_FAMILIES)
def test_a_model_made_twice_has_the_same_weights(family: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    digests = set()
    for name in ("one", "other"):
        make_model(family, tmp_path / name, num_layers=2)
        digests.add(hashlib.sha256((tmp_path / name / "model.safetensors").read_bytes()).hexdigest())
    assert len(digests) == 1
