"""What is written beside the parts of a composite tensor, and its words in reports."""

from __future__ import annotations

from collections.abc import Mapping

COMPOSITE = "torch.tensor"
"""The container attribute that says that a container is one tensor: a map with its `kind`."""

_CURES = {
    "sparse_coo": "to_sparse()",
    "sparse_csr": "to_sparse_csr()",
    "sparse_csc": "to_sparse_csc()",
    "sparse_bsr": "to_sparse_bsr(blocksize)",
    "sparse_bsc": "to_sparse_bsc(blocksize)",
    "quantized": "torch.quantize_per_tensor or quantize_per_channel",
    "nested": "torch.nested.nested_tensor",
    "nested_jagged": "torch.nested.nested_tensor(layout=torch.jagged)",
}


def text_of_facts(facts: object) -> str:
    """A stored composite in the words of a report."""
    if not isinstance(facts, Mapping):
        return "a container"
    kind = str(facts.get("kind"))
    if kind == "subclass":
        kind = str(facts.get("class"))
    elif kind == "quantized":
        kind = f"quantized {facts.get('dtype')}"
    return f"a {kind} tensor"


def cure_of(facts: object) -> str:
    """How to make a target that takes what is stored."""
    cure = _CURES.get(str(facts.get("kind"))) if isinstance(facts, Mapping) else None
    return f" (make the target one: {cure})" if cure else ""
