"""XMP, the XML of photo editors: a property called workflow or prompt, as an element or as an attribute."""

import html
import re
from collections.abc import Iterator

from comfyfleet.workflow.media.limits import Budget
from comfyfleet.workflow.media.span import Span
from comfyfleet.workflow.media.text import Text

# Only where a property starts; its end is searched for from there, so no input makes this slow.
_PROPERTY = re.compile(r"[<:\s](workflow|prompt)(>|=[\"'])", re.IGNORECASE)


def texts(packet: Span, budget: Budget) -> Iterator[Text]:
    xml = packet.copy(budget.limits).decode("utf-8", "replace")
    position = 0
    while position >= 0 and (start := _PROPERTY.search(xml, position)):
        budget.step()
        is_element = start[2] == ">"
        end = xml.find("</" if is_element else start[2][1], start.end())
        if end < 0:
            return
        yield Text(start[1], html.unescape(xml[start.end() : end]).strip())
        # The closing tag has the name, too.
        position = xml.find(">", end) if is_element else end
