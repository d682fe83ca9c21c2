"""``python -m smalti`` is the ``smalti`` command."""

from smalti.cli.main import main

if __name__ == "__main__":
    main()
