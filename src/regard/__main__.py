"""`python -m regard` is `regard`."""

from .cli.entry import run

if __name__ == "__main__":
    run()
