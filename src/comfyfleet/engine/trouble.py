"""What ComfyUI trips over."""

from comfyfleet.kernel.errors import InvalidInput


class Trouble(InvalidInput):
    """Bad input that ComfyUI does not foresee: it answers 500, so clients expect just that."""

    code = "trouble"


class MalformedBody(Trouble):
    code = "malformed_body"
