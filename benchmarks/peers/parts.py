"""What a packed batch is held against: its sequences one by one."""

from __future__ import annotations

import torch

from .. import options
from .base import Skip, TorchPeer


class Parts(TorchPeer):
    name = "parts"
    about = "attnjourney.attention of each sequence of a packed batch"
    options = True

    def attend(self, case, inputs):
        if case.option != "ragged":
            raise Skip("only for packed batches")
        import attnjourney

        ends = options.ragged(case)

        def loop(q, k, v, causal):
            parts = [
                attnjourney.attention(*(x[:, :, a:b] for x in (q, k, v)), is_causal=causal)
                for a, b in zip(ends, ends[1:])
            ]
            return torch.cat(parts, 2)

        return loop
