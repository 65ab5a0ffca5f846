"""The frame of a GGUF file, read without torch: whole or not, which architecture, how its weights are packed."""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, field
from pathlib import Path

from training_core.config.paths import lfs_pointer
from training_core.errors import ArtifactError

GGUF_MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 8
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""Number of a value type -> struct code; 8 is text, 9 a list."""
TEXT, LIST = 8, 9
PACKINGS = (
    "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S",
    "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
)  # fmt: skip
"""Types of tensors that the gguf package turns into plain numbers."""
FETCH_AGAIN = "Copy or download it again"


@dataclass(frozen=True)
class GgufTensor:
    """One tensor of the directory; its data lies at `offset` bytes after the header."""

    name: str
    packing: int
    shape: tuple[int, ...]
    offset: int


@dataclass
class GgufHeader:
    """What stands before the data."""

    metadata: dict[str, object] = field(default_factory=dict)
    """Numbers and texts; a list is given by its length."""
    tensors: list[GgufTensor] = field(default_factory=list)
    data_start: int = 0

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


def is_gguf(path: Path) -> bool:
    return path.is_file() and path.suffix.lower() == ".gguf"


def check_gguf(path: Path) -> GgufHeader:
    """Check that a GGUF file is whole, holds a model, and is packed in a way that can be unpacked.

    Raises:
        ArtifactError: it is cut short, another kind of file, one part of several, or packed in an unknown way.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        head = stream.read(64)
        refuse_other_kinds(path, head)
        with mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = read_header(path, data)
    if int(_number(header, "split.count") or 1) > 1:
        raise ArtifactError(
            f"{path} is one part of {header.metadata['split.count']}. Join them with `llama-gguf-split --merge` and "
            "name the result"
        )
    if not header.tensors:
        raise ArtifactError(f"{path} holds no tensors: it is a vocabulary, not a model. Name the model's GGUF file")
    check_tensors(path, header, size)
    return header


def refuse_other_kinds(path: Path, head: bytes) -> None:
    """Refuse what does not start like a GGUF file, and say what it looks like.

    Raises:
        ArtifactError: it has another magic number, or none.
    """
    if head.startswith(GGUF_MAGIC):
        return
    advice = "Name a GGUF file (its first four bytes are the letters GGUF)"
    if not head:
        what, advice = "it is empty", FETCH_AGAIN
    elif (pointer := lfs_pointer(head)) is not None:
        raise ArtifactError(f"{path} {pointer}")
    elif len(head) > 8 and head[8:9] == b"{":
        what = "it looks like a safetensors file"
        advice = "Name the folder that holds it together with config.json and the tokenizer's files"
    elif head.startswith((b"PK\x03\x04", b"\x80\x02")):
        what = "it looks like pickled weights, which can run any code when loaded"
    elif head[:4] in (b"ggml", b"lmgg", b"fmgg", b"tjgg"):
        what, advice = "it has the format that came before GGUF", "Convert it with llama.cpp"
    elif head.lstrip()[:1] == b"<":
        what, advice = "it looks like a web page", FETCH_AGAIN
    else:
        what = f"it starts with {head[:4]!r}, not with GGUF"
    raise ArtifactError(f"{path} is no GGUF file: {what}. {advice}")


def read_header(path: Path, data: mmap.mmap) -> GgufHeader:
    """Return the metadata and the directory of tensors.

    Raises:
        ArtifactError: the file ends within them, or they make no sense.
    """
    cursor = _Cursor(data)
    try:
        version = cursor.number("I")
        if version & 0xFFFF == 0:  # Written on a machine with the other byte order.
            cursor.order, version = ">", int.from_bytes(version.to_bytes(4, "little"), "big")
        if version not in VERSIONS:
            raise ArtifactError(
                f"{path} is a GGUF file of version {version}; allowed: {', '.join(map(str, VERSIONS))}. Convert it "
                "with a current llama.cpp"
            )
        num_tensors, num_values = cursor.number("Q"), cursor.number("Q")
        header = GgufHeader()
        for _ in range(num_values):
            name = cursor.text()
            header.metadata[name] = cursor.value(cursor.number("I"))
        header.tensors = [_read_tensor(cursor) for _ in range(num_tensors)]
    except (struct.error, IndexError):
        raise damaged(path, f"its header needs more than the {len(data)} bytes of the file") from None
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"its header is malformed at byte {cursor.position} ({error})") from None
    alignment = int(_number(header, "general.alignment") or DEFAULT_ALIGNMENT)
    header.data_start = -(-cursor.position // alignment) * alignment
    return header


def check_tensors(path: Path, header: GgufHeader, size: int) -> None:
    """Check that every tensor can be unpacked and lies within the file.

    Raises:
        ArtifactError: names the first one that does not.
    """
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    names = {int(kind): kind.name for kind in GGMLQuantizationType}
    end = header.data_start
    for tensor in header.tensors:
        packing = names.get(tensor.packing, f"number {tensor.packing}")
        if packing not in PACKINGS:
            raise ArtifactError(
                f"{path}: tensor {tensor.name} is packed as {packing}, which cannot be unpacked. Allowed: "
                f"{', '.join(PACKINGS)}. Write the model in one of these (llama-quantize), or name its "
                "safetensors folder"
            )
        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.packing)]
        elements = math.prod(tensor.shape)
        if elements % block_elements:
            raise damaged(path, f"tensor {tensor.name} has {elements} elements, not whole blocks of {block_elements}")
        end = max(end, header.data_start + tensor.offset + elements // block_elements * block_bytes)
    if end > size:
        raise damaged(path, f"its tensors end at byte {end}, the file has {size} bytes")


def damaged(path: Path, what: str) -> ArtifactError:
    return ArtifactError(f"{path} is not a whole GGUF file: {what}. {FETCH_AGAIN}")


def _read_tensor(cursor: _Cursor) -> GgufTensor:
    name, num_dimensions = cursor.text(), cursor.number("I")
    if num_dimensions > MAX_DIMENSIONS:
        raise ValueError(f"a tensor with {num_dimensions} dimensions")
    shape = tuple(cursor.number("Q") for _ in range(num_dimensions))
    return GgufTensor(name, cursor.number("I"), shape, cursor.number("Q"))


def _number(header: GgufHeader, name: str) -> int | float | None:
    value = header.metadata.get(name)
    return value if isinstance(value, int | float) else None


class _Cursor:
    """A place in the file. Reading past its end raises struct.error or IndexError."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.position = len(GGUF_MAGIC)
        self.order = "<"

    def number(self, code: str) -> int:
        value: int = struct.unpack_from(self.order + code, self.data, self.position)[0]
        self.position += struct.calcsize(self.order + code)
        return value

    def skip(self, length: int) -> None:
        if length > len(self.data) - self.position:
            raise IndexError
        self.position += length

    def text(self) -> str:
        length = self.number("Q")
        self.skip(length)
        return self.data[self.position - length : self.position].decode("utf-8", errors="replace")

    def value(self, kind: int) -> object:
        if kind == TEXT:
            return self.text()
        if kind == LIST:
            return self._list()
        if kind not in SCALARS:
            raise ValueError(f"a value of type {kind}")
        return self.number(SCALARS[kind])

    def _list(self) -> int:
        """Skip a list; return its length."""
        kind, length = self.number("I"), self.number("Q")
        if kind in SCALARS:
            self.skip(length * struct.calcsize(SCALARS[kind]))
            return length
        for _ in range(length):
            if kind == TEXT:
                self.skip(self.number("Q"))
            else:
                self.value(kind)
        return length
