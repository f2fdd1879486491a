from __future__ import annotations

import io
import linecache
import os
import pickle
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np  # noqa: F401  (imported already, as in a process that deploys)
import pytest

from gpufn import gpu_function, method
from gpufn.deploy import bundle as _bundle
from gpufn_core.errors import InvalidBundle
from gpufn_core.spec.function_spec import Packaging
from tests.sdk.conftest import Project

_APP = """
from gpufn import gpu_function
import helper
from pkg import sub

@gpu_function
def f(x: int) -> int:
    import lazy
    return helper.double(x) + lazy.ONE
"""
_FILES = {
    "app.py": _APP,
    "helper.py": "def double(x): return 2 * x",
    "lazy.py": "ONE = 1",
    "unused.py": "",
    "notes.txt": "hello",
    "data/labels.txt": "cat",
    "pkg/__init__.py": "",
    "pkg/sub.py": "from . import other",
    "pkg/other.py": "import numpy",
    "pkg/unused.py": "",
}
_NEEDED = ("app.py", "helper.py", "lazy.py", "pkg/__init__.py", "pkg/other.py", "pkg/sub.py")


def test_a_bundle_holds_the_file_and_the_project_modules_it_needs(project: Project) -> None:
    loaded = _bundle.load(project(_FILES) / "app.py")
    bundle = _bundle.pack_source(loaded)
    assert [function.name for function in loaded.functions] == ["f"]
    assert (bundle.files, bundle.modules) == (_NEEDED, ("numpy",))


@pytest.mark.parametrize("glob", ["/etc/passwd", "", "..", "../*", "data/../../x", "data/..", "."])
def test_a_pattern_outside_the_project_is_refused(project: Project, glob: str) -> None:
    root = project(_FILES)
    with pytest.raises(InvalidBundle) as caught:
        _bundle.pack_source(_bundle.load(root / "app.py"), [glob])
    assert f"include={glob!r}" in caught.value.message
    assert str(root) in caught.value.message


def test_other_files_are_added_with_include(project: Project) -> None:
    loaded = _bundle.load(project(_FILES) / "app.py")
    assert set(_bundle.pack_source(loaded, ["data/*", "*.txt"]).files) - set(_NEEDED) == {
        "data/labels.txt",
        "notes.txt",
    }
    with pytest.raises(InvalidBundle, match="include='nothing/\\*'"):
        _bundle.pack_source(loaded, ["nothing/*"])


def test_all_below_a_folder_is_included_as_every_python_reads_two_stars(project: Project) -> None:
    loaded = _bundle.load(project({"app.py": "", "data/a.txt": "", "data/deep/b.txt": ""}) / "app.py")
    assert _bundle.pack_source(loaded, ["data/**"]).files == ("app.py", "data/a.txt", "data/deep/b.txt")
    with pytest.raises(InvalidBundle, match=r"include='data' .*'data/\*\*'"):
        _bundle.pack_source(loaded, ["data"])


def test_modules_of_the_project_that_are_links_are_included(project: Project, tmp_path: Path) -> None:
    root = project({"app.py": "import shared\ndef f():\n    import lib.part"})
    (tmp_path / "elsewhere" / "lib").mkdir(parents=True)
    (tmp_path / "elsewhere" / "lib" / "part.py").write_text("")
    (tmp_path / "elsewhere" / "common.py").write_text("")
    (root / "shared.py").symlink_to(tmp_path / "elsewhere" / "common.py")
    (root / "lib").symlink_to(tmp_path / "elsewhere" / "lib")
    bundle = _bundle.pack_source(_bundle.load(root / "app.py"))
    assert (bundle.files, bundle.modules) == (("app.py", "lib/part.py", "shared.py"), ())


def test_a_link_to_an_installed_package_is_not_a_module_of_the_project(project: Project) -> None:
    root = project({"app.py": "import numpy"})
    (root / "numpy").symlink_to(Path(sys.modules["numpy"].__file__ or "").parent)
    bundle = _bundle.pack_source(_bundle.load(root / "app.py"))
    assert (bundle.files, bundle.modules) == (("app.py",), ("numpy",))


def test_the_same_files_make_the_same_bytes(project: Project) -> None:
    root = project(_FILES)
    loaded = _bundle.load(root / "app.py")
    first = _bundle.pack_source(loaded)
    os.utime(root / "helper.py", (1, 1))
    assert _bundle.pack_source(loaded).digest == first.digest
    (root / "lazy.py").write_text("ONE = 2")
    assert _bundle.pack_source(loaded).digest != first.digest


def test_a_bundle_runs_where_the_project_is_not(project: Project, tmp_path: Path) -> None:
    loaded = _bundle.load(project(_FILES) / "app.py")
    elsewhere = tmp_path / "elsewhere"
    zipfile.ZipFile(io.BytesIO(_bundle.pack_source(loaded).data)).extractall(elsewhere)
    process = subprocess.run(
        [sys.executable, "-c", "from app import f; print(f(4))"],
        cwd=elsewhere,
        capture_output=True,
        text=True,
        check=True,
    )
    assert process.stdout == "9\n"


def test_a_file_in_a_package_keeps_its_full_name(project: Project) -> None:
    files = {
        "shop/__init__.py": "",
        "shop/ml/__init__.py": "",
        "shop/ml/serve.py": "from gpufn import gpu_function\nfrom ..common import N\n@gpu_function\ndef g(): return N",
        "shop/common.py": "N = 7",
    }
    loaded = _bundle.load(project(files) / "shop/ml/serve.py")
    ((function, packaging, bundle),) = _bundle.bundles_of(loaded.functions)
    assert (packaging, function.spec().entry.module) == (Packaging.SOURCE, "shop.ml.serve")
    assert bundle.files == ("shop/__init__.py", "shop/common.py", "shop/ml/__init__.py", "shop/ml/serve.py")


def test_functions_that_are_imported_belong_to_their_own_file(project: Project) -> None:
    files = {
        "one.py": "from gpufn import gpu_function\n@gpu_function\ndef one(): ...",
        "two.py": "from gpufn import gpu_function\nfrom one import one\n@gpu_function\ndef two(): ...\nalias = two",
    }
    assert [function.name for function in _bundle.load(project(files) / "two.py").functions] == ["two"]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"app.py": "x = 1\ndef f(:\n  pass"}, "cannot import app.py: line 2, `def f(:`: SyntaxError: invalid syntax"),
        (
            {"app.py": "x = 1\nimport torhc"},
            "cannot import app.py: line 2, `import torhc`: ModuleNotFoundError: No module named 'torhc'",
        ),
        (
            {"app.py": "import part", "part.py": "\n\n1 / 0"},
            "cannot import app.py: part.py, line 3, `1 / 0`: ZeroDivisionError: division by zero",
        ),
        (
            {"app.py": "from gpufn import gpu_function\n@gpu_function(gup='L4')\ndef f(): ..."},
            "cannot import app.py: line 2, `@gpu_function(gup='L4')`: there is no option 'gup'; did you mean 'gpu'?",
        ),
        ({"app.py": "import sys\nsys.exit(3)"}, "cannot import app.py: line 2, `sys.exit(3)`: SystemExit: 3"),
    ],
)
def test_a_file_that_cannot_be_imported_shows_the_line(project: Project, files: dict[str, str], message: str) -> None:
    project(files)
    with pytest.raises(InvalidBundle) as caught:
        _bundle.load(Path("app.py"))
    assert str(caught.value) == message


@pytest.mark.parametrize("wraps", ["@functools.wraps(f)", ""])
def test_a_function_hidden_by_another_decorator_is_an_error(project: Project, wraps: str) -> None:
    timed = f"import functools\ndef timed(f):\n    {wraps}\n    def inner(*a): return f(*a)\n    return inner\n"
    app = "from gpufn import gpu_function\nfrom timed import timed\n@gpu_function\ndef seen(): ...\n"
    root = project({"timed.py": timed, "app.py": f"{app}@timed\n@gpu_function\ndef hidden(): ..."})
    with pytest.raises(InvalidBundle) as caught:
        _bundle.load(root / "app.py")
    assert caught.value.message.startswith("hidden has a decorator")


def test_a_decorator_below_and_a_function_under_another_name_hide_nothing(project: Project) -> None:
    timed = (
        "import functools\ndef timed(f):\n    @functools.wraps(f)\n    def inner(*a): return f(*a)\n    return inner\n"
    )
    app = "from gpufn import gpu_function\nfrom timed import timed\n@gpu_function\n@timed\ndef seen(): ...\n"
    other = "def plain(): ...\nremote = gpu_function(plain)\nkept = {'other': gpu_function(plain)}\n"
    loaded = _bundle.load(project({"timed.py": timed, "app.py": app + other}) / "app.py")
    assert [function.name for function in loaded.functions] == ["seen", "plain"]


def test_an_option_that_there_is_not_shows_the_users_line_in_a_folder_that_has_this_package_in_it(
    project: Project,
) -> None:
    """A clone of the repository is such a folder."""
    file = project({"app.py": "from gpufn import gpu_function\n@gpu_function(gup='L4')\ndef f(): ..."}) / "app.py"
    with pytest.raises(InvalidBundle) as caught:
        _bundle.load(file)
    assert caught.value.__cause__ is not None
    message = _bundle.describe_failure(caught.value.__cause__, file, Path("/"))
    assert message.startswith("line 2, `@gpu_function(gup='L4')`: ")
    assert "option 'gup'" in message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gone.py", "there is no file gone.py"),
        (".", ". is a folder: pass the file in it that declares the functions"),
        ("notes.txt", "notes.txt is not a Python file"),
        ("json.py", "json.py has the same name as the module json"),
        ("my-app.py", "my-app cannot be imported: use letters, digits and underscores in the name"),
    ],
)
def test_a_file_that_is_no_module_is_refused(project: Project, name: str, message: str) -> None:
    project({"notes.txt": "", "json.py": "", "my-app.py": ""})
    with pytest.raises(InvalidBundle) as caught:
        _bundle.load(Path(name))
    assert message in str(caught.value)


def test_a_file_that_is_called_like_one_of_pythons_modules_is_not_imported_for_it(tmp_path: Path) -> None:
    """Neither the user's file nor gpufn imports it, and it is not sent, because a worker would import it."""
    for name in ("colorsys", "wave", "sndhdr", "rich", "httpx"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the wrong one')")
    (tmp_path / "tabular.py").write_text("import colorsys")
    (tmp_path / "app.py").write_text(
        "from gpufn import gpu_function\nimport tabular\n@gpu_function\ndef f(): import wave"
    )
    script = """if True:
        from pathlib import Path
        from gpufn.deploy import bundle as _bundle
        project = _bundle.load(Path("app.py"))
        import colorsys, rich, httpx
        print(*_bundle.pack_source(project).files)
    """
    process = _python(script, tmp_path)
    assert (process.stdout, process.stderr) == ("app.py tabular.py\n", "")


def test_a_file_with_the_name_of_a_module_of_python_is_reported(tmp_path: Path) -> None:
    (tmp_path / "colorsys.py").write_text("def mine(): ...")
    (tmp_path / "app.py").write_text("from colorsys import mine")
    process = _python(
        "from pathlib import Path\nfrom gpufn.deploy import bundle as _bundle\n_bundle.load(Path('app.py'))", tmp_path
    )
    assert ". colorsys.py " in process.stderr
    assert process.stderr.endswith("rename it\n")


def _python(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-P", "-c", script], cwd=folder, capture_output=True, text=True, check=False, timeout=60
    )


def _closure(k: int) -> Any:
    @gpu_function
    def shifted(x: int) -> int:
        return x + k

    return shifted


def test_a_closure_travels_by_value() -> None:
    ((_, packaging, bundle),) = _bundle.bundles_of([_closure(5)])
    with zipfile.ZipFile(io.BytesIO(bundle.data)) as archive:
        function = pickle.loads(archive.read(_bundle.PICKLE_NAME))
    assert (packaging, function(1)) == (Packaging.PICKLE, 6)


def test_a_closure_brings_the_project_modules_it_names(project: Project) -> None:
    files = {
        "app.py": "from gpufn import gpu_function\nimport helper\ndef make():\n    @gpu_function\n"
        "    def f(x): return helper.double(x)\n    return f\nmade = make()",
        "helper.py": "import part\ndef double(x): return 2 * x",
        "part.py": "",
        "unused.py": "",
    }
    (function,) = _bundle.load(project(files) / "app.py").functions
    assert {"function.pkl", "helper.py", "part.py"} <= set(_bundle.pack_pickle(function).files)
    assert "unused.py" not in _bundle.pack_pickle(function).files


def test_a_closure_of_a_file_elsewhere_brings_the_modules_beside_that(
    project: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "elsewhere/app.py": "from gpufn import gpu_function\ndef make():\n    @gpu_function\n    def f(x):\n"
        "        import lazy\n    return f\nmade = make()",
        "elsewhere/lazy.py": "",
        "here/readme": "",
    }
    monkeypatch.chdir(project(files) / "here")
    ((_, packaging, bundle),) = _bundle.bundles_of(_bundle.load(Path("../elsewhere/app.py")).functions)
    assert (packaging, bundle.files) == (Packaging.PICKLE, ("app.py", "function.pkl", "lazy.py"))


_SCRIPT = """
from gpufn import gpu_function
from gpufn.deploy import bundle as _bundle

def aid():
    from pkg import sub

@gpu_function
def f(x):
    import lazy
    def inner():
        import deep.down as d
    aid()

print(*_bundle.pack_pickle(f).files)
"""


def test_imports_of_a_script_at_run_time_are_included(tmp_path: Path) -> None:
    """Imports in the function, its callees and nested functions; not modules whose names only look alike."""
    for name in ("lazy.py", "deep/down.py", "pkg/__init__.py", "pkg/sub.py", "aid.py", "x.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    process = _python(_SCRIPT, tmp_path)
    assert (process.stdout, process.stderr) == ("deep/down.py function.pkl lazy.py pkg/__init__.py pkg/sub.py\n", "")


_SCRIPT_WITH_TEXTS_FOR_HINTS = """
from __future__ import annotations
import dataclasses, pathlib, typing
from gpufn import gpu_function
from gpufn.deploy import bundle as _bundle

class Corner(typing.NamedTuple):
    at: Size

@dataclasses.dataclass
class Size:
    width: int
    inner: typing.Optional[Size] = None

class Options(typing.TypedDict):
    size: Size

@dataclasses.dataclass
class Box(typing.Generic[typing.TypeVar("T")]):
    kinds: typing.ClassVar[list[Size]] = []
    corner: Corner
    options: Options
    missing: Nowhere = 0

@gpu_function
def f(box: Box, size: Size, other: Nowhere = 0) -> Size: ...

pathlib.Path("bundle.zip").write_bytes(_bundle.pack_pickle(f).data)
"""


def test_hints_that_are_texts_mean_the_same_where_the_names_of_the_script_are_not(tmp_path: Path) -> None:
    """A dataclass arrived as a dict in every script with `from __future__ import annotations`."""
    assert _python(_SCRIPT_WITH_TEXTS_FOR_HINTS, tmp_path).stderr == ""
    with zipfile.ZipFile(tmp_path / "bundle.zip") as archive:
        raw = pickle.loads(archive.read(_bundle.PICKLE_NAME)).raw
    box, size = raw.__annotations__["box"], raw.__annotations__["size"]
    assert (raw.__annotations__["return"], raw.__annotations__["other"]) == (size, "Nowhere")
    assert size.__annotations__ == {"width": int, "inner": size | None}
    assert box.__annotations__["corner"].__annotations__ == {"at": size}
    assert box.__annotations__["options"].__annotations__ == {"size": size}
    assert box.__annotations__["missing"] == "Nowhere"


_SCRIPT_OF_USED_CLASSES = """
import dataclasses, enum, pathlib, typing
import msgspec
from gpufn import gpu_function
from gpufn.deploy import bundle as _bundle

@dataclasses.dataclass
class Size:
    width: int

class Corner(typing.NamedTuple):
    at: Size

class Kind(enum.Enum):
    ROUND = "round"

@gpu_function
def f(corner: Corner, kind: Kind = Kind.ROUND) -> Size: return corner.at

before = _bundle.pack_pickle(f).data
msgspec.json.decode(msgspec.json.encode(Corner(Size(1))), type=Corner)
msgspec.json.decode(b'"round"', type=Kind)
assert _bundle.pack_pickle(f).data == before
pathlib.Path("bundle.zip").write_bytes(before)
"""


def test_classes_that_a_call_has_used_are_still_sent(tmp_path: Path) -> None:
    """msgspec stores its own objects in them: the second deploy from a notebook failed."""
    assert _python(_SCRIPT_OF_USED_CLASSES, tmp_path).stderr == ""
    with zipfile.ZipFile(tmp_path / "bundle.zip") as archive:
        assert pickle.loads(archive.read(_bundle.PICKLE_NAME)).name == "f"


def test_a_struct_is_not_sent_by_value_for_it_would_arrive_without_its_fields() -> None:
    class Size(msgspec.Struct):
        width: int

    @gpu_function
    def grown(size: int) -> int:
        return Size(size).width + 1

    with pytest.raises(InvalidBundle, match=r"grown .*Size is a msgspec\.Struct"):
        _bundle.pack_pickle(grown)


def test_a_refusal_names_the_variable_and_the_way_to_it() -> None:
    import threading

    lock = threading.Lock()
    config = {"name": "a", "locks": [lock]}

    def helper() -> object:
        return config

    @gpu_function
    def direct() -> bool:
        return lock.locked()

    @gpu_function
    def indirect(x: int = 1) -> object:
        return [helper() for _ in range(x)]

    @gpu_function
    class Holder:
        @method
        def get(self) -> object:
            return lock

    cases: list[tuple[Any, str]] = [
        (direct, r"lock \(lock\)"),
        (indirect, r"helper → config\['locks'\]\[0\] \(lock\)"),
        (Holder, r"get → lock \(lock\)"),
    ]
    for function, way in cases:
        with pytest.raises(InvalidBundle, match=rf"its variable {way}: cannot pickle '_thread\.lock' object"):
            _bundle.pack_pickle(function)


_CELL = """
secret = "hunter2"

@gpu_function
def f(x):
    return [1 / each for each in range(x)]
"""


def _cell(number: int) -> Any:
    """Define `f` as a notebook does: the source is known to linecache, and there is no file."""
    file = f"/tmp/ipykernel_{number}/1.py"
    linecache.cache[file] = (len(_CELL), None, _CELL.splitlines(True), file)
    namespace = {"gpu_function": gpu_function, "__name__": "__main__"}
    exec(compile(_CELL, file, "exec"), namespace)
    return namespace["f"]


def test_the_lines_of_a_cell_are_included_and_the_process_does_not_matter() -> None:
    bundle = _bundle.pack_pickle(_cell(1))
    assert bundle.data == _bundle.pack_pickle(_cell(2)).data
    (source,) = (text for name, text in bundle.contents().items() if name.startswith("cell-"))
    assert source.decode().splitlines() == ["", "", "", *_CELL.splitlines()[3:]]


def test_a_large_variable_is_named() -> None:
    table, small = bytes(9 << 20), bytes(1 << 10)

    @gpu_function
    def sized() -> int:
        return len(table) + len(small)

    with pytest.warns(UserWarning, match=r"its variable table of 9 MiB"):
        _bundle.pack_pickle(sized)
