"""``python -m areal_mega`` is ``areal-mega``."""

from areal_mega.cli.main import main

if __name__ == "__main__":
    main()
