"""GPU kernels of a perceptron of three layers: one forward, two backward, instead of some thirty small ones.

The matrices are too small to fill a GPU, so that what counts is how many kernels wait for each other. A program takes a
few rows through all three layers. Products are in TF32, sums in float32; the same inputs give the same bits.
"""

# The annotations are read by torch and Triton, so they are not put off (no ``from __future__ import annotations``).

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

from manydg.errors import in_a_line

_ROWS, _PIECE, _TILE, _ROWS_SUMMED = 16, 64, 32, 64
_WARPS = 4


@triton.jit
def _product(left, right):
    return tl.dot(left, right, input_precision="tf32")


@triton.jit
def _block(start, row, column, rows, columns):
    """Part of a matrix of so many rows and columns, zero outside of it."""
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    return tl.load(start + row[:, None] * columns + column[None, :], mask=inside, other=0.0)


@triton.jit
def _turned(start, row, column, rows, columns):
    """The same part with rows and columns exchanged."""
    inside = (row < rows)[None, :] & (column < columns)[:, None]
    return tl.load(start + row[None, :] * columns + column[:, None], mask=inside, other=0.0)


@triton.jit
def _put(start, values, row, column, rows, columns):
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    tl.store(start + row[:, None] * columns + column[None, :], values, mask=inside)


@triton.jit
def _forward(
    x, w1, b1, w2, b2, w3, b3, first, second, out, rows,
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    unit = tl.arange(0, WIDE)
    present = unit < WIDTH
    hidden = tl.zeros((ROWS, WIDE), tl.float32)
    for start in range(0, INPUTS, PIECE):
        column = start + tl.arange(0, PIECE)
        hidden += _product(_block(x, row, column, rows, INPUTS), _turned(w1, unit, column, WIDTH, INPUTS))
    hidden = tl.maximum(hidden + tl.load(b1 + unit, mask=present, other=0.0)[None, :], 0.0)
    _put(first, hidden, row, unit, rows, WIDTH)
    hidden = _product(hidden, _turned(w2, unit, unit, WIDTH, WIDTH))
    hidden = tl.maximum(hidden + tl.load(b2 + unit, mask=present, other=0.0)[None, :], 0.0)
    _put(second, hidden, row, unit, rows, WIDTH)
    hidden = _product(hidden, _turned(w3, unit, unit, WIDTH, WIDTH))
    hidden += tl.load(b3 + unit, mask=present, other=0.0)[None, :]
    _put(out, hidden, row, unit, rows, WIDTH)


@triton.jit
def _backward_of_rows(
    of_out, first, second, w1, w2, w3, of_first, of_second, of_x, rows,
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    unit = tl.arange(0, WIDE)
    gradient = _block(of_out, row, unit, rows, WIDTH)
    gradient = _product(gradient, _block(w3, unit, unit, WIDTH, WIDTH))
    gradient = tl.where(_block(second, row, unit, rows, WIDTH) > 0, gradient, 0.0)
    _put(of_second, gradient, row, unit, rows, WIDTH)
    gradient = _product(gradient, _block(w2, unit, unit, WIDTH, WIDTH))
    gradient = tl.where(_block(first, row, unit, rows, WIDTH) > 0, gradient, 0.0)
    _put(of_first, gradient, row, unit, rows, WIDTH)
    for start in range(0, INPUTS, PIECE):
        column = start + tl.arange(0, PIECE)
        _put(of_x, _product(gradient, _block(w1, unit, column, WIDTH, INPUTS)), row, column, rows, INPUTS)


@triton.jit
def _gradient_of_layer(
    of_out, inputs, of_weights, of_bias, rows, tile_out, tile_in,
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    unit, column = tile_out * TILE + tl.arange(0, TILE), tile_in * TILE + tl.arange(0, TILE)
    weights, bias = tl.zeros((TILE, TILE), tl.float32), tl.zeros((TILE,), tl.float32)
    for start in range(0, rows, ROWS):
        row = start + tl.arange(0, ROWS)
        gradient = _turned(of_out, row, unit, rows, WIDTH)
        weights += _product(gradient, _block(inputs, row, column, rows, INPUTS))
        bias += tl.sum(gradient, axis=1)
    _put(of_weights, weights, unit, column, WIDTH, INPUTS)
    if tile_in == 0:
        tl.store(of_bias + unit, bias, mask=unit < WIDTH)


@triton.jit
def _backward_of_weights(
    x, first, second, of_first, of_second, of_out, of_w1, of_b1, of_w2, of_b2, of_w3, of_b3, rows,
    INPUTS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
    TILES: tl.constexpr, TILES_OF_INPUTS: tl.constexpr,
):  # fmt: skip
    """One program a tile: those of the first layer's weights, then the second's, then the third's."""
    program = tl.program_id(0)
    of_layer_one, of_a_layer = TILES * TILES_OF_INPUTS, TILES * TILES
    if program < of_layer_one:
        tile_out, tile_in = program // TILES_OF_INPUTS, program % TILES_OF_INPUTS
        _gradient_of_layer(of_first, x, of_w1, of_b1, rows, tile_out, tile_in, INPUTS, WIDTH, TILE, ROWS)
    else:
        place = (program - of_layer_one) % of_a_layer
        if program < of_layer_one + of_a_layer:
            _gradient_of_layer(
                of_second, first, of_w2, of_b2, rows, place // TILES, place % TILES, WIDTH, WIDTH, TILE, ROWS
            )
        else:
            _gradient_of_layer(
                of_out, second, of_w3, of_b3, rows, place // TILES, place % TILES, WIDTH, WIDTH, TILE, ROWS
            )


@functools.cache
def reason_against(device: torch.device, inputs: int, width: int) -> str | None:
    """Why the kernels for layers of this size cannot be built or run on a GPU; ``None`` where they can.

    They are built where they are run, which takes a C compiler, and a GPU with matrix units for TF32 and room for a
    layer's weights close to them.
    """
    try:
        sizes = ((width, inputs), (width,), *((width, width), (width,)) * 2)
        weights = [torch.ones(size, device=device, requires_grad=True) for size in sizes]
        three_layers(torch.ones(2, inputs, device=device), *weights).sum().backward()
        torch.cuda.synchronize(device)
    except Exception as error:  # noqa: BLE001 - compilers and drivers fail in many ways, and there is another way to go
        return in_a_line(error)
    return None


def three_layers(x: Tensor, *weights: Tensor) -> Tensor:
    """What three linear layers with a ReLU between each two make of ``x``: weights and bias of each, in order."""
    out: Tensor = forward_of_layers(x, *weights)[0]
    return out


@triton_op("manydg::perceptron", mutates_args={})
def forward_of_layers(
    x: Tensor, w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor, w3: Tensor, b3: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What the layers make of x, and what the first two make of it."""
    (rows, inputs), width = x.shape, len(b1)
    first, second, out = (x.new_empty(rows, width) for _ in range(3))
    grid = (triton.cdiv(rows, _ROWS),)
    wrap_triton(_forward)[grid](
        x.contiguous(), w1, b1, w2, b2, w3, b3, first, second, out, rows,
        INPUTS=inputs, WIDTH=width, ROWS=_ROWS, WIDE=_wide(width), PIECE=_PIECE, num_warps=_WARPS,
    )  # fmt: skip
    return out, first, second


@triton_op("manydg::perceptron_backward", mutates_args={})
def _backward_of_layers(
    of_out: Tensor, x: Tensor, first: Tensor, second: Tensor, w1: Tensor, w2: Tensor, w3: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    (rows, inputs), width = x.shape, len(w1)
    of_out, x = of_out.contiguous(), x.contiguous()
    of_first, of_second, of_x = torch.empty_like(first), torch.empty_like(second), torch.empty_like(x)
    wrap_triton(_backward_of_rows)[(triton.cdiv(rows, _ROWS),)](
        of_out, first, second, w1, w2, w3, of_first, of_second, of_x, rows,
        INPUTS=inputs, WIDTH=width, ROWS=_ROWS, WIDE=_wide(width), PIECE=_PIECE, num_warps=_WARPS,
    )  # fmt: skip
    of_w1, of_w2, of_w3 = torch.empty_like(w1), torch.empty_like(w2), torch.empty_like(w3)
    of_b1, of_b2, of_b3 = (x.new_empty(width) for _ in range(3))
    tiles, tiles_of_inputs = triton.cdiv(width, _TILE), triton.cdiv(inputs, _TILE)
    wrap_triton(_backward_of_weights)[(tiles * (tiles_of_inputs + 2 * tiles),)](
        x, first, second, of_first, of_second, of_out, of_w1, of_b1, of_w2, of_b2, of_w3, of_b3, rows,
        INPUTS=inputs, WIDTH=width, TILE=_TILE, ROWS=_ROWS_SUMMED, TILES=tiles, TILES_OF_INPUTS=tiles_of_inputs,
    )  # fmt: skip
    return of_x, of_w1, of_b1, of_w2, of_b2, of_w3, of_b3


def _keep(ctx, inputs, output) -> None:
    x, w1, _, w2, _, w3, _ = inputs
    _, first, second = output
    ctx.mark_non_differentiable(first, second)
    ctx.save_for_backward(x, first, second, w1, w2, w3)


def _differentiate(ctx, of_out, _of_first, _of_second):
    return _backward_of_layers(of_out, *ctx.saved_tensors)


forward_of_layers.register_autograd(_differentiate, setup_context=_keep)


def _wide(width: int) -> int:
    wide: int = triton.next_power_of_2(width)
    return max(16, wide)
