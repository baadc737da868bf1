"""What of the package is public says so, and so does what isn't."""

import ast
from pathlib import Path

import pytest

from comfyfleet import errors

SOURCE = Path(__file__).parents[2] / "src" / "comfyfleet"
PUBLIC = {SOURCE, SOURCE / "client", SOURCE / "workflow"}
PACKAGES = [each.parent for each in sorted(SOURCE.rglob("__init__.py"))]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda each: each.name)
def test_a_package_that_is_not_public_says_so(package: Path) -> None:
    told = ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or ""
    assert told.endswith("Internal: may change without notice.") == (package not in PUBLIC)


def test_every_public_name_is_described() -> None:
    page = (SOURCE.parents[1] / "docs" / "reference" / "python.md").read_text()
    assert "`convert`" in page
    assert [line for line in page.splitlines() if line.endswith("|  |")] == []


def test_every_error_is_public() -> None:
    kinds = {name for name, each in vars(errors).items() if isinstance(each, type)}
    assert set(errors.__all__) == {name for name in kinds if hasattr(getattr(errors, name), "code")}
