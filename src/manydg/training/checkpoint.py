"""Checkpoints: tensors and JSON in one safetensors file, replaced in one step. Nothing is ever unpickled."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor
from torch.optim import Optimizer

from manydg.errors import StorageError
from manydg.files import JsonObject, ParsedJson, fingerprint, write_atomically


def write_tensors(path: Path, tensors: Mapping[str, Tensor], meta: JsonObject) -> None:
    """Write tensors and JSON values to one file; the old file stays until the new one is whole."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    text = json.dumps({"checksum": checksum(plain), "meta_checksum": fingerprint(meta), **meta})
    try:
        # Not safetensors' save_file: it writes through a temporary file of its own, which a kill leaves behind.
        content = save(plain, metadata={"manydg": text})
    except SafetensorError as error:
        raise StorageError(f"cannot write {path}: {error}") from error
    write_atomically(path, content)


def read_tensors(
    path: Path, remedy: str = "delete it and run the same command again"
) -> tuple[dict[str, Tensor], ParsedJson]:
    """Read what :func:`write_tensors` wrote; an error ends in the remedy."""
    try:
        with safe_open(path, framework="pt") as file:
            meta = json.loads(file.metadata()["manydg"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        if meta.pop("checksum") != checksum(tensors) or meta.pop("meta_checksum") != fingerprint(meta):
            raise ValueError("its content does not match its checksum")
        return tensors, meta
    except FileNotFoundError:
        raise StorageError(f"{path} is missing: {remedy}") from None
    except (OSError, SafetensorError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise StorageError(f"{path} is damaged ({error}): {remedy}") from error


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """A hash of all values, by name; safetensors itself only notices a file of the wrong length."""
    digest = hashlib.blake2b(digest_size=16)
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def pack_optimizer(name: str, optimizer: Optimizer) -> tuple[dict[str, Tensor], JsonObject]:
    """An optimiser's state as named tensors and JSON values."""
    state = optimizer.state_dict()
    entries = {
        f"{name}/{index}/{key}": value for index, entry in state["state"].items() for key, value in entry.items()
    }
    tensors = {path: value for path, value in entries.items() if isinstance(value, Tensor)}
    scalars = {path: value for path, value in entries.items() if not isinstance(value, Tensor)}
    return tensors, {"groups": state["param_groups"], "scalars": scalars}


def unpack_optimizer(name: str, optimizer: Optimizer, tensors: Mapping[str, Tensor], meta: ParsedJson) -> None:
    """Put back what :func:`pack_optimizer` took out."""
    state: dict[int, dict[str, object]] = {}
    for source in (tensors, meta["scalars"]):
        for path, value in source.items():
            owner, _, rest = path.partition("/")
            if owner == name:
                index, _, key = rest.partition("/")
                state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": meta["groups"]})
    for weight, entry in optimizer.state.items():
        # A fused update needs the memory layout of the weights; files hold every tensor in its plain layout.
        entry.update({key: _laid_out_as(value, weight) for key, value in entry.items() if isinstance(value, Tensor)})


def _laid_out_as(tensor: Tensor, weight: Tensor) -> Tensor:
    if tensor.shape != weight.shape or tensor.stride() == weight.stride():
        return tensor
    return torch.empty_like(weight, dtype=tensor.dtype).copy_(tensor)


def same_device(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The tensors on a device."""
    return {name: tensor.to(device) for name, tensor in tensors.items()}
