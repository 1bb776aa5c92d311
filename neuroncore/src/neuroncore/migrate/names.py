"""What the names of a file of the Beta dialect stand for."""

from __future__ import annotations

import ast

from neuroncore.checks.lint_source import FunctionNode

NKI = "neuronxcc.nki"
NL, NISA = f"{NKI}.language", f"{NKI}.isa"


class Names:
    """What the names of a file stand for, and what its new text calls the packages."""

    def __init__(self, tree: ast.Module) -> None:
        self.dotted: dict[str, str] = {}
        self.buffers: dict[str, str] = {}
        self.used = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                for a in node.names:
                    top = a.name.partition(".")[0]
                    self.dotted[a.asname or top] = a.name if a.asname else top
            elif isinstance(node, ast.ImportFrom):
                self.dotted |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        spelled = {dotted: name for name, dotted in self.dotted.items()}
        self.nl, self.nisa = spelled.get(NL, "nl"), spelled.get(NISA, "nisa")
        self.nki = spelled.get(NKI, "nki")
        self.kernels = {
            n.name for n in ast.walk(tree) if isinstance(n, FunctionNode) and n.decorator_list
        }
        uses = {f"{NL}.program_id", f"{NL}.num_programs"}
        self.grids = {
            f.name for f in ast.walk(tree) if isinstance(f, FunctionNode) and any(
                self.of(n) in uses for n in ast.walk(f) if isinstance(n, ast.Attribute | ast.Name))
        }  # fmt: skip
        for node in ast.walk(tree):  # what returns an allocator's place stands for its memory
            made = node.value if isinstance(node, ast.Assign | ast.Return) else None
            memories = {m for n in ast.walk(made) if (m := self.memory(n))} if made else set()
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and memories:
                self.buffers[node.targets[0].id] = memories.pop()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef):
                ends = [n.value for n in ast.walk(node) if isinstance(n, ast.Return) and n.value]
                memories = {m for e in ends for n in ast.walk(e) if (m := self.memory(n))}
                if len(memories) == 1:
                    self.buffers[node.name] = memories.pop()

    def of(self, node: ast.AST) -> str:
        """The dotted name of an expression, resolved through imports; "" where it has none."""
        if isinstance(node, ast.Name):
            return self.dotted.get(node.id, "")
        if isinstance(node, ast.Attribute):
            before = self.of(node.value)
            return f"{before}.{node.attr}" if before else ""
        return ""

    def memory(self, node: ast.AST) -> str:
        """The memory that an allocator's place, or what returns one, stands for."""
        if isinstance(node, ast.Call):
            return self.memory(node.func)
        if isinstance(node, ast.Attribute) and node.attr in self.buffers:
            return self.buffers[node.attr]
        name = self.of(node)
        if name.startswith(f"{NKI}.compiler."):
            return name.split(".")[3] if name.split(".")[3] in ("sbuf", "psum") else ""
        return self.buffers.get(node.id, "") if isinstance(node, ast.Name) else ""
