"""The package as such: a quick import, optional dependencies, and the promises of its metadata."""

import ast
import configparser
import subprocess
import sys
from pathlib import Path

import erpo_trl


ROOT = Path(erpo_trl.__file__).parent.parent
OPTIONAL = ["matplotlib", "vllm", "deepspeed", "pytest", "openai"]


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_importing_the_package_imports_nothing_heavy():
    loaded = run(
        "import sys, erpo_trl, erpo_trl.rewards, erpo_trl.tiny; "
        "print([m for m in ('torch', 'transformers', 'trl', 'datasets', 'sympy', 'pandas') if m in sys.modules])"
    )
    assert loaded.strip() == "[]"


def test_public_names():
    names = run("import erpo_trl; print(all(getattr(erpo_trl, n).__name__ == n for n in erpo_trl.__all__))")
    assert names.strip() == "True"
    assert set(erpo_trl.__all__) <= set(dir(erpo_trl))


def test_everything_imports_without_the_optional_packages():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((ROOT / "erpo_trl").rglob("*.py"))
        if path.name not in ("_verifier.py", "__main__.py")
    ]
    run(
        "import sys, importlib\n"
        f"for name in {OPTIONAL}: sys.modules[name] = None\n"  # importing it raises ImportError
        f"for module in {modules}: importlib.import_module(module)\n"
    )


def test_pure_modules_know_nothing_of_trl():
    for name in ("query_kl", "query_weight"):
        tree = ast.parse((ROOT / "erpo_trl" / f"{name}.py").read_text())
        imported = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
        imported |= {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
        assert imported <= {"torch", "math"}


def test_tested_versions_are_within_the_ranges():
    from importlib.metadata import version

    from packaging.requirements import Requirement

    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    pinned = dict(
        line.split("==") for line in (ROOT / "constraints.txt").read_text().split() if "==" in line and line[0] != "#"
    )
    for line in setup["options"]["install_requires"].split("\n"):
        if line.strip():
            requirement = Requirement(line)
            assert requirement.specifier.contains(pinned.get(requirement.name, version(requirement.name)))
    assert pinned["trl"] == version("trl")
