"""Small files in the formats of the papers' data sets."""

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet

WIKITEXT = ["", " = Title = \n", "", " A sentence , with <unk> tokens . \n"] * 12
PTB = [f"no it was n't black monday number {index}" for index in range(30)]
C4 = [f"Beginners {index}\nBBQ class, caf\u00e9 and more." for index in range(60)]


def write_parquet(path: Path, column: str, texts: list[str | None]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pa.table({column: pa.array(texts, pa.string())}), path)
    return path


def write_arrow(path: Path, column: str, texts: list[str]) -> Path:
    """As `datasets` writes its cache: a stream."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table({column: texts})
    with pyarrow.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table)
    return path


def write_c4(path: Path, texts: list[str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [{"text": text, "timestamp": "2019-04-25T12:57:54Z", "url": "a.b"} for text in texts]
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(lines) if path.suffix == ".gz" else lines)
    return path


def write_corpora(folder: Path) -> Path:
    """Write all three as the hub's repositories have them."""
    write_parquet(folder / "wikitext-2-raw-v1/test-00000-of-00001.parquet", "text", [*WIKITEXT])
    write_parquet(folder / "penn_treebank/test/0000.parquet", "sentence", [*PTB])
    write_c4(folder / "en/c4-validation.00000-of-00008.json.gz", C4)
    return folder
