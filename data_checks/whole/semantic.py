"""Prompts of the sample that say the same in other words."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

SIMILARITY = 0.90
"""Cosine from which on two prompts say the same: the default of semhash."""
MAX_PROMPTS = 20_000
ROWS_AT_ONCE = 1024
TEXTS_AT_ONCE = 512
CHARACTERS = 2000
"""Of a longer prompt only the beginning counts: what is asked for is rarely decided later, and the cost is bounded."""


def semantic_duplicates_fraction(prompts: Sequence[str], similarity: float = SIMILARITY) -> float:
    """Return the share of distinct prompts that say the same as an earlier one.

    Embeddings are averages of 256-dimensional token vectors (WordLlama, bundled with its package; nothing is loaded
    over the network); two prompts say the same when the cosine of theirs is `similarity` or more.

    Args:
        prompts: at most 20,000. Equal ones count once; what has no token is left out.
        similarity: cosine, 0 to 1.

    Returns:
        0 to 1; 0 where no prompt has a token.

    Raises:
        ValueError: more prompts than are compared.
    """
    distinct = sorted(set(prompts))
    if len(distinct) > MAX_PROMPTS:
        raise ValueError(f"{len(distinct)} prompts: at most {MAX_PROMPTS} are compared")
    vectors = embed(distinct)
    norms = np.linalg.norm(vectors, axis=1)
    vectors = vectors[norms > 0] / norms[norms > 0, None]
    if not len(vectors):
        return 0.0
    again = 0
    for start in range(0, len(vectors), ROWS_AT_ONCE):
        block = vectors[start : start + ROWS_AT_ONCE]
        cosines = block @ vectors[: start + len(block)].T
        # Only with earlier ones.
        cosines[:, start:] = np.tril(cosines[:, start:], -1)
        again += int((cosines >= similarity).any(axis=1).sum())
    return again / len(vectors)


def embed(texts: Sequence[str]) -> NDArray[np.float32]:
    """Return the mean of the token vectors of each text, zeros where there is no token: (texts, 256)."""
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer

    folder = _package_folder()
    table = load_file(folder / "weights" / "l2_supercat_256.safetensors")["embedding.weight"].astype(np.float32)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizers" / "l2_supercat_tokenizer_config.json"))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    found = np.zeros((len(texts), table.shape[1]), np.float32)
    for start in range(0, len(texts), TEXTS_AT_ONCE):
        block = [text[:CHARACTERS] for text in texts[start : start + TEXTS_AT_ONCE]]
        encoded = tokenizer.encode_batch_fast(block, add_special_tokens=False)
        for row, encoding in enumerate(encoded, start=start):
            if len(encoding.ids):
                found[row] = table[np.minimum(encoding.ids, len(table) - 1)].mean(axis=0)
    return found


def _package_folder() -> Path:
    """Return where the package's files lie. It is not imported: that would set up logging and look for downloads."""
    spec = find_spec("wordllama")
    if spec is None or spec.origin is None:
        raise ModuleNotFoundError("No module named 'wordllama'", name="wordllama")
    return Path(spec.origin).parent
