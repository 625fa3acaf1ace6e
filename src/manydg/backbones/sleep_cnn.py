"""The sleep network: a convolution and three residual blocks on the spectrogram of a two-channel EEG."""

from __future__ import annotations

from torch import nn

from manydg.backbones._convolution import ResidualBlock, Stem
from manydg.backbones._spectrogram import LogSpectrogram, SpectrogramCNN
from manydg.data.dataset import InputSchema


class SleepCNN(SpectrogramCNN):
    """Spectrogram, not centred, through a convolution to 6 channels and blocks of 8, 16 and 32.

    For 2 channels of 3,000 samples (30 s at 100 Hz) the spectrogram is 2 x 129 x 43, the features have width 128 and
    there are 25,110 parameters. Other numbers of channels and lengths are taken as the data have them, if the
    spectrogram has at least 21 frequencies and frames; the features are then the last maps laid flat.

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

    compiled_gain: float = 2.1e-3

    def __init__(
        self,
        schema: InputSchema,
        window: int = 256,
        hop: int = 64,
        taper: str = "rectangular",
        floor: float = 1e-3,
        dropout: float = 0.5,
    ) -> None:
        super().__init__(schema, LogSpectrogram(window, hop, False, taper, floor))
        stem = Stem(self.shape[0], 6)
        first = ResidualBlock(6, 8, nn.Identity(), dropout)
        second = ResidualBlock(8, 16, nn.MaxPool2d(2), dropout)
        third = ResidualBlock(16, 32, nn.MaxPool2d(2), dropout)
        self.assemble(nn.Sequential(stem, first, second), third)
