"""All measurements of the queue, one table each."""


def main() -> None:
    """Filled in below."""
