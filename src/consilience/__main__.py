"""The command `consilience`, also as `python -m consilience`."""

import sys


def main() -> None:
    """Run the command line; say which extra it needs where that is not installed."""
    try:
        from consilience import cli  # noqa: PLC0415 - it may not be there

        cli.main()
    except ModuleNotFoundError as error:
        missing = (error.name or "consilience").partition(".")[0]
        if missing == "consilience":
            raise
        sys.exit(
            f"The command line needs the extra `lab`, and `{missing}` is not installed. Run "
            "`pip install 'consilience[lab]'`, or `pip install '.[lab]'` in a checkout."
        )


if __name__ == "__main__":
    main()
