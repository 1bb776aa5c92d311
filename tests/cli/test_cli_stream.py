"""`neuronmm compress --stream`."""

from pathlib import Path

import pytest
from outcomes import COMPRESS, Run, refused

from neuronmm_ops.hf.streaming.source import LayersOnDisk


def test_the_same_document_as_without(
    run: Run, dense: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a table's title wraps at the table's width: a long path would
    arguments = ("--ratio", "0.3", "--calibration", text, *COMPRESS)
    whole = run("compress", dense, "-o", "a", *arguments)
    streamed = run("compress", dense, "-o", "b", *arguments, "--stream")
    assert streamed.code == whole.code == 0, streamed.err
    assert whole.out.splitlines()[0].strip() == "a"
    assert streamed.out.splitlines()[1:] == whole.out.splitlines()[1:]


def test_mistakes_are_one_line(
    run: Run, dense: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ("--calibration", text, *COMPRESS, "--stream")
    command = ("compress", dense, "-o", tmp_path / "out", *arguments)
    refused(run(*command, "--method", "drift"), "drift cannot be streamed", "without --stream")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LayersOnDisk, "keep", interrupted)
        stopped = run(*command)
    assert stopped.code == 130
    assert "Traceback" not in stopped.err
    refused(run(*command, "--ratio", "0.5"), "an unfinished compression", "another SVDConfig")
    assert run(*command).code == 0
    assert sorted(path.name for path in tmp_path.iterdir() if "stream" in path.name) == []
