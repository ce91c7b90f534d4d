"""`python -m core.run`: everything is in core.cli, because this module is loaded under the name __main__."""

from core.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
