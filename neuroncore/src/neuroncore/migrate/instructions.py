"""The new statements of a function: tiles, and the instructions that fill them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from neuroncore.checks.lint_source import FunctionNode
from neuroncore.migrate.names import Names
from neuroncore.migrate.values import Box, ByHandError, Value, tidy, view


class Instructions:
    """The values of a function's names, and the new statements of the current one."""

    def __init__(
        self,
        names: Names,
        env: dict[str, Value],
        sums: set[str],
        function: FunctionNode | None = None,
    ) -> None:
        self.names, self.env, self.sums, self.function = names, env, sums, function
        self.lines: list[str] = []
        self.places: dict[int, str] = {}

    def name(self, stem: str) -> str:
        """A name that the file does not have."""
        numbered = (f"{stem}_{i}" for i in range(1 << 20))
        free = next(n for n in numbered if n not in self.names.used)
        self.names.used.add(free)
        return free

    def kept(self, text: str, value: Value, name: str) -> Value:
        """A call that stays, bound to a name."""
        name = name or self.name("tile")
        self.lines.append(f"{name} = {text}")
        return replace(value, text=name)

    def fresh(self, shape: Any, dtype: str, memory: str, name: str) -> Value:
        """Allocate a tile."""
        name = name or self.name("tile")
        value = Value(name, "tile", shape, dtype, memory)
        nl = self.names.nl
        self.lines.append(
            f"{name} = {nl}.ndarray({value.shape_text()}, dtype={dtype}, buffer={nl}.{memory})"
        )
        return value

    def result(self, like: Value, name: str, dtype: str = "", other: Value | None = None) -> Value:
        """Allocate a tile in SBUF of the shape of another one, and of its dtype unless given."""
        if like.kind != "tile":
            raise ByHandError("result")
        shape = like.shape
        if shape and len(shape) == 1:
            shape = (*shape, "1")
        if not dtype:
            dtypes = [v.dtype_text() for v in (like, other) if v is not None and v.kind == "tile"]
            wide = [d for d in dtypes if d.endswith(".float32")]
            dtype = wide[0] if wide else dtypes[0]
        if shape is None:
            made = replace(like, text=view(like), base=None)
            text, name = made.shape_text(), name or self.name("tile")
            nl = self.names.nl
            self.lines.append(f"{name} = {nl}.ndarray({text}, dtype={dtype}, buffer={nl}.sbuf)")
            return Value(name, "tile", None, dtype, "sbuf")
        return self.fresh(shape, dtype, "sbuf", name)

    def issue(self, function: str, to: Value, box: Box, written: str = "", **values: Any) -> Value:
        """An instruction."""
        options = []
        for key, v in values.items():
            text = view(v, box) if isinstance(v, Value) and v.kind == "tile" else v
            options.append(f"{key}={text.text if isinstance(text, Value) else text}")
        if not written:
            written = view(to, box)
        self.lines.append(
            f"{self.names.nisa}.{function}({', '.join([f'dst={written}', *options])})"
        )
        return to

    def binary(
        self, op: str, x: Value, y: Value, name: str = "", dtype: str = "", box: Box | None = None,
        to: Value | None = None,
    ) -> Value:  # fmt: skip
        """x op y of tiles, or of a tile and a number."""
        nl, box = self.names.nl, box or {}
        if op == "divide":
            if y.kind != "tile":
                op, y = "multiply", Value(tidy(f"1 / ({y.text})"))
            else:
                inverse = self.result(y, "", f"{nl}.float32")
                op, y = "multiply", self.issue("reciprocal", inverse, {}, data=y)
        token = f"{nl}.{op}"
        if x.kind != "tile" or y.kind != "tile":
            data, number = (x, y) if x.kind == "tile" else (y, x)
            swap = {} if x.kind == "tile" or op in ("add", "multiply") else {"reverse0": "True"}
            to = to or self.result(data, name, dtype)
            return self.issue(
                "tensor_scalar", to, box, data=data, op0=token, operand0=number, **swap
            )
        for a, b, swapped in ((x, y, False), (y, x, True)):
            if self.is_column(b) and not self.is_column(a):
                if b.dtype != f"{nl}.float32":
                    b = self.issue("tensor_copy", self.result(b, "", f"{nl}.float32"), {}, src=b)
                swap = {"reverse0": "True"} if swapped and op not in ("add", "multiply") else {}
                to = to or self.result(a, name, dtype, y if a is x else x)
                return self.issue("tensor_scalar", to, box, data=a, op0=token, operand0=b, **swap)
        pairs = zip(x.shape or (), y.shape or (), strict=False)
        if any("1" in pair and len({*pair}) > 1 for pair in pairs):
            raise ByHandError("broadcast")
        if x.memory == "psum" and y.memory == "psum":
            y = self._near(y)
        to = to or self.result(x, name, dtype, y)
        return self.issue("tensor_tensor", to, box, data1=x, data2=y, op=token)

    @staticmethod
    def is_column(x: Value) -> bool:
        """Whether it is a tile with one number in each partition."""
        return bool(x.shape) and {*x.shape[1:]} <= {"1"}

    def _near(self, x: Value) -> Value:
        if x.memory != "psum":
            return x
        return self.issue("tensor_copy", self.result(x, ""), {}, src=x)

    def _transposed(self, x: Value, name: str) -> Value:
        to = self.fresh((x.size(1), x.size(0)), x.dtype_text(), "psum", name)
        return self.issue("nc_transpose", to, {}, data=x)

    def _tensor(self, value: Value) -> Value:
        """What must be a tensor: a name of which nothing else is known is one."""
        return replace(value, kind="tile") if value.kind == "python" else value

    def _store(self, dst: Value, value: Value, box: Box) -> Value:
        dst, value = self._tensor(dst), self._near(self._tensor(value))
        if value.shape is None and box:
            value = replace(value, shape=dst.shape)
        return self.issue("dma_copy", dst, box, src=value)

    def _redirect(self, before: int, value: Value, target: Value) -> bool:
        """Let the instruction that made a temporary write the target instead, if it reaches it."""
        if value.memory == "psum" and target.memory != "psum":
            return False
        made = f"{value.text} = {self.names.nl}.ndarray("
        allocated = [
            i for i, line in enumerate(self.lines[before:], before) if line.startswith(made)
        ]
        if not allocated or value.text in self.env or f"dst={value.text}," not in self.lines[-1]:
            return False
        self.lines[-1] = self.lines[-1].replace(f"dst={value.text},", f"dst={view(target)},", 1)
        del self.lines[allocated[-1]]
        return True
