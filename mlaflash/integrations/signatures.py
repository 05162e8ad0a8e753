"""What an engine's sources look like where mlaflash reaches into them, recorded, and compared with those installed."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from mlaflash.errors import MissingDependencyError, UnsupportedError

Record = dict[str, Any]
"""``package``, ``version``, and by ``file.py:Class.method``:

``functions``
    Names of the parameters.
``calls``
    By ``file.py:Class.method:callee``: the arguments of the call as they are written, ``positional`` and ``keywords``.
``attributes``
    Names that the method sets on ``self``; more may be set.
``constants``
    Values of names of a module or a class.
"""

_FOLDER: Final = Path(__file__).parent / "recorded"
_KINDS: Final = ("functions", "calls", "attributes", "constants")


def known_versions(package: str) -> tuple[str, ...]:
    """Name the versions of an engine that are recorded.

    Parameters
    ----------
    package : {"sglang", "vllm"}
    """
    return tuple(sorted(path.stem.partition("-")[2] for path in _FOLDER.glob(f"{package}-*.json")))


def load(package: str, version: str) -> Record:
    """Read the record of a version.

    Parameters
    ----------
    package, version : str

    Raises
    ------
    UnsupportedError
        There is none.
    """
    known = known_versions(package)
    if version not in known:
        raise UnsupportedError(
            f"{package} {version} is installed, which this version of mlaflash does not know; it knows "
            f"{', '.join(known)}. Install one of these, or a newer mlaflash; {package} goes on with its own kernels."
        )
    record: Record = json.loads((_FOLDER / f"{package}-{version}.json").read_text())
    return record


def installed(package: str) -> tuple[str, Path]:
    """Find an engine without importing it.

    Parameters
    ----------
    package : str

    Returns
    -------
    version : str
    root : Path
        The folder that holds the package's.

    Raises
    ------
    MissingDependencyError
        It is not installed.
    """
    try:
        spec = importlib.util.find_spec(package)
        version = importlib.metadata.version(package)
    except (ImportError, ValueError, importlib.metadata.PackageNotFoundError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise MissingDependencyError(f"{package} is not installed here; install it as its documentation says.")
    return version, Path(next(iter(spec.submodule_search_locations))).parent


def read(record: Mapping[str, Any], root: Path) -> Record:
    """Read from sources what a record names.

    Parameters
    ----------
    record : mapping
        Its keys say what to read; what is not there reads as None.
    root : Path

    Returns
    -------
    Record
    """
    trees: dict[str, ast.Module | None] = {}

    def node(place: str) -> tuple[ast.AST | None, str]:
        file, _, name = place.partition(":")
        if file not in trees:
            path = root / file
            trees[file] = ast.parse(path.read_text()) if path.is_file() else None
        return trees[file], name

    def find(place: str) -> ast.AST | None:
        found, name = node(place)
        for part in name.split(".") if found is not None else ():
            found = next((child for child in getattr(found, "body", ()) if getattr(child, "name", None) == part), None)
        return found

    result: Record = {name: record[name] for name in ("package", "version")}
    result["functions"] = {place: _parameters(find(place)) for place in record["functions"]}
    result["calls"] = {
        place: _call(find(place.rpartition(":")[0]), place.rpartition(":")[2]) for place in record["calls"]
    }
    result["attributes"] = {
        place: _kept(names, _attributes(find(place))) for place, names in record["attributes"].items()
    }
    result["constants"] = {
        place: _constant(find(place.rpartition(".")[0]) if "." in place.partition(":")[2] else node(place)[0], place)
        for place in record["constants"]
    }
    return result


def differences(record: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Say where sources differ from their record.

    Parameters
    ----------
    record, found : mapping
        From `load` and `read`.
    """
    return [
        f"{place}: {kind} are {found[kind][place]}, recorded is {wanted}"
        for kind in _KINDS
        for place, wanted in record[kind].items()
        if found[kind][place] != wanted
    ]


def _parameters(found: ast.AST | None) -> list[str] | None:
    if not isinstance(found, ast.FunctionDef):
        return None
    parts = found.args
    rest = [f"*{part.arg}" for part in (parts.vararg,) if part] + [f"**{part.arg}" for part in (parts.kwarg,) if part]
    return [part.arg for part in (*parts.posonlyargs, *parts.args, *parts.kwonlyargs)] + rest


def _call(found: ast.AST | None, callee: str) -> Record | None:
    calls = [
        part
        for part in (ast.walk(found) if found is not None else ())
        if isinstance(part, ast.Call) and ast.unparse(part.func) == callee
    ]
    if len(calls) != 1:
        return None
    return {
        "positional": [ast.unparse(argument) for argument in calls[0].args],
        "keywords": {str(keyword.arg): ast.unparse(keyword.value) for keyword in calls[0].keywords},
    }


def _attributes(found: ast.AST | None) -> set[str]:
    targets = [
        target
        for part in (ast.walk(found) if found is not None else ())
        if isinstance(part, ast.Assign | ast.AnnAssign)
        for target in (part.targets if isinstance(part, ast.Assign) else [part.target])
    ]
    return {
        target.attr
        for target in targets
        if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self"
    }


def _kept(names: list[str], there: set[str]) -> list[str]:
    return [name for name in names if name in there]


def _constant(found: ast.AST | None, place: str) -> Any:
    name = place.rpartition(":")[2].rpartition(".")[2]
    for part in getattr(found, "body", ()):
        targets = part.targets if isinstance(part, ast.Assign) else [getattr(part, "target", None)]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            # Of a field without a value, its type.
            value = getattr(part, "value", None) or getattr(part, "annotation", None)
            return value.value if isinstance(value, ast.Constant) else ast.unparse(value) if value else None
    return None
