"""``python -m areal_mega.serving MODEL [flags]``."""

from __future__ import annotations

import sys

from areal_mega.core.errors import UserError
from areal_mega.serving.app import serve


def main() -> int:
    try:
        return serve(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
