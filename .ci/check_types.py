"""Let pyright and mypy check what a user writes, against the tvmify of an environment.

    python .ci/check_types.py ENVIRONMENT/bin/python [CHECKOUT]

The checkers are those of the Python that runs this. An editable installation is nothing that they
could find: then name the checkout.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

USER = Path(__file__).parents[1] / "tests" / "behaviour" / "ordinary_user.py"
# "strict" also complains where an error is expected and there is none.
MYPY = """
[mypy]
strict = True
plugins = tvmify.mypy_plugin
[mypy-tvmify.*]
follow_imports = silent
"""


def main(python: str, *checkouts: str) -> int:
    """Return how many of the checkers complain; they print why."""
    with tempfile.TemporaryDirectory() as place:
        user = shutil.copy(USER, place)
        pyright = {"reportUnnecessaryTypeIgnoreComment": "error", "extraPaths": checkouts}
        Path(place, "pyrightconfig.json").write_text(json.dumps(pyright), encoding="utf-8")
        Path(place, "mypy.ini").write_text(MYPY, encoding="utf-8")
        # The second is for the plugin, which mypy itself imports.
        environment = os.environ | {"MYPYPATH": os.pathsep.join(checkouts)}
        if checkouts:
            before = os.environ.get("PYTHONPATH", "").split(os.pathsep)
            environment["PYTHONPATH"] = os.pathsep.join([*checkouts, *filter(None, before)])
        commands = (
            ["pyright", "--pythonpath", python, "--project", place],
            ["mypy", "--python-executable", python, user],
        )
        return sum(
            subprocess.run(
                [sys.executable, "-m", *command], cwd=place, env=environment, check=False
            ).returncode
            != 0
            for command in commands
        )


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
