"""Layout rules of `gpt.py`: heads, MLP and classes split over the axis `model`, as in Megatron-LM (arXiv 1909.08053).

query, key, value, up    split by columns (heads, hidden features): no communication
attention output, down   split by rows: one all-reduce each, forward and backward
head                     split by classes; the loss gathers the logits
"""

from __future__ import annotations

from tfpar.layouts import LayoutMap


def tensor_parallel() -> LayoutMap:
    """The rules; everything else (embeddings, norms) is replicated.

    Returns:
        A `tfpar.LayoutMap` for a mesh with an axis `model` that divides the number of heads and of token ids.
    """
    return LayoutMap(
        {
            r".*attention/(query|key|value)/kernel": (None, "model", None),
            r".*attention/(query|key|value)/bias": ("model", None),
            r".*attention/attention_output/kernel": ("model", None, None),
            r".*_up/kernel": (None, "model"),
            r".*_up/bias": ("model",),
            r".*_down/kernel": ("model", None),
            r".*head/kernel": (None, "model"),
            r".*head/bias": ("model",),
        }
    )
