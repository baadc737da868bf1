"""Which chain a person means, and how many of its segments there are."""

from collections.abc import Sequence

from comfyfleet.kernel.errors import InvalidInput
from comfyfleet.workflow.switching.families import tidy
from comfyfleet.workflow.switching.model import Chain


def choose(chains: Sequence[Chain], name: str | None) -> Chain:
    """By its name; with its kind in front (`group:Extend`) where two have the same."""
    if not chains:
        raise InvalidInput("this workflow has no chain of numbered segments")
    matching = [chain for chain in chains if name is None or _is_called(chain, name)]
    if len(matching) == 1:
        return matching[0]
    if not matching:
        raise InvalidInput(f"no chain is called {name}; there is {_listed(chains)}")
    which = "name one" if name is None else "say its kind, too (group:NAME)"
    raise InvalidInput(f"there are several chains, {which}: {_listed(matching)}")


def check_count(chain: Chain, count: int) -> None:
    there = len(chain.segments)
    if count < 1:
        raise InvalidInput("at least one segment must be kept")
    if count > there + len(chain.off):
        off = f" and {len(chain.off)} more that are off" if chain.off else ""
        raise InvalidInput(f"there are no {count} segments: there is {described(chain)}{off}")


def described(chain: Chain) -> str:
    count = len(chain.segments)
    return f'"{chain.name}" ({chain.kind}, {count} segment{"" if count == 1 else "s"})'


def _is_called(chain: Chain, name: str) -> bool:
    kind, _, rest = name.partition(":")
    wanted = rest if kind == chain.kind else name
    return tidy(wanted).casefold() == chain.name.casefold()


def _listed(chains: Sequence[Chain]) -> str:
    return ", ".join(described(chain) for chain in chains)
