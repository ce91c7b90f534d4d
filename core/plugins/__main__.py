"""`python -m core.plugins`; see `core.plugins.commands`."""

from core.plugins.commands import main

if __name__ == "__main__":
    raise SystemExit(main())
