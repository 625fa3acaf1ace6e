"""The seizure network: three residual blocks on the spectrogram of a many-channel EEG."""

from __future__ import annotations

from torch import nn

from manydg.backbones._convolution import ResidualBlock
from manydg.backbones._spectrogram import LogSpectrogram, SpectrogramCNN
from manydg.data.dataset import InputSchema


class SeizureCNN(SpectrogramCNN):
    """Centred spectrogram through blocks of 32, 64 and 128 channels, each with a max-pool.

    For 16 channels of 2,000 samples (10 s at 200 Hz) the spectrogram is 16 x 33 x 63, the features have width 128 and
    there are 389,088 parameters. Other numbers of channels and lengths are taken as the data have them; the features
    are then the last maps laid flat, 128 for every 64 x 64 frequencies by frames or part of it.

    Parameters
    ----------
    schema : InputSchema
    window, hop : int
        Of the spectrogram, in samples.
    taper : {"rectangular", "hann"}
        The paper's transform has a rectangular one.
    floor : float
        Lowest energy in square microvolts.
    dropout : float
    """

    fast_precision: str = "bf16"
    compiled_gain: float = 0.68e-3

    def __init__(
        self,
        schema: InputSchema,
        window: int = 64,
        hop: int = 32,
        taper: str = "rectangular",
        floor: float = 1e-3,
        dropout: float = 0.5,
    ) -> None:
        super().__init__(schema, LogSpectrogram(window, hop, True, taper, floor))
        first, second, third = (
            ResidualBlock(inputs, outputs, nn.MaxPool2d(3, stride=2, padding=1), dropout)
            for inputs, outputs in ((self.shape[0], 32), (32, 64), (64, 128))
        )
        self.assemble(nn.Sequential(first, second), third)
