"""A GGUF file's weights as floating-point numbers, with everything else that the file says."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np

COUNTED = ("GGUF.", "general.architecture", "general.file_type", "general.quantization_version")
"""Fields that a writer makes by itself."""


def write_float_gguf(source: Path, target: Path, *, half: bool = False) -> None:
    """Write `target`: the tensors of `source` in float32, in its channel order.

    With `half`, matrices are in float16, which OpenVINO reads.
    """
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(target, architecture)
    kind = gguf.LlamaFileType.MOSTLY_F16 if half else gguf.LlamaFileType.ALL_F32
    writer.add_file_type(kind)
    for name, field in reader.fields.items():
        if name.startswith(COUNTED):
            continue
        item = field.types[1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, field.contents(), field.types[0], item)
    for tensor in reader.tensors:
        numbers = gguf.dequantize(tensor.data, tensor.tensor_type)
        dtype = np.float16 if half and numbers.ndim > 1 else np.float32
        writer.add_tensor(tensor.name, np.ascontiguousarray(numbers, dtype))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
