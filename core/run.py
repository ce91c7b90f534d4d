"""`python -m core.run`: everything is in core.cli, because this module is loaded under the name __main__."""

if __name__ == "__main__":
    try:
        from core.cli import main

        code = main()
    except KeyboardInterrupt:  # during the imports, which take a while; main has its own answer
        code = 130
    raise SystemExit(code)
