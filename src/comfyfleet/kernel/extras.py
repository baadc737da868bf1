"""Optional parts: what to install when one is used without its packages."""

from comfyfleet.kernel.errors import InvalidInput


def install_line(extra: str) -> str:
    return f'pip install "comfyfleet[{extra}]"'


def missing_extra(what: str, package: str | None, extra: str) -> InvalidInput:
    """The error of a part that can't work because `package` is not installed."""
    return InvalidInput(
        f"{what} needs {package or 'a package'}, which is not installed", hint=install_line(extra)
    )
