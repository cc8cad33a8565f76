"""Rules of the code base: imports go one way, files and functions stay small, private APIs stay in compat.py, and
`import regard` needs no extra."""

import ast
import builtins
import importlib.util
import os
import re
import subprocess
import symtable
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import jaxtyping
import pytest

import new_process
import regard

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "regard"
FILES = sorted(SRC.rglob("*.py"))
parse = cache(ast.parse)  # each file is read by several rules

# A module may import modules of earlier groups; modules of one group do not import one another.
ORDER = [
    {"errors"},
    {"compat", "value", "files", "machine", "nested", "table"},
    {"progression"},
    {"pattern", "position", "schedule"},
    {"spec"},
    {"reference"},
    {"engine"},
    {"nn"},
    {"generation", "interop", "convolution"},
    {"formulas"},
    {"costs"},
    {"laws"},
    {"testing"},
    {"lens"},
    {"training"},
    {"cli"},
    {"web"},  # the command line imports its command by name
]
MAX_ENGINE_FILES, MAX_ENGINE_LINES = 45, 11_746  # lines to shrink to 8,800 (issue 20)
MAX_FUNCTIONS_WITH_MANY_ARGUMENTS = 20
SIGNATURES = {"attention": 14}  # the one function whose arguments are the subject: DESIGN.md, "The signature"
RANK = {name: rank for rank, group in enumerate(ORDER) for name in group}
FRONT = {"__init__", "__main__"}  # these may import everything


@cache
def nodes(source: str) -> tuple[ast.AST, ...]:
    """Of each file once, as several rules look at them."""
    return tuple(ast.walk(parse(source)))


def name_of(file: Path, root: Path = SRC) -> str:
    """The top-level module a file belongs to: `pattern` for pattern/words.py."""
    return file.relative_to(root).parts[0].removesuffix(".py")


def imports(source: str, package: list[str]) -> Iterator[tuple[str, ast.AST]]:
    """The modules of regard that are imported, by their top-level names, and where. package: where we are."""
    for node in nodes(source):
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            targets = [f"{stem}.{alias.name}" for alias in node.names] if stem == "regard" else [stem]
        else:
            continue
        yield from ((t.split(".")[1], node) for t in targets if t.startswith("regard."))


def late(tree: ast.AST) -> set[ast.AST]:
    """What runs when a function is called, or never: inside functions and under `if TYPE_CHECKING`."""
    functions = [f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)]
    types = [i for i in ast.walk(tree) if isinstance(i, ast.If) and ast.unparse(i.test) == "TYPE_CHECKING"]
    return {inner for f in [*functions, *types] for inner in ast.walk(f)}


def wrong_imports(source: str, file: Path, root: Path = SRC) -> list[str]:
    """What this file imports against the order. spec alone may import its readers inside a function."""
    here = name_of(file, root)
    allowed = late(parse(source)) if here == "spec" else set()
    package = ["regard", *file.relative_to(root).parts[:-1]]
    return [
        f"{file.relative_to(root)}:{node.lineno} imports {there}"
        for there, node in imports(source, package)
        if here not in FRONT and there != here and node not in allowed and RANK.get(there, 99) >= RANK[here]
    ]


def test_imports_follow_the_order_of_packages():
    unknown = {name_of(f) for f in FILES} - FRONT - set(RANK)
    assert not unknown, f"not in the order of imports: {sorted(unknown)}"
    wrong = [w for f in FILES for w in wrong_imports(f.read_text(encoding="utf-8"), f)]
    assert not wrong, "\n".join(["imports go one way:", *wrong])


@pytest.mark.parametrize(
    ("file", "source", "wrong"),
    [
        (
            "pattern/words.py",
            "from .. import value\nfrom ..errors import SpecError\nfrom . import algebra",
            [],
        ),
        ("pattern/words.py", "from ..position import rope", ["pattern/words.py:1 imports position"]),
        ("errors.py", "from . import value", ["errors.py:1 imports value"]),
        ("errors.py", "def f():\n    from .engine import plan", ["errors.py:2 imports engine"]),
        ("spec/base.py", "def f():\n    from ..nn import build", []),
        ("spec/base.py", "from ..nn import build", ["spec/base.py:1 imports nn"]),
        ("spec/base.py", "if TYPE_CHECKING:\n    from ..nn import build", []),
        ("nn/stack.py", "if TYPE_CHECKING:\n    from ..costs import x", ["nn/stack.py:2 imports costs"]),
        ("nn/stack.py", "import regard.costs", ["nn/stack.py:1 imports costs"]),
        ("nn/stack.py", "from regard import lens", ["nn/stack.py:1 imports lens"]),
        ("nn/stack.py", "import torch.nn\nfrom ..engine.attention import attention", []),
        ("interop/torch.py", "from ..generation.beam import beam", ["interop/torch.py:1 imports generation"]),
        ("costs/count.py", "from ..utils import x", ["costs/count.py:1 imports utils"]),
        ("__init__.py", "from .training import train", []),
    ],
)
def test_the_rule_of_imports_finds_violations(file, source, wrong):
    assert wrong_imports(source, SRC / file) == wrong


def test_nothing_is_called_utils():
    assert not [f for f in FILES if re.search(r"util|helper|misc", f.stem)]


def test_no_module_has_the_name_of_a_public_function():
    modules = {name_of(f) for f in FILES} - FRONT
    public = {name for name in vars(regard) if not name.startswith("_")} | set(getattr(regard, "__all__", ()))
    functions = {n for n in public if callable(getattr(regard, n))}
    assert functions, "regard has no public function"
    assert not modules & functions, f"module and function of one name: {sorted(modules & functions)}"


def test_every_public_name_exists_and_has_a_docstring():
    names = [n for n in getattr(regard, "__all__", vars(regard)) if not n.startswith("_")]
    things = {n: getattr(regard, n) for n in names if callable(getattr(regard, n))}
    assert things and not [n for n, thing in things.items() if not thing.__doc__]


def long_files(files: list[Path], most: int = 500) -> list[str]:
    sizes = {f: len(f.read_text(encoding="utf-8").splitlines()) for f in files}
    return [f"{f.relative_to(ROOT)} has {size} lines" for f, size in sizes.items() if size >= most]


def bulky_functions(source: str, name: str, most_lines: int = 70, most_parameters: int = 12) -> list[str]:
    found = []
    for f in nodes(source):
        if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef):
            given = [*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs]
            # A Triton kernel takes every stride, and its state lives in registers: it is not cut at will.
            kernel = any(re.search(r"\.jit\b", ast.unparse(d)) for d in f.decorator_list)
            parameters = [] if kernel else [a for a in given if a.arg not in ("self", "cls")]
            lines = f.end_lineno - f.lineno + 1
            allowed = SIGNATURES.get(f.name, most_parameters)
            if lines > most_lines * (2 if kernel else 1) or len(parameters) > allowed:
                found.append(f"{name}:{f.lineno} {f.name}: {lines} lines, {len(parameters)} parameters")
    return found


def undefined(code: str, file: str = "code.py") -> list[str]:
    """Global names that functions and classes of a module read, and that neither it nor Python defines."""
    module = symtable.symtable(code, file, "exec")
    known = {s.get_name() for s in module.get_symbols() if s.is_assigned() or s.is_imported()} | set(
        dir(builtins)
    )
    known |= {"__file__", "__doc__", "__name__", "__path__", "__class__"}
    found, tables = [], [module]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        found += [
            f"{file}: {s.get_name()} in {table.get_name()}"
            for s in table.get_symbols()
            if s.is_global() and s.is_referenced() and s.get_name() not in known
        ]
    return found


def test_every_name_is_defined():
    code = "import a\nX = 1\nclass C:\n    def f(self): return a, X, C, len, y\n"
    assert undefined(code) == ["code.py: y in f"]
    found = [x for file in FILES for x in undefined(file.read_text(), str(file.relative_to(SRC)))]
    assert found == ["engine/flex.py: flex_attention in _run"]  # which _compiled gives it


def test_files_stay_under_500_lines():
    files = [f for folder in ("src", "bench", "examples") for f in (ROOT / folder).rglob("*.py")]
    assert not long_files(sorted(files)), "\n".join(long_files(sorted(files)))


def test_functions_stay_under_70_lines_and_12_parameters():
    files = [*FILES, *sorted((ROOT / "bench").glob("*.py")), *sorted((ROOT / "examples").glob("*.py"))]
    bulky = [
        b for f in files for b in bulky_functions(f.read_text(encoding="utf-8"), str(f.relative_to(ROOT)))
    ]
    assert not bulky, "\n".join(bulky)


def test_a_bulky_function_is_found():
    many = ", ".join(f"a{k}" for k in range(13))
    assert bulky_functions(f"def f(self, {many}): ...", "x.py") == ["x.py:1 f: 1 lines, 13 parameters"]
    assert bulky_functions("def f():\n" + "    pass\n" * 70, "x.py") == ["x.py:1 f: 71 lines, 0 parameters"]
    assert not bulky_functions(f"@triton.jit\ndef f({many}): ...", "x.py")
    assert not bulky_functions(f"@triton.jit(debug=True)\ndef f({many}): ...", "x.py")
    assert not bulky_functions("def f():\n" + "    pass\n" * 69, "x.py")


def functions_with_many_arguments(source: str, name: str, many: int = 8) -> list[str]:
    """Functions with `many` or more parameters; Triton kernels, which take every stride, are not counted."""
    found = []
    for f in nodes(source):
        if not isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if any(re.search(r"\bjit\b", ast.unparse(d)) for d in f.decorator_list):
            continue
        given = [*f.args.posonlyargs, *f.args.args, *f.args.kwonlyargs]
        count = sum(a.arg not in ("self", "cls", "ctx") for a in given)
        if count >= many:
            found.append(f"{name}:{f.lineno} {f.name} has {count} parameters")
    return found


def test_few_functions_have_eight_or_more_arguments():
    found = [
        f
        for file in FILES
        for f in functions_with_many_arguments(file.read_text("utf-8"), str(file.relative_to(SRC)))
    ]
    assert len(found) <= MAX_FUNCTIONS_WITH_MANY_ARGUMENTS, "\n".join(found)
    arguments = ", ".join("abcdefgh")
    assert functions_with_many_arguments(f"def f(self, {arguments}): ...", "x.py")
    assert not functions_with_many_arguments(f"@triton.jit\ndef f({arguments}): ...", "x.py")
    assert not functions_with_many_arguments("def f(self, a, b, c, d, e, f, g): ...", "x.py")


def test_the_engine_stays_small():
    engine = [f for f in FILES if name_of(f) == "engine"]
    lines = sum(len(f.read_text(encoding="utf-8").splitlines()) for f in engine)
    assert len(engine) <= MAX_ENGINE_FILES and lines <= MAX_ENGINE_LINES, (
        f"{len(engine)} files, {lines} lines"
    )


# Names of 0.1 that had to be explained before they could be understood.
OLD_NAMES = set(
    """abreast again brief by_hand causes door hops joint kept laid lay lie once quick recalled rivals short standing
    stretches together told twice walk ways whole""".split()  # noqa: SIM905
)


def test_file_names_need_no_explanation():
    assert not [str(f.relative_to(SRC)) for f in FILES if f.stem in OLD_NAMES]


# Private attributes of tensors, storages and operators.
PRIVATE_ATTRIBUTES = {"_version", "_base", "_cdata", "_schema", "_is_view", "_saved_result"}


def private_apis(source: str) -> list[str]:
    """The private PyTorch and Triton APIs that this source uses: `torch._C`, `torch.ops.aten._x`, `x._version`."""
    found = []
    for node in nodes(source):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [dotted(node)]
            if node.attr in PRIVATE_ATTRIBUTES:
                found.append(f"line {node.lineno}: .{node.attr}")
        elif isinstance(node, ast.Call) and ast.unparse(node.func) == "getattr":
            names = [
                ".".join(x.value if isinstance(x, ast.Constant) else ast.unparse(x) for x in node.args[:2])
            ]
        for name in names:
            first, *rest = name.split(".")
            private = first in ("torch", "triton", "aten") and any(re.match(r"_[^_]", part) for part in rest)
            if private or name.startswith("triton.experimental"):
                found.append(f"line {node.lineno}: {name}")
    return list(dict.fromkeys(found))


def test_private_apis_are_reached_in_compat_only():
    found = {str(f.relative_to(SRC)): private_apis(f.read_text("utf-8")) for f in FILES if f.stem != "compat"}
    assert not any(found.values()), "\n".join(
        f"{name}, {what}" for name, each in found.items() for what in each
    )


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("import torch\ntorch._C._len_torch_dispatch_stack()", 2),
        ("from torch.utils._python_dispatch import TorchDispatchMode", 1),
        ("torch.ops.aten._softmax(x, -1, False)", 1),
        ("x._version", 1),
        ('getattr(torch, "_disable_dynamo", None)', 1),
        ("from triton.experimental import gluon", 1),
        ("import torch\ntorch.nn.functional.softmax(x, -1)\nself._origins.x", 0),
    ],
)
def test_a_private_api_is_found(source, count):
    assert len(private_apis(source)) == count


def dotted(node: ast.Attribute) -> str:
    """`a.b.c` of an attribute chain, "" where it begins with anything but a name."""
    names, base = [node.attr], node.value
    while isinstance(base, ast.Attribute):
        names.append(base.attr)
        base = base.value
    return ".".join([base.id, *reversed(names)]) if isinstance(base, ast.Name) else ""


def unsafe(source: str) -> list[str]:
    """Calls that read a file and can run code."""
    found = []
    for node in nodes(source):
        text = ast.unparse(node) if isinstance(node, ast.Import | ast.ImportFrom) else ""
        text = dotted(node) if isinstance(node, ast.Attribute) else text
        if not text:
            continue
        if re.match(
            r"(import|from) (c?pickle|dill|cloudpickle|joblib|shelve|marshal)\b", text, re.IGNORECASE
        ):
            found.append(text)
        if text in ("torch.load", "torch.save", "yaml.load") or re.match(
            r"from torch import .*\bload\b", text
        ):
            found.append(text)
    return found


def test_nothing_is_unpickled():
    found = {str(f.relative_to(SRC)): unsafe(f.read_text(encoding="utf-8")) for f in FILES}
    assert not {name: what for name, what in found.items() if what}
    assert unsafe("import pickle\nx = torch.load(f)") == ["import pickle", "torch.load"]


BLOCKED = """
import builtins, importlib.abc, sys
import torch, numpy, einops, safetensors.torch, jaxtyping  # the core: it may import what it likes

EXTRAS = {extras!r}
true_import = builtins.__import__

class Blocked(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in EXTRAS:
            raise ModuleNotFoundError(name + " is blocked", name=name)

def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    # what torch has imported already would be found without asking a finder
    ours = (globals or {{}}).get("__name__", "").split(".")[0] == "regard"
    if ours and level == 0 and name.split(".")[0] in EXTRAS:
        raise ModuleNotFoundError(name + " is blocked", name=name)
    return true_import(name, globals, locals, fromlist, level)

sys.meta_path.insert(0, Blocked())
builtins.__import__ = guarded
EXTRAS.add("einops")  # regard imports einops, so this must fail
try:
    import regard; regard.attention
except ModuleNotFoundError as error:
    print(error)
EXTRAS.remove("einops")
for name in [name for name in sys.modules if name.split(".")[0] == "regard"]:
    del sys.modules[name]
import regard
q = torch.randn(1, 2, 7, 5)
print(tuple(regard.attention(q, q, q, regard.causal()).shape), regard.__version__)
"""
EXTRAS = (
    "triton sympy hypothesis tokenizers sacrebleu matplotlib rich typer yaml fastapi uvicorn huggingface_hub "
    "tensorboard transformers timm ctranslate2 sklearn beartype pandas scipy fcntl termios resource pwd grp posix "
    "pty tty syslog"
)


def run(program: str) -> subprocess.CompletedProcess:
    env = {**os.environ, "PYTHONPATH": str(SRC.parent), "CUDA_VISIBLE_DEVICES": ""}
    return new_process.run(program, env=env)


PACKAGE_OF = {
    "yaml": "pyyaml",
    "PIL": "pillow",
    "sklearn": "scikit-learn",
    "triton": "torch",
    "flash_attn": "flash-attn-4",
}
ONLY_IF_THERE = {"pytest", "pandas", "scikit-learn", "x_transformers"}  # each with an error that names it


def third_party(source: str) -> set[str]:
    """The packages that a file imports from outside of Python and of regard."""
    names = set()
    for node in nodes(source):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module).split(".")[0])
    return {PACKAGE_OF.get(n, n) for n in names - set(sys.stdlib_module_names) - {"regard"}}


def test_every_imported_package_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {
        name: r for name, r in project["optional-dependencies"].items() if name not in ("test", "check")
    }
    requirements = [*project["dependencies"], *(r for group in extras.values() for r in group)]
    declared = {re.split(r"[\[<>=; ]", r)[0] for r in requirements}
    imported = set().union(*(third_party(f.read_text(encoding="utf-8")) for f in FILES))
    assert imported - ONLY_IF_THERE <= declared
    assert third_party("import yaml.x\nfrom os import path\nfrom . import y\nimport foo") == {"pyyaml", "foo"}


def packages_of(extra: str) -> set[str]:
    """The packages that `pip install 'regard[extra]'` brings by name, with those of the core."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    packages = set()
    for requirement in project["dependencies"] + project["optional-dependencies"][extra]:
        package, *extras = re.split(r"[\[\],<>=; ]+", requirement)
        packages |= set().union(*map(packages_of, extras[:-1])) if package == "regard" else {package}
    return packages


def advised_extras(source: str) -> Iterator[tuple[str, set[str]]]:
    """Each extra that is named where an import failed, with the packages that this import asks for."""
    for node in nodes(source):
        if isinstance(node, ast.Try):
            needed = third_party("\n".join(map(ast.unparse, node.body)))
            for extra in re.findall(r"regard\[(\w+)\]", "\n".join(map(ast.unparse, node.handlers))):
                yield extra, needed


def test_an_extra_that_an_error_advises_brings_what_was_missing():
    advised = [one for f in FILES for one in advised_extras(f.read_text(encoding="utf-8"))]
    assert {"cost", "export", "figures", "huggingface", "train", "web"} <= {extra for extra, _ in advised}
    assert [(extra, lacking) for extra, needed in advised if (lacking := needed - packages_of(extra))] == []


@pytest.fixture(scope="module")
def blocked():
    """What a process prints in which the extras are blocked, and at first einops too."""
    done = run(BLOCKED.format(extras=set(EXTRAS.split())))
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")


@pytest.mark.slow
def test_regard_needs_no_extra_no_triton_and_nothing_that_only_posix_has(blocked):
    assert blocked[1] == f"(1, 2, 7, 5) {regard.__version__}"


@pytest.mark.slow
def test_the_block_on_imports_blocks(blocked):
    assert blocked[0] == "einops is blocked"


PAGE = """
import uvicorn, regard.web.app
from regard.cli.models import included_translator
print(included_translator().tokenizer)
"""


@pytest.mark.slow
def test_the_page_needs_no_extra_but_its_own():
    others = packages_of("all") - packages_of("web") - {"filelock"}  # which torch needs
    assert others >= {"matplotlib", "sacrebleu"}
    done = run(BLOCKED.format(extras=others) + PAGE)
    assert done.returncode == 0 and "Tokens" in done.stdout, done.stderr


@pytest.mark.parametrize("case", [1, 2, 3])
def test_shapes_are_checked_in_the_first_cases_of_a_test(case, pytestconfig):
    limit = pytestconfig.getoption("--checked-cases")
    assert jaxtyping.config.jaxtyping_disable == (limit is not None and case > limit)


def test_the_package_is_marked_as_typed():
    assert (SRC / "py.typed").exists()
    assert importlib.util.find_spec("regard").submodule_search_locations[0] == str(SRC)


def test_there_is_one_version():
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert settings["tool"]["hatch"]["version"]["path"] == "src/regard/__init__.py"
    written = re.findall(
        r'^__version__ = "(\d+\.\d+\.\d+)"$', (SRC / "__init__.py").read_text(), re.MULTILINE
    )
    assert written == [regard.__version__]
