"""neuron-explorer's parquet tables: the summary of a run, and its instructions by source line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from neuroncore.cli import lines as source_lines
from neuroncore.cli.summaries import ENGINES
from neuroncore.documents import check_regular

if TYPE_CHECKING:
    import numpy as np

_WAITS = "EVENT_SEMAPHORE"
"""How opcodes begin that only wait, which AWS's active times leave out."""
_REQUIRED = ("start_ts", "end_ts", "engine", "opcode")
_OPTIONAL = ("nki_source_location", "pcore_idx", "dma_trigger_start_ts", "dma_trigger_end_ts")


def session(folder: Path) -> dict[str, Any]:
    """The fields of `Metadata` and `Summary`, as a session of summary-json has them.

    Raises ValueError where a table cannot be read or has not one row, or there is no summary.
    """
    fields: dict[str, Any] = {}
    for name in ("Metadata", "Summary"):
        table = _table(folder, name)
        if table is None and name == "Summary":
            raise ValueError(f"{folder} has no Summary.parquet; name the directory that holds it")
        if table is not None and table.num_rows != 1:
            raise ValueError(f"{folder}: {name} has {table.num_rows} rows; one run has one")
        fields |= table.to_pylist()[0] if table is not None else {}
    return fields


def lines(folder: Path) -> list[dict[str, Any]] | None:
    """`lines.gathered` of the table `Instruction`; None where it names no line.

    A DMA counts for DMA, from its start to its end, and for the engine that triggers it. What
    several lines share counts for the first.

    Raises ValueError where the table cannot be read, lacks a column, or holds impossible times.
    """
    import numpy as np

    table = _table(folder, "Instruction", (*_REQUIRED, *_OPTIONAL))
    if table is None or "nki_source_location" not in table.column_names:
        return None
    source, texts = _coded(table, "nki_source_location")
    opcode, opcodes = _coded(table, "opcode")
    engine, engines = _coded(table, "engine")
    names = [ENGINES.get(name.lower(), name) for name in engines] + ["DMA"]
    sources = [re.search(r"([^\s\[\],\"']+):(\d+)", text) for text in texts]
    is_work = np.array([not text.startswith(_WAITS) for text in opcodes], bool)[opcode]
    keep = np.array([match is not None for match in sources], bool)[source] & is_work
    start, end = _times(folder, table, "start_ts", "end_ts")
    dma_start, dma_end = _times(folder, table, "dma_trigger_start_ts", "dma_trigger_end_ts")
    is_dma = keep & (dma_end > dma_start)
    core = np.unique(_whole(table, "pcore_idx"), return_inverse=True)[1]
    place = (core * len(sources) + source) * len(names)

    def place_of(group: int) -> source_lines.Place:
        source = sources[group // len(names) % len(sources)]
        assert source is not None  # `keep` has no other
        return Path(source[1]).name, int(source[2]), names[group % len(names)]

    rows = source_lines.gathered(
        np.concatenate([(place + engine)[keep], place[is_dma] + len(names) - 1]),
        np.concatenate([start[keep], dma_start[is_dma]]),
        np.concatenate([end[keep], dma_end[is_dma]]),
        place_of,
    )
    return rows or None


def _table(folder: Path, name: str, columns: tuple[str, ...] = ()) -> Any:
    """A table of `NAME.parquet`, or of `NAME_0.parquet` and so on; None if there is none."""
    try:
        import pyarrow as pa
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        need = "a directory of parquet needs pyarrow"
        raise ImportError(f"{need}; run: pip install 'neuroncore[parquet]'") from error
    whole: Any = None
    for path in sorted(folder.glob(f"{name}*.parquet")):
        if not re.fullmatch(rf"{name}(_\d+)?", path.stem):
            continue
        check_regular(path)
        try:
            with ParquetFile(path) as file:
                present = [column for column in columns if column in file.schema_arrow.names]
                part = file.read(present or None)
            whole = part if whole is None else pa.concat_tables([whole, part])
        except (OSError, ValueError, pa.ArrowException) as error:
            raise ValueError(f"{path} is no parquet table, or is cut off: {error}") from error
        missing = {*columns} & {*_REQUIRED} - {*present}
        if missing:
            raise ValueError(f"{path} has no column {min(missing)}: it is of another version")
    return whole


def _coded(table: Any, name: str) -> tuple[np.ndarray, list[str]]:
    """A column of texts as numbers, and the texts by number; null is ""."""
    encoded = _column(table, name, "string").fill_null("").combine_chunks().dictionary_encode()
    return encoded.indices.to_numpy().astype("int64"), encoded.dictionary.to_pylist()


def _times(folder: Path, table: Any, first: str, last: str) -> tuple[np.ndarray, np.ndarray]:
    start, end = _whole(table, first), _whole(table, last)
    wrong = (start < 0) | (end < start)
    if wrong.any():
        at = f"{first} {start[wrong][0]} and {last} {end[wrong][0]}"
        raise ValueError(f"{folder}: Instruction has {at}; times begin at 0 and do not run back")
    return start, end


def _whole(table: Any, name: str) -> np.ndarray:
    """A column of whole numbers; 0 for null, and for a column that is not there."""
    import numpy as np

    if name not in table.column_names:
        return np.zeros(table.num_rows, np.int64)
    return _column(table, name, "int64").fill_null(0).to_numpy()


def _column(table: Any, name: str, type_name: str) -> Any:
    import pyarrow as pa

    try:
        return table[name].cast(type_name)
    except pa.ArrowException as error:
        raise ValueError(f"{name} of Instruction must be {type_name}: {error}") from error
