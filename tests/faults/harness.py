"""One fault after another, each in a fork of a process that has imported everything once.

A fault is a command line, damage to the inputs that it names, and what is done to the process. It
is clean where the command refuses it in one line of its own and leaves inputs and outputs alone, or
does what it does without the damage.
"""

import contextlib
import hashlib
import json
import os
import re
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

CPU_SECONDS, IDLE_SECONDS, MEMORY_BYTES = 20, 15, 3 << 30
LONGEST_LINE = 2000
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")
PLACEHOLDER = re.compile(r"\{([\w.]+)\}")
# What Python, torch or a library says to a programmer.
INTERNAL = re.compile(
    r"Traceback|internal error|has no attribute|'NoneType' object|unexpected keyword|subscriptable"
    r"|index out of range|unsupported operand|not iterable|required positional|Exception ignored"
    r"|panicked|not supported between|cannot be interpreted|Errno|RuntimeError|KeyError"
)
REFUSED, UNCHANGED, DONE = "refused", "refused or unchanged", "done"
EITHER, NOTED = "refused or done", "refused, or done with another note"


def nothing(*_: object) -> None:
    """Do no damage."""


@dataclass(frozen=True)
class Fault:
    """What is tried.

    Attributes:
        kind: the row of the table.
        name: which of its kind.
        arguments: of the command; `{low}` is a copy of the pristine input of that name, `{out}` the
            output, `{case}` the working directory.
        damage: done to the case's directory before the command.
        inside: done in the command's own process.
        expect: REFUSED, DONE, EITHER, or UNCHANGED: refused, or with the result of pristine inputs.
            NOTED is UNCHANGED but for commands that print what is damaged.
        codes: exit codes of a refusal.
        inputs: further pristine inputs to copy.
    """

    kind: str
    name: str
    arguments: tuple[str, ...]
    damage: Callable[[Path], None] = nothing
    inside: Callable[[], None] = nothing
    expect: str = UNCHANGED
    codes: tuple[int, ...] = (2,)
    inputs: tuple[str, ...] = ()

    @property
    def command(self) -> str:
        """The command line, for people."""
        return " ".join(("neuronmm", *self.arguments))


@dataclass(frozen=True)
class Verdict:
    """What became of a fault; `problems` is empty where it is clean."""

    fault: Fault
    code: int
    problems: tuple[str, ...]
    out: str
    err: str
    seconds: float


@dataclass
class Harness:
    """Runs faults on copies of pristine inputs.

    Attributes:
        pristine: directory of the inputs, each a file or a directory of that name.
        main: the command, arguments in and exit code out.
    """

    pristine: Path
    main: Callable[[list[str]], int]
    _results: dict[tuple[str, ...], str] = field(default_factory=dict[tuple[str, ...], str])

    def run(self, fault: Fault) -> Verdict:
        """Run a fault to its end, or to its limits: of CPU time, waiting, and memory."""
        case = Path(tempfile.mkdtemp(prefix="fault-"))
        case.chmod(0o777)
        try:
            return self._run(fault, case)
        finally:
            for folder in (case, *case.rglob("*")):
                if folder.is_dir() and not folder.is_symlink():
                    folder.chmod(0o777)
            shutil.rmtree(case)

    def _run(self, fault: Fault, case: Path) -> Verdict:
        self._copy(fault, case)
        fault.damage(case)
        before = dict(_contents(case))
        code, out, err, seconds = self._fork(fault, case)
        result = _result(case, out)
        kept = dict(_contents(case))
        problems = list(_problems(fault, code, out, err))
        changed = [name for name, digest in before.items() if kept.get(name) != digest]
        # A streamed run, and any other that can be repeated, goes on from the state it keeps.
        resumed = re.compile(r"state|\.stream|^kept/")
        changed = [name for name in changed if not resumed.search(name)]
        if changed and "--force" not in fault.arguments:
            problems.append(f"changed {changed[0]}")
        if code:
            # The OUT of a reproduction says which cells failed.
            left = [] if fault.arguments[0] == "reproduce" else list(_left(before, kept))
            problems += [f"left {name}" for name in left[:1]]
        elif fault.expect == REFUSED:
            problems.append("silent: exit 0")
        elif _is_compared(fault) and result != self._expected(fault):
            problems.append("silent: exit 0, another result")
        return Verdict(fault, code, tuple(problems), out, err, seconds)

    def _copy(self, fault: Fault, case: Path) -> None:
        named = {name for text in fault.arguments for name in PLACEHOLDER.findall(text)}
        for name in sorted((named | set(fault.inputs)) - {"out", "case"}):
            source = self.pristine / name
            if source.is_dir():
                shutil.copytree(source, case / name)
            else:
                shutil.copy(source, case / name)

    def _expected(self, fault: Fault) -> str:
        """Return the command's result on pristine inputs."""
        if fault.arguments not in self._results:
            case = Path(tempfile.mkdtemp(prefix="fault-"))
            undamaged = Fault(fault.kind, "", fault.arguments, inputs=fault.inputs)
            self._copy(undamaged, case)
            code, out, err, _ = self._fork(undamaged, case)
            self._results[fault.arguments] = _result(case, out) if code == 0 else f"{code}: {err}"
            shutil.rmtree(case)
        return self._results[fault.arguments]

    def _fork(self, fault: Fault, case: Path) -> tuple[int, str, str, float]:
        streams = [Path(tempfile.mkstemp(prefix="fault-")[1]) for _ in range(2)]
        begun = time.monotonic()
        pid = os.fork()
        if pid == 0:
            self._child(fault, case, streams)
        code = _wait(pid)
        out, err = (path.read_bytes().decode("utf-8", "replace") for path in streams)
        for path in streams:
            path.unlink()
        return code, out.replace(str(case), "CASE"), err, time.monotonic() - begun

    def _child(self, fault: Fault, case: Path, streams: list[Path]) -> NoReturn:
        code = 70
        try:
            os.setpgid(0, 0)
            sys.dont_write_bytecode = True  # of kernels: Python's caches are no trace of a fault
            for number, path in enumerate(streams, 1):
                os.dup2(os.open(path, os.O_WRONLY), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
            sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
            os.chdir(case)
            _limit(resource.RLIMIT_CPU, CPU_SECONDS)
            _limit(resource.RLIMIT_AS, _virtual_bytes() + MEMORY_BYTES)
            values = {"case": str(case), "out": str(case / "out")}
            # Every other placeholder is the copy's place; braces elsewhere are the argument's own.
            arguments = [
                PLACEHOLDER.sub(lambda m: values.get(m[1], str(case / m[1])), text)
                for text in fault.arguments
            ]
            fault.inside()
            code = self.main(arguments)
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()
        except BaseException:
            code = 70
            traceback.print_exc()
        finally:
            try:
                sys.stderr.flush()
            finally:
                os._exit(code)


def _limit(what: int, value: int) -> None:
    resource.setrlimit(what, (value, resource.getrlimit(what)[1]))


def _virtual_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _wait(pid: int) -> int:
    """Return the exit code, or minus the signal; kill the process where it waits for nothing.

    Seconds of waiting without computing are what counts: under load a sound command takes long.
    """
    before, since = "", time.monotonic()
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        state, used = fields[0], " ".join(fields[11:13])
        if state != "S" or used != before:
            before, since = used, time.monotonic()
        if time.monotonic() > since + IDLE_SECONDS:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.005)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)  # what it has started
    return os.waitstatus_to_exitcode(status)


def _contents(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield every path and a digest of what is there; nothing is opened that is no file."""
    for path in sorted(directory.rglob("*")):
        mode = path.lstat().st_mode
        kind = stat.filemode(mode)
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if stat.S_ISREG(mode) else ""
        yield str(path.relative_to(directory)), f"{kind} {digest}"


def _left(before: dict[str, str], after: dict[str, str]) -> Iterator[str]:
    """Yield new files, but for the state that a repeated command goes on from."""
    for name in after:
        resumable = ".stream" in name or "state" in name or name.startswith("kept/")
        if name not in before and not resumable:
            yield name


def _result(case: Path, out: str) -> str:
    """Return what a command made: the weights in OUT, or else what it printed."""
    weights = sorted((case / "out").glob("*.safetensors")) if (case / "out").is_dir() else []
    if weights:
        return " ".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in weights)
    return out


def _is_compared(fault: Fault) -> bool:
    is_noted = fault.expect == NOTED and fault.arguments[0] != "inspect"
    return fault.expect == UNCHANGED or is_noted


def _problems(fault: Fault, code: int, out: str, err: str) -> Iterator[str]:
    if code == -signal.SIGXCPU or code == -signal.SIGKILL:
        yield "hangs"
        return
    if code < 0:
        yield f"ended by {signal.Signals(-code).name}"
    if CONTROL.search(out) or CONTROL.search(err):
        yield "prints control characters"
    lines = [line for line in err.splitlines() if line.strip()]
    lines = [line for line in lines if not re.match(r"warning: |\w+ \d+/\d+, ", line)]
    if max(map(len, lines), default=0) > LONGEST_LINE:
        yield f"a line of {max(map(len, lines))} characters"
    # What a kernel raises is shown in its own words.
    internal = re.search("internal error", err) if "kernel" in fault.kind else INTERNAL.search(err)
    if internal:
        yield f"says {internal[0]!r}"
    if code == 0 and "--json" in fault.arguments and not _is_json(out):
        yield "stdout is no JSON document"
    if code == 0:
        return
    if fault.expect == DONE:
        yield f"exit {code}"
    elif code not in fault.codes:
        yield f"exit {code}, not {' or '.join(map(str, fault.codes))}"
    if code == 1 and fault.arguments[0] == "reproduce":  # a line for each cell that failed
        return
    if code == 128 + signal.SIGPIPE:  # nobody reads, so that nothing is to say
        return
    if len(lines) != 1 or not lines[0].startswith("neuronmm"):
        yield f"{len(lines)} lines on stderr"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
