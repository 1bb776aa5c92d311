"""What is read from outside: a fifo or a device is refused at once, whoever reads it."""

import os
from pathlib import Path

import pytest

from neuroncore.calibration import measurements
from neuroncore.cli import main, summaries


@pytest.mark.parametrize("read", [measurements.read, summaries.read])
def test_what_is_no_regular_file_is_not_waited_for(read, tmp_path):
    os.mkfifo(fifo := tmp_path / "fifo.json")
    for path in (fifo, Path("/dev/zero")):
        with pytest.raises(OSError, match="must be a regular file, no fifo or device"):
            read(path)


def test_a_fifo_among_tables_is_not_waited_for(tmp_path):
    pytest.importorskip("pyarrow")
    os.mkfifo(tmp_path / "Metadata.parquet")
    with pytest.raises(OSError, match="must be a regular file"):
        summaries.read(tmp_path)


def test_commands_say_so_in_one_line(tmp_path, capsys):
    os.mkfifo(fifo := tmp_path / "fifo.json")
    for command in (["calibrate", str(fifo)], ["compare", str(fifo), str(fifo)]):
        assert main(command) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "regular file" in line
