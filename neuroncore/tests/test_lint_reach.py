"""What `lint` reads beside the kernel: classes, helpers and the files that they are in."""

import importlib.util
from pathlib import Path

from lint_sources import places, write

from neuroncore.checks.lint import lint

FILES = {
    "pack/__init__.py": "",
    "pack/kernels/__init__.py": "from .helpers import third\n",
    "pack/kernels/first.py": """\
import json
import pack.kernels.helpers as h
from pack.kernels import third
from pack.kernels.classes import Part
from other.module import helper
from . import helpers
import nki

@nki.jit
def kernel(x):
    json.dumps(x)
    helper(x)
    helpers.second(x)
    return Part(h.first(x)), third(x)
""",
    "pack/kernels/classes.py": """\
from .helpers import Base

class Part(Base):
    pass
""",
    "pack/kernels/helpers.py": """\
import nki.language as nl

class Base(nl.NKIObject):
    def f(self):
        return self is None

def first(x):
    return x is None

def second(x):
    return [i for i in x]

def third(x):
    return unused if x else lambda: x

def not_reached(x):
    yield x
""",
    "other/__init__.py": "",
    "other/module.py": "def helper(x):\n    return x is None\n",
}


def test_helpers_and_classes_of_the_kernels_package_are_read(tmp_path):
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text, encoding="utf-8")
    found = lint(tmp_path / "pack/kernels/first.py", "0.6")
    assert [(Path(e.path).name, e.rule, e.line) for e in found] == [
        ("classes.py", "class-base", 3),
        ("helpers.py", "identity", 5),
        ("helpers.py", "identity", 8),
        ("helpers.py", "comprehension", 11),
        ("helpers.py", "lambda", 14),
    ]


def test_a_script_reaches_the_files_beside_it(tmp_path):
    (tmp_path / "beside.py").write_text("def helper(x):\n    return x is None\n", encoding="utf-8")
    kernel = "from beside import helper\n@jit\ndef kernel(x):\n    return helper(x)\n"
    (found,) = lint(write(tmp_path, kernel), "0.6")
    assert (Path(found.path).name, found.rule, found.line) == ("beside.py", "identity", 2)


def test_a_function_reaches_modules_that_python_has_imported(tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "lint_helper.py").write_text("def helper(x):\n    return x is None\n")
    kernel = "from lint_helper import helper\ndef kernel(x):\n    return helper(x), json.dumps(x)\n"
    path = write(tmp_path, "import json\n" + kernel)
    monkeypatch.syspath_prepend(elsewhere)
    spec = importlib.util.spec_from_file_location("lint_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (found,) = lint(module.kernel, "0.6")
    assert (Path(found.path).name, found.line) == ("lint_helper.py", 2)


def test_a_kernel_of_another_file_may_not_be_called(tmp_path):
    (tmp_path / "beside.py").write_text("@jit\ndef other(x):\n    return x\n", encoding="utf-8")
    kernel = "import beside\n@jit\ndef kernel(x):\n    return beside.other(x)\n"
    assert places(lint(write(tmp_path, kernel))) == [("sub-kernel", 4, 12)]
