"""An optimiser's state comes back from its file as it was."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.optim import Adam

from manydg.training.record import pack_optimizer, unpack_optimizer


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_training_goes_on_as_if_never_stopped_whatever_the_layout_of_the_weights(layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    start, slopes = torch.randn(4, 3, 3, 3), torch.randn(6, 4, 3, 3, 3)
    ends = []
    for stop in (None, 3):
        weight = nn.Parameter(start.clone().contiguous(memory_format=layout))
        optimizer = Adam([weight], lr=0.1, fused=True)
        for step, slope in enumerate(slopes):
            if step == stop:
                tensors, meta = pack_optimizer("main", optimizer)
                plain = {name: tensor.contiguous() for name, tensor in tensors.items()}
                optimizer = Adam([weight], lr=0.1, fused=True)
                unpack_optimizer("main", optimizer, plain, meta)
            weight.grad = torch.empty_like(weight).copy_(slope)
            optimizer.step()
        ends.append(weight.detach().clone())
    assert torch.equal(ends[0], ends[1])
