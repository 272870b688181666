"""What an error of the service advises, in the words of the command line.

The service names its own paths, as whoever asks by HTTP needs them; a command stands for each.
"""

from __future__ import annotations

import re
from collections.abc import Container
from typing import Final

_PATH: Final = re.compile(
    r"(?<![\w./])(?:GET )?/(?:(?P<kind>[a-z]+)/(?P<of>[^\s/;,]+)/)?(?P<noun>[a-z-]+)"
    r"(?:\?(?P<query>\w+=\w+(?:&\w+=\w+)*))?(?![\w/?])"
)
_CAPTURE: Final = re.compile(r"(?<![\w./])/captures/(?P<of>[^\s/;,]+)")


def for_command_line(text: str, commands: Container[str]) -> str:
    """Return `text` with the commands that answer what its paths of the API answer.

    Usage:
        >>> for_command_line("see /steps/5/stages, /losses", {"stages", "losses"})
        'see `stagescope stages 5`, `stagescope losses`'

    Args:
        text: an error's advice.
        commands: what `stagescope` knows; what looks like a path of something else stays.
    """

    def command(path: re.Match[str]) -> str:
        noun, kind, of = path["noun"], path["kind"], path["of"]
        if noun not in commands or kind not in (None, "runs", "steps"):
            return path[0]
        which = {None: "", "runs": f" --run {of}", "steps": f" {of}"}[kind]
        asked = [word.split("=") for word in (path["query"] or "").split("&") if word]
        options = "".join(f" --{name.replace('_', '-')} {value}" for name, value in asked)
        return f"`stagescope {noun}{which}{options}`"

    return _PATH.sub(command, _CAPTURE.sub(r"`stagescope progress \g<of>`", text))
