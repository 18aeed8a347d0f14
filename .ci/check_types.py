"""Check typical user code with pyright and mypy, against the tvmify of an environment.

    python .ci/check_types.py ENVIRONMENT/bin/python

The checkers are those installed for the Python that runs this script.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

USER = Path(__file__).parents[1] / "tests" / "behaviour" / "ordinary_user.py"
# "strict" also reports expected errors that do not occur.
MYPY = """
[mypy]
strict = True
plugins = tvmify.mypy_plugin
[mypy-tvmify.*]
follow_imports = silent
"""


def main(python: str) -> int:
    """Return how many of the checkers fail; they print why."""
    with tempfile.TemporaryDirectory() as place:
        user = shutil.copy(USER, place)
        pyright = {"reportUnnecessaryTypeIgnoreComment": "error"}
        Path(place, "pyrightconfig.json").write_text(json.dumps(pyright), encoding="utf-8")
        Path(place, "mypy.ini").write_text(MYPY, encoding="utf-8")
        commands = (
            ["pyright", "--pythonpath", python, "--project", place],
            ["mypy", "--python-executable", python, user],
        )
        return sum(
            subprocess.run([sys.executable, "-m", *command], cwd=place, check=False).returncode != 0
            for command in commands
        )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
