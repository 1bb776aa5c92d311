"""Kernels of the Beta dialect (`neuronxcc.nki`) as text of the current one."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import replace
from typing import Any

from neuroncore import isa
from neuroncore.legacy import names as beta
from neuroncore.migrate import tables
from neuroncore.migrate.expressions import Expressions
from neuroncore.migrate.names import NISA, NKI, NL
from neuroncore.migrate.values import (
    Box,
    ByHandError,
    Value,
    box_of,
    fixed,
    index,
    product,
    view,
)

_IDENTITY = ("numpy.identity", "numpy.eye")


class Scope(Expressions):
    """The statements of a function, rewritten: what it calls, and where results go."""

    def _call(self, node: ast.Call, name: str) -> Value | None:
        dotted = self.names.of(node.func)
        if isinstance(node.func, ast.Call | ast.Subscript) or dotted.startswith(f"{NKI}."):
            launch = self._launch(node, dotted)
            if launch is not None:
                return launch
        if isinstance(node.func, ast.Attribute) and not dotted:
            of = self.value(node.func.value)
            if node.func.attr == "broadcast_to" and of.kind == "tile":
                shape = self.value(node.args[0]).text
                return self.kept(f"{self.names.nl}.broadcast_to({view(of)}, {shape})",
                                 replace(of, base=None, shape=_tuple(shape)), name)  # fmt: skip
            if node.func.attr == "reshape" and of.kind == "tile" and len(node.args) == 1:
                shape = self.value(node.args[0]).text
                text = f"{view(of)}.reshape({shape})"
                return replace(of, text=text, base=None, shape=_tuple(shape))
            if node.func.attr == "type" and len(node.args) == 1:
                return self._number(node.func.value, node.args[0])
            return None
        if dotted == "numpy.dtype" and len(node.args) == 1:
            return Value(self.dtype(node.args[0]))
        if dotted.startswith(f"{NISA}."):
            return self._isa(dotted.rpartition(".")[2], node, name)
        if not dotted.startswith(f"{NL}."):
            return None
        return self._nl(dotted.rpartition(".")[2], node, name)

    def _number(self, of: ast.expr, dim: ast.expr) -> Value | None:
        """`np.dtype(...).type(number)`: instructions take Python's numbers."""
        if not isinstance(of, ast.Call) or self.names.of(of.func) != "numpy.dtype":
            return None
        return Value(ast.unparse(dim)) if isinstance(dim, ast.Constant) else None

    def _launch(self, node: ast.Call, dotted: str) -> Value | None:
        """Calls of the host: wrappers of kernels, and launches of a grid."""
        called = self.names.of(node.func.func) if isinstance(node.func, ast.Call) else dotted
        wrapper = called.removeprefix(f"{NKI}.")
        if wrapper in ("benchmark", "profile"):
            raise ByHandError("benchmark")
        if wrapper == "simulate_kernel" and node.args:
            kernel, *rest = [self.value(a).text for a in node.args]
            rest += [f"{k.arg}={self.value(k.value).text}" for k in node.keywords]
            return Value(f"{self.names.nki}.simulate({kernel})({', '.join(rest)})")
        if wrapper in ("jit", "baremetal", "trace") and node.args:
            kernel = self.value(node.args[0]).text
            known = kernel in self.names.kernels
            return Value(kernel if known else f"{self.names.nki}.jit({kernel})")
        if not isinstance(node.func, ast.Subscript) or not isinstance(node.func.value, ast.Name):
            return None
        kernel, key = node.func.value.id, node.func.slice
        if kernel in self.env:
            return None
        sizes = list(key.elts) if isinstance(key, ast.Tuple) else [key]
        if kernel in self.names.kernels and kernel not in self.names.grids:
            if len(sizes) == 1:
                return None  # cores
            raise ByHandError("grid")
        if kernel not in self.names.grids and len(sizes) < 2:
            return None
        grid = ", ".join(self._programs(n) for n in sizes) + "," * (len(sizes) == 1)
        text = [self.value(a).text for a in node.args]
        text += [f"{k.arg}={self.value(k.value).text}" for k in node.keywords]
        return Value(f"{kernel}({', '.join([*text, f'grid=({grid})'])})")

    def _programs(self, node: ast.expr) -> str:
        """The number of programs on an axis of a grid; 0 is one."""
        if isinstance(node, ast.Call) and self.names.of(node.func) == f"{NL}.spmd_dim":
            size, cores = node.args
            cores = cores.args[0] if isinstance(cores, ast.Call) else cores
            return product(self.value(size).text, self.value(cores).text)
        text = self.value(node).text
        return "1" if text == "0" else text

    def _given(self, node: ast.Call, *names: str) -> dict[str, ast.expr]:
        if any(k.arg is None for k in node.keywords):
            raise ByHandError("nested")
        positional = dict(zip(names, node.args, strict=False))
        return {**positional, **{k.arg: k.value for k in node.keywords if k.arg}}

    def _nl(self, function: str, node: ast.Call, name: str) -> Value | None:
        nl = self.names.nl
        if function in ("ndarray", "zeros", "ones", "full", "zeros_like"):
            return self._allocate(function, node, name)
        if function in tables.LOOPS:
            return Value(f"range({', '.join(self.value(a).text for a in node.args)})")
        if function == "arange":
            stop = [*self._given(node, "start", "stop").values()]
            if len(stop) > 1:
                raise ByHandError("index-pattern")
            return index("0", {-1: ("1", self.value(stop[0]).text)})
        if function == "par_dim":
            return self.value(self._given(node, "size")["size"])
        if function in ("load", "store", "copy"):
            arguments = self._given(node, *(("dst", "value") if function == "store" else ("src",)))
            box = box_of(self._mask(arguments))
            if function == "store":
                return self._store(
                    self.value(arguments["dst"]), self.value(arguments["value"]), box
                )
            src = self._tensor(self.value(arguments["src"]))
            to = self.result(src, name, self.dtype(arguments.get("dtype")))
            call = "dma_copy" if function == "load" and src.memory != "sbuf" else "tensor_copy"
            return self.issue(call, to, box, src=src)
        if function in tables.BINARY:
            arguments = self._given(node, "x", "y")
            a, b = self.value(arguments["x"]), self.value(arguments["y"])
            return self.binary(function, a, b, name, self.dtype(arguments.get("dtype")),
                               box_of(self._mask(arguments)))  # fmt: skip
        if function in beta.REDUCTIONS:
            arguments = self._given(node, "x", "axis")
            return self._reduce(f"{nl}.{beta.REDUCTIONS[function]}", arguments, "x", name)
        if function in tables.ACTIVATIONS or function == "reciprocal":
            arguments = self._given(node, "x")
            x = self.value(arguments["x"])
            if x.kind != "tile":
                return None
            to = self.result(x, name, self.dtype(arguments.get("dtype")))
            box = box_of(self._mask(arguments))
            if function == "reciprocal":
                return self.issue("reciprocal", to, box, data=x)
            return self.issue("activation", to, box, op=f"{nl}.{function}", data=x)
        if function == "matmul":
            arguments = self._given(node, "x", "y", "transpose_x")
            x, y = self._near(self.value(arguments["x"])), self._near(self.value(arguments["y"]))
            flag = arguments.get("transpose_x")
            if not (isinstance(flag, ast.Constant) and flag.value):
                x = self._near(self._transposed(x, ""))
            shape = (x.size(1), y.size(1))
            to = self.fresh(shape, f"{nl}.float32", "psum", name)
            return self.issue("nc_matmul", to, {}, stationary=x, moving=y)
        if function == "transpose":
            x = self._near(self._tensor(self.value(self._given(node, "x")["x"])))
            return self._transposed(x, name)
        if function == "shared_constant":
            arguments = self._given(node, "constant", "dtype")
            array, dtype = arguments["constant"], self.dtype(arguments.get("dtype"))
            if isinstance(array, ast.Call) and self.names.of(array.func) in _IDENTITY and dtype:
                n = self.value(array.args[0]).text
                text = f"{nl}.shared_identity_matrix({n}, dtype={dtype})"
                return self.kept(text, Value("", "tile", (n, n), dtype, "sbuf"), name)
            text = f"{nl}.shared_constant({self.value(arguments['constant']).text})"
            return self.kept(text, Value(text, "tile", dtype=dtype, memory="hbm"), name)
        if function == "shared_identity_matrix":
            return self.kept(ast.unparse(node), Value("", "tile", memory="sbuf"), name)
        if function == "static_cast":
            arguments = self._given(node, "value", "dtype")
            array, dtype = (self.value(arguments[key]).text for key in ("value", "dtype"))
            return Value(f"{array}.astype({dtype})")
        if function in ("program_id", "num_programs") and "grid" in self.env:
            axis = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else 0
            return Value(f"program_{axis}" if function == "program_id" else f"grid[{axis}]")
        if function in ("loop_reduce", "where", "softmax", "mean", "var", "rms_norm", "all"):
            raise ByHandError("removed")
        return None

    def _mask(self, arguments: dict[str, ast.expr]) -> Value | None:
        node = arguments.pop("mask", None)
        if node is None or (isinstance(node, ast.Constant) and node.value is None):
            return None
        mask = self.value(node)
        if mask.kind != "mask":
            raise ByHandError("mask")
        return replace(mask, parts=[fixed(p, self.places) for p in mask.parts])

    def dtype(self, node: ast.expr | None) -> str:
        """A dtype as text; "" for none."""
        if node is None or (isinstance(node, ast.Constant) and node.value is None):
            return ""
        dotted = self.names.of(node)
        if dotted.startswith("numpy."):
            return f"{self.names.nl}.{dotted.rpartition('.')[2]}"
        return self.value(node).text

    def _op(self, node: ast.expr) -> str:
        dotted = self.names.of(node)
        last = dotted.rpartition(".")[2]
        if dotted.startswith(("numpy.", f"{NL}.")):
            return f"{self.names.nl}.{beta.SYNONYMS.get(last, last)}"
        return self.value(node).text

    def _allocate(self, function: str, node: ast.Call, name: str) -> Value:
        given_shape = given_dtype = None
        order = {"full": ("shape", "fill_value", "dtype"), "zeros_like": ("x", "dtype")}
        named = self._given(node, *order.get(function, ("shape", "dtype")))
        nl = self.names.nl
        if function == "zeros_like":
            x = self.value(named.pop("x"))
            shape, place, shown = x.shape, 0, x.shape_text()
            dtype = self.dtype(named.pop("dtype", None)) or x.dtype_text()
        else:
            given_shape, given_dtype = named.pop("shape"), named.pop("dtype")
            shape, place = self._shape(given_shape)
            shown, dtype = self.value(given_shape).text, self.dtype(given_dtype)
        buffer = named.pop("buffer", None)
        memory = "sbuf" if buffer is None else self.names.memory(buffer)
        if not memory and buffer is not None:
            memory = (
                "hbm" if "hbm" in ast.unparse(buffer) else ast.unparse(buffer).rpartition(".")[2]
            )
        kept = ast.unparse(buffer) if memory == "hbm" and buffer else f"{nl}.{memory}"
        value = {"zeros": "0", "ones": "1", "zeros_like": "0"}.get(function, "")
        value = self.value(named.pop("fill_value")).text if function == "full" else value
        blocks = shape[:place] if shape and memory != "hbm" else ()
        tile = shape[len(blocks) :] if shape else None
        name = name or self.name("tile")
        if value and value not in ("0", "0.0"):
            self.sums.discard(name)
        sums = name in self.sums and memory == "psum"  # the first matmul overwrites PSUM
        call = "ndarray" if not value or sums else function if function != "zeros_like" else "zeros"
        shown = f"({', '.join(tile)}{',' * (len(tile) == 1)})" if tile else shown
        arguments = [shown, *([value] if call == "full" else [])]
        made = f"{nl}.{call}({', '.join(arguments)}, dtype={dtype}, buffer={kept})"
        plain = buffer is None or not self.names.memory(buffer)
        if given_shape is not None and given_dtype is not None and plain and call == function:
            same = shown in (ast.unparse(given_shape), f"({ast.unparse(given_shape)[1:-1]})")
            made = ast.unparse(node) if same and dtype == ast.unparse(given_dtype) else made
        if not blocks:
            self.lines.append(f"{name} = {made}")
        else:
            self.lines += _lists(name, blocks, made, self.names.used)
        kind = "blocks" if blocks else "tile"
        return Value(name, kind, tile, dtype, memory, len(blocks))  # type: ignore[arg-type]

    def _shape(self, node: ast.expr) -> tuple[tuple[str, ...] | None, int]:
        """The sizes, and the place of the partition among them."""
        if not isinstance(node, ast.Tuple | ast.List):
            shape = self.value(node)
            sizes = _tuple(shape.text)
            return sizes, 0
        places = [
            i for i, n in enumerate(node.elts)
            if isinstance(n, ast.Call) and self.names.of(n.func) == f"{NL}.par_dim"
        ]  # fmt: skip
        return tuple(self.value(n).text for n in node.elts), places[0] if places else 0

    def _isa(
        self, function: str, node: ast.Call, name: str, to: Value | None = None
    ) -> Value | None:
        known = getattr(isa, function, None)
        if known is None:
            raise ByHandError("removed")
        if not inspect.isfunction(known) or function.startswith(("get_", "register")):
            return None
        order = [n for n in inspect.signature(known).parameters if n != "dst"]
        arguments = self._given(node, *order)
        if function in ("affine_select", "iota", "memset") and "dst" not in arguments:
            return self._special(function, node, name, to)
        dtype = self.dtype(arguments.pop("dtype", None))
        mask = self._mask(arguments)
        if function == "nc_matmul" and mask:
            raise ByHandError("mask")
        values: dict[str, Any] = {
            key: self._op(n) if "op" in key.split("_") or re.fullmatch(r"op\d", key) else
            self.value(n) for key, n in arguments.items()
            if not (isinstance(n, ast.Constant) and n.value is None)
        }  # fmt: skip
        if function == "tensor_tensor":
            x, y = values["data1"], values["data2"]
            if self.is_column(x) != self.is_column(y):
                op, to = values["op"].rpartition(".")[2], values.get("dst", to)
                return self.binary(op, x, y, name, dtype, box_of(mask), to)
        if "dst" in values:
            return self.issue(function, values.pop("dst"), box_of(mask), **values)
        if function == "tensor_reduce":
            unmasked = {**arguments, "mask": None}
            return self._reduce(values.pop("op"), unmasked, "data", name, to, dtype, box_of(mask))
        if to is None:
            to = self._result(function, values, name, dtype)
        return self.issue(function, to, box_of(mask), **values)

    def _result(self, function: str, values: dict[str, Any], name: str, dtype: str) -> Value:
        nl = self.names.nl
        if function in beta.ON_DATA:
            return self.result(values[beta.ON_DATA[function]], name, dtype, values.get("data2"))
        if function == "nc_matmul":
            a, b = values["stationary"], values["moving"]
            flag = values.get("is_transpose")
            dtype = a.dtype_text() if flag and flag.text == "True" else f"{nl}.float32"
            return self.fresh((_free(a), _free(b)), dtype, "psum", name)
        data: Any = values.get("data", values.get("src"))
        if function == "nc_transpose":
            vector = "engine" in values and "vector" in values["engine"].text
            memory = "sbuf" if vector else "psum"
            return self.fresh((_free(data), data.size(0)), data.dtype_text(), memory, name)
        columns = {"bn_stats": "6", "bn_aggr": "2", "max8": "8"}.get(function)
        if columns is None:
            raise ByHandError("result")
        return self.fresh((data.size(0), columns), dtype or data.dtype_text(), "sbuf", name)

    def _special(self, function: str, node: ast.Call, name: str, to: Value | None) -> Value:
        nl = self.names.nl
        if function == "memset":
            arguments = self._given(node, "shape", "value", "dtype")
            if to is not None:
                return self.issue("memset", to, {}, value=self.value(arguments["value"]))
            arguments["fill_value"] = ast.Name(self.value(arguments.pop("value")).text)
            keywords = [ast.keyword(key, value) for key, value in arguments.items()]
            call = ast.Call(ast.Name(f"{nl}.full"), [], keywords)
            return self._allocate("full", call, name)
        names = ("expr", "dtype") if function == "iota" else (
            "pred", "on_true_tile", "on_false_value")  # fmt: skip
        arguments = self._given(node, *names)
        expr = self.value(arguments[names[0]])
        part = expr.parts[0] if expr.kind == "mask" and len(expr.parts) == 1 else expr
        if part.kind != "index":
            raise ByHandError("index-pattern")
        axes = range(min(part.terms), 0)
        pairs = [part.terms.get(axis, ("0", "1")) for axis in axes]
        pattern = f"[{', '.join(f'[{s}, {n}]' for s, n in pairs[1:])}]"
        dtype = self.dtype(arguments.get("dtype"))
        options: dict[str, Any] = {"pattern": pattern, "offset": part.offset,
                                   "channel_multiplier": pairs[0][0]}  # fmt: skip
        if function == "iota":
            to = to or self.fresh(tuple(n for _, n in pairs), dtype, "sbuf", name)
        else:
            data = self.value(arguments["on_true_tile"])
            to = to or self.result(data, name, dtype)
            options |= {"on_true_tile": data, "cmp_op": f"{nl}.greater_equal",
                        "on_false_value": self.value(arguments["on_false_value"])}  # fmt: skip
        return self.issue(function, to, {}, **options)

    def _reduce(
        self, op: str, arguments: dict[str, Any], key: str, name: str, to: Value | None = None,
        dtype: str = "", box: Box | None = None,
    ) -> Value:  # fmt: skip
        x = self._tensor(self.value(arguments[key]))
        box = box_of(self._mask(arguments)) if arguments.get("mask") is not None else box or {}
        axis = ast.literal_eval(arguments["axis"]) if _literal(arguments["axis"]) else None
        if axis is None or (x.shape is None and axis not in (1, (1,), [1])):
            raise ByHandError("result")
        axes = [axis] if isinstance(axis, int) else list(axis)
        rank = len(x.shape) if x.shape else 2
        axes = sorted(a % rank for a in axes)
        kept = [d for d in range(rank) if d not in axes]
        moved = kept + axes != list(range(rank))
        flags = {k: self.value(arguments[k]) for k in ("negate", "keepdims") if k in arguments}
        ones = len(axes) if "keepdims" in flags else int(len(kept) == 1)
        shape = (*[x.size(d) for d in kept], *["1"] * ones)
        dtype = dtype or self.dtype(arguments.get("dtype")) or x.dtype_text()
        to = to or self.fresh(shape, dtype, "sbuf", name)
        if moved and x.base is None:
            if box:
                raise ByHandError("index-pattern")
            data = Value(f"{view(x)}.permute({(*kept, *axes)})")
        else:
            data = Value(view(x, box, tuple(a - rank for a in axes) if moved else ()))
        cut = {i - len(shape): box[d - rank] for i, d in enumerate(kept) if d - rank in box}
        end = tuple(range(len(kept), rank))
        shown = str(end[0]) if len(end) == 1 else str(end)
        to_text = view(to, cut)
        return self.issue("tensor_reduce", to, {}, written=to_text, op=op, data=data, axis=shown,
                          **flags)  # fmt: skip

    def into(self, target: Value, node: ast.expr, adding: bool = False) -> None:
        """target[...] = node, or with `adding` target[...] += node."""
        call = self.names.of(node.func) if isinstance(node, ast.Call) else ""
        root = re.split(r"\W", target.base.text if target.base else target.text)[0]
        in_psum = target.memory == "psum" and (root in self.sums or not adding)
        if isinstance(node, ast.Call) and call == f"{NISA}.nc_matmul" and in_psum:
            self._isa("nc_matmul", node, "", target)
            if not adding:  # whatever was there is overwritten
                self.lines[-1] = f"{self.lines[-1][:-1]}, accumulate=False)"
            return
        if isinstance(node, ast.Call) and call == f"{NL}.loop_reduce":
            arguments = self._given(node, "data", "op")
            op = self._op(arguments["op"]).rpartition(".")[2]
            self.binary(op, target, self.value(arguments["data"]), to=target)
            return
        if adding:
            self.binary("add", target, self.value(node), to=target)
        elif (
            isinstance(node, ast.Call)
            and call.startswith(f"{NISA}.")
            and not (_from_tensor_engine(call, node) and target.memory != "psum")
        ):
            if self._isa(call.rpartition(".")[2], node, "", target) is None:
                raise ByHandError("result")
        elif isinstance(node, ast.Call) and call == f"{NL}.load":
            arguments = self._given(node, "src")
            src = self._tensor(self.value(arguments["src"]))
            copied = "tensor_copy" if src.memory == "sbuf" else "dma_copy"
            self.issue(copied, target, box_of(self._mask(arguments)), src=src)
        else:
            before = len(self.lines)
            value = self.value(node)
            if value.kind == "python":
                self.issue("memset", target, {}, value=value)
            elif value.kind != "tile":
                raise ByHandError("index-pattern")
            elif not self._redirect(before, value, target):
                self.issue("tensor_copy", target, {}, src=value)


def _from_tensor_engine(call: str, node: ast.Call) -> bool:
    """Whether its result is in PSUM."""
    engine = "".join(ast.unparse(k.value) for k in node.keywords if k.arg == "engine")
    return call in (f"{NISA}.nc_matmul", f"{NISA}.nc_transpose") and "vector" not in engine


def _literal(node: ast.AST) -> bool:
    return all(
        isinstance(n, ast.Constant | ast.Tuple | ast.List | ast.Load | ast.UnaryOp | ast.USub)
        for n in ast.walk(node)
    )


def _tuple(text: str) -> tuple[str, ...] | None:
    node = ast.parse(text, mode="eval").body
    return tuple(map(ast.unparse, node.elts)) if isinstance(node, ast.Tuple | ast.List) else None


def _free(x: Value) -> str:
    if x.shape is None or len(x.shape) == 2:
        return x.size(1)
    return product(*x.shape[1:])


def _lists(name: str, blocks: tuple[str, ...], made: str, used: set[str]) -> list[str]:
    """Nested lists of tiles, by loops: NKI 0.6 has no comprehensions."""
    lines, holder = [f"{name} = []"], name
    for depth, size in enumerate(blocks):
        pad = "    " * depth
        variable = next(v for i in range(1 << 10) if (v := f"block_{i}") not in used)
        used.add(variable)
        lines.append(f"{pad}for {variable} in range({size}):")
        inner = made if depth == len(blocks) - 1 else "[]"
        lines.append(f"{pad}    {holder}.append({inner})")
        holder = f"{holder}[{variable}]"
    return lines
