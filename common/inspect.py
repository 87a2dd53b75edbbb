"""What `lesson inspect FILE` shows: a GGUF's three regions, as a document or as tables."""

import math

import numpy as np

from common.gguf import GGUF, Strings, printable

SCHEMA = 1
FIRST = 8  # items of an array that are shown
WIDEST = 96  # characters of a value in a table


def document(gguf: GGUF) -> dict:
    """The three regions as JSON values; text is whole, an array is its count and first items.

    Offsets count from the start of the file, in bytes; shapes are in numpy order; strides are the bytes from item to
    item, where an item is a number, or a whole block of a quantized row.
    """
    metadata = [
        {"key": key, "type": gguf.value_types[key], "value": plain(value)} for key, value in gguf.metadata.items()
    ]
    tensors = [
        {
            "name": tensor.name,
            "type": tensor.type.name,
            "shape": list(tensor.shape),
            "strides": list(tensor.strides),
            "block": {"weights": tensor.type.block, "bytes": tensor.type.bytes},
            "offset": tensor.offset,
            "nbytes": tensor.nbytes,
        }
        for tensor in gguf.tensors.values()
    ]
    header = {
        "version": gguf.version,
        "metadata": len(metadata),
        "tensors": len(tensors),
        "alignment": gguf.alignment,
        "data_offset": gguf.data_offset,
        "size": gguf.size,
    }
    return {"schema": SCHEMA, "path": str(gguf.path), "header": header, "metadata": metadata, "tensors": tensors}


def plain(value):
    """A metadata value in JSON's types: bytes that are not UTF-8 become escapes, a NaN or an infinity its name."""
    if isinstance(value, (Strings, np.ndarray)):
        items = value[:FIRST]
        return {"count": len(value), "first": [plain(item) for item in getattr(items, "tolist", lambda: items)()]}
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace")
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def show(gguf: GGUF, console) -> None:
    """Print the three regions to a rich console."""
    from rich.table import Table
    from rich.text import Text

    def table(title: str, names: str, rows, right: str = "") -> None:
        view = Table(title=Text(title), title_justify="left", box=None, pad_edge=False)
        for name in names.split():
            view.add_column(name, justify="right" if name in right.split() else "left", overflow="fold")
        for row in rows:
            # Text, not str: a str would be read as markup, and the file's text is not ours.
            view.add_row(*(Text(printable(str(cell))) for cell in row))
        console.print(view)
        console.print()

    doc = document(gguf)
    table("Header", "field value", [("file", doc["path"]), *doc["header"].items()])
    table("Metadata", "key type value", [(row["key"], row["type"], brief(row["value"])) for row in doc["metadata"]])
    table(
        "Tensors",
        "name type shape strides offset nbytes",
        [
            (t["name"], t["type"], tuple(t["shape"]), tuple(t["strides"]), t["offset"], t["nbytes"])
            for t in doc["tensors"]
        ],
        right="offset nbytes",
    )


def brief(value) -> str:
    """A value on one line, cut to WIDEST characters; an array says how many items it has."""
    if isinstance(value, dict):
        items = ", ".join(shortened(str(item), WIDEST // 4) for item in value["first"])
        return f"{value['count']}: {items}" + (", …" if value["count"] > len(value["first"]) else "")
    return shortened(str(value), WIDEST)


def shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}… ({len(text)} characters)"
