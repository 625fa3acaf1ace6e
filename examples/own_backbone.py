"""Own backbone: any PyTorch module that gives features

A module that maps one tensor to ``(batch, width)`` needs no base class. Every algorithm can use it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import manydg


class Bumps(nn.Module):
    """A small convolutional network for signals ``(batch, channels, samples)``."""

    def __init__(self, channels: int = 2, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(channels, width, kernel_size=7, stride=2),
            nn.ReLU(),
            nn.Conv1d(width, width, kernel_size=5),
            nn.ReLU(),
        )

    def forward(self, signals: Tensor) -> Tensor:
        """Mean over time of what the filters give, ``(batch, width)``."""
        features: Tensor = self.layers(signals).mean(dim=-1)
        return features


def main() -> None:
    rng = torch.Generator().manual_seed(0)
    patients = torch.arange(24).repeat_interleave(10)
    labels = torch.randint(0, 2, (240,), generator=rng)
    time = torch.linspace(0, 6.28, 64)
    gain = 0.5 + torch.rand(24, generator=rng)[patients]
    wave = torch.sin(time * (3 + 5 * labels[:, None])) * gain[:, None]
    signals = wave[:, None, :] + 0.3 * torch.randn(240, 2, 64, generator=rng)
    data = manydg.from_arrays(signals.numpy(), labels.numpy(), patients.numpy())
    for algorithm in ("base", "manydg"):
        run = manydg.train(data, algorithm=algorithm, backbone=Bumps(), epochs=4, batch_size=32, lr=3e-3)
        print(f"{algorithm}: AUROC {run.record.test['auroc']:.2f} on test patients")


if __name__ == "__main__":
    main()
