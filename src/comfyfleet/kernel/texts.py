"""Which texts every database can keep: PostgreSQL takes no NUL, UTF-8 no half of a character."""


def problem_with_text(text: str) -> str | None:
    if "\0" in text:
        return "the text holds a NUL character"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "the text holds half a character (a lone surrogate)"
    return None


def is_storable(text: str) -> bool:
    return problem_with_text(text) is None
