"""How much of anything we take. Every limit has its unit in its name."""

from typing import NamedTuple


class Limits(NamedTuple):
    """Real workflows stay a hundred times below these; a hostile file hits them early."""

    nodes_max: int = 200_000  # after expansion of all subgraphs
    links_max: int = 1_000_000
    subgraph_depth_max: int = 100
    group_nodes_max: int = 1_000  # of the old kind, which take longer the more there are
    value_depth_max: int = 100
    dynamic_rows_max: int = 1_000
    text_characters_max: int = 10_000_000
    choice_depth_max: int = 100  # of {a|{b|c}} in one text


DEFAULT_LIMITS = Limits()
